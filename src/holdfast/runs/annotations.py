"""Notes on committed checkpoints: late metrics, tags, damage. Each is a small file that is written once.

A storage and a checkpoint's folder and digest enter, notes leave. Knows nothing of manifests.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.errors import DamagedRecordError, KeyExistsError, KeyMissingError, StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import MAX_RECORD_BYTES, encode_record, read_record
from holdfast.runs.clock import timestamp
from holdfast.storage.base import Storage

logger = logging.getLogger("holdfast")

__all__ = [
    "MAX_NOTE_NUMBER",
    "Annotations",
    "Note",
    "NoteName",
    "Notes",
    "encode_note",
    "note_key",
    "parse_note_name",
    "read_note",
    "sum_up",
]

# No run ever gets there by counting.
MAX_NOTE_NUMBER = 10**15 - 1

_NAME = re.compile(r"(step-[0-9.]+)--([0-9]{6,15})\.json", re.ASCII)


class Subject(Protocol):
    """A checkpoint, as far as notes on it are concerned."""

    @property
    def folder(self) -> str: ...

    @property
    def digest(self) -> str: ...


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One note on the checkpoint with that digest. Of several, the later one counts.

    `metrics` are encoded by the codec. `damage` states what is wrong with its bytes; an empty text withdraws that.
    """

    checkpoint: str
    created: str
    metrics: dict[str, Any] = {}
    tag: str = ""
    untag: str = ""
    damage: str | None = None


class NoteName(NamedTuple):
    folder: str
    number: int


class Notes(NamedTuple):
    """All notes on one checkpoint, taken together."""

    metrics: dict[str, Any]
    tags: tuple[str, ...]
    damage: str


class Annotations:
    """The notes of one run. Those that were read are remembered: a note never changes.

    Several threads may use one object: what is remembered is only ever iterated over as a copy.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, Note] = {}
        self._reported: set[str] = set()

    def names(self) -> list[str]:
        """Return the names of all files in the folder of the notes."""
        return [entry.name for entry in self._storage.entries(paths.NOTES)]

    def names_by_folder(self) -> dict[str, list[str]]:
        """Return the names of all notes by the folder that they are about, in order."""
        try:
            names = self.names()
        except StorageError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            # Something that is no folder has its name: the notes on every checkpoint are unknown.
            return {entry.name: [paths.NOTES] for entry in self._storage.entries("")}
        found: dict[str, list[str]] = {}
        parsed = [(name, parse_note_name(name)) for name in names]
        for name, about in sorted(((n, p) for n, p in parsed if p is not None), key=lambda pair: pair[1].number):
            found.setdefault(about.folder, []).append(name)
        present = set(names)
        self._known = {name: note for name, note in list(self._known.items()) if name in present}
        return found

    def on(self, subject: Subject, names: Mapping[str, list[str]]) -> tuple[tuple[Note, ...], tuple[str, ...]]:
        """Return the notes on a checkpoint and the names of those that cannot be decoded; `names`: by folder."""
        notes, undecodable = [], []
        for name in names.get(subject.folder, ()):
            try:
                note = self._note_on(subject, name)
            except DamagedRecordError as error:
                self._warn_once(name, error)
                undecodable.append(name)
                continue
            if note is not None:
                notes.append(note)
        return tuple(notes), tuple(undecodable)

    def read(self, name: str) -> Note | None:
        """Return a note, None when it is gone; a `DamagedRecordError` for one that cannot be decoded. One that cannot
        be read now is a `StorageError`: it may hold a tag, without which its checkpoint would be deleted."""
        key = paths.key(paths.NOTES, name)
        try:
            return read_note(partial(self._storage.read, key), key)
        except KeyMissingError:
            return None

    def add(self, subject: Subject, **content: Any) -> None:
        """Write a note on a checkpoint: `metrics` (encoded), `tag`, `untag` or `damage`."""
        data = encode_note(Note(checkpoint=subject.digest, created=timestamp(), **content))
        if len(data) > MAX_RECORD_BYTES:
            raise UsageError(
                f"a note of {len(data):,} bytes is over the limit of {MAX_RECORD_BYTES:,}", run=self._storage.url
            )
        numbers = [parsed.number for parsed in map(parse_note_name, self.names()) if parsed is not None]
        self._put(subject.folder, max(numbers, default=0) + 1, data)
        self._storage.sync(paths.NOTES)

    def remove_about(self, folder: str) -> None:
        """Remove all notes on what a folder held."""
        for name in self.names():
            parsed = parse_note_name(name)
            if parsed is not None and parsed.folder == folder:
                self.remove(name)

    def remove(self, name: str) -> None:
        self._storage.delete(paths.key(paths.NOTES, name))

    def is_on_another(self, name: str, digest: str) -> bool:
        """Return whether a note, as it was last read, is on another checkpoint than the one with this digest."""
        note = self._known.get(name)
        return note is not None and note.checkpoint != digest

    def _put(self, folder: str, number: int, data: bytes) -> None:
        """Create the note with the first free number from this one on."""
        while number <= MAX_NOTE_NUMBER:
            try:
                self._storage.put(note_key(folder, number), data)
                return
            except KeyExistsError:
                number += 1
        raise StorageError(
            f"a note has the highest number that there is, {MAX_NOTE_NUMBER}",
            run=self._storage.url,
            file=paths.NOTES,
            advice="remove that file, which no writer made",
        )

    def _note_on(self, subject: Subject, name: str) -> Note | None:
        """Return a note if it is on this checkpoint. One on another may have been removed, and its name used again."""
        note = self._known.get(name)
        if note is None or note.checkpoint != subject.digest:
            self._known.pop(name, None)
            note = self.read(name)
        if note is None:
            return None
        self._known[name] = note
        return note if note.checkpoint == subject.digest else None

    def _warn_once(self, name: str, error: DamagedRecordError) -> None:
        """Log a damaged note once: a run is scanned after every save."""
        if name not in self._reported:
            self._reported.add(name)
            logger.warning("the note %s is damaged and is skipped; its checkpoint is kept: %s", name, error)


def sum_up(notes: Iterable[Note], tags: tuple[str, ...]) -> Notes:
    """Return the late metrics, the tags and the damage after all notes. `tags`: those of the manifest."""
    metrics: dict[str, Any] = {}
    held = dict.fromkeys(tags)
    damage = ""
    for note in notes:
        metrics.update(note.metrics)
        if note.tag:
            held[note.tag] = None
        held.pop(note.untag, None)
        damage = damage if note.damage is None else note.damage
    return Notes(metrics, tuple(held), damage)


def note_key(folder: str, number: int) -> str:
    return paths.key(paths.NOTES, f"{folder}--{number:06d}.json")


def parse_note_name(name: str) -> NoteName | None:
    match = _NAME.fullmatch(name)
    if match is None or paths.parse_folder(match[1]) is None:
        return None
    return NoteName(match[1], int(match[2]))


def encode_note(note: Note) -> bytes:
    return encode_record(note)


def read_note(read: Callable[[int], bytes], file: str) -> Note:
    """Return the note that `read` gives; see `read_record` for what it raises."""
    return read_record(read, Note, what="a note on a checkpoint", file=file)
