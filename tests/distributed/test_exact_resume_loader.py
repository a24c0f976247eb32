"""G8 with torchdata's StatefulDataLoader: what happens to it between a restore and its first batch, and around a save.

Every order, number of workers and stop is in `test_loader_matrix.py`.
"""

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
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast

BATCHES = 5  # of an epoch
STEPS = 3 * BATCHES + 2
MID_EPOCH = BATCHES + 3


class Training:
    """A model with dropout and a loader. The losses and draws from all three global generators are compared."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        data = torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(100)
        self.loader = StatefulDataLoader(list(data), batch_size=2, shuffle=True)
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


def _restored(run: Path) -> Training:
    """A training whose loader was restored in the middle of an epoch and has not been asked for a batch since."""
    first = Training()
    with holdfast.CheckpointManager(run, first.state, mode="sync") as manager:
        first.train(0, manager, MID_EPOCH)
    second = Training()
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
    first, second = Training(), Training()
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

    first, second = Training(), Training()
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
    first, second = Training(), Training()
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
