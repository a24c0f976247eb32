"""The arithmetic of pieces against the plain model: an array whose elements are counted one by one."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from holdfast.ondisk.regions import Box, cover_exactly, span_of, strides_of, whole

steady = settings(derandomize=True, deadline=None, max_examples=400)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], *, smallest: int = 0) -> Box:
    sizes = tuple(draw(st.integers(min(smallest, size), size)) for size in shape)
    offsets = tuple(draw(st.integers(0, total - size)) for total, size in zip(shape, sizes, strict=True))
    return Box(offsets, sizes)


def marked(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Which elements of the shape a box covers."""
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))] = True
    return mask


@given(data=st.data(), shape=SHAPES)
@steady
def test_two_boxes_share_exactly_the_elements_that_both_cover(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = marked(one, shape) & marked(other, shape)
    shared = one.overlap(other)
    assert (shared is not None) == bool(both.any())
    assert shared == other.overlap(one)
    if shared is not None:
        assert np.array_equal(marked(shared, shape), both)
        assert shared.volume == both.sum()


@given(data=st.data(), shape=SHAPES.filter(all))
@steady
def test_a_span_holds_the_inner_elements_and_knows_whether_they_are_alone(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    inner = data.draw(boxes_in(shape, smallest=1))
    places = np.flatnonzero(marked(inner, shape))
    span = span_of(inner, shape)
    assert (span.start, span.start + span.length) == (places[0], places[-1] + 1)
    assert span.dense == (span.length == len(places))


@given(shape=SHAPES.filter(all))
@steady
def test_strides_are_those_of_a_contiguous_array(shape: tuple[int, ...]) -> None:
    model = np.zeros(shape, dtype=np.int8).strides
    # numpy is free in the stride of a dimension of size 1: only where an index can move does it mean anything.
    assert [stride for stride, size in zip(strides_of(shape), shape, strict=True) if size > 1] == [
        stride for stride, size in zip(model, shape, strict=True) if size > 1
    ]


@given(data=st.data(), shape=SHAPES)
@steady
def test_a_box_relative_to_another_covers_the_same_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.sizes))
    placed = Box(tuple(a + b for a, b in zip(outer.offsets, inner.offsets, strict=True)), inner.sizes)
    assert placed.relative_to(outer) == inner


def covers(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """The model: every element once."""
    if not all(box.within(shape) for box in boxes):
        return False
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts += marked(box, shape)
    return bool((counts == 1).all()) and (counts.size > 0 or len(boxes) <= 1)


@given(data=st.data(), shape=SHAPES)
@steady
def test_arbitrary_pieces_cover_a_shape_as_the_model_says(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape, smallest=1), max_size=6))
    assert (cover_exactly(boxes, shape) is None) == covers(boxes, shape)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[Box], tuple[int, ...]]:
    """Pieces made by cutting a shape again and again: they cover it exactly."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    pieces = [whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, piece.sizes[dimension]))
        for start, size in ((0, cut), (cut, piece.sizes[dimension] - cut)):
            if size:
                offsets, sizes = list(piece.offsets), list(piece.sizes)
                offsets[dimension] += start
                sizes[dimension] = size
                pieces.append(Box(tuple(offsets), tuple(sizes)))
    return draw(st.permutations(pieces)), shape


@given(tiling=tilings())
@steady
def test_a_cut_up_shape_is_covered_exactly(tiling: tuple[list[Box], tuple[int, ...]]) -> None:
    boxes, shape = tiling
    assert cover_exactly(boxes, shape) is None


@given(data=st.data(), tiling=tilings())
@steady
def test_a_piece_that_is_lost_doubled_or_moved_is_noticed(
    data: st.DataObject, tiling: tuple[list[Box], tuple[int, ...]]
) -> None:
    boxes, shape = tiling
    index = data.draw(st.integers(0, len(boxes) - 1))
    assert "elements are there" in (cover_exactly(boxes[:index] + boxes[index + 1 :], shape) or "")
    assert "overlap" in (cover_exactly([*boxes, boxes[index]], shape) or "")
    for dimension in range(len(shape)):
        offsets = list(boxes[index].offsets)
        offsets[dimension] += 1
        moved = [*boxes[:index], Box(tuple(offsets), boxes[index].sizes), *boxes[index + 1 :]]
        assert cover_exactly(moved, shape) is not None


PINWHEEL = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((1, 0), (2, 1)), Box((2, 1), (1, 2)), Box((1, 1), (1, 1))]


def test_pieces_that_no_straight_cut_parts_are_compared_too() -> None:
    assert cover_exactly(PINWHEEL, (3, 3)) is None
    assert "overlap" in (cover_exactly([*PINWHEEL[:4], Box((0, 0), (1, 1))], (3, 3)) or "")


@given(
    shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    box=st.builds(
        Box,
        st.lists(st.integers(-3, 2**62), max_size=4).map(tuple),
        st.lists(st.integers(-3, 2**62), max_size=4).map(tuple),
    ),
)
@example(shape=(3,), box=Box((-1,), (2,)))
@example(shape=(3,), box=Box((4,), (-1,)))
@example(shape=(), box=Box((0,), (1,)))
@steady
def test_a_piece_that_leaves_the_shape_is_refused(shape: tuple[int, ...], box: Box) -> None:
    fits = (
        len(box.offsets) == len(box.sizes) == len(shape)
        and min((*box.offsets, *box.sizes), default=0) >= 0
        and all(a + n <= total for a, n, total in zip(box.offsets, box.sizes, shape, strict=True))
    )
    assert box.within(shape) == fits
    if not fits:
        assert "leaves the shape" in (cover_exactly([box], shape) or "")


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_thousands_of_shards_are_compared_in_no_time_along_any_dimension(dimension: int) -> None:
    sizes = [4, 4, 4]
    sizes[dimension] = 4096
    cut = [4, 4, 4]
    cut[dimension] = 1
    offsets = ([number if other == dimension else 0 for other in range(3)] for number in range(4096))
    boxes = [Box(tuple(offset), tuple(cut)) for offset in offsets]
    grid = [Box((x, y), (1, 1)) for x, y in itertools.product(range(64), range(64))]
    begin = time.process_time()
    assert cover_exactly(boxes, tuple(sizes)) is None
    assert cover_exactly(grid, (64, 64)) is None
    # Comparing each with each takes a minute; this takes some hundredths of a second.
    assert time.process_time() - begin < 5
