"""Ranks that are simulated in one process, one at a time, in a fixed order. A function enters, each rank's end leaves.

Every rank is a thread, but only the one with the baton runs; it hands the baton on when it waits for another rank. The
order of all that happens is therefore the same in every run, so a crash "at the 17th operation" is always the same one.
A simulated crash is the whole machine's: it ends all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.ranks.store import StoreRanks
from holdfast.testing.storages import SimulatedCrash

__all__ = ["simulate_ranks"]


def simulate_ranks(n: int, function: Callable[[Ranks], Any], *, timeout_seconds: float = 60.0) -> list[Any]:
    """Call `function(ranks)` on `n` simulated ranks and return what each returned, or the exception that it raised."""
    if n == 1:
        return [_outcome(function, Alone())]
    baton = _Baton(n)
    store: dict[str, bytes] = {}
    outcomes: list[Any] = [None] * n

    def live(rank: int) -> None:
        ranks = StoreRanks(_Store(store, baton, rank), rank, n, name="simulated", timeout_seconds=timeout_seconds)
        baton.take(rank)
        outcomes[rank] = _outcome(function, ranks)
        baton.leave(rank, crashed=isinstance(outcomes[rank], SimulatedCrash))

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds)
    return outcomes


def _outcome(function: Callable[[Ranks], Any], ranks: Ranks) -> Any:
    try:
        return function(ranks)
    except (Exception, SimulatedCrash) as error:
        return error


class _Baton:
    """Whose turn it is."""

    def __init__(self, n: int) -> None:
        self._condition = threading.Condition()
        self._alive = list(range(n))
        self._turn = 0
        self._crashed = False

    def take(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank or self._crashed)

    def hand_on(self, rank: int) -> None:
        with self._condition:
            self._next(rank)
            self._condition.wait_for(lambda: self._turn == rank or self._crashed)
            if self._crashed:
                raise SimulatedCrash("the machine is gone")

    def leave(self, rank: int, *, crashed: bool) -> None:
        with self._condition:
            self._crashed = self._crashed or crashed
            self._next(rank)
            self._alive.remove(rank)
            self._condition.notify_all()

    def _next(self, rank: int) -> None:
        index = self._alive.index(rank)
        self._turn = self._alive[(index + 1) % len(self._alive)]
        self._condition.notify_all()


class _Store:
    """A key-value store whose pauses hand the baton on."""

    def __init__(self, values: dict[str, bytes], baton: _Baton, rank: int) -> None:
        self._values = values
        self._baton = baton
        self._rank = rank

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def pause(self, seconds: float) -> None:
        self._baton.hand_on(self._rank)

    def branch(self) -> _Store:
        raise NotImplementedError("a simulated rank is one thread")
