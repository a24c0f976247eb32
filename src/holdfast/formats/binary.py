"""Read ranges of a file, or of a part of one, such as a member of an archive. Paths enter; bytes leave.

Files may come from a stranger: only regular files are opened, and no range outside of the file is read. They are never
mapped: when a mapped file is truncated, the process ends.
"""

from __future__ import annotations

import os
import stat
import threading
from typing import Self

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UnsafeContentError

__all__ = ["BinaryFile"]


class BinaryFile:
    """A range of a regular file. Several threads may read it at once. The parts of a file share its descriptor."""

    def __init__(self, opened: _Descriptor, start: int, size_bytes: int, name: str) -> None:
        self._opened = opened
        self._start = start
        self.size_bytes = size_bytes
        self.name = name

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a regular file. What is no regular file, such as a pipe or a device, is an UnsafeContentError."""
        name = os.fspath(path)
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            number = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CheckpointNotFoundError("there is no such file", file=name) from None
        except OSError as error:
            raise StorageError(f"the file cannot be opened: {error.strerror}", file=name, errno=error.errno) from error
        opened = _Descriptor(number)
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            opened.close()
            raise UnsafeContentError("this is no regular file", file=name)
        return cls(opened, 0, status.st_size, name)

    @classmethod
    def of_descriptor(cls, number: int, name: str) -> Self:
        """Take over an open descriptor, such as that of an unnamed temporary file."""
        return cls(_Descriptor(number), 0, os.fstat(number).st_size, name)

    def part(self, start: int, size_bytes: int, name: str) -> BinaryFile:
        """Return a range of this file as a file of its own. It is read as long as this one is open."""
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"the bytes {start}-{start + size_bytes} of '{name}' are outside of the file, which has "
                f"{self.size_bytes}",
                file=self.name,
            )
        return BinaryFile(self._opened, self._start + start, size_bytes, f"{self.name}:{name}")

    def place_in(self, whole: BinaryFile) -> int:
        """Return where this part starts in a file that it is a part of."""
        return self._start - whole._start

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return a range of bytes. A range that leaves the file, or a file that has become shorter, is damage."""
        self._require(start, size_bytes)
        data = bytearray(size_bytes)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill memory with the bytes from `start` on."""
        self._require(start, len(target))
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._opened.number, [target[done:]], self._start + start + done)
            except OSError as error:
                raise StorageError(f"reading failed: {error.strerror}", file=self.name, errno=error.errno) from error
            if count == 0:
                raise CorruptCheckpointError(
                    f"the file ends at byte {start + done}, before the {len(target)} bytes from {start} on",
                    file=self.name,
                )
            done += count

    def close(self) -> None:
        """Close the file and every part of it."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require(self, start: int, size_bytes: int) -> None:
        if start < 0 or start + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"the bytes {start}-{start + size_bytes} are outside of the file, which has {self.size_bytes}",
                file=self.name,
            )


class _Descriptor:
    """An open descriptor that is closed once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()
