"""Readers of checkpoints: each has a claim, so that no cleanup removes the bytes meanwhile. Knows storage, not torch.

A reader on this machine is looked up among the processes. One elsewhere counts as gone when no heartbeat has come for
as long as its claim states, by the clock of the process that watches. A claim of this very process counts only while
something in it reads: an interrupt can leave one behind, and the process may live for weeks.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from holdfast.errors import DamagedRecordError, HoldfastError, StorageError
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record
from holdfast.runs.claims import (
    BEATS_PER_TIMEOUT,
    CLAIM,
    DEFAULT_TIMEOUT_SECONDS,
    UNKNOWN,
    Claim,
    claim_key,
    entries_of,
    last_beat,
    read_claim_in,
)
from holdfast.runs.clock import Clock
from holdfast.runs.heartbeat import Heartbeat
from holdfast.runs.interrupts import finish
from holdfast.runs.process_identity import is_alive, this_process
from holdfast.storage.base import Storage

logger = logging.getLogger("holdfast")

__all__ = ["Readers", "reader_claims", "reading"]

# The names of the claims by which this process reads now. Adding and removing one are single operations of the
# interpreter: a lock could be left locked by a fork or an interrupt.
_in_use: set[str] = set()


@contextmanager
def reading(storage: Storage, folder: str) -> Iterator[None]:
    """Claim a checkpoint for reading, so that its bytes are not removed meanwhile. Read its manifest only inside: one
    that was removed before is missing then. Where nothing can be written there is no claim."""
    name = f"{folder}--{uuid.uuid4().hex[:12]}"
    heartbeat = Heartbeat(storage, paths.READERS, name, DEFAULT_TIMEOUT_SECONDS / BEATS_PER_TIMEOUT)
    end = partial(_end_reading, storage, name, heartbeat)
    # Before the claim is made: an interrupt may come right after it.
    try:
        if _has_claimed(storage, folder, name):
            _start(heartbeat, folder)
        yield
    finally:
        try:
            end()
        except BaseException:
            finish(end)
            raise


def _has_claimed(storage: Storage, folder: str, name: str) -> bool:
    """Make the claim; return False where nothing can be written."""
    claim = Claim.of(this_process(), DEFAULT_TIMEOUT_SECONDS)
    _in_use.add(name)
    try:
        storage.put(claim_key(paths.READERS, name, CLAIM), encode_record(claim))
    except StorageError as error:
        logger.debug("%s is read without a claim: %s", folder, error)
        return False
    return True


def _start(heartbeat: Heartbeat, folder: str) -> None:
    """Start the heartbeat. Where the system refuses a thread the claim counts on this machine, and elsewhere for as
    long as it states."""
    try:
        heartbeat.start()
    except RuntimeError as error:
        logger.debug("%s is read without a heartbeat: %s", folder, error)


def _end_reading(storage: Storage, name: str, heartbeat: Heartbeat) -> None:
    """Remove the claim, if there is one. Can be repeated after an interrupt."""
    heartbeat.end()
    # First: a claim that cannot be removed here and now is one that the next cleanup of this process removes.
    _in_use.discard(name)
    _forget_reader(storage, name)


@dataclass(slots=True)
class Readers:
    """The readers of a run, as one process observes them over time."""

    storage: Storage
    clock: Clock = field(default_factory=Clock)
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def folders(self) -> set[str]:
        """Return the checkpoints that are being read."""
        return {name.partition("--")[0] for name, lives in self._claims() if lives}

    def sweep(self) -> None:
        """Remove the claims of readers that are gone."""
        for name, lives in self._claims():
            if not lives:
                _forget_reader(self.storage, name)

    def _claims(self) -> list[tuple[str, bool]]:
        """Return the name of each claim, and whether its reader lives."""
        entries = entries_of(self.storage, paths.READERS)
        names = [entry.name.removesuffix(CLAIM) for entry in entries if entry.name.endswith(CLAIM)]
        return [(name, self._lives(name, last_beat(entries, name))) for name in names]

    def _lives(self, name: str, beat: int) -> bool:
        try:
            claim = read_claim_in(self.storage, paths.READERS, name)
        except HoldfastError:
            claim = UNKNOWN  # watched, as one on another machine is
        if claim is None:
            return False
        alive = is_alive(claim.holder)
        if alive is not None:
            return alive and (name in _in_use or claim.holder != this_process())
        last, since = self._seen.get(name, (-1, 0.0))
        if beat != last:
            self._seen[name] = (beat, self.clock.now())
            return True
        return self.clock.now() - since < claim.patience_seconds


def _forget_reader(storage: Storage, name: str) -> None:
    with contextlib.suppress(StorageError):
        for entry in storage.entries(paths.READERS):
            if entry.name.startswith(f"{name}."):
                storage.delete(f"{paths.READERS}/{entry.name}")


def reader_claims(storage: Storage) -> list[tuple[str, Claim | DamagedRecordError | None]]:
    """Return the name of each claim of a reader with its content, or what is wrong with it; None when it is gone."""
    names = [entry.name for entry in storage.entries(paths.READERS) if entry.name.endswith(CLAIM)]
    return [(name, _claim_or_damage(storage, name.removesuffix(CLAIM))) for name in names]


def _claim_or_damage(storage: Storage, name: str) -> Claim | DamagedRecordError | None:
    try:
        return read_claim_in(storage, paths.READERS, name)
    except DamagedRecordError as error:
        return error
