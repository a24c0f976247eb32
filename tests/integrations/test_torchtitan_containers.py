"""torchtitan's containers as components: they resume on any number of ranks, and nothing steps them by looking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks

pytest.importorskip("torchtitan")

from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

SIZES = (1, 2)


def build(group: Any, seed: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    groups = [
        ParamGroupConfig(pattern="weight", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
        ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.2}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    return model, optimizers, {"model": ModelWrapper(model), "optimizer": optimizers, "scheduler": schedulers}


def train(model: nn.Module, state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.full((2, 3), step + 1.0)).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def whole(state: dict[str, Any]) -> dict[str, Any]:
    found = {**state["model"].state_dict(), **state["optimizer"].state_dict()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def matrix(rank: int, folder: str) -> list[str]:
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    wrong = []
    for size in SIZES:
        if rank < size:
            model, _, state = build(groups[size], seed=1)
            expected = train(model, state, range(4))
            model, optimizers, state = build(groups[size], seed=1)
            with holdfast.CheckpointManager(f"{folder}/{size}", state, process_group=groups[size]) as manager:
                if any(one.state for one in optimizers):
                    wrong.append(f"{size}: the manager made state")
                losses = train(model, state, range(2))
                manager.save(2)
                content = whole(state)
                if rank == 0:
                    torch.save(content, f"{folder}/{size}.pt")
            model, _, state = build(groups[size], seed=7)
            with holdfast.CheckpointManager(f"{folder}/{size}", state, process_group=groups[size]) as manager:
                manager.restore()
            if losses + train(model, state, range(2, 4)) != expected:
                wrong.append(f"{size}: not exact")
    dist.barrier()
    for saved in SIZES:
        content = torch.load(f"{folder}/{saved}.pt")
        for size in SIZES:
            if rank < size:
                _, _, state = build(groups[size], seed=9)
                run = f"{folder}/{saved}"
                with holdfast.CheckpointManager(run, state, process_group=groups[size], rng=False) as manager:
                    manager.restore()
                found = whole(state)
                for key, value in content.items():
                    same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
                    wrong += [] if same else [f"{saved} to {size}: {key}"]
    return wrong


@pytest.mark.slow
def test_containers_resume_exactly_and_on_another_number_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert values(run_ranks(2, matrix, str(tmp_path_factory.mktemp("titan")))) == [[], []]
