"""One process that needs no agreement with others. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.ranks.base import Choice, Mine

__all__ = ["Alone"]


class Alone:
    """One process that saves by itself."""

    rank = 0
    size = 1

    def decide(
        self,
        label: str,
        mine: Callable[[], Mine],
        choose: Callable[[list[Mine]], Choice],
        *,
        sends: Any,
        returns: Any,
        if_failed: Callable[[], None] = lambda: None,
        if_silent: Callable[[], Choice] | None = None,
    ) -> Choice:
        try:
            return choose([mine()])
        except BaseException:
            if_failed()
            raise

    def branch(self, name: str) -> Alone:
        return self

    def heartbeat(self) -> None:
        pass

    def broadcast(self, compute: Callable[[], bytes]) -> bytes:
        return compute()

    def flag(self, texts: list[str]) -> None:
        pass

    def flags(self) -> list[str]:
        return []

    def close(self, seconds: float) -> None:
        pass

    def __repr__(self) -> str:
        return "Alone()"
