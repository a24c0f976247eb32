"""Host memory for copies from and to devices: in huge pages, and page-locked where an accelerator allows it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from holdfast.errors import HoldfastError
from holdfast.state.devices import Accelerator
from holdfast.state.memory import HUGE_PAGE_BYTES, prefer_huge_pages

__all__ = ["HostBuffer"]


class HostBuffer:
    """Memory that begins at a huge page, and has huge pages where the system has them: a disk reads and writes it at
    full speed, and to page-lock it takes less time than small pages do.

    The memory is there as long as anything refers to `tensor` or `view`. Its page locks end with `close`, or when the
    buffer is dropped: no copy may be under way then.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HoldfastError(
                f"the system refuses {size_bytes} bytes of memory to read or write files through: {error.strerror}",
                advice="free memory, or raise the limit (ulimit -v, the limit of the container)",
            ) from error
        # A child that is forked meanwhile must not share the pages with this process: whichever of the two writes to
        # one then gets another page, and a device would go on with the first.
        memory.madvise(mmap.MADV_DONTFORK)
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
        self.size_bytes = size_bytes
        self.view = memoryview(memory)[start : start + size_bytes]
        # Of the view, and not a part of a larger tensor: torch asks where the storage begins whether that is locked.
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        prefer_huge_pages(self.tensor.data_ptr(), size_bytes)
        self._locked: list[Accelerator] = []
        self.close = weakref.finalize(self, _release, memory, self.tensor.data_ptr(), self._locked, os.getpid())

    def take_pages(self) -> None:
        """Take all pages now, in the calling thread: to page-lock memory that has none takes longer, and keeps other
        threads from it."""
        ctypes.memset(self.tensor.data_ptr(), 0, self.size_bytes)

    def page_lock(self, accelerator: Accelerator) -> None:
        """Have an accelerator copy from and to this memory without waiting. Raise a RuntimeError where that is refused:
        copies then are right, and slower."""
        accelerator.page_lock(self.tensor.data_ptr(), self.size_bytes)
        self._locked.append(accelerator)


def _release(memory: mmap.mmap, address: int, locked: Sequence[Accelerator], owner: int) -> None:
    """Undo the page locks. The last reference to the memory unmaps it."""
    if os.getpid() != owner:
        # A forked child does not have these pages, and may have others at the same address by now.
        _kept_after_fork.append(memory)
        return
    for accelerator in locked:
        accelerator.undo_page_lock(address)


_kept_after_fork: list[mmap.mmap] = []
