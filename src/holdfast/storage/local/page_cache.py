"""The system calls of the local storage by which bytes pass by the page cache, or are looked for in it.

Part of `Disk`, and like it a seam: a handle enters, nothing is decided here, and errors are plain `OSError`.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["PageCache"]


class PageCache:
    """The page cache as it is."""

    def set_direct(self, file: int, direct: bool) -> None:
        """Let reads and writes pass by the page cache, or not.

        Set after the file was made, not while: an open with O_DIRECT that is refused may leave the new file behind.
        """
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        """Read as `Disk.read_at` does, bytes that are in the page cache; `BlockingIOError` when the disk would have to
        be asked."""
        return os.preadv(file, [target], offset, os.RWF_NOWAIT)

    def start_write_back(self, file: int, offset: int, size_bytes: int) -> None:
        """Let the disk begin with these bytes. Makes nothing durable; does not wait."""
        # The advice that pages are not needed any more makes Linux write the dirty ones out first.
        os.posix_fadvise(file, offset, size_bytes, os.POSIX_FADV_DONTNEED)
