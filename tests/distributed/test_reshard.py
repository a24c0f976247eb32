"""A checkpoint of any number of ranks loads on any other: the same tensors, and only the bytes that are needed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import values
from tests.distributed.training import Training, build
from tests.ranks import run_ranks
from tests.sizes import DEEP, some

SIZES = (1, 2, 3, 4) if DEEP else (1, 2, 4)


def full(training: Training) -> dict[str, torch.Tensor]:
    """Model and moments, whole, on every rank."""
    options = StateDictOptions(full_state_dict=True)
    state = {f"model.{name}": tensor for name, tensor in get_model_state_dict(training.model, options=options).items()}
    for index, parameter in enumerate(training.model.parameters()):
        for key, value in training.optimizer.state[parameter].items():
            state[f"optimizer.{index}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return state


def build_on(form: str, group: dist.ProcessGroup, size: int, seed: int) -> Training:
    """Sharded over the group, or, plain, the same replica of everything on each of its ranks."""
    if form == "plain":
        return build(form, 0, 1, seed=seed)
    return build(form, dist.get_rank(group), size, mesh=DeviceMesh.from_group(group, "cpu"), seed=seed)


def matrix(rank: int, form: str, folder: str) -> list[str]:
    """Save on 1 to 4 of the ranks, load each of these on 1 to 4; what is not equal."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    wrong = []
    for size in SIZES:
        if rank < size:
            training = build_on(form, groups[size], size, seed=size)
            training.steps(2)
            with holdfast.CheckpointManager(f"{folder}/{size}", training.state, process_group=groups[size]) as manager:
                manager.save(2)
            expected = full(training)
            if rank == 0:
                torch.save(expected, f"{folder}/{size}.pt")
    dist.barrier()
    for saved in SIZES:
        expected = torch.load(f"{folder}/{saved}.pt")
        for size in SIZES:
            if rank < size:
                training = build_on(form, groups[size], size, seed=99)
                state = {"model": training.model, "optimizer": training.optimizer}
                run = f"{folder}/{saved}"
                with holdfast.CheckpointManager(run, state, process_group=groups[size], rng=False) as manager:
                    assert manager.restore().step == 2
                found = full(training)
                wrong += [
                    f"{saved} to {size}: {name}"
                    for name in expected.keys() | found.keys()
                    if name not in found or name not in expected or not torch.equal(found[name], expected[name])
                ]
    return wrong


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("form", ["fsdp", "plain"])
def test_every_number_of_ranks_loads_every_other(form: str, tmp_path: Path) -> None:
    for wrong in values(run_ranks(4, matrix, form, str(tmp_path), timeout_seconds=240)):
        assert wrong == []


class Holder:
    """A component that holds tensors as they are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


LAYOUTS = {
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Shard(1)),
    "both": (Shard(0), Shard(1)),
    "both-turned": (Shard(1), Shard(0)),
    "replicas-of-rows": (Replicate(), Shard(0)),
    "rows-of-replicas": (Shard(0), Replicate()),
    "replicas": (Replicate(), Replicate()),
    "last": (Shard(2), Shard(0)),
}


def every_layout(rank: int, folder: str) -> list[str]:
    """Save every placement on a 2x2 mesh, uneven sizes, and load each as every other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    empty = torch.empty(0, 5, 3)
    wrong = []
    for name, placements in LAYOUTS.items():
        holder = Holder(
            {
                "t": distribute_tensor(whole.clone(), mesh, placements),
                "empty": distribute_tensor(empty.clone(), mesh, placements),
            }
        )
        with holdfast.CheckpointManager(f"{folder}/{name}", {"holder": holdfast.Shared(holder)}, rng=False) as manager:
            manager.save(0)
    for saved, name in some(itertools.product(LAYOUTS, LAYOUTS), 16):
        holder = Holder(
            {
                "t": distribute_tensor(torch.zeros_like(whole), mesh, LAYOUTS[name]),
                "empty": distribute_tensor(empty.clone(), mesh, LAYOUTS[name]),
            }
        )
        state = {"holder": holdfast.Shared(holder)}
        with holdfast.CheckpointManager(f"{folder}/{saved}", state, rng=False) as manager:
            manager.restore()
        if not torch.equal(holder.tensors["t"].full_tensor(), whole):
            wrong.append(f"{saved} to {name}")
    return wrong


def test_every_placement_loads_as_every_other(tmp_path: Path) -> None:
    for wrong in values(run_ranks(4, every_layout, str(tmp_path), timeout_seconds=240)):
        assert wrong == []
    stored = [
        (chunk.offsets, chunk.sizes)
        for tensor in holdfast.resolve(tmp_path / "replicas").manifest.tensors
        for chunk in tensor.chunks
        if tensor.name == "holder.t"
    ]
    assert stored == [((0, 0, 0), (7, 5, 3))], "a replica is written once"


class CountingStorage(LocalStorage):
    """Counts the bytes that are read from tensor files."""

    read_bytes = 0

    def open(self, key: str) -> Any:
        source = super().open(key)
        return _Counted(self, source) if key.endswith(".safetensors") else source


class _Counted:
    def __init__(self, storage: CountingStorage, source: Any) -> None:
        self.storage, self.source = storage, source

    def read_into(self, offset: int, target: memoryview) -> None:
        self.storage.read_bytes += len(target)
        self.source.read_into(offset, target)

    @property
    def size_bytes(self) -> int:
        return self.source.size_bytes

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


ROWS, COLUMNS = 4096, 1024  # 16 MiB of float32: sixteen blocks


def read_a_share(rank: int, folder: str, verify: str) -> int:
    mesh = init_device_mesh("cpu", (4,))
    holder = Holder({"t": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)])})
    storage = CountingStorage(folder)
    state = {"holder": holdfast.Shared(holder)}
    with holdfast.CheckpointManager(folder, state, rng=False, storage=storage, verify=verify) as manager:
        manager.restore()
    start = rank * ROWS // 4
    expected = torch.arange(start, start + ROWS // 4, dtype=torch.float32)
    assert torch.equal(holder.tensors["t"].to_local()[:, 0], expected)
    return storage.read_bytes


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_rank_reads_only_its_share(verify: str, tmp_path: Path) -> None:
    whole = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, COLUMNS).contiguous()
    with holdfast.CheckpointManager(tmp_path, {"holder": holdfast.Shared(Holder({"t": whole}))}, rng=False) as manager:
        manager.save(0)
    share = ROWS * COLUMNS * 4 // 4
    for read in values(run_ranks(4, read_a_share, str(tmp_path), verify)):
        assert read == share


ODD_ROWS, ODD_COLUMNS, TENSORS = 1000, 700, 4  # 2.8 MB each


def read_a_share_of_small_tensors(rank: int, folder: str) -> int:
    mesh = init_device_mesh("cpu", (4,))
    zeros = torch.zeros(ODD_ROWS, ODD_COLUMNS)
    tensors = {str(number): distribute_tensor(zeros.clone(), mesh, [Shard(0)]) for number in range(TENSORS)}
    storage = CountingStorage(folder)
    state = {"holder": holdfast.Shared(Holder(tensors))}
    with holdfast.CheckpointManager(folder, state, rng=False, storage=storage) as manager:
        manager.restore()
    for number, tensor in tensors.items():
        assert torch.equal(tensor.to_local(), odd_tensor(int(number))[rank * 250 : (rank + 1) * 250])
    return storage.read_bytes


def odd_tensor(number: int) -> torch.Tensor:
    return torch.randn(ODD_ROWS, ODD_COLUMNS, generator=torch.Generator().manual_seed(number))


def test_of_tensors_of_a_few_megabytes_a_rank_reads_little_more_than_its_share(tmp_path: Path) -> None:
    tensors = {str(number): odd_tensor(number) for number in range(TENSORS)}
    with holdfast.CheckpointManager(tmp_path, {"holder": holdfast.Shared(Holder(tensors))}, rng=False) as manager:
        manager.save(0)
    share = ODD_ROWS * ODD_COLUMNS * 4 // 4
    for read in values(run_ranks(4, read_a_share_of_small_tensors, str(tmp_path))):
        assert TENSORS * share < read <= TENSORS * (share + 2 * (64 << 10))
