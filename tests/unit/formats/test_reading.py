"""Tensors of plain files into memory: boxes over chunks, strides, other devices' order, pieces, and what is damaged."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.reading import fill_all, pieces_of, read_range
from holdfast.formats.source import Fill, StoredChunk, TensorEntry, tensors_of
from holdfast.ondisk.regions import Box, whole

SHAPE = (7, 5, 6)


@pytest.fixture
def file(tmp_path: Path) -> BinaryFile:
    """The numbers from 0 on, as float32."""
    (tmp_path / "numbers").write_bytes(torch.arange(4096.0).numpy().tobytes())
    return BinaryFile.open(tmp_path / "numbers")


def entries(file: BinaryFile) -> dict[str, tuple[TensorEntry, torch.Tensor]]:
    """Tensors that are stored in several ways, each with what it is."""
    numbers = torch.arange(4096.0)
    dense = torch.as_strided(numbers, SHAPE, (30, 6, 1), 10)
    turned = torch.as_strided(numbers, SHAPE, (1, 7, 35), 10)
    cut = torch.cat([numbers[0:90].view(3, 5, 6), numbers[1000:1120].view(4, 5, 6)])
    parts = [StoredChunk(file, 0, Box((0, 0, 0), (3, 5, 6))), StoredChunk(file, 4000, Box((3, 0, 0), (4, 5, 6)))]
    sides = [
        StoredChunk(file, 0, Box((0, 0, 0), (7, 5, 2))),
        StoredChunk(file, 2000, Box((0, 0, 2), (7, 5, 4))),
    ]
    columns = torch.cat([numbers[0:70].view(7, 5, 2), numbers[500:640].view(7, 5, 4)], dim=2)
    return {
        "dense": (TensorEntry("x", "float32", SHAPE, (StoredChunk(file, 40, whole(SHAPE)),)), dense),
        "strides": (TensorEntry("x", "float32", SHAPE, (StoredChunk(file, 40, whole(SHAPE), (1, 7, 35)),)), turned),
        "rows": (TensorEntry("x", "float32", SHAPE, tuple(parts)), cut),
        "columns": (TensorEntry("x", "float32", SHAPE, tuple(sides)), columns),
    }


@pytest.mark.parametrize("name", ["dense", "strides", "rows", "columns"])
def test_any_box_is_read_into_any_memory(file: BinaryFile, name: str) -> None:
    entry, expected = entries(file)[name]
    draw = random.Random(name)
    for _ in range(60):
        offsets = tuple(draw.randrange(size) for size in SHAPE)
        sizes = tuple(draw.randint(1, size - start) for start, size in zip(offsets, SHAPE, strict=True))
        part = expected[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        for target in (torch.zeros(sizes), torch.zeros(sizes[::-1]).permute(2, 1, 0)):
            fill_all([Fill(entry.checked(), Box(offsets, sizes), target)])
            assert torch.equal(target, part)


@pytest.mark.parametrize("name", ["dense", "strides", "rows", "columns"])
@pytest.mark.parametrize("limit", [4, 28, 1000, 1 << 20])
def test_pieces_are_the_bytes_in_order(file: BinaryFile, name: str, limit: int) -> None:
    entry, expected = entries(file)[name]
    pieces = [bytes(piece) for piece in pieces_of(entry, limit)]
    assert b"".join(pieces) == expected.contiguous().numpy().tobytes()
    assert max(map(len, pieces)) <= max(limit, 4)


@pytest.mark.parametrize("name", ["dense", "strides", "rows", "columns"])
def test_any_range_of_the_elements_is_read(file: BinaryFile, name: str) -> None:
    entry, expected = entries(file)[name]
    data = expected.contiguous().numpy().tobytes()
    for first, end in itertools.combinations(range(0, len(data) + 1, 20), 2):
        memory = bytearray(end - first)
        read_range(entry, first, memoryview(memory))
        assert memory == data[first:end]


@pytest.mark.parametrize(("start", "size"), [(2, 4), (0, 6), (-4, 4), (836, 8)])
def test_a_range_that_is_not_whole_elements_of_the_tensor_is_refused(file: BinaryFile, start: int, size: int) -> None:
    entry, _ = entries(file)["strides"]
    with pytest.raises(HoldfastError, match="not whole elements"):
        read_range(entry, start, memoryview(bytearray(size)))


class CountingFile(BinaryFile):
    """A file that keeps the size of the largest read."""

    largest = 0

    def read_into(self, start: int, target: memoryview) -> None:
        self.largest = max(self.largest, len(target))
        super().read_into(start, target)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 4), (1 << 25, 1 << 25)), ((3, 2, 2), (1, 1 << 24, 1 << 25)), ((2, 2, 3), (1 << 25, 1 << 20, 1 << 20))],
)
def test_elements_far_apart_in_a_file_are_read_without_what_is_between_them(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    expected = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(4 * size)
        for place in itertools.product(*map(range, shape)):
            at = sum(index * stride for index, stride in zip(place, strides, strict=True))
            os.pwrite(stream.fileno(), expected[place].numpy().tobytes(), 4 * at)
    stored = torch.from_file(str(tmp_path / "sparse"), size=size).as_strided(shape, strides).clone()
    with CountingFile.open(tmp_path / "sparse") as file:
        entry = TensorEntry("x", "float32", shape, (StoredChunk(file, 0, whole(shape), strides),)).checked()
        target = torch.zeros(shape)
        fill_all([Fill(entry, whole(shape), target)])
        assert torch.equal(target, stored)
        assert 0 < file.largest <= 8 << 20


def test_an_error_of_one_thread_ends_all_and_is_raised(file: BinaryFile) -> None:
    entry, _ = entries(file)["dense"]
    outside = TensorEntry("y", "float32", (4096,), (StoredChunk(file, 8, whole((4096,))),))
    with pytest.raises(CorruptCheckpointError, match="outside of the file"):
        fill_all([Fill(outside, whole((4096,)), torch.zeros(4096)), Fill(entry, whole(SHAPE), torch.zeros(SHAPE))])


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((4,), []),
        ((4,), [(0, (0,), (3,), None)]),
        ((4,), [(0, (0,), (4,), None), (0, (3,), (1,), None)]),
        ((4,), [(16380, (0,), (4,), None)]),
        ((4,), [(-4, (0,), (4,), None)]),
        ((2, 2), [(0, (0, 0), (2, 2), (1,))]),
        ((2, 2), [(0, (0, 0), (2, 2), (-1, 1))]),
        ((2, 2), [(0, (0, 0), (2, 2), (4096, 1))]),
        ((2**40, 2**40), [(0, (0, 0), (2**40, 2**40), None)]),
        ((-1,), [(0, (0,), (-1,), None)]),
    ],
    ids=["none", "less", "twice", "after the end", "before the start", "few strides", "negative", "far", "huge", "-1"],
)
def test_an_entry_that_its_file_cannot_hold_is_damage(file: BinaryFile, shape: tuple[int, ...], chunks: list) -> None:
    made = tuple(StoredChunk(file, start, Box(offsets, sizes), strides) for start, offsets, sizes, strides in chunks)
    with pytest.raises(CorruptCheckpointError):
        TensorEntry("x", "float32", shape, made).checked()


def test_tensors_of_a_tree_have_their_paths_as_names() -> None:
    one, other = (TensorEntry(name, "float32", ()) for name in "ab")
    assert tensors_of({"model": {"layers": [one, {"w": other}]}, "step": 3}) == {
        "model.layers.0": one,
        "model.layers.1.w": other,
    }
    with pytest.raises(CorruptCheckpointError, match="same name"):
        tensors_of({"a.b": one, "a": {"b": other}})


def test_an_entry_without_chunks_is_an_error_and_not_memory_as_it_was() -> None:
    entry = TensorEntry("x", "float32", (3,))
    with pytest.raises(HoldfastError):
        fill_all([Fill(entry, whole((3,)), torch.ones(3))])
    with pytest.raises(HoldfastError):
        list(pieces_of(entry, 1 << 20))
