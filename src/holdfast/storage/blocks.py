"""Read byte ranges of a chunk, checked on the way. A source and a chunk's digests enter; bytes, or damage, leave."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from holdfast.storage.base import Source


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of a file that has a digest per block: a chunk of a tensor."""

    start: int
    size_bytes: int
    block_bytes: int
    digests: Sequence[str]

    def block(self, index: int) -> tuple[int, int]:
        """Return one block's range, relative to the region."""
        return index * self.block_bytes, min((index + 1) * self.block_bytes, self.size_bytes)

    def blocks(self, start: int, end: int) -> range:
        """Return the blocks that a range of the region touches."""
        return range(start // self.block_bytes, -(-end // self.block_bytes))

    def whole_blocks(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of the region that must be there for its bytes from `start` to `end` to be checked."""
        return start // self.block_bytes * self.block_bytes, min(
            -(-end // self.block_bytes) * self.block_bytes, self.size_bytes
        )


def read_unchecked(source: Source, region: Region, start: int, target: memoryview) -> None:
    source.read_into(region.start + start, target)


def read_checked(source: Source, region: Region, start: int, target: memoryview) -> list[tuple[int, int]]:
    """Fill `target` with the region's bytes from `start` on, and give the absolute ranges of blocks that are damaged.

    Whole blocks are read straight into the target; at the edges, where only a part of a block is wanted, the whole
    block is read into another buffer, because its digest is over all of its bytes.
    """
    end = start + len(target)
    damaged = []
    for index in region.blocks(start, end):
        low, high = region.block(index)
        if start <= low and high <= end:
            block = target[low - start : high - start]
            source.read_into(region.start + low, block)
        else:
            block = _scratch(high - low)
            source.read_into(region.start + low, block)
            wanted_low, wanted_high = max(low, start), min(high, end)
            target[wanted_low - start : wanted_high - start] = block[wanted_low - low : wanted_high - low]
        if blake3(block).hexdigest() != region.digests[index]:
            damaged.append((region.start + low, region.start + high))
    return damaged


def check(source: Source, region: Region, start: int, end: int) -> list[tuple[int, int]]:
    """Return the absolute ranges of the damaged blocks that a range touches. Keeps nothing of what it reads."""
    damaged = []
    for index in region.blocks(start, end):
        low, high = region.block(index)
        block = _scratch(high - low)
        source.read_into(region.start + low, block)
        if blake3(block).hexdigest() != region.digests[index]:
            damaged.append((region.start + low, region.start + high))
    return damaged


def check_in(memory: memoryview, offset: int, region: Region, start: int, end: int) -> list[tuple[int, int]]:
    """Return the damaged ranges among bytes that were read already: `memory` has those of the file from `offset` on."""
    damaged = []
    for index in region.blocks(start, end):
        low, high = region.block(index)
        low, high = region.start + low, region.start + high
        if blake3(memory[low - offset : high - offset]).hexdigest() != region.digests[index]:
            damaged.append((low, high))
    return damaged


_local = threading.local()


def _scratch(size: int) -> memoryview:
    """Memory of this thread's own, used again and again: fresh pages would cost more than the reading."""
    buffer: bytearray | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = bytearray(size)
    return memoryview(buffer)[:size]
