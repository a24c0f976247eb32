"""Waits of a round: they end when the ranks that are missing send no heartbeats any more."""

from __future__ import annotations

from holdfast.ranks.rounds import LONGEST_PAUSE_SECONDS, Rounds
from holdfast.ranks.store import StoreRanks

OVER = -1.0  # a time limit that has passed


class PausedStore:
    """A dict as a store, which notes the pauses and makes none."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.pauses: list[float] = []

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def branch(self) -> PausedStore:
        return self


def rounds(store: PausedStore, rank: int, size: int = 3) -> Rounds:
    return Rounds(store, rank, size, "name", 10.0)


def test_within_the_time_limit_nobody_has_to_send_a_heartbeat() -> None:
    store = PausedStore()
    waiting = rounds(store, 0).start_waiting(1000.0)
    assert all(waiting.pause([1, 2]) for _ in range(20))


def test_after_the_time_limit_a_wait_goes_on_for_each_further_heartbeat_of_the_missing_rank() -> None:
    store = PausedStore()
    leader, follower = rounds(store, 0), rounds(store, 1)
    waiting = leader.start_waiting(OVER)
    for _ in range(3):
        follower.heartbeats.send(1)
        assert waiting.pause([1])
    assert not waiting.pause([1]), "the last heartbeat was seen before"


def test_one_missing_rank_without_heartbeats_ends_the_wait() -> None:
    store = PausedStore()
    leader, follower = rounds(store, 0), rounds(store, 1)
    follower.heartbeats.send(1)
    assert not leader.start_waiting(OVER).pause([1, 2])


def test_a_heartbeat_counts_in_the_round_that_it_was_sent_in() -> None:
    store = PausedStore()
    leader, follower = rounds(store, 0), StoreRanks(store, 1, 3, name="name", timeout_seconds=10.0)
    follower.heartbeat()
    leader.number += 1
    assert not leader.start_waiting(OVER).pause([1])
    leader.number -= 1
    assert leader.start_waiting(OVER).pause([1])


def test_pauses_grow_to_a_limit_and_begin_again_when_a_rank_has_come() -> None:
    store = PausedStore()
    waiting = rounds(store, 0).start_waiting(1000.0)
    for _ in range(30):
        waiting.pause([1])
    assert store.pauses == sorted(store.pauses)
    assert store.pauses[-1] == LONGEST_PAUSE_SECONDS
    waiting.look_often()
    waiting.pause([1])
    assert store.pauses[-1] == store.pauses[0]
