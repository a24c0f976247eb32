"""Door 2: the only way to other processes. Each rank's answer enters; one decision, or one error, leaves on every rank.

There is one primitive, `decide`: every rank does its part of the work, the leader sees all the answers and chooses, and
every rank gets the choice. If the part of any rank fails, every rank raises that rank's error. Waits are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Choice", "Mine", "Ranks", "call_each", "on_leader", "together"]

Mine = TypeVar("Mine")
Choice = TypeVar("Choice")
Item = TypeVar("Item")

# How long a rank waits for another one, unless the caller gives a time.
DEFAULT_TIMEOUT_SECONDS = 600.0


class Ranks(Protocol):
    """The processes that save and load one run together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

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
        """Do `mine` on every rank and `choose` on the leader; return the choice, or raise the same error, on all.

        `sends` and `returns` are the types of the two values, which must be such that msgspec can carry them. The
        leader calls `if_failed` when there is no choice, before any other rank can know of it. Where ranks do not
        answer in time, and none failed, `if_silent` can still choose, or raise.
        """

    def branch(self, name: str) -> Ranks:
        """Return the same ranks for a second thread, whose agreements do not mix with those of the first."""

    def heartbeat(self) -> None:
        """Send a heartbeat in the middle of this rank's part of a decision: the ranks that wait for it wait longer."""

    def broadcast(self, compute: Callable[[], bytes]) -> bytes:
        """Return what `compute` returns, which is called on the leader alone and may not fail. Cheap enough for every
        step: one message, which the other ranks fetch, and no answer."""

    def flag(self, texts: list[str]) -> None:
        """Leave texts for the leader, which reads them whenever it calls `flags`."""

    def flags(self) -> list[str]:
        """Return what ranks have flagged so far. Of two that flag at the same moment one may be missing."""

    def close(self, seconds: float) -> None:
        """Make the last call: the leader waits, for at most `seconds`, until all others have fetched what it sent."""


def on_leader(ranks: Ranks, label: str, work: Callable[[], Choice], *, returns: Any) -> Choice:
    """Do the work on the leader, and return its result, or raise its error, on every rank."""
    return ranks.decide(label, lambda: None, lambda _: work(), sends=None, returns=returns)


def call_each(work: Callable[[Item], Mine], items: Iterable[Item]) -> list[Mine]:
    """Return what `work` returns for each item. An error of one is raised after the others were done: what a component
    does may be a collective of torch.distributed, in which the other ranks would wait for this one in vain."""
    done, errors = [], []
    for item in items:
        try:
            done.append(work(item))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return done


def together(ranks: Ranks, label: str, work: Callable[[], Mine], *, sends: Any) -> list[Mine]:
    """Do the work on every rank, and return all results in the order of the ranks, or raise the first failure."""
    return ranks.decide(label, work, lambda answers: answers, sends=sends, returns=list[sends])
