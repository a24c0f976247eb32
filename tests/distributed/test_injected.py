"""The built-in manager behind the protocol, on two ranks: every rank gets the same answers and the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.plugins.config import CheckpointConfig
from holdfast.plugins.contexts import LoadContext, SaveContext
from holdfast.plugins.protocol import create_checkpoint_manager
from tests.distributed.scenes import bits, caught, run_scenes


def parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def whole(model: nn.Module) -> str:
    return bits({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})


def manager_of(run: Path, state: dict[str, Any]) -> Any:
    config = CheckpointConfig(run=run, mode="async", save={"every_steps": 2, "every_minutes": 60}, timeout=30.0)
    return create_checkpoint_manager(config, state=state, config_to_store={"width": 6})


def a_run_and_all_ways_to_load_it(rank: int, folder: Path) -> Any:
    state = parts(1)
    manager = manager_of(folder, state)
    assert not manager.should_load(LoadContext())
    assert not manager.load(LoadContext()).resumed
    for step in range(1, 6):
        context = SaveContext(step=step, state=state, metrics={"loss": 1.0 / step})
        if manager.should_save(context):
            manager.save(context)
        manager.finalize_async_saves(blocking=False)
    # A plain model of the whole size, while the last save may still be under way.
    served = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    inference = manager.load_weights(LoadContext(purpose="inference", state={"model": served}))
    missing = caught(lambda: manager.load(LoadContext(selector=77)))
    manager.finalize_async_saves(terminate=True)
    closed = caught(lambda: manager.save(SaveContext(step=9)))
    resumed, warm = parts(2), parts(3)
    second = manager_of(folder, resumed)
    start = second.load(LoadContext())
    second.finalize_async_saves(terminate=True)
    third = manager_of(folder.with_name("other"), warm)
    third.load(LoadContext(purpose="warm_start", source=folder, selector="best:loss"))
    config = third.read_config(LoadContext(source=folder))
    third.finalize_async_saves(terminate=True)
    return {
        "weights": [whole(resumed["model"]), whole(warm["model"]), bits(served.state_dict())],
        "expected": whole(state["model"]),
        "steps": (inference.checkpoint.step, start.next_step),
        "errors": [type(missing), type(closed)],
        "config": config,
    }


def test_two_ranks_save_and_load_through_the_protocol(tmp_path: Path) -> None:
    play = run_scenes(2, [a_run_and_all_ways_to_load_it], tmp_path)
    for seen in play("a_run_and_all_ways_to_load_it"):
        assert seen["weights"] == [seen["expected"]] * 3
        assert seen["steps"] == (4, 5)
        assert seen["errors"] == [holdfast.CheckpointNotFoundError, holdfast.ClosedError]
        assert seen["config"] == {"width": 6}
