"""Agree with other processes through the key-value store that torch.distributed has anyway. Each rank's answer enters;
one decision, or one error, leaves on every rank.

Never through collectives: an agreement cannot deadlock with the training's own traffic, and works the same whether the
process group is gloo or NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import msgspec

from holdfast.errors import UsageError, error_from_record
from holdfast.ondisk.decoding import from_msgpack
from holdfast.ranks.base import Choice, Mine
from holdfast.ranks.broadcast import LeaderBroadcast
from holdfast.ranks.follower import Follower, LeaderLosses
from holdfast.ranks.leader import Leader
from holdfast.ranks.messages import KeyValue, message_of
from holdfast.ranks.rounds import LONGEST_PAUSE_SECONDS, Rounds

__all__ = ["StoreRanks"]


class StoreRanks:
    """Ranks that agree through a key-value store, in numbered rounds. All ranks must make the same calls in order."""

    def __init__(
        self,
        store: KeyValue,
        rank: int,
        size: int,
        *,
        name: str,
        timeout_seconds: float,
        losses: LeaderLosses | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._losses = losses or LeaderLosses()
        # At most one, under an empty key: `setdefault` lets one of several threads put its own there.
        self._under_way: dict[str, list[str]] = {}
        self._rounds = Rounds(store, rank, size, name, timeout_seconds)
        self._leader = Leader(self._rounds)
        self._follower = Follower(self._rounds, self._losses)
        self._broadcast = LeaderBroadcast(store, f"{name}/broadcast", rank, timeout_seconds)

    def __repr__(self) -> str:
        return f"StoreRanks(rank={self.rank}, size={self.size}, name={self._name!r})"

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
        own_round = [label]
        try:
            if (other := self._under_way.setdefault("", own_round)) is not own_round:
                # Before anything is sent: the answers of the two would be taken for each other.
                raise UsageError(
                    f"'{label}' was called during '{other[0]}'",
                    advice="call the manager's methods one after the other, in one thread, and not in state_dict() or "
                    "load_state_dict()",
                )
            self._rounds.number += 1
            own, cause = message_of(label, mine)
            if self.rank == 0:
                choice, of_choosing = self._leader.decide(own, choose, sends, if_failed, if_silent)
                cause = cause or of_choosing
            else:
                choice = self._follower.take_part(own)
        finally:
            if self._under_way.get("") is own_round:
                del self._under_way[""]
        if isinstance(cause, KeyboardInterrupt | SystemExit):
            raise cause
        if choice.error is not None:
            raise error_from_record(choice.error) from cause
        return cast(Choice, from_msgpack(choice.value, returns))

    def branch(self, name: str) -> StoreRanks:
        return StoreRanks(
            self._store.branch(),
            self.rank,
            self.size,
            name=f"{self._name}/{name}",
            timeout_seconds=self._timeout_seconds,
            losses=self._losses,
        )

    def heartbeat(self) -> None:
        self._rounds.heartbeats.send(self.rank)

    def broadcast(self, compute: Callable[[], bytes]) -> bytes:
        return self._broadcast.next(compute)

    def flag(self, texts: list[str]) -> None:
        # What others have flagged stays.
        self._store.set(f"{self._name}/flag", msgspec.msgpack.encode(sorted({*self.flags(), *texts})))

    def flags(self) -> list[str]:
        found = self._store.get(f"{self._name}/flag")
        return from_msgpack(found, list[str]) if found is not None else []

    def close(self, seconds: float) -> None:
        # The store may end with the leader's process, and a message that was not fetched would be lost with it.
        if self.rank != 0:
            self._store.set(f"{self._name}/closed/{self.rank}", b"")
            return
        deadline = time.monotonic() + seconds
        open_ranks = set(range(1, self.size))
        while open_ranks and time.monotonic() < deadline:
            open_ranks = {rank for rank in open_ranks if self._store.get(f"{self._name}/closed/{rank}") is None}
            if open_ranks:
                self._store.pause(LONGEST_PAUSE_SECONDS)
