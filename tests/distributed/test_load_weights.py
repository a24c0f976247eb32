"""Weights of other files into sharded models: each rank reads its own part, and all ranks succeed or fail together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.testing import values
from tests.distributed.scenes import caught, the_same_error
from tests.ranks import run_ranks

WIDTH, HIDDEN = 6, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.arange(5))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(model: nn.Module, layout: str) -> nn.Module:
    if layout == "fsdp":
        return fully_shard(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), plan)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def loads(rank: int, path: Path, layout: str, meta: bool) -> tuple[bool, int]:
    if meta:
        with torch.device("meta"):
            model = Net()
        model.seen = torch.zeros(5, dtype=torch.int64)
    else:
        model = net(9)
    model = sharded(model, layout)
    report = holdfast.load_weights(model, path)
    found, expected = whole(model), net(1).state_dict()
    right = all(torch.equal(found[name], expected[name]) for name in expected)
    # FSDP must know the tensors that got their memory: a forward pass uses them.
    same = torch.equal(sharded_output(model), net(1).up(torch.ones(2, WIDTH)).sum()) if layout == "fsdp" else True
    return right and same and report.complete, report.size_bytes


def sharded_output(model: nn.Module) -> torch.Tensor:
    model.unshard()  # type: ignore[operator]
    return model.up(torch.ones(2, WIDTH)).sum().detach()  # type: ignore[operator]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    model = net(1)
    save_file({f"module.{name}": value for name, value in model.state_dict().items()}, folder / "file")
    with holdfast.CheckpointManager(folder / "run", {"model": model}, mode="sync") as manager:
        manager.save(0)
    return {"safetensors": folder / "file", "holdfast": folder / "run"}


@pytest.mark.parametrize("kind", ["safetensors", "holdfast"])
@pytest.mark.parametrize(
    ("layout", "size", "meta"), [("fsdp", 2, False), ("fsdp", 2, True), ("tp", 2, False), ("2d", 4, False)]
)
def test_each_rank_reads_its_part(sources: dict[str, Path], kind: str, layout: str, size: int, meta: bool) -> None:
    results = values(run_ranks(size, loads, sources[kind], layout, meta))
    total = sum(value.nbytes for value in net(1).state_dict().values())
    assert [right for right, _ in results] == [True] * size
    assert all(read < total for _, read in results)


def fails(rank: int, path: Path) -> Any:
    model = sharded(nn.Sequential(net(9)), "fsdp") if rank else sharded(net(9), "fsdp")
    before = whole_local(model)
    error = caught(lambda: holdfast.load_weights(model, path, rename=None if rank == 0 else {"no.such": "name"}))
    unchanged = all(torch.equal(one, other) for one, other in zip(before, whole_local(model), strict=True))
    return error, unchanged


def whole_local(model: nn.Module) -> list[torch.Tensor]:
    return [
        value.to_local().clone() if hasattr(value, "to_local") else value.clone()
        for value in model.state_dict().values()
    ]


def test_an_error_of_one_rank_is_raised_on_all_before_anything_changes(sources: dict[str, Path]) -> None:
    results = values(run_ranks(2, fails, sources["holdfast"]))
    assert isinstance(the_same_error([error for error, _ in results]), holdfast.UsageError)
    assert [unchanged for _, unchanged in results] == [True, True]


def cannot_open(rank: int, path: Path) -> Any:
    return caught(lambda: holdfast.load_weights(sharded(net(9), "fsdp"), path if rank else path / "nothing"))


def test_a_source_that_one_rank_cannot_open_is_an_error_on_all(sources: dict[str, Path]) -> None:
    error = the_same_error(values(run_ranks(2, cannot_open, sources["safetensors"])))
    assert isinstance(error, holdfast.CheckpointNotFoundError)


def reads_another(rank: int, folder: Path) -> Any:
    return caught(lambda: holdfast.load_weights(sharded(net(9), "fsdp"), folder / f"run-{rank}"))


def test_ranks_that_read_different_checkpoints_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        with holdfast.CheckpointManager(tmp_path / f"run-{rank}", {"model": net(rank)}, mode="sync") as manager:
            manager.save(0)
    assert isinstance(the_same_error(values(run_ranks(2, reads_another, tmp_path))), StateMismatchError)
