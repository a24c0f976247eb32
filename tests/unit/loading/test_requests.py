"""Which byte ranges of files hold a box of a leaf: every element once, and no piece larger than it may be."""

from __future__ import annotations

import pytest

from holdfast.loading.requests import READ_PIECE_BYTES, ROWS_PIECE_BYTES, pieces, row_groups, rows_bytes
from holdfast.ondisk.regions import Box, cover_exactly
from holdfast.storage.blocks import Region

BLOCK_BYTES = 1 << 20


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 3 * READ_PIECE_BYTES), (5, READ_PIECE_BYTES + 7), (9, 9)])
def test_pieces_follow_each_other_and_end_on_blocks(start: int, end: int) -> None:
    region = Region(0, end, BLOCK_BYTES, ())
    found = list(pieces(region, start, end))
    edges = [start, *(stop for _, stop in found)]
    assert [first for first, _ in found] == edges[:-1]
    assert edges[-1] == end
    assert all(stop % BLOCK_BYTES == 0 for _, stop in found[:-1])
    assert all(stop - first <= READ_PIECE_BYTES for first, stop in found)


@pytest.mark.parametrize("row_bytes", [1, 4096, READ_PIECE_BYTES, 3 * READ_PIECE_BYTES])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_groups_of_rows_are_the_whole_box(row_bytes: int, rows: int) -> None:
    groups = list(row_groups(Box((0, 3), (rows, 5)), row_bytes, BLOCK_BYTES))
    assert cover_exactly([Box((one.offsets[0], 0), one.sizes) for one in groups], (rows, 5)) is None
    assert all(one.sizes[0] == 1 or one.sizes[0] * row_bytes <= ROWS_PIECE_BYTES for one in groups)


def test_a_scalar_is_one_group() -> None:
    assert list(row_groups(Box((), ()), 4, BLOCK_BYTES)) == [Box((), ())]


@pytest.mark.parametrize("block_bytes", [64 << 10, 256 << 10, 512 << 10, 1 << 20])
@pytest.mark.parametrize("row_bytes", [4096, 12_288, 50_000])
def test_rows_of_which_a_part_is_wanted_are_read_about_once(row_bytes: int, block_bytes: int) -> None:
    """Of a tensor that is split along its columns, each rank needs a part of every row, and of every block."""
    rows = (64 << 20) // row_bytes
    region = Region(0, rows * row_bytes, block_bytes, ())
    read_bytes = 0
    for group in row_groups(Box((0, 3), (rows, 5)), row_bytes, block_bytes):
        first = group.offsets[0] * row_bytes
        start, end = region.whole_blocks(first, first + group.sizes[0] * row_bytes)
        assert end - start <= rows_bytes(block_bytes)
        read_bytes += end - start
    assert read_bytes <= 1.2 * region.size_bytes
