"""Files of `torch.save`: the tree of both forms, tensors as ranges, code and damage refused."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import os
import pathlib
import random
import zipfile
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.source import Fill, Source, TensorEntry, tensors_of
from holdfast.formats.torch_files.torch_file import TorchFormat
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.regions import Box, whole
from holdfast.testing import values
from tests.ranks import run_ranks

FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(value: Any, folder: pathlib.Path, *, zipped: bool = True, **options: Any) -> pathlib.Path:
    path = folder / "file.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zipped, **options)
    return path


def opened(path: pathlib.Path) -> Source:
    assert TorchFormat().detects(path)
    return TorchFormat().open(path)


def read(source: Source, entry: TensorEntry) -> torch.Tensor:
    target = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    source.read([Fill(entry, whole(entry.shape), target)])
    return target


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*parts)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


@FORMS
def test_a_training_checkpoint_is_read_bit_for_bit(zipped: bool, tmp_path: pathlib.Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    with opened(saved(state, tmp_path, zipped=zipped)) as source:
        assert source.format == "torch"
        tree = source.tree
        assert tree["epoch"] == 3
        assert tree["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
        assert tree["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
        for name, tensor in model.state_dict().items():
            assert tree["model"][name].name == f"model.{name}"
            assert same_bytes(read(source, tree["model"][name]), tensor)
        for number, state_of_one in optimizer.state_dict()["state"].items():
            for name, tensor in state_of_one.items():
                assert same_bytes(read(source, tree["optimizer"]["state"][number][name]), tensor)


@FORMS
@pytest.mark.parametrize("dtype", sorted(ELEMENT_TYPES))
def test_tensors_of_every_type_are_read(dtype: str, zipped: bool, tmp_path: pathlib.Path) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    tensor = torch.randint(0, 2, (6 * kind.itemsize,), dtype=torch.uint8).view(kind).reshape(2, 3)
    with opened(saved({"x": tensor}, tmp_path, zipped=zipped)) as source:
        assert same_bytes(read(source, source.tree["x"]), tensor)


@FORMS
def test_views_are_read_as_they_lie(zipped: bool, tmp_path: pathlib.Path) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    views = {
        "whole": base,
        "turned": base.t(),
        "part": base[1:3, 2:7:2],
        "expanded": base[:, :1].expand(6, 4),
        "scalar": base[2, 3],
        "empty": base[:0],
        "image": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(base),
    }
    with opened(saved(views, tmp_path, zipped=zipped)) as source:
        for name, view in views.items():
            assert same_bytes(read(source, source.tree[name]), view), name
            pieces = b"".join(bytes(piece) for piece in source.pieces(source.tree[name], limit_bytes=20))
            assert pieces == view.detach().contiguous().numpy().tobytes(), name
        box = Box((1, 2), (4, 3))
        target = torch.empty(box.sizes)
        source.read([Fill(source.tree["turned"], box, target)])
        assert torch.equal(target, base.t()[1:5, 2:5])


@FORMS
def test_tied_tensors_are_one_entry_under_two_names(zipped: bool, tmp_path: pathlib.Path) -> None:
    weight = torch.ones(3, 2)
    state = {"embedding": weight, "head": weight, "other": weight[:2], "turned": weight.t()}
    with opened(saved(state, tmp_path, zipped=zipped)) as source:
        assert source.tree["embedding"] is source.tree["head"]
        assert len({id(entry) for entry in tensors_of(source.tree).values()}) == 3


VALUES = {
    "plain": [1, 2.5, "x", None, True, (1, (2,)), {"a": {1: 2}}],
    "sets": [{1, 2}, frozenset(("a",)), {(1, 2)}],
    "bytes": [b"ab\xff", bytearray(b"z"), 2 + 3j, slice(1, None, 2), range(3)],
    "torch": [torch.Size([1, 2]), torch.device("cuda", 1), torch.device("cpu"), torch.bfloat16, torch.strided],
    "collections": [collections.Counter("aab"), collections.deque([1, 2], 5), collections.OrderedDict(b=1, a=2)],
    "times": [
        datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        datetime.date(2024, 1, 2),
        datetime.timedelta(1, 2, 3),
    ],
    "python random state": random.Random(1).getstate(),
}


@FORMS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_with_their_types(zipped: bool, protocol: int, tmp_path: pathlib.Path) -> None:
    with opened(saved(VALUES, tmp_path, zipped=zipped, pickle_protocol=protocol)) as source:
        assert source.tree == VALUES
        assert str(source.tree) == str(VALUES)


def test_values_of_numpy_are_read(tmp_path: pathlib.Path) -> None:
    name, keys, *rest = numpy.random.RandomState(1).get_state()
    arrays = [
        numpy.arange(6, dtype=">i4").reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.array(["ab", "c"]),
    ]
    value = {"state": (name, keys, *rest), "scalars": [numpy.float64(2.5), numpy.int32(-1)], "arrays": arrays}
    with opened(saved(value, tmp_path)) as source:
        assert source.tree["state"][0] == name
        numpy.testing.assert_array_equal(source.tree["state"][1], keys)
        assert [(type(scalar), scalar) for scalar in source.tree["scalars"]] == [
            (numpy.float64, 2.5),
            (numpy.int32, -1),
        ]
        for found, wanted in zip(source.tree["arrays"], arrays, strict=True):
            assert found.dtype == wanted.dtype
            numpy.testing.assert_array_equal(found, wanted)


def test_records_of_common_classes_become_plain_values(tmp_path: pathlib.Path) -> None:
    value = {
        "arguments": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "path": pathlib.PurePosixPath("/a/b"),
        "stream": io.BytesIO(b"123"),
        "default": collections.defaultdict(list, {"a": [1]}),
    }
    with opened(saved(value, tmp_path)) as source:
        assert source.tree["arguments"] == {"lr": 0.1, "layers": [1, 2]}
        assert source.tree["path"] == "/a/b"
        assert source.tree["stream"].getvalue() == b"123"
        assert source.tree["default"] == {"a": [1]}
        assert source.tree["default"].default_factory is list


def test_a_value_that_is_no_dict_has_a_name(tmp_path: pathlib.Path) -> None:
    with opened(saved(torch.ones(2), tmp_path)) as source:
        assert list(tensors_of(source.tree)) == ["value"]


def test_a_pickle_of_the_old_form_may_be_long(tmp_path: pathlib.Path) -> None:
    value = {"text": "x" * (5 << 20), "last": torch.ones(2)}
    with opened(saved(value, tmp_path, zipped=False)) as source:
        assert source.tree["text"] == value["text"]
        assert same_bytes(read(source, source.tree["last"]), torch.ones(2))


# Content that is refused


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.guarantee("G9")
@FORMS
def test_code_is_refused_by_its_name_and_not_run(zipped: bool, tmp_path: pathlib.Path) -> None:
    path = saved({"x": torch.ones(2), "y": Touch(tmp_path / "touched")}, tmp_path, zipped=zipped)
    with pytest.raises(UnsafeContentError, match=r"posix\.mkdir"):
        opened(path)
    assert not (tmp_path / "touched").exists()


def test_a_whole_module_is_refused_by_its_class(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsafeContentError, match=r"torch\.nn\.modules\.linear\.Linear.*state dict"):
        opened(saved(torch.nn.Linear(2, 2), tmp_path))


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.empty(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
    ],
)
def test_tensors_that_are_not_dense_are_refused_by_name(
    tensor: torch.Tensor, named: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UnsafeContentError, match=named):
        opened(saved({"x": tensor}, tmp_path))


def save_sharded(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    saved({"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, pathlib.Path(folder))


def test_a_sharded_tensor_is_refused_with_the_way_to_save_it(tmp_path: pathlib.Path) -> None:
    values(run_ranks(1, save_sharded, str(tmp_path)))
    with pytest.raises(UnsafeContentError, match=r"torch\.distributed\.checkpoint"):
        opened(tmp_path / "file.pt")


@FORMS
@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag],
    ids=["conjugated", "negated"],
)
def test_a_conjugated_or_negated_view_is_refused_with_the_way_to_save_it(
    tensor: torch.Tensor, zipped: bool, tmp_path: pathlib.Path
) -> None:
    path = saved({"x": tensor}, tmp_path, zipped=zipped)
    with pytest.raises(UnsupportedFormatError, match=r"file\.pt.*conjugated or negated.*resolve_conj\(\)"):
        opened(path)
    plain = tensor.resolve_conj().resolve_neg()
    source = opened(saved({"x": plain}, tmp_path, zipped=zipped))
    assert same_bytes(read(source, source.tree["x"]), plain)


@pytest.mark.guarantee("G9")
def test_a_tensor_that_is_far_larger_than_its_bytes_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsafeContentError, match="stored in 4"):
        opened(saved({"x": torch.ones(1).expand(1 << 40)}, tmp_path))


def test_a_torchscript_program_is_refused(tmp_path: pathlib.Path) -> None:
    path = saved({"x": torch.ones(2)}, tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("file/constants.pkl", b"\x80\x02).")
    with pytest.raises(UnsupportedFormatError, match="TorchScript"):
        opened(path)


def test_numbers_with_the_big_end_first_are_refused(tmp_path: pathlib.Path) -> None:
    path = saved({"x": torch.ones(2)}, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"little", b"bigbig"))
    with pytest.raises(UnsupportedFormatError, match="big end"):
        opened(path)
    path = saved({"x": torch.ones(2)}, tmp_path, zipped=False)
    data = bytearray(path.read_bytes())
    data[data.index(b"\x88", data.index(b"little_endian"))] = 0x89
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError, match="big end"):
        opened(path)


def test_files_of_other_formats_are_not_taken_for_torch_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file.pt"
    for data in (b"", b"PK\x03\x04", b"\x80\x02}.", bytes(100)):
        path.write_bytes(data)
        assert not TorchFormat().detects(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.txt", b"x")
    assert not TorchFormat().detects(path)
    assert not TorchFormat().detects(tmp_path)


@FORMS
def test_a_file_that_was_cut_off_is_damage(zipped: bool, tmp_path: pathlib.Path) -> None:
    path = saved({"x": torch.ones(20), "y": torch.zeros(10)}, tmp_path, zipped=zipped)
    data = path.read_bytes()
    for size in range(20, len(data), 11):
        path.write_bytes(data[:size])
        assert TorchFormat().detects(path) or size < 60
        with pytest.raises(HoldfastError):
            TorchFormat().open(path)


def test_a_storage_that_is_shorter_than_its_tensor_is_damage(tmp_path: pathlib.Path) -> None:
    path = saved({"x": torch.ones(20)}, tmp_path)
    data = path.read_bytes()
    # 20 elements are BININT1 20 in the shape; 21 are one more than the storage has.
    path.write_bytes(data.replace(b"K\x14\x85", b"K\x15\x85"))
    with pytest.raises(CorruptCheckpointError, match="outside of its file"):
        opened(path)
