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
    "GAP_BYTES",
    "HELD_FROM_BYTES",
    "READ_PIECE_BYTES",
    "READ_SLOTS",
    "ROWS_PIECE_BYTES",
    "SMALL_READ_BYTES",
    "WIDENED_BYTES",
    "Overlap",
    "Request",
    "overlaps",
    "pieces",
    "row_groups",
    "rows_bytes",
    "size_of",
]

WIDENED_BYTES = 64 << 10
"""By how much a read of a piece may be widened, on both sides together, to what a file is read in best."""

READ_PIECE_BYTES = (4 << 20) - WIDENED_BYTES
"""The most bytes that are read at once, but for a device."""

ROWS_PIECE_BYTES = (8 << 20) - WIDENED_BYTES
"""The most bytes of rows that are read at once where only a part of each row is wanted; see `rows_bytes`."""

READ_SLOTS = 16
"""How many pieces threads that read past the page cache for host memory may be ahead of those that digest."""

HELD_FROM_BYTES = 64 << 10
"""Below this, to read twice costs less than to keep the books of what is held beside a live tensor."""

SMALL_READ_BYTES = 64 << 10
"""Up to this size one copy out of a slot costs less than a separate read."""

GAP_BYTES = 64 << 10
"""A gap up to this size between two parts of a file is read, too: that costs less than to begin another read."""

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
    most = rows_bytes(block_bytes)
    rows = max(max(most - 2 * block_bytes, most // 2) // row_bytes, 1)
    for row in range(0, box.sizes[0], rows):
        size = min(rows, box.sizes[0] - row)
        yield Box((box.offsets[0] + row, *box.offsets[1:]), (size, *box.sizes[1:]))


def rows_bytes(block_bytes: int) -> int:
    """Return how many bytes of rows are read at once, with the whole blocks that they touch: at least about eight
    blocks, of which one is read again with the next rows."""
    return max(READ_PIECE_BYTES, min(8 * block_bytes - WIDENED_BYTES, ROWS_PIECE_BYTES))
