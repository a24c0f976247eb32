"""Shared memory at addresses where huge pages can begin, and whose pages are there when they were asked for."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.saving.staging.shared_memory import HUGE_PAGE_BYTES, PAGE_BYTES, map_shared, take_pages

SIZE_BYTES = 2 * HUGE_PAGE_BYTES + 3 * PAGE_BYTES


@pytest.fixture
def handle() -> Iterator[int]:
    handle = os.memfd_create("holdfast-pages-test")
    os.ftruncate(handle, SIZE_BYTES)
    yield handle
    os.close(handle)


def taken_bytes(handle: int) -> int:
    return os.fstat(handle).st_blocks * 512


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "holdfast-pages-test" in line]


def test_it_begins_where_a_huge_page_can_begin(handle: int) -> None:
    arrays = [map_shared(handle, SIZE_BYTES) for _ in range(5)]
    assert [ctypes.addressof(array) % HUGE_PAGE_BYTES for array in arrays] == [0] * 5
    assert len(mappings()) == 5
    del arrays
    gc.collect()
    assert mappings() == []


def test_to_map_takes_no_memory_and_what_is_written_is_in_the_file(handle: int) -> None:
    array = map_shared(handle, SIZE_BYTES)
    assert taken_bytes(handle) == 0
    memoryview(array).cast("B")[SIZE_BYTES - 3 :] = b"end"
    assert os.pread(handle, 9, SIZE_BYTES - 3) == b"end"


def test_no_address_space_is_kept_when_it_cannot_be_mapped(handle: int) -> None:
    def reserved() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmSize"))

    os.close(broken := os.dup(handle))
    before = reserved()
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        map_shared(broken, 1 << 36)
    assert caught.value.errno == errno.EBADF
    assert reserved() - before < 1 << 25, "kibibytes, of the 64 GiB that were asked for"


@pytest.mark.parametrize(
    ("start", "size_bytes"),
    [
        (0, SIZE_BYTES),
        (0, PAGE_BYTES),
        (PAGE_BYTES, HUGE_PAGE_BYTES),
        (HUGE_PAGE_BYTES - PAGE_BYTES, HUGE_PAGE_BYTES + 2 * PAGE_BYTES),
        (2 * HUGE_PAGE_BYTES, 3 * PAGE_BYTES),
    ],
)
def test_every_page_of_the_range_is_there_and_holds_what_it_held(handle: int, start: int, size_bytes: int) -> None:
    array = map_shared(handle, SIZE_BYTES)
    memoryview(array).cast("B")[start : start + 5] = b"first"
    take_pages(ctypes.addressof(array) + start, size_bytes)
    assert all(resident(ctypes.addressof(array))[start // PAGE_BYTES : (start + size_bytes) // PAGE_BYTES])
    assert taken_bytes(handle) >= size_bytes
    assert bytes(memoryview(array).cast("B")[start : start + size_bytes]) == b"first" + bytes(size_bytes - 5)


def resident(address: int) -> list[bool]:
    """Return for each page of the file whether it is there."""
    pages = SIZE_BYTES // PAGE_BYTES
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(SIZE_BYTES), found) == 0
    return [bool(one & 1) for one in found]


def test_pages_that_cannot_be_had_are_an_error_and_no_signal(handle: int) -> None:
    array = map_shared(handle, SIZE_BYTES)
    os.ftruncate(handle, HUGE_PAGE_BYTES)
    take_pages(ctypes.addressof(array), HUGE_PAGE_BYTES)
    for start in (0, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES):
        with pytest.raises(OSError, match="Bad address"):
            take_pages(ctypes.addressof(array) + start, SIZE_BYTES - start)


def test_it_is_not_in_a_forked_child(handle: int) -> None:
    array = map_shared(handle, SIZE_BYTES)
    assert len(mappings()) == 1
    assert mmap.PAGESIZE == PAGE_BYTES
    child = os.fork()
    if child == 0:
        os._exit(len(mappings()))
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.sizeof(array) == SIZE_BYTES


def huge_bytes(name: str) -> int:
    """Return how much of a mapping by this name is in huge pages."""
    found, is_named = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_named = name in line
        elif is_named and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            found += int(line.split()[1]) << 10
    return found


def test_the_pages_are_huge_ones_where_the_kernel_collapses_pages(handle: int) -> None:
    probe = os.memfd_create("holdfast-probe")
    os.ftruncate(probe, SIZE_BYTES)
    other = map_shared(probe, SIZE_BYTES)
    memoryview(other).cast("B")[:] = bytes(SIZE_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    collapses = libc.madvise(ctypes.c_void_p(ctypes.addressof(other)), ctypes.c_size_t(HUGE_PAGE_BYTES), 25) == 0
    os.close(probe)
    if not collapses:
        pytest.skip(f"MADV_COLLAPSE is refused here: {os.strerror(ctypes.get_errno())}")
    array = map_shared(handle, SIZE_BYTES)
    take_pages(ctypes.addressof(array), SIZE_BYTES)
    assert huge_bytes("holdfast-pages-test") == 2 * HUGE_PAGE_BYTES
