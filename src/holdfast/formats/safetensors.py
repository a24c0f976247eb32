"""One safetensors file as a source of weights. A path enters; names, types, shapes and places leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.formats.base import Format
from holdfast.formats.binary import BinaryFile
from holdfast.formats.source import Source, StoredChunk, TensorEntry
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import header_length, parse_header

__all__ = ["SafetensorsFormat", "SafetensorsSource", "read_entries"]

# The element type that a code names by itself. Types that are stored as another one, with a dimension more, cannot be
# told from that one.
_TYPES = {kind.code: name for name, kind in ELEMENT_TYPES.items() if not kind.extra}


class SafetensorsSource(Source):
    """The tensors of one safetensors file."""

    format: ClassVar[str] = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._file = BinaryFile.open(path)
        try:
            self._tree = read_entries(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    def close(self) -> None:
        self._file.close()


def read_entries(file: BinaryFile) -> dict[str, TensorEntry]:
    """Return the tensors that the header of a file lists, each checked to lie in it, none over another."""
    try:
        header = file.read(0, header_length(file.read(0, min(8, file.size_bytes)), file.size_bytes))
        _refuse_duplicates(header)
        entries = parse_header(header, file.size_bytes)
    except HoldfastError as error:
        raise error.at(file=file.name) from None
    found = {}
    for name, entry in entries.items():
        chunk = StoredChunk(file, entry.start, whole(entry.shape))
        if entry.code not in _TYPES:
            raise CorruptCheckpointError(f"the element type {entry.code!r} is unknown", leaf=name, file=file.name)
        found[name] = TensorEntry(name, _TYPES[entry.code], entry.shape, (chunk,)).checked()
    _refuse_overlaps(file, len(header), sorted((entry.start, entry.end, name) for name, entry in entries.items()))
    return found


def _refuse_duplicates(header: bytes) -> None:
    """Refuse a header that has a name twice: readers differ in which of them they take."""
    import json

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise CorruptCheckpointError("the header has a name twice")
        return made

    try:
        json.loads(header[8:].decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the header is no safetensors header: {error}") from None


def _refuse_overlaps(file: BinaryFile, header_bytes: int, ranges: list[tuple[int, int, str]]) -> None:
    """Refuse tensors that share bytes, holes between them and bytes after the last: what safetensors itself refuses."""
    position = header_bytes
    for start, end, name in ranges:
        if start != position:
            raise CorruptCheckpointError("the tensors do not lie back to back", leaf=name, file=file.name)
        position = end
    if position != file.size_bytes:
        raise CorruptCheckpointError(
            f"the tensors end at byte {position}, the file at {file.size_bytes}", file=file.name
        )


def read_notes(file: BinaryFile) -> dict[str, str]:
    """Return the `__metadata__` of a file, empty where there is none."""
    header = file.read(0, header_length(file.read(0, min(8, file.size_bytes)), file.size_bytes))
    try:
        return from_json(header[8:], _Notes).notes
    except msgspec.MsgspecError:
        return {}


class _Notes(msgspec.Struct, frozen=True):
    notes: dict[str, str] = msgspec.field(default_factory=dict, name="__metadata__")


class SafetensorsFormat(Format):
    """One file, or several with an index, of the safetensors format."""

    name: ClassVar[str] = "safetensors"

    def detects(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with BinaryFile.open(path) as file:
                length = header_length(file.read(0, min(8, file.size_bytes)), file.size_bytes)
                return length > 8 and file.read(8, 1) == b"{"
        except HoldfastError:
            return False

    def open(self, path: Path) -> Source:
        return SafetensorsSource(path)
