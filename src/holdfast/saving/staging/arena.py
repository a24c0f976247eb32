"""Shared memory that holds the images of the files of one save, and two numbers for its progress. Knows no torch.

The trainer makes it and fills it front to back; the writer process attaches to it by its handle and writes it out. The
first page is the control page: how many bytes are staged, which the trainer sets, how many are written, which the
writer sets, and whether the trainer gave up. They are plain words in shared memory: a process that looks at them never
waits for the other one.

A processor with weak memory order, such as ARM, may show a word before the bytes that were stored before it, and may
read bytes ahead of the word that counts them. So `staged` has a fence on both sides: the trainer passes it
after the bytes and before the word, the writer after the word and before the bytes. See `Arena._fence`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from holdfast.errors import StorageError

__all__ = ["Arena"]

PAGE_BYTES = 4096
_STAGED, _WRITTEN, _ABANDONED = 0, 1, 2
# In the control page, behind the words.
_FENCE_AT, _FENCE_MARK = 64, b"\1"
_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 64 << 20
_MAX_TOUCHERS = 8


class Arena:
    """`size_bytes` of shared memory at `address`, every page of it there."""

    def __init__(self, handle: int, size_bytes: int) -> None:
        self.handle = handle
        self.size_bytes = size_bytes
        array = _mapped(handle, PAGE_BYTES + size_bytes)
        whole = memoryview(array).cast("B")
        self._words = whole[:PAGE_BYTES].cast("Q")
        self.memory = whole[PAGE_BYTES:]
        self.address = ctypes.addressof(array) + PAGE_BYTES
        _arenas.add(self)

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """Allocate memory, all of it now: a lack of it must be an error here and not a signal at the first touch."""
        handle = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, PAGE_BYTES + size_bytes)
            arena = cls(handle, size_bytes)
            arena._touch()
        except OSError as error:
            os.close(handle)
            raise StorageError.of(
                error,
                f"taking {size_bytes / 2**20:,.0f} MiB of memory for staging",
                advice="give staging_limit_bytes= to save in pieces, or use mode='sync'",
            ) from error
        return arena

    @property
    def staged(self) -> int:
        """Return how many bytes are staged, from the start. A process that has read this may read them."""
        count = self._words[_STAGED]
        self._fence()
        return count

    @staged.setter
    def staged(self, count: int) -> None:
        self._fence()
        self._words[_STAGED] = count

    @property
    def written(self) -> int:
        return self._words[_WRITTEN]

    @written.setter
    def written(self, count: int) -> None:
        self._words[_WRITTEN] = count

    def begin(self) -> None:
        """Begin a new save, of which nothing is staged yet."""
        self._words[_STAGED] = self._words[_WRITTEN] = self._words[_ABANDONED] = 0

    def abandon(self) -> None:
        """Mark this save as one whose rest will not be staged."""
        self._words[_ABANDONED] = 1

    @property
    def abandoned(self) -> bool:
        return self._words[_ABANDONED] != 0

    def _fence(self) -> None:
        """Keep what this thread did in memory before from what it does after, as seen by the process that shares it.

        Python has no atomic operations. But writes to one file exclude each other by a lock of that file in the kernel,
        and both processes write the same byte. Say that the writer has read the trainer's word N. If the writer's write
        had come first, then it would have read N before the trainer stored it: the read comes before that write, which
        comes before the trainer's write, which comes before the store. So the trainer's write came first, and all that
        the trainer had stored until then, the bytes below N, is visible to a process that takes the lock later. It is
        one call, which holds nothing when it is interrupted, takes about a microsecond, and is made once for each
        piece of some megabytes.
        """
        os.pwrite(self.handle, _FENCE_MARK, _FENCE_AT)

    def close(self) -> None:
        """Close the handle. The memory itself is freed when nothing refers to it any more."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    def _touch(self) -> None:
        """Take every page, on several threads: the kernel clears each of them, which takes longer than a copy."""
        total = PAGE_BYTES + self.size_bytes
        starts = range(0, total, _TOUCH_BYTES)
        with ThreadPoolExecutor(min(_MAX_TOUCHERS, os.cpu_count() or 1, len(starts))) as pool:
            results = list(pool.map(lambda start: self._populate(start, min(_TOUCH_BYTES, total - start)), starts))
        for code in results:
            if code == errno.EINVAL:  # a kernel before 5.14
                os.posix_fallocate(self.handle, 0, total)
                return
            if code:
                raise OSError(code, os.strerror(code))

    def _populate(self, start: int, size_bytes: int) -> int:
        # Through ctypes, which lets other threads run meanwhile.
        done = _libc.madvise(self.address - PAGE_BYTES + start, size_bytes, _MADV_POPULATE_WRITE)
        return 0 if done == 0 else ctypes.get_errno()


def _mapped(handle: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a handle, which stays where it is as long as anything refers to it.

    Not by the mmap module: it keeps a handle of its own, which a data loader's worker would inherit and keep the memory
    alive with, long after the trainer gave it back.
    """
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Nor may such a worker have the memory itself.
    _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK)
    array = (ctypes.c_ubyte * size_bytes).from_address(address)
    # At the end of the process the system does it, when nothing can look at the memory any more.
    weakref.finalize(array, _unmap, address, size_bytes, os.getpid()).atexit = False
    return array


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


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the handle in a forked child: it would keep the memory alive after the trainer has released it."""
    for arena in list(_arenas):
        arena.close()


os.register_at_fork(after_in_child=_let_go_in_child)
