"""Broadcast small values from the leader to all ranks, once per step, with one message and no answer.

The leader keeps its latest values under one key, which each rank reads when it comes to that step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from holdfast.errors import RankError
from holdfast.ondisk.decoding import from_msgpack
from holdfast.ranks.messages import KeyValue
from holdfast.ranks.rounds import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, no_answer

__all__ = ["LeaderBroadcast"]

_KEPT_VALUES = 64


class _Record(msgspec.Struct, array_like=True):
    """The number of the latest call, that of the latest value that was dropped, and the values that are kept."""

    latest: int
    last_dropped: int
    kept: list[tuple[int, bytes]]


class LeaderBroadcast:
    """The values that the leader broadcasts, by the number of the call. Empty ones are not stored."""

    def __init__(self, store: KeyValue, key: str, rank: int, timeout_seconds: float) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._calls = 0
        self._last_dropped = 0
        self._kept: list[tuple[int, bytes]] = []

    def next(self, compute: Callable[[], bytes]) -> bytes:
        """Return what `compute` returns on the leader in the call of this number."""
        self._calls += 1
        return self._send(compute()) if self._rank == 0 else self._wait_for(self._calls)

    def _send(self, value: bytes) -> bytes:
        if value:
            self._kept.append((self._calls, value))
        if len(self._kept) > _KEPT_VALUES:
            self._last_dropped, _ = self._kept.pop(0)
        # One key, written over each time, with the latest values: a rank may be some steps behind.
        record = _Record(self._calls, self._last_dropped, self._kept)
        self._store.set(self._key, msgspec.msgpack.encode(record))
        return value

    def _wait_for(self, number: int) -> bytes:
        deadline = time.monotonic() + self._timeout_seconds
        pause = 0.0
        while True:
            stored = self._store.get(self._key)
            if stored is not None:
                record = from_msgpack(stored, _Record)
                if number <= record.last_dropped:
                    behind = record.latest - number
                    raise RankError(
                        f"rank {self._rank} is {behind} steps behind the leader, which keeps {_KEPT_VALUES} broadcasts",
                        ranks=[self._rank],
                        advice="let the ranks wait for each other now and then, as training together does",
                    )
                if record.latest >= number:
                    return next((value for sent, value in record.kept if sent == number), b"")
            if time.monotonic() > deadline:
                raise no_answer("the leader's broadcast", [0], self._timeout_seconds)
            self._store.pause(pause)
            pause = min(max(pause * 1.5, FIRST_PAUSE_SECONDS / 16), LONGEST_PAUSE_SECONDS)
