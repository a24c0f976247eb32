"""The storage in memory keeps the contract, and has the manners of an object store."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import KeyExistsError, KeyMissingError, StorageError
from holdfast.storage.base import Entry, Storage
from holdfast.testing import CrashingStorage, FullStorage, MemoryStorage, SlowStorage, StorageContract


class TestMemoryStorage(StorageContract):
    def make(self, tmp_path: Path) -> Storage:
        return MemoryStorage("memory://bucket")


class TestWrapped(StorageContract):
    def make(self, tmp_path: Path) -> Storage:
        return CrashingStorage(FullStorage(SlowStorage(MemoryStorage(), 0.0), 1 << 40))


def test_a_streamed_key_is_visible_when_it_is_closed() -> None:
    storage = MemoryStorage()
    sink = storage.create("key", 3)
    sink.write(b"abc")
    assert storage.entries("") == []
    with pytest.raises(KeyMissingError):
        storage.open("key")
    sink.close()
    assert storage.entries("") == [Entry("key", 3)]


def test_a_key_that_another_made_meanwhile_is_found_at_close() -> None:
    storage = MemoryStorage()
    sink = storage.create("key", 3)
    sink.write(b"abc")
    storage.put("key", b"first")
    with pytest.raises(KeyExistsError, match="key"):
        sink.close()
    assert storage.read("key", 10) == b"first"


def test_an_aborted_key_leaves_nothing() -> None:
    storage = MemoryStorage()
    sink = storage.create("key", 3)
    sink.write(b"abc")
    sink.abort()
    assert storage.entries("") == []


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_storage_says_so_and_has_room_again(wrapped: bool) -> None:
    memory = MemoryStorage("memory://bucket", capacity_bytes=None if wrapped else 10)
    storage = FullStorage(memory, 10) if wrapped else memory
    storage.put("a", bytes(6))
    assert storage.free_bytes() == 4
    for write in (storage.put, partial(_stream, storage)):
        with pytest.raises(StorageError, match=r"b: writing 5 bytes failed.*ENOSPC") as caught:
            write("b", bytes(5))
        assert caught.value.errno == errno.ENOSPC
    assert storage.entries("") == [Entry("a", 6)]
    if isinstance(storage, FullStorage):
        storage.room_bytes = 5
    else:
        storage.capacity_bytes = 11
    storage.put("b", bytes(5))
    assert storage.free_bytes() == 0


def _stream(storage: Storage, key: str, data: bytes) -> None:
    with storage.create(key, len(data)) as sink:
        sink.write(data)
