"""The contract of keys that are streamed."""

from __future__ import annotations

import random
from functools import partial

import pytest

from holdfast.errors import KeyExistsError, StorageError, UsageError
from holdfast.storage.base import Entry, Storage
from holdfast.testing.contract.making import StorageMaker
from holdfast.testing.contract.values import (
    MEBIBYTE,
    RACERS,
    SIZES,
    WEIGHTS,
    pattern,
    race,
    stream,
    value_of,
    whole,
    write_and_close,
)

__all__ = ["CreateContract"]


class CreateContract(StorageMaker):
    """What `create` and its sinks must keep."""

    @pytest.mark.parametrize("size_bytes", SIZES)
    def test_what_is_streamed_is_read_back(self, storage: Storage, size_bytes: int) -> None:
        data = pattern(size_bytes)
        with storage.create("folder/key", size_bytes) as sink:
            sink.write(data)
        assert whole(storage, "folder/key") == data
        assert storage.entries("folder") == [Entry("key", size_bytes)]

    @pytest.mark.parametrize("seed", range(4))
    def test_writes_of_any_size_are_joined(self, storage: Storage, seed: int) -> None:
        chooser = random.Random(seed)
        data = pattern(17 * MEBIBYTE + 4242)
        with storage.create("key", len(data)) as sink:
            offset = 0
            while offset < len(data):
                size_bytes = chooser.choice((0, 1, 511, 4096, 70_001, 3 * MEBIBYTE, 9 * MEBIBYTE))
                sink.write(memoryview(data)[offset : offset + size_bytes])
                offset += size_bytes
        assert whole(storage, "key") == data

    def test_the_caller_may_change_its_memory_after_write(self, storage: Storage) -> None:
        piece = bytearray(MEBIBYTE)
        with storage.create("key", 20 * MEBIBYTE) as sink:
            for number in range(20):
                piece[:] = bytes([number]) * MEBIBYTE
                sink.write(piece)
                piece[:] = b"\xff" * MEBIBYTE
        assert whole(storage, "key") == b"".join(bytes([number]) * MEBIBYTE for number in range(20))

    @pytest.mark.parametrize("first_bytes", WEIGHTS)
    @pytest.mark.parametrize("second_bytes", WEIGHTS)
    @pytest.mark.parametrize("made_by", ["put", "create"])
    def test_create_never_replaces(self, storage: Storage, first_bytes: int, second_bytes: int, made_by: str) -> None:
        first = pattern(first_bytes)
        if made_by == "put":
            storage.put("key", first)
        else:
            stream(storage, "key", first)
        with pytest.raises(KeyExistsError, match="key"):
            stream(storage, "key", pattern(second_bytes)[::-1])
        assert whole(storage, "key") == first
        assert storage.entries("") == [Entry("key", first_bytes)]

    @pytest.mark.parametrize(("racers", "size_bytes"), [(RACERS, 40), (4, 9 * MEBIBYTE), (3, 17 * MEBIBYTE + 3)])
    def test_of_many_racing_creates_exactly_one_wins(self, storage: Storage, racers: int, size_bytes: int) -> None:
        doors = [storage if racer % 2 else self.reopen(storage) for racer in range(racers)]
        values = [value_of(racer, size_bytes) for racer in range(racers)]
        won = race([partial(stream, door, "key", value) for door, value in zip(doors, values, strict=True)])
        assert won.count(True) == 1
        assert whole(storage, "key") == values[won.index(True)]
        assert storage.entries("") == [Entry("key", size_bytes)]

    @pytest.mark.parametrize("size_bytes", WEIGHTS)
    @pytest.mark.parametrize("later", ["put", "create"])
    def test_of_two_that_write_a_key_at_once_exactly_one_ends_well(
        self, storage: Storage, size_bytes: int, later: str
    ) -> None:
        """The second begins when the first has written half, and ends before it. Either of them may be the one."""
        values = [value_of(number, size_bytes) for number in (1, 2)]
        first = storage.create("key", size_bytes)
        first.write(values[0][: size_bytes // 2])
        ended_well = []
        door = self.reopen(storage)
        try:
            door.put("key", values[1]) if later == "put" else stream(door, "key", values[1])
            ended_well.append(values[1])
        except KeyExistsError:
            pass
        try:
            write_and_close(first.write, first.close, values[0][size_bytes // 2 :])
            ended_well.append(values[0])
        except KeyExistsError:
            first.abort()
        assert len(ended_well) == 1
        assert whole(storage, "key") == ended_well[0]

    @pytest.mark.parametrize("size_bytes", WEIGHTS)
    def test_put_never_replaces_what_was_streamed(self, storage: Storage, size_bytes: int) -> None:
        first = pattern(size_bytes)
        stream(storage, "key", first)
        with pytest.raises(KeyExistsError):
            storage.put("key", b"second")
        assert whole(storage, "key") == first

    @pytest.mark.parametrize("size_bytes", [1, 10, 2 * MEBIBYTE, 20 * MEBIBYTE])
    @pytest.mark.parametrize("difference", [-1, 1])
    def test_another_size_than_announced_is_an_error(self, storage: Storage, size_bytes: int, difference: int) -> None:
        sink = storage.create("key", size_bytes)
        with pytest.raises(StorageError, match="key"):
            write_and_close(sink.write, sink.close, pattern(size_bytes + difference))
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

    @pytest.mark.parametrize("written_bytes", [0, 10, 9 * MEBIBYTE])
    def test_an_aborted_sink_never_raises_and_never_closes(self, storage: Storage, written_bytes: int) -> None:
        sink = storage.create("key", 30 * MEBIBYTE)
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
