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
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from holdfast.errors import StorageError
from holdfast.saving.staging.shared_memory import PAGE_BYTES, map_shared, take_pages
from holdfast.state.budget import own_processors

__all__ = ["PAGE_BYTES", "Arena"]

_STAGED, _WRITTEN, _ABANDONED = 0, 1, 2
# In the control page, behind the words.
_FENCE_AT, _FENCE_MARK = 64, b"\1"
_PIECE_BYTES = 32 << 20
_MAX_THREADS = 8

TakePages = Callable[[int, int], None]


class Arena:
    """`size_bytes` of shared memory at `address`. Its pages are taken front to back; the writer attaches to an arena
    whose pages are all there."""

    def __init__(
        self,
        handle: int,
        size_bytes: int,
        take: TakePages = take_pages,
        close_handle: Callable[[], None] | None = None,
    ) -> None:
        """Map the memory of a handle. take: what takes the pages of a range, given its address and its size.
        close_handle: closes the handle, once."""
        self.handle = handle
        self.size_bytes = size_bytes
        self._total_bytes = PAGE_BYTES + size_bytes
        self._taken_bytes = 0
        self._take_pages = take
        array = map_shared(handle, self._total_bytes)
        whole = memoryview(array).cast("B")
        self._words = whole[:PAGE_BYTES].cast("Q")
        self.memory = whole[PAGE_BYTES:]
        self.address = ctypes.addressof(array) + PAGE_BYTES
        # An arena that is dropped without being closed: the handle alone would keep the memory.
        self._close_handle = weakref.finalize(self, close_handle or _closing(handle))
        self._close_handle.atexit = False
        _arenas.add(self)

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """Return an arena with all of its pages."""
        arena = cls.reserve(size_bytes)
        arena.take_rest()
        return arena

    @classmethod
    def reserve(cls, size_bytes: int, take: TakePages = take_pages) -> Self:
        """Return an arena without its pages."""
        try:
            handle = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_memory(error, size_bytes) from error
        close_handle = _closing(handle)
        try:
            os.ftruncate(handle, PAGE_BYTES + size_bytes)
            return cls(handle, size_bytes, take, close_handle)
        except OSError as error:
            close_handle()
            raise _no_memory(error, size_bytes) from error
        except BaseException:
            close_handle()
            raise

    @property
    def taken_bytes(self) -> int:
        """Return how much memory the arena takes now."""
        return self._taken_bytes

    @property
    def missing_bytes(self) -> int:
        """Return how much memory is not taken yet."""
        return self._total_bytes - self._taken_bytes

    def take_more(self) -> bool:
        """Take the pages of the next pieces, one on each thread. Return whether more are missing then."""
        self._take(range(self._taken_bytes, self._total_bytes, _PIECE_BYTES)[: _threads()])
        return self.missing_bytes > 0

    def take_rest(self) -> None:
        """Take all pages that are missing, on several threads: a lack of memory must be an error here, and not a signal
        at the first use. The arena is closed then."""
        try:
            self._take(range(self._taken_bytes, self._total_bytes, _PIECE_BYTES))
        except StorageError:
            self.close()
            raise

    def shrink(self, size_bytes: int) -> None:
        """Give back what lies behind the first `size_bytes`, before the first save. The addresses stay as they are."""
        os.ftruncate(self.handle, PAGE_BYTES + size_bytes)
        self.memory = self.memory[:size_bytes]
        self.size_bytes = size_bytes
        self._total_bytes = PAGE_BYTES + size_bytes
        self._taken_bytes = min(self._taken_bytes, self._total_bytes)

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
        self.handle = -1
        self._close_handle()

    def _take(self, starts: Sequence[int]) -> None:
        """Take the pages of the pieces that begin at these bytes of the file."""
        if not starts:
            return
        try:
            self._take_pieces(starts)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _no_memory(error, self.size_bytes) from error
            self._allocate()
            self._taken_bytes = self._total_bytes
            return
        self._taken_bytes = min(starts[-1] + _PIECE_BYTES, self._total_bytes)

    def _take_pieces(self, starts: Sequence[int]) -> None:
        try:
            with ThreadPoolExecutor(min(_threads(), len(starts))) as pool:
                list(pool.map(self._take_piece, starts))
        except RuntimeError:  # no more threads
            for start in starts:
                self._take_piece(start)

    def _take_piece(self, start: int) -> None:
        self._take_pages(self.address - PAGE_BYTES + start, min(_PIECE_BYTES, self._total_bytes - start))

    def _allocate(self) -> None:
        """Take all pages in the way of kernels before 5.14."""
        try:
            os.posix_fallocate(self.handle, 0, self._total_bytes)
        except OSError as error:
            raise _no_memory(error, self.size_bytes) from error


def _closing(handle: int) -> Callable[[], None]:
    """Return a function that closes a handle when it is first called. An arena that an interrupt left half made would
    close it a second time at its end, and it may be another's by then."""
    handles = [handle]

    def close() -> None:
        if handles:
            os.close(handles.pop())

    return close


def _threads() -> int:
    return min(own_processors(), _MAX_THREADS)


def _no_memory(error: OSError, size_bytes: int) -> StorageError:
    return StorageError.of(
        error,
        f"taking {size_bytes / 2**20:,.0f} MiB of memory for staging",
        advice="give staging_limit_bytes= to save in pieces, or use mode='sync'",
    )


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the handle in a forked child: it would keep the memory alive after the trainer has released it."""
    for arena in list(_arenas):
        arena.close()


os.register_at_fork(after_in_child=_let_go_in_child)
