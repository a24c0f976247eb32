"""The line of a manager: what it restored and saved since. Each start has one of its own, and annotations stay on it."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Every, KeepLast, LoadStrategy
from holdfast.errors import StorageError
from holdfast.testing import MemoryStorage

MODES = ("sync", "async")
_PATIENCE_SECONDS = 20.0


class Weights(torch.nn.Module):
    """A model whose value tells which save it is of."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), value))

    def set(self, value: float) -> None:
        torch.nn.init.constant_(self.weight, value)

    @property
    def value(self) -> float:
        return self.weight[0].item()


def opened(run: Any, model: Weights | None = None, **options: Any) -> holdfast.CheckpointManager:
    state = {"model": model if model is not None else Weights()}
    return holdfast.CheckpointManager(run, state, **{"mode": "sync", "timeout": 30, **options})


def saved_steps(manager: holdfast.CheckpointManager, model: Weights, steps: range, base: float) -> list[bool]:
    """Save each step with the value base + step; return which saves were skipped."""
    skipped = []
    for step in steps:
        model.set(base + step)
        handle = manager.save(step, wait=True)
        skipped.append(handle.skipped)
    return skipped


def value_at(run: Any, selector: str | int = "latest") -> tuple[int | None, float]:
    model = Weights(-1.0)
    with opened(run, model) as manager:
        return manager.restore(selector).step, model.value


# A start without the progress of the checkpoint, or from another run


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["warm_start", "weights_only", "progress"])
def test_saves_after_a_warm_start_in_a_manager_that_has_saved_are_written(tmp_path: Path, mode: Any, how: str) -> None:
    strategies = {
        "warm_start": LoadStrategy.warm_start(),
        "weights_only": LoadStrategy.weights_only(),
        "progress": LoadStrategy(progress=False),
    }
    model = Weights()
    with opened(tmp_path, model, mode=mode) as manager:
        saved_steps(manager, model, range(4), 0.0)
        start = manager.restore(strategy=strategies[how])
        assert (start.resumed, start.next_step, model.value) == (False, 0, 3.0)
        assert saved_steps(manager, model, range(4), 100.0) == [False] * 4
        model.set(-5.0)
        assert manager.save(2).skipped, "the new line has that step now"
    assert value_at(tmp_path) == (3, 103.0)
    assert [found.folder for found in holdfast.checkpoints(tmp_path)][:4] == [
        "step-000000003.2",
        "step-000000002.2",
        "step-000000001.2",
        "step-000000000.2",
    ]
    assert holdfast.resolve(tmp_path / "step-000000000.2").parent is None
    assert holdfast.resolve(tmp_path / "step-000000001.2").parent == holdfast.resolve(tmp_path, 0).digest


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("mode", MODES)
def test_saves_after_a_restore_of_another_run_are_written(tmp_path: Path, mode: Any) -> None:
    other, run, model = tmp_path / "other", tmp_path / "run", Weights()
    with opened(other, Weights(5.0)) as manager:
        manager.save(0)
    with opened(run, model, mode=mode) as manager:
        saved_steps(manager, model, range(4), 0.0)
        start = manager.restore(other)
        assert (start.resumed, start.next_step, model.value) == (True, 1, 5.0)
        assert saved_steps(manager, model, range(1, 4), 100.0) == [False] * 3
        assert manager.checkpoints()[2].parent is None
    assert value_at(run) == (3, 103.0)


def test_saves_after_a_fresh_start_in_a_manager_that_has_saved_are_written(tmp_path: Path) -> None:
    model = Weights()
    with opened(tmp_path, model, resume="never") as manager:
        saved_steps(manager, model, range(2), 0.0)
        assert manager.restore().next_step == 0
        assert saved_steps(manager, model, range(2), 100.0) == [False] * 2
    assert value_at(tmp_path) == (1, 101.0)


def test_a_restore_of_the_own_run_after_a_warm_start_continues_its_line_again(tmp_path: Path) -> None:
    model = Weights()
    with opened(tmp_path, model) as manager:
        saved_steps(manager, model, range(4), 0.0)
        manager.restore(strategy=LoadStrategy.warm_start())
        saved_steps(manager, model, range(2), 100.0)
        assert (manager.restore().step, model.value) == (1, 101.0)
        assert saved_steps(manager, model, range(2, 3), 200.0) == [False]
        assert manager.save(0).skipped
        assert manager.checkpoints()[0].parent == manager.checkpoints()[1].digest


def test_retention_after_a_warm_start_counts_the_new_line_and_leaves_the_old_start(tmp_path: Path) -> None:
    model = Weights()
    with opened(tmp_path, model, keep=KeepLast(2)) as manager:
        saved_steps(manager, model, range(4), 0.0)
        manager.restore(strategy=LoadStrategy.warm_start())
        manager.prune()
        assert [found.step for found in manager.checkpoints()] == [3, 2], "nothing new yet: the old line counts"
        saved_steps(manager, model, range(4), 100.0)
        manager.prune()
        assert [found.folder for found in manager.checkpoints()] == [
            "step-000000003.2",
            "step-000000002.2",
            "step-000000003",
            "step-000000002",
        ]


def test_epochs_begin_anew_after_a_warm_start(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        manager.step(0, epoch=3)
        manager.restore(strategy=LoadStrategy.warm_start())
        manager.step(0, epoch=1)
        assert [found.epoch for found in manager.checkpoints()] == [1, 3]
        manager.restore(strategy=LoadStrategy.warm_start())
        manager.save(5)
        assert manager.checkpoints()[0].epoch is None
