"""What is written as a torch file loads with weights_only=True and mmap=True, and is the same for the same tree."""

from __future__ import annotations

import collections
import io
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch

from holdfast.errors import UsageError
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.source import Fill, Source, TensorEntry
from holdfast.formats.torch_files.torch_file import TorchFormat, write_torch
from holdfast.ondisk.dtypes import ELEMENT_TYPES


class Tensors(Source):
    """Live tensors as a source, and how many bytes of them a piece has."""

    format = "live"
    piece_bytes = 1000

    @property
    def tree(self) -> dict[str, Any]:
        return {}

    def item(self, tensor: torch.Tensor, name: str = "") -> ExportItem:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ExportItem(name, TensorEntry(name, dtype, tuple(tensor.shape), handle=tensor), dtype)

    def pieces(self, entry: TensorEntry, *, limit_bytes: int = 0) -> Iterator[memoryview]:
        memory = entry.handle.detach().contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(memory), self.piece_bytes):
            yield memory[start : start + self.piece_bytes]

    def read(self, fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        for fill in fills:
            part = fill.entry.handle
            for dimension, (offset, size) in enumerate(zip(fill.box.offsets, fill.box.sizes, strict=True)):
                part = part.narrow(dimension, offset, size)
            fill.target.copy_(part)


SOURCE = Tensors("live")


def written(tree: Any) -> bytes:
    stream = io.BytesIO()
    write_torch(stream, tree, lambda item: SOURCE.pieces(item.entry))
    return stream.getvalue()


def loaded(data: bytes, folder: pathlib.Path, **options: Any) -> Any:
    path = folder / "written.pt"
    path.write_bytes(data)
    return torch.load(path, weights_only=True, **options)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", sorted(ELEMENT_TYPES))
def test_tensors_of_every_type_load_as_weights(dtype: str, mmap: bool, tmp_path: pathlib.Path) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    tensor = torch.randint(0, 2, (600 * kind.itemsize,), dtype=torch.uint8).view(kind).reshape(20, 30)
    tree = {"x": SOURCE.item(tensor), "empty": SOURCE.item(tensor[:0]), "scalar": SOURCE.item(tensor[0, 0])}
    found = loaded(written(tree), tmp_path, mmap=mmap)
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        "x": (kind, (20, 30)),
        "empty": (kind, (0, 30)),
        "scalar": (kind, ()),
    }
    assert torch.equal(found["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert found["x"].untyped_storage().data_ptr() % 64 == 0


def test_values_and_the_metadata_of_modules_load_as_weights(tmp_path: pathlib.Path) -> None:
    state: Any = collections.OrderedDict(weight=SOURCE.item(torch.ones(2)))
    state._metadata = collections.OrderedDict({"": {"version": 2}})
    tree = {
        "state": state,
        "numbers": [0, 255, 256, -1, 2**31, -(2**63), 2**200, 0.5, float("inf"), True, None],
        "text": ["", "é", "\ud800", "a" * 300],
        "nested": ((), (1, (2,)), {1: {"a": []}, (1, "k"): 0}),
        "rare": [{2, 1}, b"\x00\xff", bytearray(b"z"), 1 + 2j, collections.Counter(a=2)],
        "torch": [torch.Size([1, 2]), torch.device("cuda", 1), torch.device("cpu"), torch.bfloat16],
    }
    found = loaded(written(tree), tmp_path)
    assert found["state"]._metadata == {"": {"version": 2}}
    assert torch.equal(found["state"]["weight"], torch.ones(2))
    assert str({**found, "state": 0}) == str({**tree, "state": 0})


def test_what_torch_load_would_refuse_becomes_its_plain_relative(tmp_path: pathlib.Path) -> None:
    tree = [frozenset((1,)), collections.defaultdict(list, a=[1]), numpy.float32(0.5), numpy.bool_(True)]
    found = loaded(written(tree), tmp_path)
    assert found == [{1}, {"a": [1]}, 0.5, True]
    assert [type(value) for value in found] == [set, dict, float, bool]


@pytest.mark.parametrize("value", [object(), pathlib.PurePath("x"), numpy.ones(2), slice(1), 1 << 4096])
def test_a_value_that_does_not_load_as_weights_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(UsageError, match=r"leaf 'a\.b'"):
        written({"a": {"b": value}})


def test_items_of_one_entry_share_a_storage(tmp_path: pathlib.Path) -> None:
    item = SOURCE.item(torch.ones(3, 2))
    found = loaded(written({"a": item, "b": ExportItem("b", item.entry, item.dtype)}), tmp_path)
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_the_same_tree_gives_the_same_bytes() -> None:
    def tree(text: str) -> dict[str, Any]:
        return {"a": [text, text], "b": SOURCE.item(torch.ones(3)), "c": {"x", "y", "z"}}

    shared, apart = "".join(["te", "xt"]), ["".join(["te", "xt"]) for _ in range(2)]
    assert written({"a": [shared, shared]}) == written({"a": apart})
    assert written(tree("one")) == written(tree("one"))
    # Both have the same place in the table of a small set: the first that was added comes first.
    one, other = {0} | {8}, {8} | {0}
    assert list(one) != list(other)
    assert written(one) == written(other)


def test_a_file_can_be_written_into_another_one(tmp_path: pathlib.Path) -> None:
    tree = {"a": SOURCE.item(torch.ones(3))}
    stream = io.BytesIO(b"head")
    stream.seek(4)
    write_torch(stream, tree, lambda item: SOURCE.pieces(item.entry))
    assert stream.getvalue() == b"head" + written(tree)
    assert stream.tell() == len(stream.getvalue())


def test_the_format_writes_the_tree_of_a_job_and_reads_it_back(tmp_path: pathlib.Path) -> None:
    item = SOURCE.item(torch.arange(5000.0), "model.x")
    counted: list[int] = []
    job = ExportJob(SOURCE, (item,), {"model": {"x": item}, "step": 3}, on_bytes=counted.append)
    TorchFormat().write(job, tmp_path / "out.pt")
    assert sum(counted) == 20_000
    with TorchFormat().open(tmp_path / "out.pt") as source:
        assert source.tree["step"] == 3
        pieces = b"".join(map(bytes, source.pieces(source.tree["model"]["x"])))
    assert pieces == torch.arange(5000.0).numpy().tobytes()
