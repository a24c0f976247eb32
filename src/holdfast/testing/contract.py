"""The contract of `holdfast.storage.base` as tests that a storage inherits. Knows the protocol; knows no storage.

    class TestMyStorage(StorageContract):
        def make(self, tmp_path):
            return MyStorage(...)          # a new, empty one at each call

`tmp_path` is pytest's. A storage that passes can hold a run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import KeyExistsError, KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry, Storage

__all__ = ["StorageContract"]

_MEBIBYTE = 1 << 20
_SIZES = (0, 1, 4095, 4096, 4097, _MEBIBYTE, _MEBIBYTE + 1, 8 * _MEBIBYTE, 8 * _MEBIBYTE + 1, 25 * _MEBIBYTE + 777)
_RACERS = 16
_BAD_KEYS = (
    "",
    "/",
    "/absolute",
    "ends/",
    "two//slashes",
    ".",
    "..",
    "../escape",
    "in/../side",
    "in/./side",
    "nul\0byte",
    "back\\slash",
    "..\\escape",
    ".tmp-reserved",
    "folder/.tmp-reserved",
    "lone-\ud800-surrogate",
)


class StorageContract:
    """Inherit, and say in `make` how a new storage is made."""

    def make(self, tmp_path: Path) -> Storage:
        raise NotImplementedError("override make() so that it returns a new, empty storage")

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return self.make(tmp_path)

    # The protocol

    def test_it_is_a_storage_and_says_where_it_is(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert storage.url
        assert repr(storage)

    def test_it_knows_its_free_room_or_says_that_it_does_not(self, storage: Storage) -> None:
        free_bytes = storage.free_bytes()
        assert free_bytes is None or free_bytes >= 0

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_a_bad_key_is_refused_by_everything(self, storage: Storage, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: storage.put(key, b"x"),
            lambda: storage.create(key, 1),
            lambda: storage.open(key),
            lambda: storage.read(key, 10),
            lambda: storage.delete(key),
        ]
        if key != "":
            calls += [lambda: storage.entries(key), lambda: storage.sync(key)]
        for call in calls:
            with pytest.raises(UsageError):
                call()
        assert storage.entries("") == []

    # put

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 100_001])
    def test_what_is_put_is_read_back(self, storage: Storage, size_bytes: int) -> None:
        data = _pattern(size_bytes)
        storage.put("folder/key", data)
        assert storage.read("folder/key", size_bytes) == data

    def test_a_key_may_have_any_unicode_name(self, storage: Storage) -> None:
        storage.put("größe/日本 語.json", b"x")
        assert storage.entries("größe") == [Entry("日本 語.json", 1)]
        assert storage.read("größe/日本 語.json", 1) == b"x"

    def test_put_never_replaces(self, storage: Storage) -> None:
        storage.put("key", b"first")
        with pytest.raises(KeyExistsError) as caught:
            storage.put("key", b"second")
        assert "key" in str(caught.value)
        assert storage.read("key", 10) == b"first"

    def test_of_many_racing_puts_exactly_one_wins(self, storage: Storage) -> None:
        for turn in range(5):
            key = f"turn-{turn}/manifest.json"
            values = [f"value of racer {racer}".encode() for racer in range(_RACERS)]
            won = _race([partial(storage.put, key, value) for value in values])
            assert won.count(True) == 1
            assert storage.read(key, 100) == values[won.index(True)]

    def test_put_is_whole_or_not_there(self, storage: Storage) -> None:
        data = _pattern(3 * _MEBIBYTE)
        seen: list[bytes] = []
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                try:
                    seen.append(storage.read("big", len(data)))
                except KeyMissingError:
                    continue

        reader = threading.Thread(target=look)
        reader.start()
        try:
            storage.put("big", data)
            assert storage.read("big", len(data)) == data
        finally:
            done.set()
            reader.join()
        assert all(value == data for value in seen)

    # create

    @pytest.mark.parametrize("size_bytes", _SIZES)
    def test_what_is_streamed_is_read_back(self, storage: Storage, size_bytes: int) -> None:
        data = _pattern(size_bytes)
        with storage.create("folder/key", size_bytes) as sink:
            sink.write(data)
        assert _whole(storage, "folder/key") == data
        assert storage.entries("folder") == [Entry("key", size_bytes)]

    @pytest.mark.parametrize("seed", range(4))
    def test_writes_of_any_size_are_joined(self, storage: Storage, seed: int) -> None:
        chooser = random.Random(seed)
        data = _pattern(17 * _MEBIBYTE + 4242)
        with storage.create("key", len(data)) as sink:
            offset = 0
            while offset < len(data):
                size_bytes = chooser.choice((0, 1, 511, 4096, 70_001, 3 * _MEBIBYTE, 9 * _MEBIBYTE))
                sink.write(memoryview(data)[offset : offset + size_bytes])
                offset += size_bytes
        assert _whole(storage, "key") == data

    def test_the_caller_may_change_its_memory_after_write(self, storage: Storage) -> None:
        piece = bytearray(_MEBIBYTE)
        with storage.create("key", 20 * _MEBIBYTE) as sink:
            for number in range(20):
                piece[:] = bytes([number]) * _MEBIBYTE
                sink.write(piece)
                piece[:] = b"\xff" * _MEBIBYTE
        assert _whole(storage, "key") == b"".join(bytes([number]) * _MEBIBYTE for number in range(20))

    def test_create_never_replaces(self, storage: Storage) -> None:
        storage.put("key", b"first")
        with pytest.raises(KeyExistsError):
            _stream(storage, "key", b"second")
        assert storage.read("key", 10) == b"first"

    def test_of_many_racing_creates_exactly_one_wins(self, storage: Storage) -> None:
        values = [f"value of racer {racer:02}".encode() for racer in range(_RACERS)]
        won = _race([partial(_stream, storage, "key", value) for value in values])
        assert won.count(True) == 1
        assert storage.read("key", 100) == values[won.index(True)]

    def test_put_and_create_keep_off_each_others_keys(self, storage: Storage) -> None:
        _stream(storage, "key", b"first")
        with pytest.raises(KeyExistsError):
            storage.put("key", b"second")
        assert storage.read("key", 10) == b"first"

    @pytest.mark.parametrize("size_bytes", [1, 10, 2 * _MEBIBYTE, 20 * _MEBIBYTE])
    @pytest.mark.parametrize("difference", [-1, 1])
    def test_another_size_than_announced_is_an_error(self, storage: Storage, size_bytes: int, difference: int) -> None:
        sink = storage.create("key", size_bytes)
        with pytest.raises(StorageError, match="key"):
            _write_and_close(sink.write, sink.close, _pattern(size_bytes + difference))
        with pytest.raises(StorageError):
            sink.close()

    def test_close_may_be_called_twice(self, storage: Storage) -> None:
        sink = storage.create("key", 3)
        sink.write(b"abc")
        sink.close()
        sink.close()
        sink.abort()
        assert storage.read("key", 3) == b"abc"

    def test_a_closed_sink_takes_no_bytes(self, storage: Storage) -> None:
        sink = storage.create("key", 3)
        sink.write(b"abc")
        sink.close()
        with pytest.raises(StorageError):
            sink.write(b"d")
        assert storage.read("key", 3) == b"abc"

    @pytest.mark.parametrize("written_bytes", [0, 10, 9 * _MEBIBYTE])
    def test_an_aborted_sink_never_raises_and_never_closes(self, storage: Storage, written_bytes: int) -> None:
        sink = storage.create("key", 30 * _MEBIBYTE)
        sink.write(bytes(written_bytes))
        sink.abort()
        sink.abort()
        with pytest.raises(StorageError):
            sink.close()

    def test_an_exception_inside_of_with_aborts(self, storage: Storage) -> None:
        sink = storage.create("key", 3)
        with pytest.raises(ZeroDivisionError), sink:
            sink.write(bytes(1 // 0))
        with pytest.raises(StorageError):
            sink.close()

    def test_a_negative_size_is_refused(self, storage: Storage) -> None:
        with pytest.raises(UsageError):
            storage.create("key", -1)

    # open and read

    def test_any_range_can_be_read(self, storage: Storage) -> None:
        data = _pattern(100_000)
        storage.put("key", data)
        with storage.open("key") as source:
            assert source.size_bytes == len(data)
            for offset, size_bytes in ((0, 0), (0, 1), (99_999, 1), (4095, 2), (1, 99_999), (100_000, 0)):
                target = bytearray(size_bytes)
                source.read_into(offset, memoryview(target))
                assert target == data[offset : offset + size_bytes]

    def test_a_range_past_the_end_is_an_error(self, storage: Storage) -> None:
        storage.put("key", b"0123456789")
        with storage.open("key") as source:
            for offset, size_bytes in ((0, 11), (9, 2), (10, 1), (5000, 1)):
                with pytest.raises(StorageError, match="key"):
                    source.read_into(offset, memoryview(bytearray(size_bytes)))
            with pytest.raises(UsageError):
                source.read_into(-1, memoryview(bytearray(1)))

    def test_a_source_serves_many_threads(self, storage: Storage) -> None:
        data = _pattern(_MEBIBYTE)
        storage.put("key", data)
        with storage.open("key") as source:

            def read(offset: int) -> bool:
                target = bytearray(3000)
                source.read_into(offset, memoryview(target))
                return target == data[offset : offset + 3000]

            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(read, range(0, _MEBIBYTE - 3000, 997)))

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

    def test_a_folder_is_no_key(self, storage: Storage) -> None:
        storage.put("folder/key", b"x")
        with pytest.raises(KeyMissingError):
            storage.read("folder", 10)

    # entries

    def test_entries_are_the_sorted_names_directly_inside(self, storage: Storage) -> None:
        for key in ("b/2", "b/10", "a", "b/deep/er/key", "c/only/deep"):
            storage.put(key, key.encode())
        assert storage.entries("") == [Entry("a", 1), Entry("b", None), Entry("c", None)]
        assert storage.entries("b") == [Entry("10", 4), Entry("2", 3), Entry("deep", None)]
        assert storage.entries("b/deep") == [Entry("er", None)]
        assert storage.entries("c")[0].is_folder

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

    # sync and delete

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


def _pattern(size_bytes: int) -> bytes:
    """Bytes in which no two sectors are alike, so that one in a wrong place is noticed."""
    return random.Random(size_bytes).randbytes(size_bytes)


def _whole(storage: Storage, key: str) -> bytes:
    with storage.open(key) as source:
        target = bytearray(source.size_bytes)
        source.read_into(0, memoryview(target))
    return bytes(target)


def _stream(storage: Storage, key: str, data: bytes) -> None:
    with storage.create(key, len(data)) as sink:
        sink.write(data)


def _write_and_close(write: Callable[[bytes], None], close: Callable[[], None], data: bytes) -> None:
    write(data)
    close()


def _race(calls: Sequence[Callable[[], None]]) -> list[bool]:
    """Start all calls at the same moment; for each, whether it won."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> bool:
        start.wait()
        try:
            call()
        except KeyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
