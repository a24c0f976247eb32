"""Rectangular pieces of a tensor: where they lie, what two of them share, which bytes that is. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

Shape = tuple[int, ...]

MAX_DIMENSIONS = 64
"""More than torch can work with; sizes that come from a file are counted before they are multiplied."""


class Box(NamedTuple):
    """A piece of a tensor: its offsets in the whole, and its sizes."""

    offsets: Shape
    sizes: Shape

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def within(self, shape: Shape) -> bool:
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """Return what both cover, or None. Two scalars overlap in their one element."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, other: Box) -> Box:
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)


class Cut(NamedTuple):
    """One of `places` equal shards of a tensor along one dimension: which one, and its sizes."""

    dimension: int
    place: int
    places: int
    sizes: Shape

    @property
    def shape(self) -> Shape:
        """Return the shape of the whole tensor."""
        return tuple(n * self.places if d == self.dimension else n for d, n in enumerate(self.sizes))

    @property
    def box(self) -> Box:
        """Return where the shard lies in the whole tensor."""
        return Box(tuple(n * self.place if d == self.dimension else 0 for d, n in enumerate(self.sizes)), self.sizes)


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def boxes_within(box: Box, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Yield boxes that make up a box, in the order of its elements, none larger than the limit, but for one element."""
    return _cut_down(box, item_bytes, max(limit_bytes, item_bytes), 0)


def _cut_down(box: Box, item_bytes: int, limit_bytes: int, dimension: int) -> Iterator[Box]:
    """Cut a box along one dimension, and along the next one where a single row of it is too large."""
    if box.volume * item_bytes <= limit_bytes:
        yield box
        return
    size = box.sizes[dimension]
    step = max(limit_bytes * size // (box.volume * item_bytes), 1)
    for start in range(0, size, step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dimension] += start
        sizes[dimension] = min(step, size - start)
        yield from _cut_down(Box(tuple(offsets), tuple(sizes)), item_bytes, limit_bytes, dimension + 1)


def strides_of(shape: Shape) -> Shape:
    """Return the element strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Span(NamedTuple):
    """The elements of an inner box, as they lie in an outer contiguous box: from `start`, `length` elements to the end
    of the last one; `dense` when all of them are wanted."""

    start: int
    length: int
    dense: bool


def span_of(inner: Box, outer_sizes: Shape) -> Span:
    """Return where an inner box (offsets relative to the outer one) lies in the memory of the outer, contiguous box."""
    strides = strides_of(outer_sizes)
    start = sum(offset * stride for offset, stride in zip(inner.offsets, strides, strict=True))
    length = sum((size - 1) * stride for size, stride in zip(inner.sizes, strides, strict=True)) + 1
    return Span(start, length, length == inner.volume)


def cover_exactly(boxes: Sequence[Box], shape: Shape) -> str | None:
    """Return None if the boxes tile the shape, with nothing missing and nothing twice; otherwise what is wrong."""
    for box in boxes:
        if not box.within(shape):
            return f"a piece at {list(box.offsets)} of size {list(box.sizes)} leaves the shape {list(shape)}"
    covered = sum(box.volume for box in boxes)
    expected = math.prod(shape)
    if covered < expected:
        return f"only {covered} of {expected} elements are there"
    twice = _overlapping(boxes)
    if twice is not None:
        return f"two pieces overlap at {list(twice.offsets)}"
    if expected == 0 and len(boxes) > 1:
        return "an empty tensor has more than one piece"
    return None


def _overlapping(boxes: Sequence[Box]) -> Box | None:
    """Return the first overlap of two boxes. They are divided before being compared, so that many shards are cheap."""
    groups = [[box for box in boxes if box.volume]]
    while groups:
        group = groups.pop()
        parts = _cut(group) if len(group) > 1 else []
        if len(parts) > 1:
            groups += parts
            continue
        for one, other in combinations(group, 2):
            shared = one.overlap(other)
            if shared is not None:
                return shared
    return None


def _cut(boxes: list[Box]) -> list[list[Box]]:
    """Return the boxes in parts between which lie planes that no box crosses; one part where there is no such plane."""
    for dimension in range(len(boxes[0].offsets)):
        parts: list[list[Box]] = []
        end = -1
        for box in sorted(boxes, key=lambda box: box.offsets[dimension]):
            if not parts or box.offsets[dimension] >= end:
                parts.append([])
            parts[-1].append(box)
            end = max(end, box.offsets[dimension] + box.sizes[dimension])
        if len(parts) > 1:
            return parts
    return [boxes]
