"""What is wanted of a checkpoint, and where it lies: boxes of leaves enter, byte ranges of files leave.

Pure arithmetic over the manifest: opens no file, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.ondisk.manifest import ChunkRecord, TensorRecord
from holdfast.ondisk.regions import Box, Span, span_of, whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.storage.blocks import Region

__all__ = [
    "DEVICE_PIECE_BYTES",
    "HOST_PIECE_BYTES",
    "READ_PIECE_BYTES",
    "Overlap",
    "Request",
    "overlaps",
    "pieces",
    "row_groups",
    "size_of",
]

READ_PIECE_BYTES = (8 << 20) - (64 << 10)
"""The most bytes that are read at once, but for a device."""

HOST_PIECE_BYTES = 2 << 20
"""How many bytes are read at once for host memory that lies as the file does. With more, threads that read past the
page cache all wait for the disk, and then the disk for all of them."""

DEVICE_PIECE_BYTES = 16 << 20
"""The most bytes that are read at once for a device: what a thread does for each piece, it does while others wait for
the interpreter."""


@dataclass(frozen=True, slots=True)
class Request:
    """Fill `target`, a torch tensor, with a box of a leaf. `fresh`: nothing but this request knows the target yet.

    A request of which only the bytes are checked, not read, needs no target: it is None.
    """

    leaf: TensorRecord
    box: Box
    target: Any
    fresh: bool


def size_of(requests: Iterable[Request]) -> int:
    """Return the number of bytes that the requests ask for."""
    return sum(request.box.volume * request.leaf.item_bytes for request in requests)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a request and a chunk share: the box in the chunk, the bytes that it spans there, and the same box in the
    request; None when it is all of the request."""

    chunk: ChunkRecord
    region: Region
    inner: Box
    span: Span
    wanted: Box | None


def overlaps(request: Request, checkpoint: Checkpoint) -> Iterator[Overlap]:
    """Yield the chunks of the leaf that hold a part of the request, each with that part."""
    item, block_bytes = request.leaf.item_bytes, checkpoint.manifest.block_bytes
    for chunk in request.leaf.chunks:
        box = chunk.box
        region = Region(chunk.start, box.volume * item, block_bytes, chunk.digests)
        if box == request.box:
            yield Overlap(chunk, region, whole(chunk.sizes), Span(0, box.volume, True), None)
            continue
        shared = box.overlap(request.box)
        if shared is not None:
            inner = shared.relative_to(box)
            yield Overlap(chunk, region, inner, span_of(inner, chunk.sizes), shared.relative_to(request.box))


def pieces(region: Region, start: int, end: int, piece_bytes: int = READ_PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Yield a range of a region in pieces that end on block boundaries, so that no block is read twice."""
    step = max(piece_bytes // region.block_bytes, 1) * region.block_bytes
    while start < end:
        stop = min((start // step + 1) * step, end)
        yield start, stop
        start = stop


def row_groups(box: Box, row_bytes: int, block_bytes: int) -> Iterator[Box]:
    """Yield the box in groups of rows that fit into one piece, with the whole blocks that they touch.

    Rows are those of the first dimension. Only a row, or a block, that is large itself makes a larger group.
    """
    if not box.sizes:
        yield box
        return
    rows = max(max(READ_PIECE_BYTES - 2 * block_bytes, READ_PIECE_BYTES // 2) // row_bytes, 1)
    for row in range(0, box.sizes[0], rows):
        size = min(rows, box.sizes[0] - row)
        yield Box((box.offsets[0] + row, *box.offsets[1:]), (size, *box.sizes[1:]))
