"""The collector pauses and goes on as it was; pages of zeros are given back and still read as zeros."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import suppress

import pytest

from holdfast.state.memory import PAGE_BYTES, collector_paused, give_back_zeros, prefer_huge_pages


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector as it was before the test."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with suppress(KeyError), collector_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is enabled


def resident_pages(address: int, count: int) -> int:
    state = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(count * PAGE_BYTES), state) == 0
    return sum(byte & 1 for byte in state)


def test_whole_pages_of_zeros_are_given_back_and_what_is_beside_them_stays() -> None:
    count = 8
    with mmap.mmap(-1, count * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:PAGE_BYTES] = b"x" * PAGE_BYTES
        memory[PAGE_BYTES:] = bytes((count - 1) * PAGE_BYTES)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(view)
        assert resident_pages(address, count) == count
        give_back_zeros(address + PAGE_BYTES - 1, (count - 1) * PAGE_BYTES)
        assert resident_pages(address, count) == 2, "the first has other bytes, the last is not wholly in the range"
        del view
        assert memory[:] == b"x" * PAGE_BYTES + bytes((count - 1) * PAGE_BYTES)


def test_a_range_without_a_whole_page_is_left_alone() -> None:
    with mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * PAGE_BYTES
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        give_back_zeros(ctypes.addressof(view) + 1, PAGE_BYTES - 1)
        prefer_huge_pages(ctypes.addressof(view) + 1, 10)
        del view
        assert memory[:] == b"x" * PAGE_BYTES
