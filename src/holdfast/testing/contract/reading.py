"""The contract of reading."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry, Storage
from holdfast.testing.contract.making import StorageMaker
from holdfast.testing.contract.values import MEBIBYTE, pattern, stream

__all__ = ["ReadContract"]


class ReadContract(StorageMaker):
    """What `open`, `read` and sources must keep."""

    def test_any_range_can_be_read(self, storage: Storage) -> None:
        data = pattern(100_000)
        storage.put("key", data)
        with storage.open("key") as source:
            assert source.size_bytes == len(data)
            for offset, size_bytes in ((0, 0), (0, 1), (99_999, 1), (4095, 2), (1, 99_999), (100_000, 0)):
                target = bytearray(size_bytes)
                source.read_into(offset, memoryview(target))
                assert target == data[offset : offset + size_bytes]

    def test_any_range_of_a_large_key_can_be_read(self, storage: Storage) -> None:
        data = pattern(17 * MEBIBYTE + 3)
        stream(storage, "key", data)
        with storage.open("key") as source:
            for boundary in (MEBIBYTE, 5 * MEBIBYTE, 8 * MEBIBYTE, 16 * MEBIBYTE):
                for offset, size_bytes in ((boundary - 1, 2), (boundary - 4096, 70_001), (boundary, 1)):
                    target = bytearray(size_bytes)
                    source.read_into(offset, memoryview(target))
                    assert target == data[offset : offset + size_bytes]

    def test_memory_of_any_element_type_can_be_filled(self, storage: Storage) -> None:
        storage.put("key", pattern(80))
        target = array("d", bytes(80))
        with storage.open("key") as source:
            source.read_into(0, memoryview(target))
        assert target.tobytes() == pattern(80)

    def test_a_source_of_a_deleted_key_reads_the_key_or_fails(self, storage: Storage) -> None:
        data = pattern(100_000)
        storage.put("key", data)
        with storage.open("key") as source:
            storage.delete("key")
            target = bytearray(1000)
            try:
                source.read_into(5000, memoryview(target))
            except StorageError:
                return
        assert target == data[5000:6000]

    @pytest.mark.parametrize("whole_bytes", [10, 9 * MEBIBYTE])
    def test_a_range_past_the_end_is_an_error(self, storage: Storage, whole_bytes: int) -> None:
        stream(storage, "key", pattern(whole_bytes))
        end = whole_bytes
        with storage.open("key") as source:
            for offset, size_bytes in ((end - 10, 11), (end - 1, 2), (end, 1), (end + 5000, 1)):
                with pytest.raises(StorageError, match="key"):
                    source.read_into(offset, memoryview(bytearray(size_bytes)))
            with pytest.raises(UsageError):
                source.read_into(-1, memoryview(bytearray(1)))

    def test_a_source_serves_many_threads(self, storage: Storage) -> None:
        data = pattern(MEBIBYTE)
        storage.put("key", data)
        with storage.open("key") as source:

            def read(offset: int) -> bool:
                target = bytearray(3000)
                source.read_into(offset, memoryview(target))
                return target == data[offset : offset + 3000]

            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(read, range(0, MEBIBYTE - 3000, 997)))

    def test_reading_stops_at_the_limit(self, storage: Storage) -> None:
        storage.put("key", b"0123456789")
        assert storage.read("key", 10) == b"0123456789"
        with pytest.raises(StorageError, match="key"):
            storage.read("key", 9)

    def test_a_missing_key_is_named(self, storage: Storage) -> None:
        storage.put("there/key", b"x")
        for key in ("missing", "there/missing", "not/there/either"):
            with pytest.raises(KeyMissingError, match=key):
                storage.open(key)
            with pytest.raises(KeyMissingError, match=key):
                storage.read(key, 10)

    def test_what_was_missing_is_seen_as_soon_as_it_is_written(self, storage: Storage) -> None:
        other = self.reopen(storage)
        for door in (storage, other):
            assert door.entries("folder") == []
            for key in ("folder/put", "folder/created"):
                with pytest.raises(KeyMissingError):
                    door.open(key)
        storage.put("folder/put", b"x")
        stream(storage, "folder/created", b"yy")
        for door in (storage, other):
            assert (door.read("folder/put", 1), door.read("folder/created", 2)) == (b"x", b"yy")
            assert door.entries("folder") == [Entry("created", 2), Entry("put", 1)]
        other.delete("folder/put")
        for door in (storage, other):
            assert door.entries("folder") == [Entry("created", 2)]
            with pytest.raises(KeyMissingError):
                door.read("folder/put", 1)

    def test_a_folder_is_no_key(self, storage: Storage) -> None:
        storage.put("folder/key", b"x")
        with pytest.raises(KeyMissingError):
            storage.read("folder", 10)
