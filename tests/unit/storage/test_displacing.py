"""What lies in the place of a key and is no value is renamed, never deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import KeyDamagedError, StorageError
from holdfast.storage.displacing import obstruction_of, remove_or_set_aside, set_aside
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage


def test_a_key_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("x")
    remove_or_set_aside(LocalStorage(tmp_path), "key")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_key_keeps_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "mine.txt").write_text("keep me")
    remove_or_set_aside(LocalStorage(tmp_path), "key")
    assert not (tmp_path / "key").exists()
    (kept,) = tmp_path.rglob("mine.txt")
    assert kept.read_text() == "keep me"


def test_a_storage_that_cannot_rename_leaves_it_to_a_person() -> None:
    with pytest.raises(StorageError, match="move it away by hand"):
        set_aside(MemoryStorage(), "key")


def test_a_file_in_the_place_of_a_folder_is_an_obstruction(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    storage = LocalStorage(tmp_path)
    assert obstruction_of(storage, "folder") is None
    assert obstruction_of(storage, "nothing") is None
    assert isinstance(obstruction_of(storage, "file"), KeyDamagedError)
