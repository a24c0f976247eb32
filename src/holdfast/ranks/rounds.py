"""The rounds in which ranks agree: the number of the current one, its keys, and the waits for other ranks in it.

Waits are bounded: a rank is given up when it has neither answered nor sent a heartbeat within the time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.errors import RankError
from holdfast.ranks.messages import KeyValue, Mailbox

__all__ = ["FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS", "Rounds", "Waiting", "no_answer"]

LONGEST_PAUSE_SECONDS = 0.05
FIRST_PAUSE_SECONDS = 0.0002


class Rounds:
    """The rounds of one rank. `number` is that of the current one; all ranks count alike."""

    def __init__(self, store: KeyValue, rank: int, size: int, name: str, timeout_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.number = 0
        self.mailbox = Mailbox(store)
        self.heartbeats = Heartbeats(store, self.heartbeat_key)
        self._store = store
        self._name = name

    def answer_key(self, rank: int) -> str:
        return f"{self._name}/{self.number}/{rank}"

    def choice_key(self, number: int | None = None) -> str:
        """Return the key of the leader's choice in a round, the current one by default."""
        return f"{self._name}/{self.number if number is None else number}/choice"

    def heartbeat_key(self, rank: int) -> str:
        return f"{self._name}/{self.number}/heartbeat/{rank}"

    def start_waiting(self, seconds: float) -> Waiting:
        """Return a wait for other ranks of the current round that begins now."""
        return Waiting(self._store, self.heartbeats, seconds)


class Waiting:
    """A wait for other ranks. Ends when those that are missing have sent no heartbeat within `seconds`."""

    def __init__(self, store: KeyValue, heartbeats: Heartbeats, seconds: float) -> None:
        self._store = store
        self._heartbeats = heartbeats
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._pause = FIRST_PAUSE_SECONDS

    def look_often(self) -> None:
        """Begin with short pauses again: one rank has come, and the others will not be long."""
        self._pause = FIRST_PAUSE_SECONDS

    def pause(self, missing: list[int]) -> bool:
        """Wait before the next look, a little longer each time. Return False, at once, when the wait has ended."""
        if time.monotonic() > self._deadline:
            if not self._heartbeats.all_alive(missing):
                return False
            self._deadline = time.monotonic() + self._seconds
        self._store.pause(self._pause)
        self._pause = min(self._pause * 1.5, LONGEST_PAUSE_SECONDS)
        return True


class Heartbeats:
    """Shows the others that this rank is at work, and looks whether they are."""

    def __init__(self, store: KeyValue, key: Callable[[int], str]) -> None:
        self._store = store
        self._key = key
        self._sent = 0
        self._seen: dict[int, bytes] = {}

    def send(self, rank: int) -> None:
        """Send a heartbeat of this rank."""
        self._sent += 1
        self._store.set(self._key(rank), str(self._sent).encode())

    def all_alive(self, ranks: list[int]) -> bool:
        """Return whether each of the ranks has sent a heartbeat since the last call of this."""
        alive = True
        for rank in ranks:
            heartbeat = self._store.get(self._key(rank))
            alive = alive and heartbeat is not None and heartbeat != self._seen.get(rank)
            if heartbeat is not None:
                self._seen[rank] = heartbeat
        return alive


def no_answer(label: str, ranks: list[int], timeout_seconds: float) -> RankError:
    """Return the error that names the ranks which did not answer."""
    names = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return RankError(
        f"rank {names} did not answer within {timeout_seconds:g} s in '{label}'",
        ranks=ranks,
        timeout_seconds=timeout_seconds,
        advice="look at that rank's log; raise timeout= if it is only slow; make this call on every rank",
    )
