"""Some components stored anew on several ranks: shards, states of each rank, and what the ranks must agree on."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import UsageError
from holdfast.testing import values
from tests.ranks import run_ranks

pytestmark = pytest.mark.deep
TIMEOUT_SECONDS = 200.0
WIDTH = 32


class Evaluation:
    """The share of an evaluation that one rank has done."""

    def __init__(self) -> None:
        self.done = 0
        self.sums = torch.zeros(20)

    def add(self, count: int) -> None:
        self.done += count
        self.sums += count

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done, self.sums = state["done"], state["sums"]


def state(seed: int, *, per_rank: bool = True) -> dict[str, Any]:
    """A model and its optimizer after one step, sharded over all ranks, and an evaluation."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    evaluation = Evaluation()
    return {
        "model": model,
        "optimizer": optimizer,
        "evaluation": holdfast.PerRank(evaluation) if per_rank else evaluation,
    }


def manager_of(run: str, live: Mapping[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, live, **{"timeout": TIMEOUT_SECONDS, "mode": "sync", **options})


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one["exp_avg"].full_tensor() for one in optimizer.state_dict()["state"].values()]


def resave(manager: holdfast.CheckpointManager) -> holdfast.Checkpoint:
    return manager.save(500, resave=True, components=("evaluation",)).wait()


def evaluate(rank: int, run: str, mode: str) -> tuple[int, list[str]]:
    live = state(0)
    with manager_of(run, live, mode=mode) as manager:
        first = manager.save(500)
        for _ in range(2):
            live["evaluation"].component.add(rank + 1)
            found = resave(manager)
        assert first.done()
        # The plan of the full saves is as it was, and holds.
        live["evaluation"].component.add(rank + 1)
        manager.save(501)
    return found.world_size, sorted(file.name for file in found.manifest.files)


def go_on(rank: int, run: str, step: int) -> tuple[int, bool]:
    live, wanted = state(1), state(0)
    with manager_of(run, live) as manager:
        assert manager.restore(step).step == step
        equal = map(torch.equal, weights(live["model"]), weights(wanted["model"]))
        also = map(torch.equal, moments(live["optimizer"]), moments(wanted["optimizer"]))
        return live["evaluation"].component.done, all(equal) and all(also)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_rank_goes_on_with_its_share_of_the_evaluation(mode: str, tmp_path: Path) -> None:
    run = str(tmp_path)
    [(size, names), other] = values(run_ranks(2, evaluate, run, mode))
    assert (size, names) == other
    assert size == 2
    # Weights and random state of both ranks as they were, and the evaluation of each in files of its own.
    assert names == [
        "rank-00000.3.json",
        "rank-00000.3.safetensors",
        "rank-00000.json",
        "rank-00000.safetensors",
        "rank-00001.3.json",
        "rank-00001.3.safetensors",
        "rank-00001.json",
        "rank-00001.safetensors",
        "shared.json",
    ]
    assert holdfast.verify(run, "500").ok
    assert values(run_ranks(2, go_on, run, 500)) == [(2, True), (4, True)]
    assert values(run_ranks(2, go_on, run, 501)) == [(3, True), (6, True)]


def restore_shared(rank: int, run: str) -> tuple[int, bool]:
    live, wanted = state(1, per_rank=False), state(0, per_rank=False)
    with manager_of(run, live, rng=False) as manager:
        manager.restore()
        equal = all(map(torch.equal, weights(live["model"]), weights(wanted["model"])))
        if dist.get_world_size() != 2:
            with pytest.raises(UsageError, match=r"saved by 2 ranks; there are 1 now"):
                resave(manager)
            manager.save(500, resave=True)
            resave(manager)
        return live["evaluation"].done, equal


def evaluate_shared(rank: int, run: str) -> None:
    live = state(0, per_rank=False)
    with manager_of(run, live, rng=False) as manager:
        manager.save(500)
        live["evaluation"].add(3)
        resave(manager)


@pytest.mark.slow
def test_it_is_restored_on_another_number_of_ranks(tmp_path: Path) -> None:
    values(run_ranks(2, evaluate_shared, str(tmp_path)))
    assert values(run_ranks(1, restore_shared, str(tmp_path))) == [(3, True)]


def disagree(rank: int, run: str) -> list[str]:
    live = state(0)
    problems = []
    with manager_of(run, live) as manager:

        def attempt(**arguments: Any) -> None:
            try:
                manager.save(500, **arguments)
            except holdfast.HoldfastError as error:
                problems.append(f"{type(error).__name__}: {error.problem}")

        attempt(resave=True, components=("evaluation",))
        manager.save(500)
        attempt(resave=True, components=("nothing",))
        attempt(resave=True, components=("evaluation",) if rank == 0 else ("model",))
        attempt(resave=rank == 0, components=("evaluation",))
        resave(manager)
    return problems


@pytest.mark.slow
def test_ranks_that_do_not_agree_all_get_an_error_and_go_on(tmp_path: Path) -> None:
    first, second = values(run_ranks(2, disagree, str(tmp_path)))
    assert first == second
    assert len(first) == 4
    assert "neither saved nor restored a checkpoint of step 500" in first[0]
    assert "there is no such component" in first[1]
    assert "evaluation" in first[2]
    assert "model" in first[2]
    assert "without resave=True" in first[3]
    folders = sorted(path.name for path in tmp_path.glob("step-*"))
    assert folders == ["step-000000500", "step-000000500.2"]


def replicated(rank: int, run: str) -> str:
    torch.manual_seed(0)
    average = nn.Linear(4, 4)
    with manager_of(run, {"average": average, "model": nn.Linear(2, 2)}, rng=False, replicas="compare") as manager:
        # Two models that are the same on both ranks.
        manager.save(500)
        manager.save(500, resave=True, components=("average",))
        with torch.no_grad():
            average.weight += rank
        with pytest.raises(UsageError, match="have different content") as caught:
            manager.save(500, resave=True, components=("average",))
    return caught.value.leaf or ""


@pytest.mark.slow
def test_replicas_are_compared_before_anything_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert values(run_ranks(2, replicated, str(tmp_path))) == ["average.weight"] * 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000500", "step-000000500.2"]


def evaluate_and_die(rank: int, run: str, stop: int) -> int:
    live = state(0)
    manager = manager_of(run, live, mode="async", timeout=10.0)
    if not manager.restore().resumed:
        manager.save(500)
    evaluation = live["evaluation"].component
    begun = evaluation.done
    while evaluation.done < 6:
        evaluation.add(1)
        manager.save(500, resave=True, components=("evaluation",))
        if evaluation.done == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    return begun


@pytest.mark.slow
def test_an_evaluation_that_was_killed_on_all_ranks_goes_on_where_it_was(tmp_path: Path) -> None:
    killed = run_ranks(2, evaluate_and_die, str(tmp_path), 3)
    assert [outcome.exit_code for outcome in killed] == [-signal.SIGKILL] * 2
    assert values(run_ranks(2, evaluate_and_die, str(tmp_path), 99)) == [3, 3]
    assert values(run_ranks(2, go_on, str(tmp_path), 500)) == [(6, True), (6, True)]
