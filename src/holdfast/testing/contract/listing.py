"""The contract of folders, and of keys that are deleted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from holdfast.errors import KeyMissingError, StorageError
from holdfast.storage.base import Entry, Storage
from holdfast.testing.contract.making import StorageMaker

__all__ = ["ListContract"]


class ListContract(StorageMaker):
    """What `entries`, `sync` and `delete` must keep."""

    def test_entries_are_the_sorted_names_directly_inside(self, storage: Storage) -> None:
        for key in ("b/2", "b/10", "a", "b/deep/er/key", "c/only/deep"):
            storage.put(key, key.encode())
        assert storage.entries("") == [Entry("a", 1), Entry("b", None), Entry("c", None)]
        assert storage.entries("b") == [Entry("10", 4), Entry("2", 3), Entry("deep", None)]
        assert storage.entries("b/deep") == [Entry("er", None)]
        assert storage.entries("c")[0].is_folder

    def test_entries_are_sorted_by_name_whatever_the_keys_below_look_like(self, storage: Storage) -> None:
        names = ["A", "a", "a b", "a-b", "a.b", "a0", "b", "\uffee", "\U0001f600"]
        for name in names:
            storage.put(f"folder/{name}/below" if name in ("a", "a.b", "b") else f"folder/{name}", b"x")
        assert [entry.name for entry in storage.entries("folder")] == names

    def test_a_folder_of_many_keys_is_listed_whole(self, storage: Storage) -> None:
        names = [f"{number:05}" for number in range(self.many_keys)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: storage.put(f"folder/{name}", b"x"), names))
        assert storage.entries("folder") == [Entry(name, 1) for name in names]
        assert storage.entries("") == [Entry("folder", None)]

    def test_a_missing_folder_is_empty(self, storage: Storage) -> None:
        assert storage.entries("") == []
        assert storage.entries("missing") == []
        storage.put("there/key", b"x")
        assert storage.entries("missing") == []
        assert storage.entries("there/missing/deeper") == []

    def test_a_folder_whose_name_begins_alike_is_another(self, storage: Storage) -> None:
        storage.put("step-5/key", b"x")
        storage.put("step-50/other", b"x")
        assert storage.entries("step-5") == [Entry("key", 1)]

    def test_sync_takes_any_folder(self, storage: Storage) -> None:
        storage.sync("")
        storage.put("a/b/key", b"x")
        for folder in ("", "a", "a/b", "missing", "a/missing/deeper"):
            storage.sync(folder)
        assert storage.read("a/b/key", 1) == b"x"

    def test_a_deleted_key_is_gone_and_free(self, storage: Storage) -> None:
        storage.put("folder/key", b"x")
        storage.delete("folder/key")
        storage.sync("folder")
        with pytest.raises(KeyMissingError):
            storage.open("folder/key")
        storage.put("folder/key", b"y")
        assert storage.read("folder/key", 1) == b"y"

    def test_deleting_what_is_not_there_is_no_error(self, storage: Storage) -> None:
        storage.delete("missing")
        storage.delete("not/there/either")
        storage.put("folder/key", b"x")
        storage.delete("folder/key")
        storage.delete("folder/key")

    def test_only_the_key_itself_is_deleted(self, storage: Storage) -> None:
        keys = ("a/b/c", "a/b/c2", "a/bc", "ab/c", "a-b")
        for key in keys:
            storage.put(key, key.encode())
        storage.delete("a/b/c")
        for folder in ("a", "a/b"):
            # A folder is no key: to refuse is right, to find nothing to delete is right.
            with suppress(StorageError):
                storage.delete(folder)
        for key in keys[1:]:
            assert storage.read(key, 10) == key.encode()

    def test_without_keys_there_are_no_folders(self, storage: Storage) -> None:
        storage.put("a/b/c/1", b"x")
        storage.put("a/b/c/2", b"x")
        storage.put("a/key", b"x")
        storage.delete("a/b/c/1")
        assert storage.entries("a/b") == [Entry("c", None)]
        storage.delete("a/b/c/2")
        assert storage.entries("a") == [Entry("key", 1)]

    def test_folders_can_be_filled_while_they_are_emptied(self, storage: Storage) -> None:
        def fill_and_empty(worker: int) -> None:
            for turn in range(30):
                key = f"a/b/key-{worker}-{turn}"
                storage.put(key, b"x")
                assert storage.read(key, 1) == b"x"
                storage.delete(key)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(fill_and_empty, range(4)))
        assert storage.entries("") == []
