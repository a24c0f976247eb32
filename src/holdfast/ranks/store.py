"""Agree with other processes through the key-value store that torch.distributed has anyway. Each rank's answer enters;
one decision, or one error, leaves on every rank.

Never through collectives: an agreement cannot deadlock with the training's own traffic, and works the same whether the
process group is gloo or NCCL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from holdfast.errors import RankError, UsageError, error_from_record, error_record
from holdfast.ondisk.decoding import from_msgpack
from holdfast.ranks.base import Choice, Mine, Ranks
from holdfast.ranks.connection import Connection
from holdfast.ranks.single import Alone

logger = logging.getLogger("holdfast")

__all__ = ["KeyValue", "StoreRanks", "torch_ranks"]

# A TCPStore refuses values over 8 MiB and drops the connection.
_PIECE_BYTES = 4 << 20
_FIRST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.05
# Followers wait longer than the leader, so that its message about missing ranks reaches them before they give up.
_GRACE_SECONDS = 5.0
_REMEMBERED_WORDS = 64
_SHORT_PAUSE_SECONDS = 0.0003
_NO_VALUE = "\0no value"
_DEFAULT_TIMEOUT_SECONDS = 600.0


class KeyValue(Protocol):
    """What `StoreRanks` needs of a store that all ranks reach."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """Return the value, or None when it is not there yet. Never waits."""

    def delete(self, key: str) -> None: ...

    def pause(self, seconds: float) -> None:
        """Wait before the next look, so that other processes can run."""

    def branch(self) -> KeyValue:
        """Return the same store for another thread."""


class _Word(msgspec.Struct, omit_defaults=True):
    """The message of one rank in one round."""

    label: str
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: dict[str, Any] | None = None
    # Of a follower's word: how many it has taken back in this round.
    retry: int = 0
    # Of a choice: the ranks whose word it does not answer, and the `retry` of the words that it does, where not 0.
    unheard: tuple[int, ...] = ()
    retries: dict[int, int] = {}


class _Losses:
    """How often this rank lost the leader, in any thread: each thread has to find the leader's round again."""

    def __init__(self) -> None:
        self.count = 0


class StoreRanks:
    """Ranks that agree through a key-value store, in numbered rounds. All ranks must make the same calls in order."""

    def __init__(self, store: KeyValue, rank: int, size: int, *, name: str, timeout_seconds: float) -> None:
        self._store = store
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._round = 0
        self._leftover: list[str] = []
        self._pulses = 0
        self._pulses_seen: dict[int, bytes] = {}
        self._words = 0
        self._forgotten = 0
        self._said: list[tuple[int, bytes]] = []
        self._warned = False
        self._losses = _Losses()
        self._losses_made_up = 0
        self._retry = 0
        self._open_rounds: list[int] = []
        self._mismatched: dict[int, deque[str]] = {}
        self.rank = rank
        self.size = size

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
        self._round += 1
        word, cause = _say(label, mine)
        if self.rank == 0:
            choice, own = self._lead(label, word, choose, sends, if_failed, if_silent)
            cause = cause or own
        else:
            choice = self._take_part(label, word)
        if isinstance(cause, KeyboardInterrupt | SystemExit):
            raise cause
        if choice.error is not None:
            raise error_from_record(choice.error) from cause
        return cast(Choice, from_msgpack(choice.value, returns))

    def branch(self, name: str) -> StoreRanks:
        branch = StoreRanks(
            self._store.branch(),
            self.rank,
            self.size,
            name=f"{self._name}/{name}",
            timeout_seconds=self._timeout_seconds,
        )
        branch._losses = self._losses
        return branch

    def pulse(self) -> None:
        self._pulses += 1
        self._store.set(self._pulse_key(self.rank), str(self._pulses).encode())

    def leaders_word(self, say: Callable[[], bytes]) -> bytes:
        self._words += 1
        if self.rank != 0:
            return self._wait_for_word(self._words)
        word = say()
        if word:
            self._said.append((self._words, word))
        if len(self._said) > _REMEMBERED_WORDS:
            self._forgotten, _ = self._said.pop(0)
        # One key, written over each time, with the latest messages: a rank may be some steps behind.
        told = (self._words, self._forgotten, self._said)
        self._store.set(f"{self._name}/word", msgspec.msgpack.encode(told))
        return word

    def flag(self, texts: list[str]) -> None:
        # What others have flagged stays.
        self._store.set(f"{self._name}/flag", msgspec.msgpack.encode(sorted({*self.flags(), *texts})))

    def flags(self) -> list[str]:
        found = self._store.get(f"{self._name}/flag")
        return from_msgpack(found, list[str]) if found is not None else []

    def part(self, seconds: float) -> None:
        # The store may end with the leader's process, and a message that was not fetched would be lost with it.
        if self.rank != 0:
            self._store.set(f"{self._name}/parted/{self.rank}", b"")
            return
        deadline = time.monotonic() + seconds
        left = set(range(1, self.size))
        while left and time.monotonic() < deadline:
            left = {rank for rank in left if self._store.get(f"{self._name}/parted/{rank}") is None}
            if left:
                self._store.pause(_LONGEST_PAUSE_SECONDS)

    def _lead(
        self,
        label: str,
        own: _Word,
        choose: Callable[[list[Mine]], Choice],
        sends: Any,
        if_failed: Callable[[], None],
        if_silent: Callable[[], Choice] | None,
    ) -> tuple[_Word, BaseException | None]:
        self._close_earlier_rounds()
        words, failure = self._collect(label, own)
        while behind := self._behind(label, words):
            self._leave_behind(label, own, behind)
            words, failure = self._collect(label, own)
        choice, cause = _Word(label, error=failure), None
        if failure is not None and _first_failure(label, words) is None and if_silent is not None:
            without, _ = _say(label, if_silent)
            choice = without if without.error is None else choice
        elif failure is None:
            # Every rank answered in this round, so every rank has read the round before it: its keys may go.
            self._sweep()
            answers = [words[rank].value for rank in range(self.size)]
            choice, cause = _say(label, lambda: choose([from_msgpack(answer, sends) for answer in answers]))
        if choice.error is not None:
            if_failed()
        # A rank that is in a call to which the leader comes later must wait for it there.
        ahead = [rank for rank, word in words.items() if word.label != label and label in self._mismatches(rank)]
        self._conclude(choice, {rank: word for rank, word in words.items() if rank not in ahead})
        self._note_mismatches(label, words)
        return choice, cause

    def _close_earlier_rounds(self) -> None:
        """Let the others pass over rounds in which the leader was interrupted, or lost the store, before its choice."""
        self._open_rounds.append(self._round)
        for number in self._open_rounds[:-1]:
            everyone = tuple(range(1, self.size))
            self._leftover += self._publish(f"{self._name}/{number}/choice", _Word("", unheard=everyone))

    def _conclude(self, choice: _Word, answered: dict[int, _Word]) -> None:
        """Publish the choice of this round, which answers these words."""
        choice.unheard = tuple(rank for rank in range(1, self.size) if rank not in answered)
        choice.retries = {rank: word.retry for rank, word in answered.items() if word.retry}
        self._leftover += self._publish(self._choice_key(), choice)
        self._leftover += [self._answer_key(rank) for rank in range(1, self.size)]
        self._leftover += [self._pulse_key(rank) for rank in range(self.size)]
        self._open_rounds.clear()

    def _mismatches(self, rank: int) -> deque[str]:
        """Return the labels in which a rank did not meet the others, since the last round in which all met."""
        return self._mismatched.setdefault(rank, deque(maxlen=_REMEMBERED_WORDS))

    def _note_mismatches(self, label: str, words: dict[int, _Word]) -> None:
        if any(word.label != label for word in words.values()):
            for rank, word in words.items():
                self._mismatches(rank).append(word.label)
        elif len(words) == self.size:
            self._mismatched.clear()

    def _behind(self, label: str, words: dict[int, _Word]) -> dict[int, _Word]:
        """Return the messages of ranks that reached a call which has failed here already."""
        if words[0].error is not None:
            return {}
        failed = self._mismatches(0)
        return {rank: word for rank, word in words.items() if word.label != label and word.label in failed}

    def _leave_behind(self, label: str, own: _Word, behind: dict[int, _Word]) -> None:
        """Have these calls fail, as they did here, and wait for all ranks in the next round."""
        self._conclude(_Word("", error=_first_failure(label, {0: own, **behind})), behind)
        self._round += 1
        self._open_rounds.append(self._round)

    def _collect(self, label: str, own: _Word) -> tuple[dict[int, _Word], dict[str, Any] | None]:
        """Return the messages of the ranks and the first failure as soon as it is known; all when there is none."""
        words: dict[int, _Word] = {0: own}
        deadline = time.monotonic() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            for rank in range(1, self.size):
                if rank not in words:
                    word = self._receive(self._answer_key(rank))
                    # One without a label was taken back.
                    if word is not None and word.label:
                        words[rank] = word
                        pause = _FIRST_PAUSE_SECONDS
            failure = _first_failure(label, words)
            if failure is not None or len(words) == self.size:
                return words, failure
            if time.monotonic() > deadline:
                silent = [rank for rank in range(self.size) if rank not in words]
                if not self._all_alive(silent):
                    return words, error_record(self._nobody(label, silent))
                deadline = time.monotonic() + self._timeout_seconds
            self._store.pause(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _take_part(self, label: str, word: _Word) -> _Word:
        """Send a follower's message and return the leader's choice.

        The leader may have gone through rounds that this rank never came to, alone or after this rank lost it. Those do
        not answer this word, or have other labels, and are passed over. A word that nobody answered is taken back: the
        next call of this rank is for the same round.
        """
        losses = self._losses.count
        try:
            word.retry = self._retry
            self._publish(self._answer_key(self.rank), word)
            choice = self._follow(label)
            while self._is_for_other_call(choice, label, lost=losses != self._losses_made_up):
                self._round += 1
                word.retry = self._retry = 0
                self._publish(self._answer_key(self.rank), word)
                choice = self._follow(label)
        except BaseException as error:
            self._losses.count += 1
            if not isinstance(error, Exception):
                self._take_back()
            self._round -= 1
            self._retry += 1
            raise
        self._losses_made_up = losses
        self._retry = 0
        return choice

    def _is_for_other_call(self, choice: _Word, label: str, *, lost: bool) -> bool:
        unheard = self.rank in choice.unheard
        if not unheard and choice.retries.get(self.rank, 0) != self._retry:
            return True
        # One without a label, as the leader sends it to a rank that is behind, is meant for this very call.
        return choice.label != label and (unheard or (lost and choice.label != ""))

    def _take_back(self) -> None:
        with contextlib.suppress(Exception):
            self._publish(self._answer_key(self.rank), _Word(""))

    def _follow(self, label: str) -> _Word:
        deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while True:
            word = self._receive(self._choice_key())
            if word is not None:
                return word
            if time.monotonic() > deadline:
                if not self._all_alive([0]):
                    self._take_back()
                    raise self._nobody(label, [0])
                deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
            self._store.pause(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _wait_for_word(self, number: int) -> bytes:
        """Return what the leader sent in its `number`-th call of `leaders_word`."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = 0.0
        while True:
            found = self._store.get(f"{self._name}/word")
            if found is not None:
                told, forgotten, said = from_msgpack(found, tuple[int, int, list[tuple[int, bytes]]])
                if number <= forgotten:
                    raise RankError(
                        f"rank {self.rank} is {told - number} steps behind the leader, too many for it to remember",
                        ranks=[self.rank],
                        advice="let the ranks wait for each other now and then, as training together does",
                    )
                if told >= number:
                    return next((word for spoken, word in said if spoken == number), b"")
            if time.monotonic() > deadline:
                raise self._nobody("the leader's word", [0])
            self._store.pause(pause)
            pause = min(max(pause * 1.5, _FIRST_PAUSE_SECONDS / 16), _LONGEST_PAUSE_SECONDS)

    def _all_alive(self, ranks: list[int]) -> bool:
        """Return whether each of them has sent a heartbeat since the last call of this."""
        alive = True
        for rank in ranks:
            pulse = self._store.get(self._pulse_key(rank))
            alive = alive and pulse is not None and pulse != self._pulses_seen.get(rank)
            if pulse is not None:
                self._pulses_seen[rank] = pulse
        return alive

    def _nobody(self, label: str, silent: list[int]) -> RankError:
        names = ", ".join(str(rank) for rank in silent[:8]) + (", ..." if len(silent) > 8 else "")
        return RankError(
            f"rank {names} did not answer within {self._timeout_seconds:g} s in '{label}'",
            ranks=silent,
            timeout_seconds=self._timeout_seconds,
            advice="look at that rank's log; raise timeout= if it is only slow; make this call on every rank",
        )

    def _answer_key(self, rank: int) -> str:
        return f"{self._name}/{self._round}/{rank}"

    def _choice_key(self) -> str:
        return f"{self._name}/{self._round}/choice"

    def _pulse_key(self, rank: int) -> str:
        return f"{self._name}/{self._round}/pulse/{rank}"

    def _publish(self, key: str, word: _Word) -> list[str]:
        """Send a message, and return the keys that it took."""
        data = msgspec.msgpack.encode(word)
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        rest = {f"{key}/{index}": piece for index, piece in enumerate(pieces[1:], start=1)}
        for piece_key, piece in rest.items():
            self._store.set(piece_key, piece)
        # The first piece goes last: a rank that sees it finds the others.
        self._store.set(key, len(pieces).to_bytes(4, "little") + pieces[0])
        return [key, *rest]

    def _receive(self, key: str) -> _Word | None:
        first = self._store.get(key)
        if first is None:
            return None
        count = int.from_bytes(first[:4], "little")
        rest = [self._store.get(f"{key}/{index}") or b"" for index in range(1, count)]
        self._leftover += [f"{key}/{index}" for index in range(1, count)] if self.rank == 0 else []
        return from_msgpack(first[4:] + b"".join(rest), _Word)

    def _sweep(self) -> None:
        """Remove the keys of earlier rounds. A failure here must not keep the ranks from a decision."""
        keys, self._leftover = self._leftover, []
        try:
            for key in keys:
                self._store.delete(key)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("keys of earlier agreements were not removed from the ranks' store: %s", error)


def _say(label: str, work: Callable[[], Any]) -> tuple[_Word, BaseException | None]:
    """Do the work, and return its value, or its error, as a message."""
    try:
        return _Word(label, value=msgspec.Raw(msgspec.msgpack.encode(work()))), None
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return _Word(label, error=error_record(error)), error


def _first_failure(label: str, words: dict[int, _Word]) -> dict[str, Any] | None:
    for rank in sorted(words):
        word = words[rank]
        if word.label != label:
            return error_record(
                RankError(
                    f"rank {rank} is in '{word.label}' while rank 0 is in '{label}'",
                    ranks=[rank],
                    advice="call the manager's methods on every rank, in the same order",
                )
            )
        if word.error is not None:
            fields = {**word.error["fields"]}
            fields.setdefault("rank", rank)
            return {**word.error, "fields": fields}
    return None


class _TorchStore:
    """torch.distributed's store as a `KeyValue`."""

    def __init__(self, original: Any, timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS) -> None:
        self._original = original
        self._timeout_seconds = timeout_seconds
        self._connection = Connection(original, timeout_seconds)
        self._compares = True
        self._warned = False

    def branch(self) -> _TorchStore:
        return _TorchStore(self._original, self._timeout_seconds)

    def set(self, key: str, value: bytes) -> None:
        self._connection.call("set", key, value)

    def get(self, key: str) -> bytes | None:
        # `get` alone would wait, and a wait that ends prints warnings and cannot be interrupted. To compare with what
        # no value is answers at once, in one message instead of two, and changes nothing.
        call, was_open = self._connection.call, self._connection.is_open
        if self._compares:
            try:
                found = bytes(call("compare_set", key, _NO_VALUE, _NO_VALUE))
            except NotImplementedError:
                self._compares = False
                logger.info("this store of torch.distributed cannot compare: agreements take two messages for one")
            except RuntimeError as error:
                # The other way shows whether the store is gone. If it is not, the next call takes this way again.
                self._note_failure(error)
            except RankError as error:
                # A connection that broke now is opened again; a host that did not answer has had its time.
                if not was_open or error.fields.get("timeout_seconds") is not None:
                    raise
                self._note_failure(error)
            else:
                return None if found == _NO_VALUE.encode() else found
        return bytes(call("get", key)) if call("check", [key]) else None

    def _note_failure(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the store of torch.distributed failed once, and is asked again: %s", error)

    def delete(self, key: str) -> None:
        self._connection.call("delete_key", key)

    def pause(self, seconds: float) -> None:
        # A short sleep takes several times as long as it says: the other ranks get the processor all the same.
        if seconds < _SHORT_PAUSE_SECONDS:
            os.sched_yield()
        else:
            time.sleep(seconds)

    def count(self, key: str) -> int:
        return int(self._connection.call("add", key, 1))


def torch_ranks(process_group: Any = None, *, timeout_seconds: float) -> Ranks:
    """Return the ranks of a process group, of all processes when None, or `Alone` without torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UsageError("process_group was given, but torch.distributed is not initialised")
        return Alone()
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    rank, size = dist.get_rank(process_group), len(members)
    if rank < 0:
        raise UsageError(
            f"this process (global rank {dist.get_rank()}) is not in the process_group that saves",
            advice="build the manager only on the members of the group",
        )
    if size == 1:
        return Alone()
    name = f"holdfast/{'-'.join(map(str, members)) if size < dist.get_world_size() else 'all'}"
    store = _TorchStore(_default_store(), timeout_seconds)
    # Managers of the same ranks are told apart by the order in which they are made, which is the same on every rank.
    number = store.count(f"{name}/made/{rank}")
    return StoreRanks(store, rank, size, name=f"{name}/{number}", timeout_seconds=timeout_seconds)


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
