"""Ranges of a region are read with the digests of their blocks checked: every range, every damaged byte."""

from __future__ import annotations

import pytest
from blake3 import blake3

from holdfast.storage.blocks import Region, check, check_in, read_checked, read_unchecked
from holdfast.testing import MemoryStorage

START, SIZE, BLOCK = 3, 11, 4
DATA = bytes(range(100, 100 + START + SIZE + 2))
BLOCKS = [DATA[START + low : START + min(low + BLOCK, SIZE)] for low in range(0, SIZE, BLOCK)]
REGION = Region(START, SIZE, BLOCK, [blake3(block).hexdigest() for block in BLOCKS])
RANGES = [(start, end) for start in range(SIZE) for end in range(start + 1, SIZE + 1)]


def stored(data: bytes) -> MemoryStorage:
    storage = MemoryStorage()
    storage.put("key", data)
    return storage


def flipped(position: int) -> bytes:
    return DATA[:position] + bytes([DATA[position] ^ 1]) + DATA[position + 1 :]


def touched(start: int, end: int) -> list[int]:
    return [index for index in range(len(BLOCKS)) if index * BLOCK < end and (index + 1) * BLOCK > start]


@pytest.mark.parametrize(("start", "end"), RANGES)
def test_a_range_of_sound_blocks_is_read_without_damage(start: int, end: int) -> None:
    target = bytearray(end - start)
    with stored(DATA).open("key") as source:
        assert read_checked(source, REGION, start, memoryview(target)) == []
        assert target == DATA[START + start : START + end]
        read_unchecked(source, REGION, start, memoryview(target))
        assert target == DATA[START + start : START + end]
        assert check(source, REGION, start, end) == []
    assert check_in(memoryview(DATA), 0, REGION, start, end) == []
    assert list(REGION.blocks(start, end)) == touched(start, end)


@pytest.mark.parametrize("position", range(START, START + SIZE))
def test_a_flipped_bit_is_found_by_every_range_that_touches_its_block(position: int) -> None:
    index = (position - START) // BLOCK
    low, high = REGION.block(index)
    damage = [(START + low, START + high)]
    with stored(flipped(position)).open("key") as source:
        for start, end in RANGES:
            expected = damage if index in touched(start, end) else []
            assert read_checked(source, REGION, start, memoryview(bytearray(end - start))) == expected
            assert check(source, REGION, start, end) == expected
            low, high = REGION.whole_blocks(start, end)
            memory = memoryview(flipped(position))[START + low : START + high]
            assert check_in(memory, START + low, REGION, start, end) == expected


def test_bytes_outside_of_the_region_do_not_matter() -> None:
    for position in (*range(START), *range(START + SIZE, len(DATA))):
        with stored(flipped(position)).open("key") as source:
            assert check(source, REGION, 0, SIZE) == []
