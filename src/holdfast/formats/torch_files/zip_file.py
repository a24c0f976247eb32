"""Read and write zip files whose members are stored as they are, as `torch.save` makes them. Ranges leave, not copies.

`zipfile` is not used: it has no place of a member's bytes, and reads files in which names or ranges stand twice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from holdfast.errors import CorruptCheckpointError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.binary import BinaryFile
from holdfast.ondisk.paths import safe_relative

__all__ = ["ALIGNMENT_BYTES", "ZipWriter", "first_name", "is_zip", "zip_members"]

ALIGNMENT_BYTES = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_MAX_COMMENT_BYTES = 1 << 16
_MAX_DIRECTORY_BYTES = 1 << 30
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 1


def is_zip(file: BinaryFile) -> bool:
    """Return whether a file starts as a zip file does."""
    return file.size_bytes >= _END.size and file.read(0, 4) == b"PK\x03\x04"


def first_name(file: BinaryFile) -> str:
    """Return the name of the first member of a zip file, empty where there is none."""
    head = file.read(0, min(file.size_bytes, _LOCAL.size + 1024))
    if len(head) < _LOCAL.size:
        return ""
    size = _LOCAL.unpack_from(head)[9]
    return head[_LOCAL.size : _LOCAL.size + size].decode("utf-8", "replace")


def zip_members(file: BinaryFile) -> dict[str, BinaryFile]:
    """Return the members of a zip file by name, each as a range of it.

    Compressed or encrypted members, unsafe names, a name twice, and members that share bytes are refused.
    """
    start, size, count = _directory(file)
    data = file.read(start, size)
    members, position = [], 0
    for _ in range(count):
        member, position = _member(file, data, position)
        members.append(member)
    if position != size:
        raise _damage(file, "the directory of the zip file has bytes after its last entry")
    found: dict[str, BinaryFile] = {}
    end = 0
    for member in sorted(members, key=lambda member: member.header):
        if member.header < end:
            raise UnsafeContentError(f"members of the zip file overlap at '{member.name}'", file=file.name)
        if member.name in found:
            raise UnsafeContentError(f"the zip file has the name '{member.name}' twice", file=file.name)
        first = _first_byte(file, member)
        end = first + member.size_bytes
        if end > start:
            raise _damage(file, f"the member '{member.name}' of the zip file reaches into its directory")
        found[member.name] = file.part(first, member.size_bytes, member.name)
    return found


class _Member(NamedTuple):
    name: str
    header: int
    size_bytes: int


def _directory(file: BinaryFile) -> tuple[int, int, int]:
    """Return where the directory starts, its bytes and its entries."""
    tail_start = max(file.size_bytes - _END.size - _MAX_COMMENT_BYTES, 0)
    tail = file.read(max(file.size_bytes - _END.size, 0), min(_END.size, file.size_bytes))
    if not tail.startswith(b"PK\x05\x06"):
        tail = file.read(tail_start, file.size_bytes - tail_start)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) - place < _END.size:
        raise _damage(file, "the end of the zip file is missing")
    end = file.size_bytes - len(tail) + place
    _, disk, first_disk, here, count, size, start, _ = _END.unpack_from(tail, place)
    if _FULL_16 in (here, count) or _FULL_32 in (size, start):
        disk, first_disk, here, count, size, start = _large_end(file, end)
    if disk or first_disk or here != count:
        raise _damage(file, "the zip file is one of several parts")
    if start + size > end or size > _MAX_DIRECTORY_BYTES or count * _CENTRAL.size > size:
        raise _damage(file, "the directory of the zip file is not where its end says")
    return start, size, count


def _large_end(file: BinaryFile, end: int) -> tuple[int, int, int, int, int, int]:
    """Return the fields of the zip64 end record, of which the locator before the end record says where it is."""
    if end < _LOCATOR.size:
        raise _damage(file, "the end of the zip file is missing")
    magic, _, place, _ = _LOCATOR.unpack(file.read(end - _LOCATOR.size, _LOCATOR.size))
    if magic != b"PK\x06\x07" or place + _END_64.size > end:
        raise _damage(file, "the end of the zip file is damaged")
    magic, _, _, _, disk, first, here, count, size, start = _END_64.unpack(file.read(place, _END_64.size))
    if magic != b"PK\x06\x06":
        raise _damage(file, "the end of the zip file is damaged")
    return disk, first, here, count, size, start


def _member(file: BinaryFile, data: bytes, position: int) -> tuple[_Member, int]:
    """Return the entry of the directory at a position, and where the next one starts."""
    if position + _CENTRAL.size > len(data):
        raise _damage(file, "the directory of the zip file ends too early")
    fields = _CENTRAL.unpack_from(data, position)
    magic, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
    name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
    name_start = position + _CENTRAL.size
    extra_start = name_start + name_bytes
    following = extra_start + extra_bytes + comment_bytes
    if magic != b"PK\x01\x02" or following > len(data):
        raise _damage(file, "an entry in the directory of the zip file is damaged")
    try:
        name = safe_relative(data[name_start:extra_start].decode().removesuffix("/"))
    except UnicodeDecodeError:
        raise _damage(file, "a name in the zip file is no text") from None
    except UnsafeContentError as error:
        raise error.at(file=file.name) from None
    large = _large_fields(data[extra_start : extra_start + extra_bytes])
    try:
        size, packed, header = (next(large) if value == _FULL_32 else value for value in (size, packed, header))
    except (StopIteration, RuntimeError):
        raise _damage(file, f"the sizes of '{name}' are missing in the zip file") from None
    if method != 0 or flags & _ENCRYPTED or packed != size:
        raise UnsupportedFormatError(
            f"the member '{name}' of the zip file is compressed or encrypted",
            file=file.name,
            advice="torch.save writes members as they are: unpack the file and save it again",
        )
    return _Member(name, header, size), following


def _large_fields(extra: bytes) -> Iterator[int]:
    """Return an iterator over the numbers of 64 bits in the extra field of an entry."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1:
            part = extra[position : position + size]
            return iter(struct.unpack(f"<{len(part) // 8}Q", part[: len(part) // 8 * 8]))
        position += size
    return iter(())


def _first_byte(file: BinaryFile, member: _Member) -> int:
    """Return where the bytes of a member start: after its own header, which must have the same name."""
    fields = _LOCAL.unpack(file.read(member.header, _LOCAL.size))
    name = file.read(member.header + _LOCAL.size, fields[9])
    if fields[0] != b"PK\x03\x04" or name.removesuffix(b"/") != member.name.encode():
        raise UnsafeContentError(
            f"the zip file has another name than '{member.name}' where its bytes are", file=file.name
        )
    return int(member.header + _LOCAL.size + fields[9] + fields[10])


def _damage(file: BinaryFile, problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(problem, file=file.name)


class ZipWriter:
    """Write a zip file to a stream that can seek, from where it stands. The same members give the same bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._start = stream.tell()
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, size_bytes: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a member of a known size. Its bytes start at a multiple of 64 from the start of the zip file."""
        header = self._stream.tell() - self._start
        encoded = name.encode()
        large = size_bytes >= _FULL_32
        extra = struct.pack("<HHQQ", 1, 16, size_bytes, size_bytes) if large else b""
        unaligned = header + _LOCAL.size + len(encoded) + len(extra) + 4
        padding = -unaligned % ALIGNMENT_BYTES
        extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        shown = _FULL_32 if large else size_bytes
        self._stream.write(self._local(0, shown, encoded, extra))
        checksum, written = 0, 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
            written += len(piece)
            self._stream.write(piece)
        if written != size_bytes:
            raise CorruptCheckpointError(f"{written} bytes came for '{name}', not {size_bytes}")
        end = self._stream.tell()
        self._stream.seek(self._start + header)
        self._stream.write(self._local(checksum, shown, encoded, extra))
        self._stream.seek(end)
        self._list(encoded, checksum, size_bytes, header)

    def finish(self) -> None:
        """Write the directory and the end of the zip file."""
        start = self._stream.tell() - self._start
        self._stream.write(self._directory)
        size, count = len(self._directory), self._count
        place = start + size
        if count >= _FULL_16 or start >= _FULL_32 or size >= _FULL_32:
            self._stream.write(_END_64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start))
            self._stream.write(_LOCATOR.pack(b"PK\x06\x07", 0, place, 1))
        short = min(count, _FULL_16)
        self._stream.write(_END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _FULL_32), min(start, _FULL_32), 0))

    def _local(self, checksum: int, size: int, name: bytes, extra: bytes) -> bytes:
        # The date is the first day that zip files know: the same content is the same file.
        head = (b"PK\x03\x04", 45 if size == _FULL_32 else 20, 0x0800, 0, 0, 0x21)
        return _LOCAL.pack(*head, checksum, size, size, len(name), len(extra)) + name + extra

    def _list(self, name: bytes, checksum: int, size: int, header: int) -> None:
        large = [value for value in (size, size, header) if value >= _FULL_32]
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        version = 45 if large else 20
        shown = min(size, _FULL_32)
        fields = (b"PK\x01\x02", version, version, 0x0800, 0, 0, 0x21, checksum, shown, shown)
        tail = (len(name), len(extra), 0, 0, 0, 0, min(header, _FULL_32))
        self._directory += _CENTRAL.pack(*fields, *tail) + name + extra
        self._count += 1
