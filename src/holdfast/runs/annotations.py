"""What is said of a checkpoint after it was committed: late metrics, tags, damage. Small values, each written once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record, read_record

__all__ = ["MAX_NOTE_NUMBER", "Note", "NoteName", "encode_note", "note_key", "parse_note_name", "read_note", "sum_up"]

# No run ever gets there by counting.
MAX_NOTE_NUMBER = 10**15 - 1

_NAME = re.compile(r"(step-[0-9.]+)--([0-9]{6,15})\.json", re.ASCII)


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One note on the checkpoint with that digest. Of several, the later one counts.

    `metrics` are encoded by the codec. `damage` says what is wrong with its bytes; an empty one takes that back.
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


def sum_up(notes: Iterable[Note], tags: tuple[str, ...]) -> Notes:
    """The metrics that came late, the tags, from those of the manifest on, and the damage, after all notes."""
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
