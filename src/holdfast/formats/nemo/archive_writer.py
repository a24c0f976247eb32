"""Write a tar archive of the same bytes for the same content. Names and bytes enter; the archive's bytes leave.

Members have no time, no owner and no group. Their sizes need not be known before they are written.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from holdfast.ondisk.paths import safe_relative

__all__ = ["ArchiveWriter"]

_BLOCK = tarfile.BLOCKSIZE


class ArchiveWriter:
    """Writes members one after the other to a seekable file that is empty."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    @contextmanager
    def member(self, name: str) -> Iterator[BinaryIO]:
        """Give the file to write a member's bytes to, from where it stands to its end."""
        stream = self._stream
        start = stream.seek(0, 2)
        stream.write(_header(name, 0))
        first = stream.tell()
        yield stream
        end = stream.seek(0, 2)
        stream.write(bytes(-(end - first) % _BLOCK))
        stream.seek(start)
        stream.write(_header(name, end - first))
        stream.seek(0, 2)

    def finish(self) -> None:
        """Write the end mark, and fill up the last record as tar does."""
        end = self._stream.seek(0, 2) + 2 * _BLOCK
        self._stream.write(bytes(2 * _BLOCK + -end % tarfile.RECORDSIZE))


def _header(name: str, size_bytes: int) -> bytes:
    """Return the header of a regular file. Its length does not depend on the size of the member: GNU's form has room
    for any size, and the size is written when the member is."""
    info = tarfile.TarInfo(safe_relative(name))
    info.size = size_bytes
    info.mode = 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")
