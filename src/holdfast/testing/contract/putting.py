"""The contract of keys, and of values that are put whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from holdfast.errors import KeyExistsError, KeyMissingError, UsageError
from holdfast.storage.base import Entry, Storage
from holdfast.testing.contract.making import StorageMaker
from holdfast.testing.contract.values import (
    BAD_KEYS,
    MEBIBYTE,
    ODD_NAMES,
    RACERS,
    WEIGHTS,
    pattern,
    race,
    value_of,
    whole,
)

__all__ = ["PutContract"]


class PutContract(StorageMaker):
    """What `put` must keep, and which keys there are."""

    def test_it_is_a_storage_and_says_where_it_is(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert storage.url
        assert repr(storage)

    def test_it_knows_its_free_room_or_says_that_it_does_not(self, storage: Storage) -> None:
        free_bytes = storage.free_bytes()
        assert free_bytes is None or free_bytes >= 0

    @pytest.mark.parametrize("key", BAD_KEYS)
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

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 100_001])
    def test_what_is_put_is_read_back(self, storage: Storage, size_bytes: int) -> None:
        data = pattern(size_bytes)
        storage.put("folder/key", data)
        assert storage.read("folder/key", size_bytes) == data

    def test_a_key_may_have_any_unicode_name(self, storage: Storage) -> None:
        storage.put("größe/日本 語.json", b"x")
        assert storage.entries("größe") == [Entry("日本 語.json", 1)]
        assert storage.read("größe/日本 語.json", 1) == b"x"

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_name_means_itself_and_nothing_else(self, storage: Storage, name: str) -> None:
        for other in ODD_NAMES:
            if other != name and len(other) < 20:
                storage.put(f"folder/{other}", b"other")
        storage.put(f"folder/{name}", b"x")
        assert storage.read(f"folder/{name}", 1) == b"x"
        assert Entry(name, 1) in storage.entries("folder")
        storage.delete(f"folder/{name}")
        with pytest.raises(KeyMissingError):
            storage.open(f"folder/{name}")
        assert {entry.size_bytes for entry in storage.entries("folder")} == {5}

    @pytest.mark.parametrize("first_bytes", WEIGHTS)
    @pytest.mark.parametrize("second_bytes", WEIGHTS)
    def test_put_never_replaces(self, storage: Storage, first_bytes: int, second_bytes: int) -> None:
        first = pattern(first_bytes)
        storage.put("key", first)
        with pytest.raises(KeyExistsError) as caught:
            storage.put("key", pattern(second_bytes)[::-1])
        assert "key" in str(caught.value)
        assert whole(storage, "key") == first
        assert storage.entries("") == [Entry("key", first_bytes)]

    @pytest.mark.parametrize(("racers", "size_bytes"), [(RACERS, 40), (4, 9 * MEBIBYTE)])
    def test_of_many_racing_puts_exactly_one_wins(self, storage: Storage, racers: int, size_bytes: int) -> None:
        doors = [storage if racer % 2 else self.reopen(storage) for racer in range(racers)]
        for turn in range(5 if size_bytes < MEBIBYTE else 1):
            key = f"turn-{turn}/manifest.json"
            values = [value_of(racer, size_bytes) for racer in range(racers)]
            won = race([partial(door.put, key, value) for door, value in zip(doors, values, strict=True)])
            assert won.count(True) == 1
            assert whole(storage, key) == values[won.index(True)]
            assert storage.entries(f"turn-{turn}") == [Entry("manifest.json", size_bytes)]

    def test_put_is_whole_or_not_there(self, storage: Storage) -> None:
        data = pattern(3 * MEBIBYTE)
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
