"""Read tar archives, plain or compressed with gzip, member by member. A file enters; its members leave, as parts of it.

Nothing is unpacked: a member is a range of the archive, and its name never reaches a file system. A compressed archive
is decompressed once, to a temporary file without a name. The headers are parsed here because an archive may come from
a stranger: what an extracting reader would follow, skip or hold in memory is an error instead.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple, Self

from holdfast.errors import CorruptCheckpointError, HoldfastError, StorageError, UnsafeContentError
from holdfast.formats.binary import BinaryFile
from holdfast.ondisk.paths import safe_relative

__all__ = ["MAX_MEMBERS", "Archive", "is_archive", "is_compressed"]

MAX_MEMBERS = 65_536
"""The most members of an archive: each takes memory, and needs but 512 bytes of the archive."""

_BLOCK = 512
_PIECE_BYTES = 1 << 20
# A header that describes the next member: its name, its size. More would be held in memory for nothing.
_MAX_EXTENSION_BYTES = 64 << 10
# Writers fill up the last record; with the largest blocking factor in use it has this many bytes.
_MAX_PADDING_BYTES = 1 << 20
# Weights hardly become smaller at all. Zeros become smaller by 1000, so small archives may hold as many as they like.
_MAX_RATIO = 100
_SMALL_BYTES = 64 << 20

_FILE, _OLD_FILE, _FOLDER = b"0", b"\0", b"5"
_LONG_NAME, _PAX, _PAX_GLOBAL = b"L", b"x", b"g"
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"7": "a contiguous file",
    b"K": "a link with a long name",
    b"S": "a sparse file",
    b"V": "a volume label",
    b"M": "a continued file of a multi-volume archive",
}
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")


class Archive:
    """An open tar archive. `members` are its regular files by their relative names, in the order of the archive."""

    def __init__(self, file: BinaryFile, members: Mapping[str, BinaryFile], name: str) -> None:
        self._file = file
        self.members = members
        self.name = name

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open an archive and check every header of it. A compressed one is decompressed to a temporary file first."""
        opened = BinaryFile.open(path)
        name = opened.name
        try:
            if is_compressed(opened):
                compressed, opened = opened, _decompressed(opened)
                compressed.close()
            return cls(opened, _members(opened), name)
        except BaseException as error:
            opened.close()
            if isinstance(error, HoldfastError):
                raise error.at(file=name) from None
            raise

    def close(self) -> None:
        """Close the archive and all of its members."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_compressed(file: BinaryFile) -> bool:
    """Return whether a file is compressed with gzip."""
    return file.size_bytes >= 18 and file.read(0, 3) == b"\x1f\x8b\x08"


def is_archive(file: BinaryFile) -> bool:
    """Return whether a file begins with the header of a tar archive, or is one that is compressed."""
    if not is_compressed(file):
        return file.size_bytes >= _BLOCK and _has_checksum(file.read(0, _BLOCK))
    try:
        with gzip.GzipFile(fileobj=_Stream(file)) as stream:
            first = stream.read(_BLOCK)
    except (EOFError, OSError, zlib.error):
        return False
    return len(first) == _BLOCK and _has_checksum(first)


# Headers


class _Header(NamedTuple):
    """One header block: what it says of the member behind it."""

    name: bytes
    size_bytes: int
    kind: bytes


class _Extension(NamedTuple):
    """What headers before that of a member say about it."""

    name: bytes | None = None
    size_bytes: int | None = None


def _members(file: BinaryFile) -> dict[str, BinaryFile]:
    """Return the regular files of an archive, each checked to lie in it, or raise what is wrong with it."""
    found: dict[str, BinaryFile] = {}
    folders: set[str] = set()
    extension = _Extension()
    position = headers = 0
    while True:
        block = _block_at(file, position)
        if not any(block):
            break
        headers += 1
        if headers > 3 * MAX_MEMBERS:
            raise UnsafeContentError(f"the archive has more than {MAX_MEMBERS} members")
        header = _parsed(block)
        position += _BLOCK
        if header.kind in (_LONG_NAME, _PAX, _PAX_GLOBAL):
            extension = _extended(extension, header, _content_of(file, position, header))
            position += _rounded(header.size_bytes)
            continue
        header = _complete(header, extension)
        extension = _Extension()
        name = _name_of(header)
        _require_kind(header, name)
        if header.kind == _FOLDER:
            folders.add(name)
            continue
        if name in found:
            raise UnsafeContentError(f"the archive has '{name}' twice", advice="readers differ in which one they take")
        found[name] = file.part(position, header.size_bytes, name)
        position += _rounded(header.size_bytes)
        if len(found) > MAX_MEMBERS:
            raise UnsafeContentError(f"the archive has more than {MAX_MEMBERS} members")
    _require_end(file, position, extension)
    _require_no_file_as_folder(found, folders)
    return found


def _block_at(file: BinaryFile, position: int) -> bytes:
    if position + _BLOCK > file.size_bytes:
        raise CorruptCheckpointError(f"the archive ends at byte {file.size_bytes} without an end mark: it was cut off")
    return file.read(position, _BLOCK)


def _parsed(block: bytes) -> _Header:
    if not _has_checksum(block):
        raise CorruptCheckpointError("a header of the archive does not have its checksum")
    name = _text(block[:100])
    # GNU's own form has other fields where the front of a name is in POSIX's.
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = prefix + b"/" + name
    return _Header(name, _number(block[124:136]), block[156:157])


def _has_checksum(block: bytes) -> bool:
    """Return whether a block has the checksum that it states. Some writers sum signed bytes."""
    match = _OCTAL.fullmatch(block[148:156])
    if match is None or not match[1]:
        return False
    plain = block[:148] + b" " * 8 + block[156:]
    stated, total = int(match[1], 8), sum(plain)
    return stated == total or stated == total - 256 * sum(byte > 127 for byte in plain)


def _number(field: bytes) -> int:
    """Return a number in octal digits or, with the first bit set, in binary."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise CorruptCheckpointError(f"a header of the archive has the size {field!r}")
    return int(match[1] or b"0", 8)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK) * _BLOCK


def _content_of(file: BinaryFile, position: int, header: _Header) -> bytes:
    if header.size_bytes > _MAX_EXTENSION_BYTES:
        raise UnsafeContentError(
            f"an extended header of the archive claims {header.size_bytes} bytes; {_MAX_EXTENSION_BYTES} are accepted"
        )
    return file.read(position, header.size_bytes)


def _extended(extension: _Extension, header: _Header, content: bytes) -> _Extension:
    """Return what is known of the next member with one more extended header read."""
    if header.kind == _LONG_NAME:
        if extension.name is not None:
            raise UnsafeContentError("the archive gives a member two names")
        return extension._replace(name=_text(content))
    records = _pax_records(content)
    refused = [key for key in records if key == "linkpath" or key.startswith("GNU.sparse")]
    if header.kind == _PAX_GLOBAL:
        refused += [key for key in records if key in ("path", "size")]
    if refused:
        raise UnsafeContentError(f"an extended header of the archive sets '{refused[0]}', which is not accepted")
    if "path" in records:
        if extension.name is not None:
            raise UnsafeContentError("the archive gives a member two names")
        extension = extension._replace(name=records["path"])
    if "size" in records:
        if extension.size_bytes is not None or not re.fullmatch(rb"[0-9]{1,19}", records["size"]):
            raise CorruptCheckpointError(f"an extended header of the archive has the size {records['size'][:30]!r}")
        extension = extension._replace(size_bytes=int(records["size"]))
    return extension


def _pax_records(content: bytes) -> dict[str, bytes]:
    """Return the records of a pax header: `LENGTH KEY=VALUE` and a line's end each, of which LENGTH counts all."""
    records: dict[str, bytes] = {}
    position = 0
    while position < len(content):
        match = _PAX_LENGTH.match(content, position)
        end = position + int(match[1]) if match else -1
        if match is None or not match.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise CorruptCheckpointError("an extended header of the archive is damaged")
        key, separator, value = content[match.end() : end - 1].partition(b"=")
        name = key.decode("utf-8", "backslashreplace")
        if not separator or name in records:
            raise CorruptCheckpointError(f"an extended header of the archive has a damaged record {name[:50]!r}")
        records[name] = value
        position = end
    return records


def _complete(header: _Header, extension: _Extension) -> _Header:
    name = header.name if extension.name is None else extension.name
    size = header.size_bytes if extension.size_bytes is None else extension.size_bytes
    return _Header(name, size, header.kind)


def _name_of(header: _Header) -> str:
    """Return the relative name of a member; that of the archive's own folder, `.`, is empty."""
    try:
        name = header.name.decode()
    except UnicodeDecodeError:
        raise UnsafeContentError(f"the name {header.name[:200]!r} of a member is not UTF-8") from None
    if header.kind == _FOLDER:
        name = name.removesuffix("/")
        if name in (".", ""):
            return ""
    while name.startswith("./"):
        name = name[2:]
    return safe_relative(name)


def _require_kind(header: _Header, name: str) -> None:
    if header.kind in (_FILE, _OLD_FILE):
        return
    if header.kind == _FOLDER:
        if header.size_bytes:
            raise CorruptCheckpointError(f"the folder '{name}' of the archive has a size of {header.size_bytes} bytes")
        return
    what = _REFUSED.get(header.kind, f"of the unknown kind {header.kind!r}")
    raise UnsafeContentError(
        f"the member '{name}' of the archive is {what}", advice="only regular files and folders are accepted"
    )


def _require_end(file: BinaryFile, position: int, extension: _Extension) -> None:
    """Require that nothing follows the end mark: readers differ in whether they go on behind it."""
    if extension != _Extension():
        raise CorruptCheckpointError("the archive ends after an extended header, before its member")
    rest = file.size_bytes - position
    if rest > _MAX_PADDING_BYTES or any(file.read(position, rest)):
        raise UnsafeContentError(f"the archive has content behind its end at byte {position}")


def _require_no_file_as_folder(found: Mapping[str, BinaryFile], folders: set[str]) -> None:
    # Sorted in this way a file comes right before all that lies below a folder of its name.
    ordered = sorted(name.replace("/", "\0") for name in (*found, *folders))
    for name, following in pairwise(ordered):
        plain = name.replace("\0", "/")
        if plain in found and (following == name or following.startswith(f"{name}\0")):
            raise UnsafeContentError(f"'{plain}' of the archive is both a file and a folder")


# Compression


class _Stream(io.RawIOBase):
    """A `BinaryFile` as what the gzip module reads from."""

    def __init__(self, file: BinaryFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self._file.size_bytes - self._position
        data = self._file.read(self._position, left if size < 0 else min(size, left))
        self._position += len(data)
        return data


def _decompressed(file: BinaryFile) -> BinaryFile:
    """Return the decompressed content, in a temporary file without a name. What grows too much is refused."""
    limit = max(_SMALL_BYTES, _MAX_RATIO * file.size_bytes)
    folder = tempfile.gettempdir()
    advice = f"set TMPDIR to a folder with more room than {folder}"
    with tempfile.TemporaryFile() as target:
        status = os.fstatvfs(target.fileno())
        # Others need room there, too.
        room = status.f_bavail * status.f_frsize * 9 // 10
        size = 0
        try:
            with gzip.GzipFile(fileobj=_Stream(file)) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    size += len(piece)
                    if size > limit:
                        raise UnsafeContentError(
                            f"{file.size_bytes} compressed bytes become more than {limit}: this is a decompression bomb"
                        )
                    if size > room:
                        raise StorageError(
                            f"the archive decompresses to more than the {room} bytes that may be used in {folder}",
                            errno=errno.ENOSPC,
                            advice=advice,
                        )
                    target.write(piece)
            target.flush()
        except HoldfastError:
            raise
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorruptCheckpointError(f"the compressed archive is damaged: {error}") from None
        except OSError as error:
            raise StorageError.of(error, "decompressing the archive", advice=advice) from error
        return BinaryFile.of_descriptor(os.dup(target.fileno()), file.name)
