"""Read a box of a leaf into host memory, checked on the way, without torch. A request enters; damage leaves.

One thread reads, and holds one piece at a time besides the target. `read` is the fast way into tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from holdfast.loading.files import DAMAGE, Files
from holdfast.loading.requests import Overlap, Request, overlaps, pieces, row_groups
from holdfast.ondisk.regions import Box, span_of, strides_of, whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem
from holdfast.storage.base import Source
from holdfast.storage.blocks import Region, read_checked, read_unchecked

__all__ = ["read_box"]


def read_box(checkpoint: Checkpoint, request: Request, *, checked: bool) -> list[Problem]:
    """Fill the target of a request, a writable view of bytes that is as long as the box, row by row.

    With `checked`, return the damage; a target that damage fell into must not be used.
    """
    with ExitStack() as stack:
        files = Files(checkpoint, stack)
        found: list[Problem] = []
        for overlap in overlaps(request, checkpoint):
            source = files.source(overlap.chunk.file, request.leaf.name)
            if source is not None:
                found += _read_overlap(request, overlap, source, checked)
        return files.problems + found


def _read_overlap(request: Request, overlap: Overlap, source: Source, checked: bool) -> list[Problem]:
    wanted = overlap.wanted or whole(request.box.sizes)
    dense = overlap.span.dense and span_of(wanted, request.box.sizes).dense
    ways = _straight(request, overlap, wanted, source, checked) if dense else None
    leaf, file = request.leaf.name, overlap.chunk.file
    try:
        damaged = list(ways if ways is not None else _by_rows(request, overlap, wanted, source, checked))
    except DAMAGE as error:
        return [Problem(file, error.problem, leaf)]
    return [Problem(file, "the bytes do not have their digest", leaf, place) for place in damaged]


def _straight(
    request: Request, overlap: Overlap, wanted: Box, source: Source, checked: bool
) -> Iterator[tuple[int, int]]:
    """Read bytes that lie together in the file and in the target."""
    item = request.leaf.item_bytes
    first = overlap.span.start * item
    place = span_of(wanted, request.box.sizes).start * item - first
    for start, end in pieces(overlap.region, first, first + wanted.volume * item):
        yield from _read(source, overlap.region, start, request.target[place + start : place + end], checked)


def _by_rows(
    request: Request, overlap: Overlap, wanted: Box, source: Source, checked: bool
) -> Iterator[tuple[int, int]]:
    """Read some rows at a time beside the target, and copy what is wanted of them."""
    import numpy

    item, sizes = request.leaf.item_bytes, overlap.chunk.sizes
    strides = strides_of(sizes)
    target = numpy.frombuffer(request.target, dtype=numpy.uint8).reshape(*request.box.sizes, item)
    target = target[_slices(wanted)]
    for part in row_groups(overlap.inner, strides[0] * item, overlap.region.block_bytes):
        span = span_of(part, sizes)
        rows = numpy.empty(span.length * item, dtype=numpy.uint8)
        yield from _read(source, overlap.region, span.start * item, rows.data, checked)
        steps = (*(stride * item for stride in strides), 1)
        view = numpy.lib.stride_tricks.as_strided(rows, (*part.sizes, item), steps)
        target[_slices(part.relative_to(overlap.inner))] = view


def _read(source: Source, region: Region, start: int, target: memoryview, checked: bool) -> list[tuple[int, int]]:
    if checked:
        return read_checked(source, region, start, target)
    read_unchecked(source, region, start, target)
    return []


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
