"""Objects that are legal and odd, on several ranks: each comes back right on all of them, or is refused on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.distributed.scenes import Play, bits, run_scenes
from tests.unit.test_odd_modules import Metric, renamed, tower

TIMEOUT_SECONDS = 20.0


def manager_of(run: Path, state: dict[str, Any], mode: Any = "sync") -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, timeout=TIMEOUT_SECONDS, mode=mode)


def stepped(model: nn.Module, optimizer: Any) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + index)
    optimizer.step()


# Modules without persistent state


def _metrics(folder: Path, mode: Any) -> Any:
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "metric": Metric(), "mine": holdfast.PerRank(Metric())}
    state["adapter"], state["loss"] = holdfast.Trainable(Metric()), holdfast.Shared(nn.MSELoss())
    with manager_of(folder, state, mode) as manager:
        manager.save(0)
        manager.save(1, wait=True)
        return manager.restore().restored


def metrics_beside_a_model(rank: int, folder: Path) -> Any:
    return _metrics(folder, "sync")


def metrics_beside_a_model_in_the_background(rank: int, folder: Path) -> Any:
    return _metrics(folder, "async")


# Keys that hooks rename


def _renamed(folder: Path, wrap: Any) -> Any:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return wrap(renamed(nn.Sequential(renamed(tower()), nn.Linear(2, 2))))

    first, optimizer = (made := model()), torch.optim.AdamW(made.parameters())
    stepped(first, optimizer)
    with manager_of(folder, {"model": first, "optimizer": optimizer}, "async") as manager:
        manager.save(0)
        manager.save(1, wait=True)
        expected = bits([first.state_dict(), optimizer.state_dict()])
        stepped(first, optimizer)
        changed = bits([first.state_dict(), optimizer.state_dict()]) != expected
        manager.restore()
    again = bits([first.state_dict(), optimizer.state_dict()]) == expected
    second, its_optimizer = (made := model()), torch.optim.AdamW(made.parameters())
    with manager_of(folder, {"model": second, "optimizer": its_optimizer}) as manager:
        manager.restore()
    leaves = {leaf.name for leaf in holdfast.resolve(folder).manifest.tensors}
    named = "model.net.0.net.0.weight" in leaves and "optimizer.state.0.0.weight.exp_avg" in leaves
    return changed, again, bits([second.state_dict(), its_optimizer.state_dict()]) == expected, named


def renamed_under_ddp(rank: int, folder: Path) -> Any:
    return _renamed(folder, DistributedDataParallel)


def renamed_under_fsdp(rank: int, folder: Path) -> Any:
    return _renamed(folder, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))


SCENES = [
    metrics_beside_a_model,
    metrics_beside_a_model_in_the_background,
    renamed_under_ddp,
    renamed_under_fsdp,
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(2, SCENES, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("scene", [metrics_beside_a_model, metrics_beside_a_model_in_the_background])
def test_modules_without_persistent_state_are_saved_by_all_ranks(play: Play, scene: Any) -> None:
    assert play(scene.__name__) == [("model", "metric", "mine", "adapter", "loss")] * 2


@pytest.mark.parametrize("scene", [renamed_under_ddp, renamed_under_fsdp])
def test_keys_that_hooks_rename_come_back_on_all_ranks(play: Play, scene: Any) -> None:
    assert play(scene.__name__) == [(True, True, True, True)] * 2
