"""Attempts: the folders of a run in which a save is being written, each with its record, `attempt.json`.

A storage enters; names, claims and records leave. The record is no part of a checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec

from holdfast.errors import DamagedRecordError, KeyDamagedError, KeyExistsError, KeyMissingError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record, read_record
from holdfast.ondisk.manifest import MAX_MANIFEST_BYTES, abandoned_at, encode_abandoned
from holdfast.runs.clock import seconds_since, timestamp
from holdfast.runs.process_identity import Identity, this_process
from holdfast.storage.base import Storage, features_of
from holdfast.storage.displacing import obstruction_of

__all__ = [
    "MAX_LEASE_NUMBER",
    "MAX_PLAUSIBLE_LEASE_NUMBER",
    "AttemptRecord",
    "Attempts",
    "encode_attempt",
    "linked_folders",
    "read_attempt",
]

# No run ever gets there by counting: a record that states a higher number is damaged, a file name with one is foreign.
MAX_LEASE_NUMBER = 10**12
# Above this number a cleanup removes a claim or a record. The numbers in between keep a run going that was given one:
# without them a number that is just accepted would leave no room for the next.
MAX_PLAUSIBLE_LEASE_NUMBER = 10**11

LeaseNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASE_NUMBER)]
ProcessNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Birth = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The process that began an attempt. `claim` is a random name for the attempt; `lease` is the number that its
    writer held; `trainer` is the process that a writer process works for."""

    claim: str = ""
    host: str = ""
    machine: str = ""
    process: ProcessNumber | None = None
    birth: Birth | None = None
    started: str = ""
    world_size: WorldSize = 0
    lease: LeaseNumber = 0
    trainer: ProcessNumber | None = None
    trainer_birth: Birth | None = None

    @property
    def writer(self) -> Identity | None:
        """Return the process that writes; None when the record does not state it."""
        if self.process is None:
            return None
        return Identity(self.host, self.machine, self.process, self.birth)


class Attempts:
    """The attempts of one run."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def claim(self, step: int, world_size: int, *, lease: int = 0, first: int = 1) -> tuple[str, str]:
        """Create the next free folder for an attempt at a step; return its name and its claim. Two processes that try
        at once get two folders. `first`: the lowest number that the attempt may have."""
        first = max(self.highest_by_step().get(step, 0) + 1, first)
        return self.claim_free(step, world_size, lease=lease, first=first)

    def claim_free(self, step: int, world_size: int, *, lease: int, first: int) -> tuple[str, str]:
        """Do what `claim` does, without a listing of the run: the first free number from this one on is taken."""
        attempt = first
        while True:
            folder = paths.folder_name(step, attempt)
            try:
                return folder, self.claim_folder(folder, world_size, lease=lease)
            except KeyExistsError:
                attempt += 1
            except KeyDamagedError:
                if not self.is_obstructed(folder):
                    raise
                attempt += 1

    def is_taken(self, folder: str) -> bool:
        """Return whether anything has the name of a folder: a folder that is not empty, a file, a link."""
        try:
            return bool(self._storage.entries(folder))
        except KeyDamagedError:
            return True

    def is_obstructed(self, folder: str) -> bool:
        """Return whether a file, a link or a special file has the name of a folder, so that no attempt can have it."""
        return obstruction_of(self._storage, folder) is not None

    def claim_folder(self, folder: str, world_size: int, **more: Any) -> str:
        """Create this folder for an attempt and return its claim; a KeyExistsError when it is taken."""
        claim = uuid.uuid4().hex
        record = AttemptRecord(
            claim=claim,
            **msgspec.to_builtins(this_process()),
            started=timestamp(),
            world_size=world_size,
            **more,
        )
        self._storage.put(paths.key(folder, paths.ATTEMPT), encode_attempt(record))
        return claim

    def require_claim(self, folder: str, claim: str) -> None:
        """Raise unless this rank sees the folder that the leader created. A path may be a local disk on every machine,
        and ranks may have been given different runs: each would write its part of the checkpoint to another place."""
        try:
            found = self.read(folder)
        except (KeyMissingError, DamagedRecordError):
            found = AttemptRecord()
        if found.claim != claim:
            raise UsageError(
                f"this rank does not see the folder {folder} that the leader has just made",
                run=self._storage.url,
                advice="give all ranks the same run, on storage that all of them share",
            )

    def highest_by_step(self) -> dict[int, int]:
        """Return the highest number of an attempt at each step so far."""
        found: dict[int, int] = {}
        names = [entry.name for entry in self._storage.entries("")]
        for name in (*names, *linked_folders(self._storage)):
            parsed = paths.parse_folder(name)
            if parsed is not None and parsed.attempt <= paths.MAX_COUNTED_ATTEMPT:
                found[parsed.step] = max(parsed.attempt, found.get(parsed.step, 0))
        return found

    def open_folders(self) -> list[str]:
        """Return the folders in which nothing is committed, without reading a manifest."""
        folders = [entry.name for entry in self._storage.entries("") if entry.is_folder]
        names = [name for name in folders if paths.parse_folder(name) is not None]
        return [name for name in names if self.is_open(name)]

    def is_open(self, folder: str) -> bool:
        """Return whether the manifest's name is free: neither committed nor closed."""
        return all(entry.name != paths.MANIFEST for entry in self._storage.entries(folder))

    def open_here(self, step: int, lease: int) -> list[str]:
        """Return the folders that this process has made for a step under this lease and in which nothing is committed.
        Other folders are not looked into."""
        found = []
        for entry in self._storage.entries(""):
            parsed = paths.parse_folder(entry.name) if entry.is_folder else None
            if parsed is None or parsed.step != step or not self.is_open(entry.name):
                continue
            record = self.record(entry.name)
            if record.writer == this_process() and record.lease == lease:
                found.append(entry.name)
        return found

    def close_older(self, number: int) -> None:
        """Close every open attempt of a lease below this number, so that it can never be committed: the first process
        that creates the manifest's name has it."""
        for folder in self.open_folders():
            if self.record(folder).lease >= number:
                continue
            self.close(folder, by=number)

    def close(self, folder: str, *, by: int | str) -> bool:
        """Close an attempt, so that it can never be committed; return False where it is committed or closed. `by`: the
        number of the lease that closes it, or the reason."""
        try:
            self._storage.put(paths.key(folder, paths.MANIFEST), encode_abandoned({"by": by, "at": timestamp()}))
        except KeyExistsError:
            return False
        self._storage.sync(folder)
        return True

    def seconds_since_closed(self, folder: str) -> float:
        """Return how long ago an attempt was closed; 0 where that is not known."""
        try:
            data = self._storage.read(paths.key(folder, paths.MANIFEST), MAX_MANIFEST_BYTES)
        except (KeyMissingError, KeyDamagedError):
            return 0.0
        return seconds_since(abandoned_at(data))

    def record(self, folder: str) -> AttemptRecord:
        """Return the record of an attempt; an empty one where there is none or it is damaged. One that cannot be read
        now is a `StorageError`: its writer may live, and must not count as unknown."""
        try:
            return self.read(folder)
        except (KeyMissingError, DamagedRecordError):
            return AttemptRecord()

    def read(self, folder: str) -> AttemptRecord:
        """Return the record of an attempt; a `DamagedRecordError` for one that cannot be decoded."""
        key = paths.key(folder, paths.ATTEMPT)
        return read_attempt(partial(self._storage.read, key), key)

    def clear(self, folder: str) -> None:
        """Remove the bytes of an attempt. Its record, and the marker that it was closed, stay."""
        self._clear(folder, {paths.ATTEMPT, paths.MANIFEST})

    def remove_record(self, folder: str) -> None:
        """Remove what `clear` leaves. The record goes last: until then the writer is known."""
        self._storage.delete(paths.key(folder, paths.MANIFEST))
        self._storage.delete(paths.key(folder, paths.ATTEMPT))
        self._storage.sync("")

    def _clear(self, folder: str, keep: set[str]) -> None:
        for entry in self._storage.entries(folder):
            if entry.is_folder:
                self._clear(paths.key(folder, entry.name), set())
            elif entry.name not in keep:
                self._storage.delete(paths.key(folder, entry.name))


def linked_folders(storage: Storage) -> dict[str, str]:
    """Return the symbolic links that have the name of a checkpoint's folder, and where each leads. None of them is
    followed, but a checkpoint that a person moved to another disk must not be left out without a word."""
    links = features_of(storage).links
    found = links.targets() if links is not None else {}
    return {name: target for name, target in found.items() if paths.parse_folder(name) is not None}


def encode_attempt(record: AttemptRecord) -> bytes:
    return encode_record(record)


def read_attempt(read: Callable[[int], bytes], file: str) -> AttemptRecord:
    """Return the record that `read` gives; see `read_record` for what it raises."""
    return read_record(read, AttemptRecord, what="the record of an attempt", file=file)
