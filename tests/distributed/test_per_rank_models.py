"""Models and optimizers of which each rank, or each place of a group, has its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import StateMismatchError, UsageError
from tests.distributed.scenes import Holder, Play, bits, caught, meet, run_scenes, the_same_error, trees

TIMEOUT_SECONDS = 200.0


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, timeout=TIMEOUT_SECONDS, mode="sync", **options)


def net(value: float, names: str = "ab") -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def trained(model: nn.Module, scale: float, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), **{"lr": 0.1, **options})
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, scale * 10.0**index)
    optimizer.step()
    return optimizer


def moments(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {name: float(optimizer.state[part.weight]["exp_avg"].sum()) for name, part in sorted(model.items())}


def parameters_in_another_order(rank: int, folder: Path) -> Any:
    model, other = net(float(rank), "ab"), net(9.0, "ba")
    optimizer, second = trained(model, 1.0 + rank), torch.optim.Adam(other.parameters())
    manager_of(folder, {"model": holdfast.PerRank(model), "optimizer": optimizer}).save(1)
    manager_of(folder, {"model": holdfast.PerRank(other), "optimizer": second}).restore()
    same = all(bits(model[name].state_dict()) == bits(other[name].state_dict()) for name in "ab")
    return same, moments(model, optimizer) == moments(other, second)


def one_rank_with_other_leaves(rank: int, folder: Path) -> Any:
    manager_of(folder, {"model": holdfast.PerRank(net(1.0))}).save(1)
    other = net(9.0, "ac" if rank == 1 else "ab")
    before = bits(other.state_dict())
    error = caught(manager_of(folder, {"model": holdfast.PerRank(other)}).restore)
    return error, bits(other.state_dict()) == before


def two_groups_that_are_one_now(rank: int, folder: Path) -> Any:
    model, other = net(1.0), net(9.0)
    groups = [{"params": list(part.parameters())} for part in model.values()]
    manager_of(folder, {"model": holdfast.PerRank(model), "optimizer": torch.optim.SGD(groups, 0.1)}).save(1)
    state = {"model": holdfast.PerRank(other), "optimizer": torch.optim.SGD(other.parameters(), 0.1)}
    return caught(manager_of(folder, state).restore), float(other["a"].weight[0, 0])


def a_model_per_rank_that_all_share_now(rank: int, folder: Path) -> Any:
    manager_of(folder, {"model": holdfast.PerRank(net(float(rank)))}).save(1)
    other = net(9.0)
    return caught(manager_of(folder, {"model": other}).restore), float(other["a"].weight[0, 0])


def a_sharded_model_per_rank(rank: int, folder: Path) -> Any:
    model = nn.Linear(2, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return caught(lambda: manager_of(folder, {"model": holdfast.PerRank(model)}).save(1))


def an_optimizer_per_rank_of_declared_shards(rank: int, folder: Path) -> Any:
    def build(value: float) -> tuple[nn.ModuleDict, dict[str, Any]]:
        model = net(value)
        optimizer = trained(model, value)
        sharded = holdfast.Sharded(model, {"*": (0, dist.group.WORLD)})
        return model, {"model": sharded, "optimizer": holdfast.PerRank(optimizer)}

    model, state = build(1.0 + rank)
    manager_of(folder, state).save(1)
    other, second = build(9.0)
    manager_of(folder, second).restore()
    return moments(model, state["optimizer"].component) == moments(other, second["optimizer"].component)


def a_model_per_place_of_a_group(rank: int, folder: Path) -> Any:
    """The ranks of one place in `dp` differ, and the first one's state counts, on the user's word."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def state(value: float) -> dict[str, Any]:
        model = net(value)
        optimizer = trained(model, value, lr=value)
        return {"model": holdfast.PerRank(model, group=mesh["dp"]), "optimizer": optimizer}

    manager_of(folder, state(1.0 + rank)).save(1)
    other = state(9.0)
    manager_of(folder, other).restore()
    model, optimizer = other["model"].component, other["optimizer"]
    expected = state(1.0 + rank - rank % 2)
    same = bits(model.state_dict()) == bits(expected["model"].component.state_dict())
    return (
        same,
        optimizer.param_groups[0]["lr"],
        moments(model, optimizer) == moments(expected["model"].component, expected["optimizer"]),
    )


class Adapting(nn.Linear):
    """A module that can take up the states of another number of ranks."""

    def load_world_state(self, states: Sequence[dict[str, Any]], index: int, count: int) -> None:
        with torch.no_grad():
            self.weight.copy_(sum(state["weight"] for state in states))


def another_number_of_ranks(rank: int, folder: Path) -> Any:
    def state(value: float) -> dict[str, Any]:
        model = Adapting(2, 2, bias=False)
        nn.init.constant_(model.weight, value)
        return {"model": holdfast.PerRank(model), "count": holdfast.Shared(Holder(a=1))}

    pair = dist.new_group([0, 1])
    if rank < 2:
        manager_of(folder, state(1.0 + rank), process_group=pair).save(1)
    meet(f"{folder} saved")
    seen: dict[str, Any] = {}
    for way in ("error", "skip", "adapt"):
        other = state(9.0)
        manager = manager_of(folder, other)
        strategy = holdfast.LoadStrategy(on_world_change=way)  # type: ignore[arg-type]
        error = caught(lambda: manager.restore(strategy=strategy))  # noqa: B023
        seen[way] = error, float(other["model"].component.weight[0, 0])
    return seen


SCENES = [
    parameters_in_another_order,
    one_rank_with_other_leaves,
    two_groups_that_are_one_now,
    a_model_per_rank_that_all_share_now,
    a_sharded_model_per_rank,
    an_optimizer_per_rank_of_declared_shards,
    a_model_per_place_of_a_group,
    another_number_of_ranks,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("per-rank")
    return run_scenes(4, SCENES, folder), folder


@pytest.mark.guarantee("G8")
def test_the_moments_of_each_rank_follow_the_names_of_its_parameters(played: tuple[Play, Path]) -> None:
    assert played[0]("parameters_in_another_order") == [(True, True)] * 4


@pytest.mark.guarantee("G7")
def test_other_leaves_on_one_rank_are_an_error_on_all_before_any_model_changes(played: tuple[Play, Path]) -> None:
    seen = played[0]("one_rank_with_other_leaves")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, StateMismatchError)
    assert "model@rank-00001.c.weight" in str(error)
    assert "model@rank-00001.b.weight" in str(error)
    assert [unchanged for _, unchanged in seen] == [True] * 4


@pytest.mark.guarantee("G7")
def test_the_groups_of_one_ranks_optimizer_are_counted_exactly(played: tuple[Play, Path]) -> None:
    seen = played[0]("two_groups_that_are_one_now")
    assert "param_groups: 2 in the checkpoint, 1 now" in str(the_same_error([error for error, _ in seen]))
    assert [weight for _, weight in seen] == [9.0] * 4


@pytest.mark.guarantee("G7")
def test_models_of_each_rank_are_no_state_for_a_model_that_all_share(played: tuple[Play, Path]) -> None:
    seen = played[0]("a_model_per_rank_that_all_share_now")
    assert all(isinstance(error, StateMismatchError) and "saved once per rank" in str(error) for error, _ in seen)
    assert [weight for _, weight in seen] == [9.0] * 4


def test_a_sharded_tensor_in_a_model_per_rank_is_refused(played: tuple[Play, Path]) -> None:
    error = the_same_error(played[0]("a_sharded_model_per_rank"))
    assert isinstance(error, UsageError)
    assert "a sharded tensor cannot be part of a PerRank component" in error.advice


def test_the_state_of_an_optimizer_per_rank_is_whole_on_its_rank(played: tuple[Play, Path]) -> None:
    play, folder = played
    assert play("an_optimizer_per_rank_of_declared_shards") == [True] * 4
    stored = trees(folder / "an_optimizer_per_rank_of_declared_shards")
    assert stored == [("model", ""), *(("optimizer", f"rank-{rank:05d}") for rank in range(4))]


def test_of_a_model_per_place_of_a_group_the_first_ranks_state_counts(played: tuple[Play, Path]) -> None:
    play, folder = played
    assert play("a_model_per_place_of_a_group") == [(True, 1.0 + rank - rank % 2, True) for rank in range(4)]
    scopes = ["rank-00000", "rank-00001"]
    stored = trees(folder / "a_model_per_place_of_a_group")
    assert stored == [(name, scope) for name in ("model", "optimizer") for scope in scopes]


def test_a_model_per_rank_on_another_number_of_ranks_is_refused_left_or_adapted(played: tuple[Play, Path]) -> None:
    for seen in played[0]("another_number_of_ranks"):
        error, unchanged = seen["error"]
        assert isinstance(error, StateMismatchError)
        assert "state of 2 ranks and there are 4 now" in str(error)
        assert unchanged == 9.0
        assert seen["skip"] == (None, 9.0)
        assert seen["adapt"] == (None, 3.0)
