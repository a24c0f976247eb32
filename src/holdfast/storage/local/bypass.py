"""Read large files past the page cache, where that pays. The handle of a file enters; bytes leave. Knows no keys.

It pays when the file is not in the cache: the kernel then neither makes pages nor copies them, and what the training
has in the cache stays there. What does not fit, such as the last bytes of a file, is left to ordinary reads.
"""

from __future__ import annotations

import errno
import time
from typing import Self

from holdfast.storage.local.disk import Disk

__all__ = ["ALIGNMENT_BYTES", "Bypass"]

ALIGNMENT_BYTES = 4096
_LARGE_BYTES = 16 << 20
_PROBES = 32
# A disk reads more slowly than the cache by about this: a file of which more is cached is read through the cache.
_CACHED_PART = 0.25


class Bypass:
    """A second handle of a file, whose reads do not go through the page cache."""

    def __init__(self, disk: Disk, file: int) -> None:
        self._disk = disk
        self._file = file

    @classmethod
    def where_it_pays(cls, disk: Disk, file: int, size_bytes: int) -> Self | None:
        """Return a bypass for a large file that is hardly cached; None where it would not be faster, or is refused."""
        if size_bytes < _LARGE_BYTES or not _is_cold(disk, file, size_bytes):
            return None
        try:
            second = disk.reopen_file(file)
        except OSError:
            return None
        try:
            disk.cache.set_direct(second, True)
        except OSError:
            disk.close(second)
            return None
        return cls(disk, second)

    def read(self, target: memoryview, offset: int) -> int:
        """Return how many of the first bytes were read. The rest, which may be all, wants an ordinary read."""
        if offset % ALIGNMENT_BYTES:
            return 0
        whole_bytes = len(target) - len(target) % ALIGNMENT_BYTES
        done = 0
        while done < whole_bytes:
            count = self._read_some(target[done:whole_bytes], offset + done)
            done += count
            if count == 0 or count % ALIGNMENT_BYTES:
                break
        return done

    def close(self) -> None:
        self._disk.close(self._file)

    def _read_some(self, target: memoryview, offset: int) -> int:
        try:
            return self._disk.read_at(self._file, target, offset)
        except OSError as error:
            # This memory is not as it must be, or the file system takes the flag and refuses the read.
            if error.errno != errno.EINVAL:
                raise
            return 0


def _is_cold(disk: Disk, file: int, size_bytes: int) -> bool:
    """Return whether little of the file is in the page cache, as some bytes of it show."""
    step = size_bytes // _PROBES
    # Never the same places: the kernel may begin to read what is asked for here, and it would be there the next time.
    first = time.monotonic_ns() % step
    byte = memoryview(bytearray(1))
    cached = 0
    for place in range(first, first + step * _PROBES, step):
        try:
            cached += disk.cache.read_at(file, byte, place)
        except BlockingIOError:
            pass
        except (OSError, AttributeError):
            # No such question here (AttributeError: a C library without it): reads through the cache always work.
            return False
    return cached <= _PROBES * _CACHED_PART
