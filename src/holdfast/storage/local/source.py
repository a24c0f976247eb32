"""Read ranges of one file, past the page cache where that pays. A handle enters; bytes leave. Knows no keys."""

from __future__ import annotations

import errno
import stat
from types import TracebackType
from typing import Self

from holdfast.errors import KeyDamagedError, KeyMissingError, StorageError, UsageError
from holdfast.storage.local.advice import explained
from holdfast.storage.local.bypass import ALIGNMENT_BYTES, Bypass
from holdfast.storage.local.disk import Disk

__all__ = ["LocalSource"]


class LocalSource:
    """A `Source` of one regular file. It owns the handle `file` from now on, also when this raises."""

    def __init__(self, disk: Disk, file: int, path: str) -> None:
        self._disk = disk
        self._bypass: Bypass | None = None
        self._bypass_decided = False
        self._path = path
        # Last: `__del__` closes what has a handle.
        self._file: int | None = file
        try:
            self._size_bytes = self._regular_size_bytes(file)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def alignment_bytes(self) -> int:
        """Return more than 1 where reads past the page cache pay, for a caller that reads much of the file, once."""
        if not self._bypass_decided and self._file is not None:
            self._bypass_decided = True
            self._bypass = Bypass.where_it_pays(self._disk, self._file, self._size_bytes)
        return 1 if self._bypass is None else ALIGNMENT_BYTES

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset < 0:
            raise UsageError(f"a file has no byte at {offset}", file=self._path)
        if target.nbytes == 0:
            return
        view = target.cast("B")
        if self._bypass is not None:
            count = self._read_past_cache(self._bypass, view, offset)
            offset += count
            view = view[count:]
        while len(view) > 0:
            count = self._read_some(view, offset)
            offset += count
            view = view[count:]

    def close(self) -> None:
        bypass, self._bypass = self._bypass, None
        if bypass is not None:
            bypass.close()
        file, self._file = self._file, None
        if file is not None:
            self._disk.close(file)

    def _read_past_cache(self, bypass: Bypass, view: memoryview, offset: int) -> int:
        try:
            return bypass.read(view, offset)
        except OSError as error:
            raise explained(error, "reading it", self._path) from error

    def _read_some(self, view: memoryview, offset: int) -> int:
        if self._file is None:
            raise StorageError("the source was closed before this read", errno=errno.EBADF, file=self._path)
        try:
            count = self._disk.read_at(self._file, view, offset)
        except OSError as error:
            raise explained(error, "reading it", self._path) from error
        if count == 0:
            raise KeyDamagedError(
                f"the key ends before byte {offset + len(view)}: the file is shorter than it should be",
                file=self._path,
                byte_range=(offset, offset + len(view)),
            )
        return count

    def _regular_size_bytes(self, file: int) -> int:
        status = self._disk.status_of(file)
        if stat.S_ISDIR(status.st_mode):
            raise KeyMissingError("the key is a folder, and holds no bytes", errno=errno.EISDIR, file=self._path)
        if not stat.S_ISREG(status.st_mode):
            raise KeyDamagedError("the key is no regular file", errno=errno.ENXIO, file=self._path)
        return status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()
