"""Optimizers and models in a layout of their own, with sharded tensors in it, load on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.testing import values
from tests.containers import FlatContainer, ModelParts
from tests.distributed.scenes import caught
from tests.ranks import run_ranks

SIZES = (1, 2, 4)
PLAIN = 0  # one process with a model that is not sharded


def tower() -> nn.Module:
    """Parameters that two and four ranks share unevenly."""
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))


def build(size: int, groups: dict[int, Any], seed: int) -> tuple[nn.Module, FlatContainer, dict[str, Any]]:
    torch.manual_seed(seed)
    model = tower()
    if size != PLAIN:
        fully_shard(model, mesh=DeviceMesh.from_group(groups[size], "cpu"))
    optimizer = FlatContainer(model)
    return model, optimizer, {"model": ModelParts(model), "optimizer": optimizer}


def stepped(model: nn.Module, optimizer: FlatContainer) -> None:
    for number in range(2):
        model(torch.full((2, 3), number + 1.0)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: FlatContainer) -> dict[str, Any]:
    state = {**model.state_dict(), **optimizer.state_dict()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def matrix(rank: int, folder: str) -> list[str]:
    """Save on one, two and four ranks, load each on one, two, four and a single one without shards; what differs."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    wrong = []
    for size in SIZES:
        if rank < size:
            model, optimizer, state = build(size, groups, seed=size)
            with holdfast.CheckpointManager(f"{folder}/{size}", state, process_group=groups[size]) as manager:
                stepped(model, optimizer)
                manager.save(2)
            expected = whole(model, optimizer)
            if rank == 0:
                torch.save(expected, f"{folder}/{size}.pt")
    dist.barrier()
    for saved in SIZES:
        expected = torch.load(f"{folder}/{saved}.pt")
        for size in (*SIZES, PLAIN):
            if rank >= max(size, 1):
                continue
            model, optimizer, state = build(size, groups, seed=99)
            group = groups[max(size, 1)]
            with holdfast.CheckpointManager(f"{folder}/{saved}", state, process_group=group, rng=False) as manager:
                manager.restore()
            found = whole(model, optimizer)
            wrong += [f"{saved} to {size}: {key}" for key in expected if not _equal(found.get(key), expected[key])]
    return wrong


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


def renamed(rank: int, folder: str) -> list[Any]:
    """Restore a model of which a layer has another name than in the checkpoint."""
    torch.manual_seed(1)
    model = fully_shard(tower(), mesh=init_device_mesh("cpu", (4,)))
    with holdfast.CheckpointManager(f"{folder}/named", {"model": ModelParts(model)}, rng=False) as manager:
        manager.save(1)
    other = nn.Sequential()
    other.add_module("0", nn.Linear(3, 5))
    other.add_module("new", nn.Linear(5, 3))
    fully_shard(other, mesh=init_device_mesh("cpu", (4,)))
    before = [parameter.full_tensor() for parameter in other.parameters()]
    with holdfast.CheckpointManager(f"{folder}/named", {"model": ModelParts(other)}, rng=False) as manager:
        error = caught(manager.restore)
        same = all(map(torch.equal, before, [parameter.full_tensor() for parameter in other.parameters()]))
        manager.restore(strategy=holdfast.LoadStrategy(strict=False))
    loaded = torch.equal(other[0].weight.full_tensor(), model[0].weight.full_tensor())
    return [error, same, loaded]


def differing(rank: int, folder: str) -> Any:
    """Save an object with shards and a value that each rank has for itself."""
    model = fully_shard(tower(), mesh=init_device_mesh("cpu", (4,)))

    class Marked(ModelParts):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "rank": rank}

    def save(component: Any, run: str) -> Any:
        with holdfast.CheckpointManager(f"{folder}/{run}", {"model": component}, rng=False) as manager:
            return caught(lambda: manager.save(1))

    save(holdfast.Shared(Marked(model)), "shared")
    return save(Marked(model), "differing"), holdfast.resolve(f"{folder}/shared").step


def scenes(rank: int, folder: str) -> tuple[list[str], list[Any], Any]:
    return matrix(rank, folder), renamed(rank, folder), differing(rank, folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], list[Any], Any]]:
    return values(run_ranks(4, scenes, str(tmp_path_factory.mktemp("layouts"))))


@pytest.mark.guarantee("G2")
def test_every_number_of_ranks_loads_containers_of_every_other(four: list[Any]) -> None:
    assert [wrong for wrong, _, _ in four] == [[]] * 4


def test_a_shard_that_only_one_side_has_is_a_mismatch_and_changes_nothing(four: list[Any]) -> None:
    for _, (error, same, loaded), _ in four:
        assert isinstance(error, StateMismatchError)
        assert "model.new.weight" in str(error)
        assert "model.1.weight" in str(error)
        assert same
        assert loaded


def test_shards_beside_values_that_differ_are_refused_with_the_way_out(four: list[Any]) -> None:
    for _, _, (error, step) in four:
        assert "wrap that in Shared" in str(error)
        assert step == 1
