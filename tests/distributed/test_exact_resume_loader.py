"""G8 with torchdata's StatefulDataLoader, in trainings whose every step draws random numbers."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks

BATCHES = 5  # of an epoch
STEPS = 3 * BATCHES + 2
# In the middle of an epoch; before its last batch; after its last batch, before the loader was asked for more.
STOPS = {"mid-epoch": BATCHES + 3, "one batch left": 2 * BATCHES - 1, "last batch": 2 * BATCHES}


class Training:
    """A model with dropout and a loader. The losses and draws from all three global generators are compared."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        workers: int = 0,
        shuffle: bool = True,
        persistent: bool = False,
        own: bool = False,
    ) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        if size > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        data = torch.randn(size * BATCHES * 2, 3, generator=torch.Generator().manual_seed(2))[rank::size]
        torch.manual_seed(100 + rank)
        self.loader = StatefulDataLoader(
            list(data),
            batch_size=2,
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(4) if own else None,
            multiprocessing_context="fork" if workers else None,
        )
        self.state = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def train(self, start: int, manager: Any, stop: int) -> list[Any]:
        step, seen = start, []
        while step < STEPS:
            for batch in self.loader:
                loss = self.model(batch).pow(2).mean() * torch.rand(())
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen.append((step, loss.item(), random.random(), numpy.random.rand()))
                step += 1
                if step == stop:
                    manager.save(step)
                if step == STEPS:
                    break
        return seen


def train_twice(rank: int, size: int, run: str, stop: int, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Train without a break and save in between; then resume from that save, with new objects and other seeds."""
    first = Training(rank, size, **options)
    with holdfast.CheckpointManager(run, first.state, mode="sync") as manager:
        uninterrupted = first.train(0, manager, stop)[stop:]
    second = Training(rank, size, **options)
    torch.manual_seed(31337)
    random.seed(31337)
    numpy.random.seed(31337)
    with holdfast.CheckpointManager(run, second.state, mode="sync") as manager:
        assert manager.restore().step == stop
        return uninterrupted, second.train(stop, manager, -1)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("shuffle", [False, True], ids=["sequential", "shuffled"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", STOPS)
def test_a_stateful_data_loader_resumes_exactly(stop: str, workers: int, shuffle: bool, tmp_path: Path) -> None:
    options = {"workers": workers, "shuffle": shuffle}
    uninterrupted, resumed = train_twice(0, 1, str(tmp_path / "run"), STOPS[stop], options)
    assert resumed == uninterrupted


@pytest.mark.guarantee("G8")
def test_a_stateful_data_loader_with_persistent_workers_resumes_exactly(tmp_path: Path) -> None:
    options = {"workers": 2, "persistent": True}
    uninterrupted, resumed = train_twice(0, 1, str(tmp_path / "run"), STOPS["mid-epoch"], options)
    assert resumed == uninterrupted


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("stop", ["mid-epoch", "last batch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_with_a_generator_of_its_own_resumes_exactly(
    workers: int, stop: str, tmp_path: Path
) -> None:
    options = {"workers": workers, "own": True}
    uninterrupted, resumed = train_twice(0, 1, str(tmp_path / "run"), STOPS[stop], options)
    assert resumed == uninterrupted


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_on_two_ranks_resumes_exactly(workers: int, tmp_path: Path) -> None:
    options = {"workers": workers}
    outcomes = run_ranks(2, train_twice, 2, str(tmp_path / "run"), STOPS["mid-epoch"], options)
    for rank, (uninterrupted, resumed) in enumerate(values(outcomes)):
        assert resumed == uninterrupted, f"rank {rank}"


def _restored(run: Path, **options: Any) -> Training:
    """A training whose loader was restored in the middle of an epoch and has not been asked for a batch since."""
    first = Training(0, 1, **options)
    with holdfast.CheckpointManager(run, first.state, mode="sync") as manager:
        first.train(0, manager, STOPS["mid-epoch"])
    second = Training(0, 1, **options)
    with holdfast.CheckpointManager(run, second.state, mode="sync") as manager:
        manager.restore()
    return second


@pytest.mark.parametrize("way", ["itself", "pickled", "copied", "asked for its state first"])
def test_a_restored_loader_can_be_copied_pickled_and_asked_for_its_state(way: str, tmp_path: Path) -> None:
    loader = _restored(tmp_path / "run").loader
    expected = torch.get_rng_state()
    if way == "pickled":
        loader = pickle.loads(pickle.dumps(loader))
    elif way == "copied":
        loader = copy.deepcopy(loader)
    elif way == "asked for its state first":
        assert loader.state_dict()["_num_yielded"] == 3
    assert torch.equal(torch.get_rng_state(), expected)
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), expected)
    assert loader.state_dict()["_num_yielded"] == 4
    iter(loader)
    assert not torch.equal(torch.get_rng_state(), expected), "the next epoch draws its seed"


def test_a_loader_that_fails_to_build_its_iterator_draws_nothing_the_next_time(tmp_path: Path) -> None:
    loader = _restored(tmp_path / "run").loader
    expected = torch.get_rng_state()
    sampler = loader.batch_sampler
    object.__setattr__(loader, "batch_sampler", None)
    with pytest.raises(KeyError):
        iter(loader)
    object.__setattr__(loader, "batch_sampler", sampler)
    iter(loader)
    assert torch.equal(torch.get_rng_state(), expected)


def test_state_that_is_given_back_without_a_manager_is_taken_up_without_a_draw() -> None:
    first, second = Training(0, 1), Training(0, 1)
    batches = iter(first.loader)
    next(batches)
    holdfast.restore_train_state(second.state, holdfast.build_train_state(first.state))
    expected = torch.get_rng_state()
    assert torch.equal(next(iter(second.loader)), next(batches))
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("where", ["in front of the loader", "behind it", "attached before it"])
def test_a_save_before_the_first_batch_resumes_exactly_wherever_the_random_state_stands(
    where: str, tmp_path: Path
) -> None:
    """Asked for its state before the first batch, a loader builds its iterator and draws a seed, inside of the save."""

    def opened(training: Training) -> holdfast.CheckpointManager:
        state: dict[str, Any] = dict(training.state)
        if where == "in front of the loader":
            state = {"random": holdfast.RNGState(), **state}
        loader = state.pop("loader") if where == "attached before it" else None
        manager = holdfast.CheckpointManager(tmp_path / "run", state, mode="sync")
        if loader is not None:
            manager.attach("loader", loader)
        return manager

    first, second = Training(0, 1), Training(0, 1)
    torch.manual_seed(5)
    with opened(first) as manager:
        manager.save(0)
        uninterrupted = first.train(0, manager, -1)
    torch.manual_seed(31337)
    with opened(second) as manager:
        manager.restore()
        assert second.train(0, manager, -1) == uninterrupted


@pytest.mark.guarantee("G8")
def test_a_loader_that_is_attached_after_the_restore_leaves_the_random_state(tmp_path: Path) -> None:
    first, second = Training(0, 1), Training(0, 1)
    batches = iter(first.loader)
    next(batches)
    with holdfast.CheckpointManager(tmp_path / "run", first.state, mode="sync") as manager:
        manager.save(1)
    state: dict[str, Any] = dict(second.state)
    loader = state.pop("loader")
    with holdfast.CheckpointManager(tmp_path / "run", state, mode="sync") as manager:
        manager.restore()
        expected = torch.get_rng_state()
        assert manager.attach("loader", loader)
        assert torch.equal(torch.get_rng_state(), expected)
        assert torch.equal(next(iter(loader)), next(batches))
        assert torch.equal(torch.get_rng_state(), expected)
