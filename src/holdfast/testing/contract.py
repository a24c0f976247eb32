"""The contract of `holdfast.storage.base` as tests that a storage inherits. Knows the protocol; knows no storage.

    class TestMyStorage(StorageContract):
        def make(self, tmp_path):
            return MyStorage(...)          # a new, empty one at each call

        def reopen(self, storage):
            return MyStorage(...)          # another object on the same place, as a second process would open it

`tmp_path` is pytest's. A storage that passes can hold a run. `many_keys` is more than the storage lists in one answer.
What only a power cut can show, that bytes and names are durable when they are said to be, no contract can ask.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import pytest

from holdfast.errors import KeyExistsError, KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry, Storage

__all__ = ["StorageContract"]

_MEBIBYTE = 1 << 20
_SIZES = (0, 1, 4095, 4096, 4097, _MEBIBYTE, _MEBIBYTE + 1, 8 * _MEBIBYTE, 8 * _MEBIBYTE + 1, 25 * _MEBIBYTE + 777)
_RACERS = 16
# What a storage may handle in different ways: at once, in one request, in many parts.
_WEIGHTS = (5, _MEBIBYTE + 1, 17 * _MEBIBYTE + 3)
_ODD_NAMES = (
    "a%2Fb",
    "a%252Fb",
    "a b",
    "a+b",
    " leading",
    "trailing ",
    "question?mark=1#part",
    "'single' and \"double\"",
    "Key",
    "key",
    "\u00e9",
    "e\u0301",
    ".hidden",
    "name.tmp",
    "name~",
    "a:b",
    "*",
    "[a]",
    "$HOME",
    "-n",
    "n" * 255,
)
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
    """Inherit, and say in `make` how a new storage is made, and in `reopen` how another process opens the same place.

    A storage that no other process can open, such as one in memory, leaves `reopen` as it is.
    """

    # More than a page of a listing: object stores answer with a thousand names at a time.
    many_keys = 1100

    def make(self, tmp_path: Path) -> Storage:
        raise NotImplementedError("override make() so that it returns a new, empty storage")

    def reopen(self, storage: Storage) -> Storage:
        return storage

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

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_a_name_means_itself_and_nothing_else(self, storage: Storage, name: str) -> None:
        for other in _ODD_NAMES:
            if other != name and len(other) < 20:
                storage.put(f"folder/{other}", b"other")
        storage.put(f"folder/{name}", b"x")
        assert storage.read(f"folder/{name}", 1) == b"x"
        assert Entry(name, 1) in storage.entries("folder")
        storage.delete(f"folder/{name}")
        with pytest.raises(KeyMissingError):
            storage.open(f"folder/{name}")
        assert {entry.size_bytes for entry in storage.entries("folder")} == {5}

    @pytest.mark.parametrize("first_bytes", _WEIGHTS)
    @pytest.mark.parametrize("second_bytes", _WEIGHTS)
    def test_put_never_replaces(self, storage: Storage, first_bytes: int, second_bytes: int) -> None:
        first = _pattern(first_bytes)
        storage.put("key", first)
        with pytest.raises(KeyExistsError) as caught:
            storage.put("key", _pattern(second_bytes)[::-1])
        assert "key" in str(caught.value)
        assert _whole(storage, "key") == first
        assert storage.entries("") == [Entry("key", first_bytes)]

    @pytest.mark.parametrize(("racers", "size_bytes"), [(_RACERS, 40), (4, 9 * _MEBIBYTE)])
    def test_of_many_racing_puts_exactly_one_wins(self, storage: Storage, racers: int, size_bytes: int) -> None:
        doors = [storage if racer % 2 else self.reopen(storage) for racer in range(racers)]
        for turn in range(5 if size_bytes < _MEBIBYTE else 1):
            key = f"turn-{turn}/manifest.json"
            values = [_value_of(racer, size_bytes) for racer in range(racers)]
            won = _race([partial(door.put, key, value) for door, value in zip(doors, values, strict=True)])
            assert won.count(True) == 1
            assert _whole(storage, key) == values[won.index(True)]
            assert storage.entries(f"turn-{turn}") == [Entry("manifest.json", size_bytes)]

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

    @pytest.mark.parametrize("first_bytes", _WEIGHTS)
    @pytest.mark.parametrize("second_bytes", _WEIGHTS)
    @pytest.mark.parametrize("made_by", ["put", "create"])
    def test_create_never_replaces(self, storage: Storage, first_bytes: int, second_bytes: int, made_by: str) -> None:
        first = _pattern(first_bytes)
        if made_by == "put":
            storage.put("key", first)
        else:
            _stream(storage, "key", first)
        with pytest.raises(KeyExistsError, match="key"):
            _stream(storage, "key", _pattern(second_bytes)[::-1])
        assert _whole(storage, "key") == first
        assert storage.entries("") == [Entry("key", first_bytes)]

    @pytest.mark.parametrize(("racers", "size_bytes"), [(_RACERS, 40), (4, 9 * _MEBIBYTE), (3, 17 * _MEBIBYTE + 3)])
    def test_of_many_racing_creates_exactly_one_wins(self, storage: Storage, racers: int, size_bytes: int) -> None:
        doors = [storage if racer % 2 else self.reopen(storage) for racer in range(racers)]
        values = [_value_of(racer, size_bytes) for racer in range(racers)]
        won = _race([partial(_stream, door, "key", value) for door, value in zip(doors, values, strict=True)])
        assert won.count(True) == 1
        assert _whole(storage, "key") == values[won.index(True)]
        assert storage.entries("") == [Entry("key", size_bytes)]

    @pytest.mark.parametrize("size_bytes", _WEIGHTS)
    @pytest.mark.parametrize("later", ["put", "create"])
    def test_of_two_that_write_a_key_at_once_exactly_one_ends_well(
        self, storage: Storage, size_bytes: int, later: str
    ) -> None:
        """The second begins when the first has written half, and ends before it. Either of them may be the one."""
        values = [_value_of(number, size_bytes) for number in (1, 2)]
        first = storage.create("key", size_bytes)
        first.write(values[0][: size_bytes // 2])
        ended_well = []
        door = self.reopen(storage)
        try:
            door.put("key", values[1]) if later == "put" else _stream(door, "key", values[1])
            ended_well.append(values[1])
        except KeyExistsError:
            pass
        try:
            _write_and_close(first.write, first.close, values[0][size_bytes // 2 :])
            ended_well.append(values[0])
        except KeyExistsError:
            first.abort()
        assert len(ended_well) == 1
        assert _whole(storage, "key") == ended_well[0]

    @pytest.mark.parametrize("size_bytes", _WEIGHTS)
    def test_put_never_replaces_what_was_streamed(self, storage: Storage, size_bytes: int) -> None:
        first = _pattern(size_bytes)
        _stream(storage, "key", first)
        with pytest.raises(KeyExistsError):
            storage.put("key", b"second")
        assert _whole(storage, "key") == first

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

    def test_any_range_of_a_large_key_can_be_read(self, storage: Storage) -> None:
        data = _pattern(17 * _MEBIBYTE + 3)
        _stream(storage, "key", data)
        with storage.open("key") as source:
            for boundary in (_MEBIBYTE, 5 * _MEBIBYTE, 8 * _MEBIBYTE, 16 * _MEBIBYTE):
                for offset, size_bytes in ((boundary - 1, 2), (boundary - 4096, 70_001), (boundary, 1)):
                    target = bytearray(size_bytes)
                    source.read_into(offset, memoryview(target))
                    assert target == data[offset : offset + size_bytes]

    def test_memory_of_any_element_type_can_be_filled(self, storage: Storage) -> None:
        storage.put("key", _pattern(80))
        target = array("d", bytes(80))
        with storage.open("key") as source:
            source.read_into(0, memoryview(target))
        assert target.tobytes() == _pattern(80)

    def test_a_source_of_a_deleted_key_reads_the_key_or_fails(self, storage: Storage) -> None:
        data = _pattern(100_000)
        storage.put("key", data)
        with storage.open("key") as source:
            storage.delete("key")
            target = bytearray(1000)
            try:
                source.read_into(5000, memoryview(target))
            except StorageError:
                return
        assert target == data[5000:6000]

    @pytest.mark.parametrize("whole_bytes", [10, 9 * _MEBIBYTE])
    def test_a_range_past_the_end_is_an_error(self, storage: Storage, whole_bytes: int) -> None:
        _stream(storage, "key", _pattern(whole_bytes))
        end = whole_bytes
        with storage.open("key") as source:
            for offset, size_bytes in ((end - 10, 11), (end - 1, 2), (end, 1), (end + 5000, 1)):
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

    def test_what_was_missing_is_seen_as_soon_as_it_is_written(self, storage: Storage) -> None:
        other = self.reopen(storage)
        for door in (storage, other):
            assert door.entries("folder") == []
            for key in ("folder/put", "folder/created"):
                with pytest.raises(KeyMissingError):
                    door.open(key)
        storage.put("folder/put", b"x")
        _stream(storage, "folder/created", b"yy")
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

    # entries

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


@lru_cache(maxsize=8)
def _pattern(size_bytes: int) -> bytes:
    """Bytes in which no two sectors are alike, so that one in a wrong place is noticed."""
    return random.Random(size_bytes).randbytes(size_bytes)


def _value_of(racer: int, size_bytes: int) -> bytes:
    """Bytes that only this racer writes, everywhere."""
    return bytes([racer + 1]) * size_bytes


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
