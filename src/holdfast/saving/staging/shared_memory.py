"""Map the memory of a handle and take its pages, as huge pages where the kernel has them. Knows no torch and no saves.

A disk writes from huge pages as fast as it can and from small ones of shared memory at half of that, and to take, to
page-lock and to free them costs a fraction. The kernel gives no huge pages to shared memory by default
(`shmem_enabled` is `never`), but it collapses small pages into a huge one when a program asks for it, since Linux 6.1.
So one small page is taken in the place of each huge one, and then collapsed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from holdfast.state.memory import HUGE_PAGE_BYTES

__all__ = ["PAGE_BYTES", "map_shared", "take_pages"]

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def map_shared(handle: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a handle, which stays where it is as long as anything refers to it. It begins at an address
    where a huge page can begin.

    Not by the mmap module: it keeps a handle of its own, which a data loader's worker would inherit and keep the memory
    alive with, long after the trainer gave it back.
    """
    reserved_bytes = size_bytes + HUGE_PAGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _map(None, reserved_bytes, 0, private, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _map(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle)
    except OSError:
        _libc.munmap(reserved, reserved_bytes)
        raise
    # Nor may such a worker have the memory itself.
    _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK)
    array = (ctypes.c_ubyte * size_bytes).from_address(address)
    # At the end of the process the system does it, when nothing can look at the memory any more.
    weakref.finalize(array, _unmap, reserved, reserved_bytes, os.getpid()).atexit = False
    return array


def take_pages(address: int, size_bytes: int) -> None:
    """Have the kernel take every page of a range now. Raises an OSError with EINVAL where it cannot be asked to (before
    Linux 5.14), and with ENOMEM or EFAULT where there is no memory.

    Through ctypes, which lets other threads run meanwhile.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < last:
        for place in range(first, last, HUGE_PAGE_BYTES):
            _advise(place, PAGE_BYTES, _MADV_POPULATE_WRITE)
        # Where it is refused, or no huge page is free, the small ones that follow do as well.
        _libc.madvise(first, last - first, _MADV_COLLAPSE)
    _advise(address, size_bytes, _MADV_POPULATE_WRITE)


def _advise(address: int, size_bytes: int, advice: int) -> None:
    while _libc.madvise(address, size_bytes, advice) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _map(address: int | None, size_bytes: int, protection: int, flags: int, handle: int) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, handle, 0)
    if found in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def _unmap(address: int, size_bytes: int, owner: int) -> None:
    if os.getpid() == owner:  # in a forked child something else may be there
        _libc.munmap(address, size_bytes)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
