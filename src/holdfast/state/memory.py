"""What the chains ask of the process's memory: a pause of the collector, huge pages, zeros without pages. Knows no
checkpoints."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: the work makes many small records and no cycles, and a collection is slow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Ask for huge pages for memory that is not in use yet: to fill small ones takes twice as long.

    The range is widened to whole pages: neighbours that all ask for it then share the huge pages between them.
    """
    start = address // PAGE_BYTES * PAGE_BYTES
    end = -(-(address + size_bytes) // PAGE_BYTES) * PAGE_BYTES
    # Only a hint, so what is answered does not matter: without huge pages it works as well, more slowly.
    _madvise(start, end - start, mmap.MADV_HUGEPAGE)


def give_back_zeros(address: int, size_bytes: int) -> None:
    """Return pages of private memory, such as the allocator's, that hold nothing but zeros to the system. They still
    read as zeros, and take no memory until they are written to. Pages at the edges, which hold more, are left alone."""
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    end = (address + size_bytes) // PAGE_BYTES * PAGE_BYTES
    if start < end:
        _madvise(start, end - start, mmap.MADV_DONTNEED)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
