"""The frame of a tensor file: an ordinary safetensors header, padded so that the data starts on a 4 KiB boundary.

Chunks enter in any order; the header and each chunk's place leave. Knows no torch and opens nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec

from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.dtypes import STORED_CODES, ElementType, element_type
from holdfast.ondisk.regions import MAX_DIMENSIONS, Box

ALIGNMENT = 4096
SMALL_BYTES = 256 << 10
"""A chunk below this size is small: what it costs is to be handled, not to be moved."""
MAX_HEADER_BYTES = 100_000_000
"""The limit that safetensors itself puts on a header."""


class FramedChunk(NamedTuple):
    """One chunk of a leaf as a file holds it."""

    leaf: str
    kind: ElementType
    box: Box
    size_bytes: int

    @classmethod
    def of(cls, leaf: str, dtype: str, box: Box) -> FramedChunk:
        kind = element_type(dtype)
        return cls(leaf, kind, box, math.prod(box.sizes) * kind.item_bytes)


@dataclass(frozen=True, slots=True)
class Frame:
    """A file's header and the absolute place of each chunk, in the order in which the file holds them. `block_bytes`:
    how many bytes of a chunk one digest is of."""

    header: bytes
    chunks: tuple[FramedChunk, ...]
    starts: tuple[int, ...]
    size_bytes: int
    block_bytes: int


def frame(chunks: Sequence[FramedChunk], block_bytes: int) -> Frame:
    """Lay chunks out as one safetensors file, without holes."""
    # Larger elements first: each chunk then starts at a multiple of its element's size, which mapping readers need.
    # Among them small chunks first, by size: neighbours can then be moved together, thousands of them at a time.
    ordered = tuple(sorted(chunks, key=lambda chunk: (-chunk.kind.alignment, min(chunk.size_bytes, SMALL_BYTES))))
    entries = [(chunk.leaf, chunk.kind, chunk.box.sizes) for chunk in ordered]
    header, size_bytes = encode_header(entries, _notes(ordered))
    starts = accumulate((chunk.size_bytes for chunk in ordered), initial=len(header))
    return Frame(header, ordered, tuple(starts)[:-1], size_bytes, block_bytes)


def encode_header(
    entries: Sequence[tuple[str, ElementType, tuple[int, ...]]], notes: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the header of a file that holds tensors of these names, types and shapes one after the other, and the size
    of the whole file."""
    listed: dict[str, object] = {"__metadata__": notes}
    position = 0
    for name, kind, shape in entries:
        end = position + math.prod(shape) * kind.item_bytes
        listed[name] = {"dtype": kind.code, "shape": kind.stored_shape(shape), "data_offsets": (position, end)}
        position = end
    try:
        header = _padded(msgspec.json.encode(listed))
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a tensor has a name that is no text: {ascii(error.object)[:200]}", advice="give the tensor another name"
        ) from None
    if len(header) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the names of {len(entries)} tensors make a header of {len(header):,} bytes, over the limit of "
            f"{MAX_HEADER_BYTES:,}",
            advice="give the tensors shorter names",
        )
    return header, len(header) + position


def _notes(chunks: Sequence[FramedChunk]) -> dict[str, str]:
    """Return the note that lets PyTorch's own reader put shards together. It wants every key of the file in it."""
    offsets = {chunk.leaf: {"saved_offsets": chunk.kind.stored_offsets(chunk.box.offsets)} for chunk in chunks}
    return {
        "format": "pt",
        "holdfast_format": "1",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": msgspec.json.encode(offsets).decode(),
    }


def _padded(text: bytes) -> bytes:
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    return struct.pack("<Q", length) + text.ljust(length, b" ")


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor in a header: the stored type and shape, and the absolute offsets of its bytes."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


class _RawEntry(msgspec.Struct, frozen=True):
    dtype: str
    # Limited before anything is multiplied: the product of a megabyte of sizes takes longer than anybody waits.
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...], msgspec.Meta(max_length=MAX_DIMENSIONS + 1)
    ]
    data_offsets: tuple[int, int]


def header_length(first_bytes: bytes, file_bytes: int) -> int:
    """Return the length of the whole header, with its first eight bytes, checked against the size of the file."""
    if len(first_bytes) != 8:
        raise CorruptCheckpointError("the file is too short for a safetensors header")
    length = 8 + int(struct.unpack("<Q", first_bytes)[0])
    if length > min(file_bytes, MAX_HEADER_BYTES):
        raise CorruptCheckpointError(f"the header claims {length} bytes, the file has {file_bytes}")
    return length


def parse_header(header: bytes, file_bytes: int) -> dict[str, HeaderEntry]:
    """Return every tensor that a header lists. A header with wrong sizes or offsets is refused."""
    try:
        raw = from_json(header[8:], dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: from_json(entry, _RawEntry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"the header is no safetensors header: {error}") from None
    return {name: _checked(name, entry, len(header), file_bytes) for name, entry in entries.items()}


def _checked(name: str, entry: _RawEntry, base: int, file_bytes: int) -> HeaderEntry:
    item_bytes = STORED_CODES.get(entry.dtype)
    start, end = entry.data_offsets
    if item_bytes is None:
        raise CorruptCheckpointError(f"the header names an unknown type {entry.dtype!r}", leaf=name)
    if math.prod(entry.shape) * item_bytes != end - start:
        raise CorruptCheckpointError(f"the header's shape {list(entry.shape)} does not fit its bytes", leaf=name)
    if not 0 <= start <= end <= file_bytes - base:
        raise CorruptCheckpointError(f"the header places bytes {start}-{end} outside of the file", leaf=name)
    return HeaderEntry(entry.dtype, entry.shape, base + start, base + end)
