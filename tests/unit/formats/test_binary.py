"""Ranges of files: what lies outside, what became shorter, and what is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeContentError
from holdfast.formats.binary import BinaryFile


def test_ranges_and_parts_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with BinaryFile.open(tmp_path / "file") as file:
        assert file.read(10, 5) == bytes(range(10, 15))
        part = file.part(20, 30, "inner").part(5, 10, "innermost")
        assert part.read(0, 10) == bytes(range(25, 35))
        memory = bytearray(4)
        part.read_into(6, memoryview(memory))
        assert bytes(memory) == bytes(range(31, 35))


@pytest.mark.parametrize(("start", "size"), [(99, 2), (-1, 1), (101, 0), (0, 101)])
def test_a_range_outside_of_the_file_is_damage(tmp_path: Path, start: int, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with BinaryFile.open(tmp_path / "file") as file:
        with pytest.raises(CorruptCheckpointError, match="outside of the file"):
            file.read(start, size)
        with pytest.raises(CorruptCheckpointError, match="outside of the file"):
            file.part(start, size, "part")


def test_a_file_that_became_shorter_is_damage_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with BinaryFile.open(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", 100)
        with pytest.raises(CorruptCheckpointError, match="ends at byte 100"):
            file.read(0, 10_000)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UnsafeContentError, match="no regular file"):
            BinaryFile.open(name)
    with pytest.raises(CheckpointNotFoundError):
        BinaryFile.open(tmp_path / "nothing")
