"""Bring tensors of plain files into memory. Entries and tensors enter; filled tensors, or pieces of bytes, leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy

from holdfast.errors import UsageError
from holdfast.formats.source import Fill, StoredChunk, TensorEntry
from holdfast.loading.task_threads import side_by_side
from holdfast.ondisk.regions import Box, boxes_within, span_of, strides_of
from holdfast.state.budget import own_processors

__all__ = ["fill_all", "pieces_of", "read_range"]

_PIECE_BYTES = 8 << 20
_MAX_THREADS = 8


class _Job(NamedTuple):
    """A box of a fill, small enough to be read at once."""

    fill: Fill
    box: Box


def fill_all(fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Fill every target from the chunks of its entry, in several threads. The first error ends all of them."""
    jobs = (_Job(fill, box) for fill in fills for box in boxes_within(fill.box, fill.entry.item_bytes, _PIECE_BYTES))

    def act(job: _Job) -> None:
        _fill_box(job)
        on_bytes(job.box.volume * job.fill.entry.item_bytes)

    side_by_side(act, jobs, min(_MAX_THREADS, own_processors()))


def _fill_box(job: _Job) -> None:
    """Read a box straight into the target's memory where both lie row by row, otherwise through a buffer."""
    import torch

    from holdfast.state.tensors import is_host_memory, memory_of, torch_dtype

    entry, wanted = job.fill.entry, job.box
    if wanted.volume == 0:
        return
    target = job.fill.target
    for dimension, (offset, size) in enumerate(
        zip(wanted.relative_to(job.fill.box).offsets, wanted.sizes, strict=True)
    ):
        if size != target.shape[dimension]:
            target = target.narrow(dimension, offset, size)
    if is_host_memory(target):
        _read_box(entry, wanted, memory_of(target))
        return
    buffer = torch.empty(wanted.sizes, dtype=torch_dtype(entry.dtype))
    _read_box(entry, wanted, memory_of(buffer))
    target.copy_(buffer)


def pieces_of(entry: TensorEntry, limit_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in the order of its elements, at most `limit_bytes` at a time."""
    memory = bytearray(min(limit_bytes, entry.size_bytes))
    for box in entry.boxes(limit_bytes) if entry.size_bytes else ():
        size = box.volume * entry.item_bytes
        if size > len(memory):
            memory = bytearray(size)
        with memoryview(memory)[:size] as view:
            _read_box(entry, box, view)
            yield view


def read_range(entry: TensorEntry, start: int, target: memoryview) -> None:
    """Fill memory with the elements of a tensor from the byte `start` of its row-by-row order on."""
    item = entry.item_bytes
    if start % item or len(target) % item or not 0 <= start <= start + len(target) <= entry.size_bytes:
        raise UsageError(f"{len(target)} bytes from {start} on are not whole elements of the tensor", leaf=entry.name)
    done = 0
    for box in _boxes_of_range(entry.shape, start // item, (start + len(target)) // item):
        size = box.volume * item
        _read_box(entry, box, target[done : done + size])
        done += size


def _boxes_of_range(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """Yield the boxes that the elements from `first` to before `end` make up, in their order."""
    if first >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    while first < end:
        place, inside = divmod(first, row)
        rows = (end - first) // row
        if inside == 0 and rows:
            yield Box((place, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            first += rows * row
        else:
            stop = min(end, (place + 1) * row)
            for box in _boxes_of_range(shape[1:], inside, inside + stop - first):
                yield Box((place, *box.offsets), (1, *box.sizes))
            first = stop


def _read_box(entry: TensorEntry, wanted: Box, target: memoryview) -> None:
    """Fill memory with a box of a tensor, row by row."""
    if not entry.chunks:
        # Without this the memory would stay as it was, and be taken for the tensor.
        raise UsageError(
            "the source does not say where the tensor is stored",
            leaf=entry.name,
            advice="a Source whose entries have no chunks overrides read() and pieces()",
        )
    item = entry.item_bytes
    for chunk in entry.chunks:
        shared = chunk.box.overlap(wanted)
        if shared is None:
            continue
        place = span_of(shared.relative_to(wanted), wanted.sizes)
        inner = shared.relative_to(chunk.box)
        span = span_of(inner, chunk.box.sizes)
        if chunk.strides is None and place.dense and span.dense:
            start = place.start * item
            chunk.file.read_into(chunk.start + span.start * item, target[start : start + shared.volume * item])
        else:
            _read_rows(chunk, inner, shared.relative_to(wanted), wanted, target, item)


def _read_rows(chunk: StoredChunk, inner: Box, place: Box, wanted: Box, target: memoryview, item: int) -> None:
    """Copy a box that lies apart in the file or in the target, some rows of the file at a time."""
    strides = chunk.strides if chunk.strides is not None else strides_of(chunk.box.sizes)
    view = numpy.frombuffer(target, dtype=numpy.uint8).reshape(*wanted.sizes, item)
    for part in _row_groups(inner, strides, item):
        first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
        length = sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True)) + 1
        rows = numpy.empty(length * item, dtype=numpy.uint8)
        chunk.file.read_into(chunk.start + first * item, rows.data)
        steps = (*(stride * item for stride in strides), 1)
        stored = numpy.lib.stride_tricks.as_strided(rows, (*part.sizes, item), steps)
        moved = Box(
            tuple(a - b + c for a, b, c in zip(part.offsets, inner.offsets, place.offsets, strict=True)), part.sizes
        )
        view[_slices(moved)] = stored


def _row_groups(box: Box, strides: tuple[int, ...], item: int) -> Iterator[Box]:
    """Yield the box in groups that span one piece of the file at most, or are single elements: cut along the dimension
    of the largest stride and, where one row of that still spans more, along the next ones."""
    limit = _PIECE_BYTES // item
    reach = [(size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)]
    if sum(reach) < limit or box.volume == 1:
        yield box
        return
    along = max((place for place, length in enumerate(reach) if length), key=lambda place: strides[place])
    others = sum(reach) - reach[along] + 1
    count = max((limit - others) // strides[along] + 1, 1)
    for start in range(0, box.sizes[along], count):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[along] += start
        sizes[along] = min(count, box.sizes[along] - start)
        yield from _row_groups(Box(tuple(offsets), tuple(sizes)), strides, item)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
