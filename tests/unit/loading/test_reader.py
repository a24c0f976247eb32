"""A checkpoint is listed and read without live objects: every box exactly, every damage named, without torch."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

import holdfast
from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.loading.reader import CheckpointReader, Leaf
from holdfast.loading.requests import READ_PIECE_BYTES
from holdfast.ondisk.manifest import TensorRecord
from holdfast.ondisk.regions import Box, cover_exactly
from holdfast.runs.checkpoint import Checkpoint

WAYS = ("array", "tensor", "read_into")
ARRAY = numpy.arange(100_000, dtype=numpy.int64)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "left": torch.randn(4, 2, generator=generator),
        "right": torch.randn(4, 4, generator=generator),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "brain": torch.randn(3, 7, generator=generator).bfloat16(),
        "large": torch.randn(1500, 1500, generator=generator, dtype=torch.float64),
    }


class Trainer:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = torch.nn.Module()
    for name, tensor in tensors().items():
        model.register_buffer(name, tensor)
    trainer = Trainer()
    trainer.state = {"epoch": 3, "pair": (1, 2.5), "best": tensors()["scalar"], "table": ARRAY}
    with holdfast.CheckpointManager(tmp_path, {"model": model, "trainer": trainer}, rng=False, mode="sync") as manager:
        manager.save(7)
    return tmp_path


@pytest.fixture
def reader(folder: Path) -> CheckpointReader:
    return CheckpointReader(joined(holdfast.resolve(folder)))


def joined(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with one more leaf, whose chunks are the left and the right columns of it."""
    manifest = checkpoint.manifest
    leaves = {leaf.name: leaf for leaf in manifest.tensors}
    left, right = leaves["model.left"], leaves["model.right"]
    chunks = (left.chunks[0], msgspec.structs.replace(right.chunks[0], offsets=(0, 2)))
    both = TensorRecord(name="model.joined", dtype="float32", shape=(4, 6), chunks=chunks)
    return dataclasses.replace(checkpoint, head=msgspec.structs.replace(manifest, tensors=(*manifest.tensors, both)))


def read(reader: CheckpointReader, leaf: str, box: Box | None, way: str) -> torch.Tensor:
    if way == "array":
        return torch.from_numpy(reader.array(leaf, box))
    if way == "tensor":
        return reader.tensor(leaf, box)
    found = reader.leaf(leaf)
    target = torch.empty(found.shape if box is None else box.sizes, dtype=getattr(torch, found.dtype))
    memory = bytearray(target.nbytes)
    reader.read_into(leaf, memory, box)
    return torch.frombuffer(memory, dtype=target.dtype).reshape(target.shape) if memory else target


def damage(folder: Path, leaf: TensorRecord) -> tuple[str, int]:
    """Flip a bit of a leaf; return the file and the place."""
    chunk = leaf.chunks[0]
    (file,) = folder.glob(f"step-*/{chunk.file}")
    data = bytearray(file.read_bytes())
    data[chunk.start + 9] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    return file.name, chunk.start + 9


def test_leaves_are_listed_with_what_they_are(reader: CheckpointReader) -> None:
    found = {leaf.name: (leaf.dtype, leaf.shape, leaf.component, leaf.path, leaf.size_bytes) for leaf in reader.leaves}
    assert found["model.brain"] == ("bfloat16", (3, 7), "model", "brain", 42)
    assert found["model.scalar"] == ("int64", (), "model", "scalar", 8)
    assert found["trainer.table"] == ("int64", (100_000,), "trainer", "table", 800_000)
    assert [(tree.name, tree.kind) for tree in reader.trees] == [("model", "module"), ("trainer", "values")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verify", ["full", "quick", "off"])
def test_whole_leaves_come_back_exactly(reader: CheckpointReader, way: str, verify: Any) -> None:
    reader = CheckpointReader(reader.checkpoint, verify=verify)
    for name, tensor in tensors().items():
        if way != "array" or name != "brain":
            assert torch.equal(read(reader, f"model.{name}", None, way), tensor), name


@pytest.mark.parametrize("way", WAYS)
def test_every_box_of_a_leaf_in_several_chunks_comes_back_exactly(reader: CheckpointReader, way: str) -> None:
    whole = torch.cat([tensors()["left"], tensors()["right"]], dim=1)
    rows, columns = (list(itertools.combinations(range(size + 1), 2)) for size in whole.shape)
    for (top, bottom), (left, right) in itertools.product(rows, columns):
        box = Box((top, left), (bottom - top, right - left))
        assert torch.equal(read(reader, "model.joined", box, way), whole[top:bottom, left:right]), box


@pytest.mark.parametrize("way", WAYS)
def test_boxes_that_cross_blocks_come_back_exactly(reader: CheckpointReader, way: str) -> None:
    whole = tensors()["large"]
    for box in (Box((0, 3), (1500, 1)), Box((700, 0), (99, 1500)), Box((1, 1), (1498, 1498))):
        (top, left), (rows, columns) = box
        assert torch.equal(read(reader, "model.large", box, way), whole[top : top + rows, left : left + columns])


@pytest.mark.parametrize("limit_bytes", [1, 8, 100, 12_000, 12_001, 100_000, 1 << 30])
def test_a_leaf_is_streamed_in_boxes_of_bounded_size(reader: CheckpointReader, limit_bytes: int) -> None:
    leaf = reader.leaf("model.large" if limit_bytes > 10_000 else "model.joined")
    boxes = list(leaf.boxes(limit_bytes))
    size = leaf.record.item_bytes
    assert cover_exactly(boxes, leaf.shape) is None
    assert all(box.volume * size <= max(limit_bytes, size) for box in boxes)
    streamed = b"".join(reader.array(leaf.name, box).tobytes() for box in boxes)
    assert streamed == reader.array(leaf.name).tobytes()


def test_a_column_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """Four times as many bytes lie between its first and its last element as may be taken at once."""
    whole = torch.arange(4 * READ_PIECE_BYTES // 8 // 1024 * 1024, dtype=torch.float64).reshape(-1, 1024)
    with holdfast.CheckpointManager(tmp_path, {"state": {"x": whole}}, rng=False, mode="sync") as manager:
        manager.save(0)
    reader = CheckpointReader(holdfast.resolve(tmp_path))
    target = numpy.empty(len(whole))
    tracemalloc.start()
    try:
        reader.read_into("state.x", target, Box((0, 5), (len(whole), 1)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert numpy.array_equal(target, whole[:, 5].numpy())
    assert peak < 2.5 * READ_PIECE_BYTES


def test_values_are_read_without_any_tensor(folder: Path, reader: CheckpointReader) -> None:
    for file in folder.glob("step-*/*.safetensors"):
        file.unlink()
    found = reader.values("trainer")
    assert (found["epoch"], found["pair"]) == (3, (1, 2.5))
    assert found["best"] == Leaf(reader.leaf("trainer.best").record)
    assert found["table"].shape == (100_000,)
    assert reader.readable_values("trainer") == {
        "epoch": 3,
        "pair": [1, 2.5],
        "best": "<tensor best>",
        "table": reader.readable_values("trainer")["table"],  # type: ignore[call-overload, index]
    }
    assert set(reader.values("model")) == set(tensors())


def test_values_are_decoded_with_their_tensors(reader: CheckpointReader) -> None:
    found = reader.decoded(reader.tree("trainer"), reader.stored_values("trainer"), "trainer")
    assert torch.equal(found["best"], tensors()["scalar"])
    assert numpy.array_equal(found["table"], ARRAY)


@pytest.mark.parametrize("way", [*WAYS, "check"])
def test_damage_is_named_where_bytes_are_checked(folder: Path, reader: CheckpointReader, way: str) -> None:
    leaf = reader.leaf("model.large")
    file, place = damage(folder, leaf.record)
    loose = CheckpointReader(reader.checkpoint, verify="quick")
    loose.check([loose.request(leaf)])
    assert not numpy.array_equal(loose.array(leaf.name), tensors()["large"].numpy())
    acts = {"check": lambda: reader.check([reader.request(leaf)])}
    with pytest.raises(CorruptCheckpointError) as failure:
        acts.get(way, lambda: read(reader, leaf.name, None, way))()
    fields = failure.value.fields
    assert (fields["leaf"], fields["file"], fields["step"]) == (leaf.name, file, 7)
    assert fields["byte_range"][0] <= place < fields["byte_range"][1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", ["missing", "short"])
def test_a_file_that_is_missing_or_short_is_damage_at_any_depth(
    folder: Path, reader: CheckpointReader, way: str, act: str
) -> None:
    for file in folder.glob("step-*/*.safetensors"):
        file.chmod(0o644)
        file.unlink() if act == "missing" else file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"model\.large"):
        read(CheckpointReader(reader.checkpoint, verify="off"), "model.large", None, way)


def test_a_missing_file_of_values_is_damage(folder: Path, reader: CheckpointReader) -> None:
    next(file for file in folder.glob("step-*/*.json") if file.name == reader.trees[0].file).unlink()
    with pytest.raises(CorruptCheckpointError):
        reader.values("trainer")


def test_what_is_not_there_or_does_not_fit_is_a_usage_error(reader: CheckpointReader) -> None:
    wrong = [
        lambda: reader.leaf("model.lost"),
        lambda: reader.values("lost"),
        lambda: reader.array("model.brain"),
        lambda: reader.tensor("model.left", Box((0, 0), (4, 3))),
        lambda: reader.array("model.left", Box((0,), (4,))),
        lambda: reader.read_into("model.scalar", bytearray(7)),
        lambda: reader.read_into("model.scalar", bytes(8)),
        lambda: reader.read_into("model.left", numpy.empty((2, 4), numpy.float32).T),
        lambda: CheckpointReader(reader.checkpoint, verify="some"),  # type: ignore[arg-type]
    ]
    for act in wrong:
        with pytest.raises(UsageError):
            act()


def test_torch_is_not_imported_to_list_and_to_read_arrays(folder: Path) -> None:
    code = (
        "import sys\n"
        "from holdfast.loading.reader import CheckpointReader\n"
        "from holdfast.loading.resolve import resolve\n"
        "reader = CheckpointReader(resolve(sys.argv[1]))\n"
        "assert reader.values('trainer')['epoch'] == 3\n"
        "assert [reader.array(leaf.name).shape == leaf.shape for leaf in reader.leaves if leaf.dtype != 'bfloat16']\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
