"""Assets as files to write: what is listed is what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import SaveFailedError, UnsafeContentError
from holdfast.ondisk.files import PlainFile
from holdfast.saving.files import asset_files


def read(file: PlainFile) -> bytes:
    return b"".join(file.pieces())


def test_files_folders_and_bytes_become_files_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "tokenizer" / "deep").mkdir(parents=True)
    (tmp_path / "tokenizer" / "deep" / "vocab.txt").write_text("a b c")
    found = asset_files({"words": tmp_path / "tokenizer", "state.json": b"{}", "none": b""})
    assert {file.name: (file.size_bytes, read(file)) for file in found} == {
        "assets/words/deep/vocab.txt": (5, b"a b c"),
        "assets/state.json": (2, b"{}"),
        "assets/none": (0, b""),
    }


def test_a_file_that_grows_is_stored_as_it_was_listed(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("one line")
    (file,) = asset_files({"train.log": log})
    with log.open("a") as more:
        more.write(" and another")
    assert (file.size_bytes, read(file)) == (8, b"one line")


def test_a_file_that_becomes_shorter_fails_the_save(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("one line")
    (file,) = asset_files({"train.log": log})
    log.write_text("one")
    with pytest.raises(SaveFailedError, match="5 bytes shorter while it was read"):
        read(file)


def test_a_file_whose_size_is_not_known_is_stored_whole() -> None:
    """The kernel's own files have a size of 0, and content."""
    (file,) = asset_files({"status": Path("/proc/self/status")})
    assert read(file).startswith(b"Name:")
    assert file.size_bytes == len(read(file))


def test_a_file_of_a_folder_that_no_storage_takes_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".tmp-half").write_text("a")
    with pytest.raises(UnsafeContentError, match="is no safe file name"):
        asset_files({"folder": tmp_path})
