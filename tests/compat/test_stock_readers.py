"""Our tensor files with nothing of ours installed: PyTorch's `HuggingFaceStorageReader` and plain safetensors."""

from __future__ import annotations

import json
import pathlib
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks

# The types that safetensors has a name for.
NAMED = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "complex64": torch.complex64,
}
# The types that it has none for, with the type and the size of the last dimension that stand for them.
SPELLED = {
    "complex128": (torch.complex128, torch.float64, 2),
    "complex32": (torch.complex32, torch.float16, 2),
    "float8_e4m3fnuz": (torch.float8_e4m3fnuz, torch.uint8, 1),
    "float8_e5m2fnuz": (torch.float8_e5m2fnuz, torch.uint8, 1),
    "float8_e8m0fnu": (torch.float8_e8m0fnu, torch.uint8, 1),
}


@pytest.fixture(autouse=True)
def _one_process_is_no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaN and infinities too, except for bool, which has two."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    item_bytes = torch.empty((), dtype=dtype).element_size()
    return (
        torch.randint(0, 256, (*shape, item_bytes), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    )


class Holder:
    """A component that holds tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def every_type() -> dict[str, torch.Tensor]:
    tensors = {}
    for seed, (name, dtype) in enumerate(NAMED.items()):
        tensors[f"{name}.matrix"] = random_bits((3, 5), dtype, seed)
        tensors[f"{name}.scalar"] = random_bits((), dtype, seed)
        tensors[f"{name}.empty"] = torch.empty((0, 4), dtype=dtype)
    return tensors


def folder_of(run: pathlib.Path) -> pathlib.Path:
    return run / holdfast.resolve(run).folder


def load_with_stock_reader(
    folder: pathlib.Path, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Any]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    return state


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def check_frame(path: pathlib.Path) -> None:
    """The data starts on a page, and its parts lie back to back from there to the end of the file."""
    header, start = read_header(path)
    header.pop("__metadata__")
    assert start % 4096 == 0
    position = 0
    for begin, end in sorted(entry["data_offsets"] for entry in header.values()):
        assert begin == position
        position = end
    assert start + position == path.stat().st_size


def test_stock_dcp_reads_every_type_that_safetensors_names(tmp_path: pathlib.Path) -> None:
    tensors = every_type()
    holdfast.CheckpointManager(tmp_path, {"all": Holder(tensors)}, rng=False, mode="sync").save(0)
    shapes = {f"all.{name}": (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    loaded = load_with_stock_reader(folder_of(tmp_path), shapes)
    for name, value in tensors.items():
        got = loaded[f"all.{name}"]
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        assert bits(got) == bits(value), name


def test_plain_safetensors_opens_every_file_and_has_the_values(tmp_path: pathlib.Path) -> None:
    tensors = every_type()
    for seed, (name, (dtype, _, _)) in enumerate(SPELLED.items()):
        tensors[name] = random_bits((4, 3), dtype, seed)
        tensors[f"{name}.scalar"] = random_bits((), dtype, seed)
        tensors[f"{name}.empty"] = torch.empty((2, 0), dtype=dtype)
    holdfast.CheckpointManager(tmp_path, {"all": Holder(tensors)}, rng=False, mode="sync").save(0)
    found: dict[str, torch.Tensor] = {}
    for path in folder_of(tmp_path).glob("*.safetensors"):
        check_frame(path)
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping: it has only keys)
    assert found.keys() == {f"all.{name}" for name in tensors}
    for name, value in tensors.items():
        got = found[f"all.{name}"]
        assert bits(got) == bits(value), name
        spelled = SPELLED.get(name.partition(".")[0])
        expected = (value.dtype, tuple(value.shape)) if spelled is None else (spelled[1], (*value.shape, spelled[2]))
        assert (got.dtype, tuple(got.shape)) == expected, name


def test_a_file_may_hold_nothing_but_empty_tensors(tmp_path: pathlib.Path) -> None:
    holdfast.CheckpointManager(tmp_path, {"all": Holder({"x": torch.empty(0)})}, rng=False, mode="sync").save(0)
    assert holdfast.verify(tmp_path).ok
    (path,) = folder_of(tmp_path).glob("*.safetensors")
    check_frame(path)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("all.x").shape == (0,)


def save_sharded(rank: int, run: str) -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    # 5, 3 and 1 rows on 2 ranks: uneven cuts, and one of which the second rank gets nothing.
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    holdfast.CheckpointManager(run, {"model": model, "optimizer": optimizer}, rng=False, mode="sync").save(3)
    whole = {f"model.{name}": value.full_tensor().detach() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            whole[f"optimizer.state.{names[index]}.{key}"] = full
    return whole


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, torch.Tensor]]:
    """A run that two ranks saved, and the whole tensors that are in it."""
    run = tmp_path_factory.mktemp("sharded")
    return run, values(run_ranks(2, save_sharded, str(run)))[0]


def test_stock_dcp_reads_every_shard_of_two_ranks_in_one_process(
    sharded: tuple[pathlib.Path, dict[str, torch.Tensor]],
) -> None:
    run, whole = sharded
    folder = folder_of(run)
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert {leaf.name for leaf in holdfast.resolve(run).manifest.tensors} == whole.keys()
    loaded = load_with_stock_reader(folder, {name: (tuple(value.shape), value.dtype) for name, value in whole.items()})
    for name, value in whole.items():
        assert bits(loaded[name]) == bits(value), name
    for path in folder.glob("*.safetensors"):
        check_frame(path)


def test_the_shards_put_together_by_hand_are_the_whole(sharded: tuple[pathlib.Path, dict[str, torch.Tensor]]) -> None:
    run, whole = sharded
    built = {name: torch.zeros_like(value) for name, value in whole.items()}
    for path in folder_of(run).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118  (no mapping: it has only keys)
                chunk = file.get_tensor(name)
                place = tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(notes[name]["saved_offsets"], chunk.shape, strict=True)
                )
                built[name][place] = chunk
    for name, value in whole.items():
        assert bits(built[name]) == bits(value), name


_STRANGER = """
import sys, warnings
sys.modules["holdfast"] = None
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
state = {"m.w": torch.zeros(4, 2)}
dcp.load(state, storage_reader=HuggingFaceStorageReader(sys.argv[1]))
print(state["m.w"].sum().item())
"""


def test_a_program_without_holdfast_reads_a_checkpoint_of_dcp_save(tmp_path: pathlib.Path) -> None:
    dcp.save({"m": {"w": torch.full((4, 2), 3.0)}, "epoch": 1}, storage_writer=holdfast.HoldfastWriter(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", _STRANGER, str(folder_of(tmp_path))], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "24.0", done.stderr
