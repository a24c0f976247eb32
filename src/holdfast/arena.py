"""Shared memory that holds the images of the files of one save, and two numbers that say how far it is. Knows no torch.

The trainer makes it and fills it front to back; the writer process attaches to it by its handle and writes it out. The
first page is the control page: how many bytes are staged, which the trainer says, how many are written, which the
writer says, and whether the trainer gave up. They are plain words in shared memory: a process that looks at them never
waits for the other one.
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
_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 64 << 20
_MAX_TOUCHERS = 8


class Arena:
    """`size_bytes` of shared memory at `address`, every page of it there."""

    def __init__(self, handle: int, size_bytes: int) -> None:
        self.handle = handle
        self.size_bytes = size_bytes
        self._map = mmap.mmap(handle, PAGE_BYTES + size_bytes)
        # A data loader's worker that is forked meanwhile must neither see this memory nor keep it alive.
        self._map.madvise(mmap.MADV_DONTFORK)
        whole = memoryview(self._map)
        self._words = whole[:PAGE_BYTES].cast("Q")
        self.memory = whole[PAGE_BYTES:]
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map)) + PAGE_BYTES
        _arenas.add(self)

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """New memory, taken now: what is not there must be an error here and not a signal at the first touch."""
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
        return self._words[_STAGED]

    @staged.setter
    def staged(self, count: int) -> None:
        self._words[_STAGED] = count

    @property
    def written(self) -> int:
        return self._words[_WRITTEN]

    @written.setter
    def written(self, count: int) -> None:
        self._words[_WRITTEN] = count

    def begin(self) -> None:
        """A new save: nothing of it is staged yet."""
        self._words[_STAGED] = self._words[_WRITTEN] = self._words[_ABANDONED] = 0

    def abandon(self) -> None:
        """The rest of this save will not be staged."""
        self._words[_ABANDONED] = 1

    @property
    def abandoned(self) -> bool:
        return self._words[_ABANDONED] != 0

    def close(self) -> None:
        """Let go of the handle. The memory itself goes when nothing refers to it any more."""
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
        # Through ctypes, which lets other threads run; the mmap module's own madvise does not.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        done = madvise(self.address - PAGE_BYTES + start, size_bytes, _MADV_POPULATE_WRITE)
        return 0 if done == 0 else ctypes.get_errno()


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child would keep the memory alive as long as it has the handle, whatever the trainer gives back."""
    for arena in list(_arenas):
        arena.close()


os.register_at_fork(after_in_child=_let_go_in_child)
