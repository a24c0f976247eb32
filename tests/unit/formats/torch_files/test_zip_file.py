"""Zip files with stored members: read as ranges, refused where readers could differ, written with the same bytes."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.torch_files.zip_file import ALIGNMENT_BYTES, ZipWriter, is_zip, zip_members

CONTENT = {"a/first": b"one", "a/second": b"", "a/third": bytes(range(256)) * 5}


def written(content: dict[str, bytes] = CONTENT, start: int = 0) -> bytes:
    stream = io.BytesIO(bytes(start))
    stream.seek(start)
    archive = ZipWriter(stream)
    for name, data in content.items():
        archive.add(name, len(data), [data[:1], memoryview(data)[1:]])
    archive.finish()
    return stream.getvalue()[start:]


def members_of(data: bytes, folder: Path) -> dict[str, bytes]:
    path = folder / "file.zip"
    path.write_bytes(data)
    with BinaryFile.open(path) as file:
        assert is_zip(file)
        return {name: part.read(0, part.size_bytes) for name, part in zip_members(file).items()}


def test_what_is_written_is_read_by_zipfile_and_here(tmp_path: Path) -> None:
    data = written()
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    assert {name: archive.read(name) for name in archive.namelist()} == CONTENT
    assert members_of(data, tmp_path) == CONTENT


def test_bytes_start_at_multiples_of_64_from_the_start_of_the_zip_file_wherever_that_is() -> None:
    assert written(start=0) == written(start=100)
    archive = zipfile.ZipFile(io.BytesIO(written()))
    for info in archive.infolist():
        name_bytes, extra_bytes = struct.unpack_from("<HH", written(), info.header_offset + 26)
        assert (info.header_offset + 30 + name_bytes + extra_bytes) % ALIGNMENT_BYTES == 0


def test_a_member_that_has_another_size_than_announced_is_an_error() -> None:
    with pytest.raises(CorruptCheckpointError, match="2 bytes came for 'a', not 3"):
        ZipWriter(io.BytesIO()).add("a", 3, [b"xx"])


class Hole(io.RawIOBase):
    """A stream that forgets zeros, so that files of gigabytes can be written."""

    def __init__(self) -> None:
        self.position = 0
        self.kept: dict[int, bytes] = {}

    def tell(self) -> int:
        return self.position

    def seek(self, position: int, whence: int = 0) -> int:
        self.position = position
        return position

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        if len(data) < 1 << 16:
            self.kept[self.position] = bytes(data)
        self.position += len(data)
        return len(data)


def test_members_and_offsets_beyond_four_gigabytes_are_written_as_zip64(tmp_path: Path) -> None:
    stream = Hole()
    archive = ZipWriter(stream)  # type: ignore[arg-type]
    piece = memoryview(bytes(1 << 30))
    archive.add("a/large", 5 << 30, [piece] * 5)
    archive.add("a/small", 3, [b"end"])
    archive.finish()
    path = tmp_path / "large.zip"
    with path.open("wb") as file:
        for position, data in stream.kept.items():
            file.seek(position)
            file.write(data)
    with BinaryFile.open(path) as opened:
        members = zip_members(opened)
        assert members["a/large"].size_bytes == 5 << 30
        assert members["a/small"].read(0, 3) == b"end"
    with zipfile.ZipFile(path) as stock:
        assert stock.getinfo("a/large").file_size == 5 << 30
        assert stock.read("a/small") == b"end"


def test_many_members_are_written_as_zip64(tmp_path: Path) -> None:
    content = {f"a/{number}": b"" for number in range(66_000)}
    data = written(content)
    assert len(zipfile.ZipFile(io.BytesIO(data)).namelist()) == 66_000
    assert members_of(data, tmp_path) == content


def test_a_comment_at_the_end_is_passed_over(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", b"one")
        archive.comment = b"comment" * 100
    assert members_of(stream.getvalue(), tmp_path) == {"a": b"one"}


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", ["../up", "/root", "a/../../up", "a\\b", "a\n"])
def test_names_that_leave_the_archive_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeContentError, match="no safe file name"):
        members_of(written({name: b"x"}), tmp_path)


@pytest.mark.guarantee("G9")
def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    data = written({"a/one": b"1", "a/two": b"2"}).replace(b"a/two", b"a/one")
    with pytest.raises(UnsafeContentError, match="'a/one' twice"):
        members_of(data, tmp_path)


@pytest.mark.guarantee("G9")
def test_another_name_at_the_bytes_than_in_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsafeContentError, match="another name"):
        members_of(written({"a/one": b"1"}).replace(b"a/one", b"a/two", 1), tmp_path)


@pytest.mark.guarantee("G9")
def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    data = bytearray(written({"a/one": b"1", "a/two": b"2"}))
    entries = [place for place in range(len(data)) if data[place : place + 4] == b"PK\x01\x02"]
    # The first member claims to have all bytes up to the middle of the second.
    struct.pack_into("<II", data, entries[0] + 20, 20, 20)
    with pytest.raises(UnsafeContentError, match="overlap"):
        members_of(bytes(data), tmp_path)


def test_a_member_that_reaches_into_the_directory_is_damage(tmp_path: Path) -> None:
    data = bytearray(written({"a/one": b"1"}))
    struct.pack_into("<II", data, data.index(b"PK\x01\x02") + 20, 20, 20)
    with pytest.raises(CorruptCheckpointError, match="reaches into its directory"):
        members_of(bytes(data), tmp_path)


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(1000))
    with pytest.raises(UnsupportedFormatError, match="compressed"):
        members_of(stream.getvalue(), tmp_path)


def test_every_changed_byte_of_the_directory_is_refused_or_harmless(tmp_path: Path) -> None:
    data = written()
    start = data.index(b"PK\x01\x02")
    for place in range(start, len(data)):
        for value in (0, 0xFF, data[place] ^ 1):
            changed = bytearray(data)
            changed[place] = value
            try:
                found = members_of(bytes(changed), tmp_path)
            except HoldfastError:
                continue
            # A version or a date says nothing about the content; a size may be smaller.
            assert all(CONTENT[name].startswith(part) for name, part in found.items())


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    data = written()
    for size in range(30, len(data), 7):
        with pytest.raises(HoldfastError):
            members_of(data[:size], tmp_path)
