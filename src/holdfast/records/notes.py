"""What is said of a checkpoint after it was committed: late metrics, tags, damage. Small values, each written once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import CorruptCheckpointError
from holdfast.records import layout
from holdfast.records.wire import from_json

__all__ = ["Note", "NoteName", "decode_note", "encode_note", "note_key", "parse_note_name", "sum_up"]

_NAME = re.compile(r"(step-[0-9.]+)--([0-9]{6,18})\.json", re.ASCII)


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
    return layout.key(layout.NOTES, f"{folder}--{number:06d}.json")


def parse_note_name(name: str) -> NoteName | None:
    match = _NAME.fullmatch(name)
    if match is None or layout.parse_folder(match[1]) is None:
        return None
    return NoteName(match[1], int(match[2]))


def encode_note(note: Note) -> bytes:
    return msgspec.json.encode(note) + b"\n"


def decode_note(data: bytes) -> Note:
    try:
        return from_json(data, Note)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"it is no note: {error}") from None
