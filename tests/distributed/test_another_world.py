"""Per-rank state on another number of ranks is taken up whole or refused, before anything has changed on any rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import holdfast
from holdfast.data import ResumableLoader
from holdfast.errors import StateMismatchError
from tests.distributed.scenes import AdaptingHolder, Holder, Play, bits, caught, meet, run_scenes, the_same_error, trees

ADAPT = holdfast.LoadStrategy(on_world_change="adapt")
_alone: list[Any] = []


def save_on_rank_0_alone(rank: int, folder: Path, state: Callable[[], dict[str, Any]], **options: Any) -> None:
    """A run of one rank; the others wait until it is there."""
    if not _alone:
        _alone.append(dist.new_group([0]))
    if rank == 0:
        with holdfast.CheckpointManager(
            folder, state(), mode="sync", process_group=_alone[0], timeout=200, **options
        ) as manager:
            manager.save(1)
    meet(f"{folder} saved")


def manager_of(folder: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(folder, state, mode="sync", timeout=200, **{"rng": False, **options})


# One rank before


def from_one_rank(rank: int, folder: Path) -> Any:
    save_on_rank_0_alone(rank, folder, lambda: {"loader": holdfast.PerRank(AdaptingHolder(position=5))}, rng=True)
    loader = AdaptingHolder()
    manager_of(folder, {"loader": holdfast.PerRank(loader)}, rng=True).restore(strategy=ADAPT)
    return loader.state, (random.random(), float(numpy.random.rand()), float(torch.rand(())))


def of_one_rank_that_cannot_adapt(rank: int, folder: Path) -> Any:
    save_on_rank_0_alone(rank, folder, lambda: {"loader": holdfast.PerRank(Holder(a=1))}, rng=False)
    holder = Holder(a=9)
    return caught(
        lambda: manager_of(folder, {"loader": holdfast.PerRank(holder)}).restore(strategy=ADAPT)
    ), holder.state


def equal_states_of_what_adapts(rank: int, folder: Path) -> Any:
    """Not wrapped in anything, and equal on both ranks."""
    manager_of(folder, {"loader": AdaptingHolder(position=5), "shared": holdfast.Shared(AdaptingHolder(a=1))}).save(1)


# A component that refuses


class Refusing(AdaptingHolder):
    """Refuses its state on one rank, by an error of ours or by any other."""

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(here=True)
        self.refuses, self.error = rank == 1, error

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.rand(3), random.random()
        if self.refuses:
            raise self.error

    def check_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        self.check_state_dict(states[0])


def a_refusal(rank: int, folder: Path) -> Any:
    seen = []
    for number, error in enumerate((StateMismatchError("other data"), KeyError("seed"))):
        for way in ("same", "other"):
            run = folder / f"{number}-{way}"
            model = nn.Linear(2, 2, bias=False)
            nn.init.ones_(model.weight)

            def saved(model: nn.Module = model) -> dict[str, Any]:
                return {"counter": holdfast.Shared(Holder(a=1)), "model": model, "loader": AdaptingHolder(position=3)}

            if way == "same":
                manager_of(run, saved(), rng=True).save(1)
            else:
                save_on_rank_0_alone(rank, run, saved, rng=True)
            nn.init.zeros_(model.weight)
            counter, loader = Holder(a=9), Refusing(rank, error)
            state = {"counter": holdfast.Shared(counter), "model": model, "loader": loader}

            def live(of: tuple[Any, ...] = (model, counter, loader)) -> Any:
                return bits([of[0].state_dict(), of[1].state, of[1].loads, of[2].state, holdfast.get_rng_state()])

            before = live()
            manager = manager_of(run, state, rng=True)
            found = caught(lambda manager=manager: manager.restore(strategy=ADAPT))  # type: ignore[misc]
            seen.append((found, live() == before))
    return seen


# Loaders and samplers of other people


def stock_loader(rank: int, size: int) -> tuple[StatefulDataLoader, Any, Any]:
    data = list(range(40))
    plain = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, size, rank), collate_fn=list)
    sampler = StatefulDistributedSampler(data, num_replicas=size, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(data, batch_size=2, sampler=sampler, collate_fn=list), sampler, ResumableLoader(plain)


def stock_loaders(rank: int, folder: Path) -> Any:
    def saved(component: int) -> dict[str, Any]:
        made = stock_loader(0, 1)
        batches = iter(made[0])
        next(batches), next(batches)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return {"model": model, "data": made[component]}

    seen = []
    for component in (0, 1, 2):
        run = folder / str(component)
        save_on_rank_0_alone(rank, run, lambda component=component: saved(component), rng=False)  # type: ignore[misc]
        for way in ("error", "adapt"):
            made = stock_loader(rank, 2)
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            manager = manager_of(run, {"model": model, "data": made[component]})
            strategy = holdfast.LoadStrategy(on_world_change=way)  # type: ignore[arg-type]
            error = caught(lambda manager=manager, strategy=strategy: manager.restore(strategy=strategy))  # type: ignore[misc]
            first = next(iter(made[0]))
            seen.append((error, float(model.weight.sum()), first == next(iter(stock_loader(rank, 2)[0]))))
    return seen


SCENES = [from_one_rank, of_one_rank_that_cannot_adapt, equal_states_of_what_adapts, a_refusal, stock_loaders]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("worlds")
    return run_scenes(2, SCENES, folder), folder


@pytest.mark.guarantee("G8")
def test_the_state_of_one_rank_is_adapted_to_two(played: tuple[Play, Path]) -> None:
    seen = played[0]("from_one_rank")
    for rank, (state, _) in enumerate(seen):
        assert state == {"states": [{"position": 5}], "index": rank, "count": 2}
    assert all(one != other for one, other in zip(seen[0][1], seen[1][1], strict=True)), "no two ranks draw the same"


@pytest.mark.guarantee("G8")
def test_what_cannot_adapt_is_not_given_the_state_of_the_only_rank(played: tuple[Play, Path]) -> None:
    seen = played[0]("of_one_rank_that_cannot_adapt")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, StateMismatchError)
    assert "the state of 1 rank, there are 2 now" in str(error)
    assert [state for _, state in seen] == [{"a": 9}] * 2


def test_what_takes_the_states_of_all_ranks_has_one_on_each_while_they_are_equal(
    played: tuple[Play, Path],
) -> None:
    played[0]("equal_states_of_what_adapts")
    assert trees(played[1] / "equal_states_of_what_adapts") == [
        ("loader", "rank-00000"),
        ("loader", "rank-00001"),
        ("shared", ""),
    ]


@pytest.mark.guarantee("G8")
def test_a_component_that_refuses_its_state_on_one_rank_leaves_all_ranks_as_they_were(
    played: tuple[Play, Path],
) -> None:
    for number, found in enumerate(zip(*played[0]("a_refusal"), strict=True)):
        error = the_same_error([error for error, _ in found])
        assert isinstance(error, StateMismatchError)
        assert error.component == "loader"
        assert ("other data" if number < 2 else "KeyError: 'seed'") in str(error)
        assert all(untouched for _, untouched in found), number


@pytest.mark.guarantee("G8")
def test_a_loader_of_one_ranks_share_is_refused_on_another_number_of_ranks(played: tuple[Play, Path]) -> None:
    for found in zip(*played[0]("stock_loaders"), strict=True):
        error = the_same_error([error for error, _, _ in found])
        assert isinstance(error, StateMismatchError)
        assert error.component == "data"
        assert "ElasticLoader" in str(error)
        assert [(weight, begins) for _, weight, begins in found] == [(0.0, True)] * 2, "nothing has changed"
