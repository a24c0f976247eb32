"""Messages of ranks, through a key-value store that all of them reach. Messages enter and leave by their keys; what
they are about is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from holdfast.errors import RankError, error_record
from holdfast.ondisk.decoding import from_msgpack

logger = logging.getLogger("holdfast")

__all__ = ["KeyValue", "Mailbox", "Message", "first_failure", "message_of"]

# A TCPStore refuses values over 8 MiB and drops the connection.
_MESSAGE_PIECE_BYTES = 4 << 20


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


class Message(msgspec.Struct, omit_defaults=True):
    """The message of one rank in one round: a follower's answer, or the leader's choice."""

    label: str
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: dict[str, Any] | None = None
    # Of an answer: how many this rank has withdrawn in this round.
    retry: int = 0
    # Of a choice: the ranks whose answer it does not use, and the `retry` of the answers that it does, where not 0.
    unanswered: tuple[int, ...] = ()
    retries: dict[int, int] = {}


def message_of(label: str, work: Callable[[], Any]) -> tuple[Message, BaseException | None]:
    """Do the work, and return its value, or its error, as a message."""
    try:
        return Message(label, value=msgspec.Raw(msgspec.msgpack.encode(work()))), None
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return Message(label, error=error_record(error)), error


def first_failure(label: str, messages: dict[int, Message]) -> dict[str, Any] | None:
    """Return the record of the first error, by rank, or of a rank that is in another call; None where all is well."""
    for rank in sorted(messages):
        message = messages[rank]
        if message.label != label:
            return error_record(
                RankError(
                    f"rank {rank} is in '{message.label}' while rank 0 is in '{label}'",
                    ranks=[rank],
                    advice="call the manager's methods on every rank, in the same order",
                )
            )
        if message.error is not None:
            fields = {**message.error["fields"]}
            fields.setdefault("rank", rank)
            return {**message.error, "fields": fields}
    return None


class Mailbox:
    """Sends and receives messages of any size, and removes the keys of old ones."""

    def __init__(self, store: KeyValue) -> None:
        self._store = store
        self._old_keys: list[str] = []
        self._warned = False

    def send(self, key: str, message: Message) -> list[str]:
        """Send a message, and return the keys that it took."""
        data = msgspec.msgpack.encode(message)
        size = _MESSAGE_PIECE_BYTES
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        rest = {f"{key}/{index}": piece for index, piece in enumerate(pieces[1:], start=1)}
        for piece_key, piece in rest.items():
            self._store.set(piece_key, piece)
        # The first piece goes last: a rank that sees it finds the others.
        self._store.set(key, len(pieces).to_bytes(4, "little") + pieces[0])
        return [key, *rest]

    def receive(self, key: str) -> tuple[Message, list[str]] | None:
        """Return a message and the further keys that it took, or None when it is not there yet. Never waits."""
        first = self._store.get(key)
        if first is None:
            return None
        further = [f"{key}/{index}" for index in range(1, int.from_bytes(first[:4], "little"))]
        rest = [self._store.get(one) or b"" for one in further]
        return from_msgpack(first[4:] + b"".join(rest), Message), further

    def discard_later(self, keys: list[str]) -> None:
        """Have the next `sweep` remove these keys."""
        self._old_keys += keys

    def sweep(self) -> None:
        """Remove the keys that no rank reads any more. A failure here must not keep the ranks from a decision."""
        keys, self._old_keys = self._old_keys, []
        try:
            for key in keys:
                self._store.delete(key)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("keys of earlier agreements were not removed from the ranks' store: %s", error)
