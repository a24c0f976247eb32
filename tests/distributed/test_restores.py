"""What a restore on two ranks reports, and which restore continues the line of checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import LoadStrategy
from holdfast.testing import values
from tests.distributed.scenes import Play, run_scenes
from tests.ranks import run_ranks


def opened(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, **{"mode": "sync", "timeout": 30, **options})


def save_once(rank: int, run: Path) -> None:
    with opened(run, {"model": torch.nn.Linear(2, 2)}, replicas="trust") as manager:
        manager.save(1)


def test_per_rank_state_that_a_changed_number_of_ranks_leaves_as_it_is_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values(run_ranks(2, save_once, tmp_path))
    with opened(tmp_path, {"model": torch.nn.Linear(2, 2)}) as manager:
        result = manager.restore(strategy=LoadStrategy(on_world_change="skip"))
    expected = "rng: the per-rank state is of another number of ranks"
    (line,) = [record for record in caplog.records if "on_world_change='skip'" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert f"1 difference was accepted ({expected})" in line.getMessage()
    assert result.accepted == (expected,)


# A save inside of a restore


class Saving:
    """A component that saves when it is restored."""

    def __init__(self) -> None:
        self.manager: holdfast.CheckpointManager | None = None
        self.error = ""

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self.manager is not None
        try:
            self.manager.save(7)
        except holdfast.HoldfastError as error:
            self.error = f"{type(error).__name__}: {error}"


def save_while_restoring(rank: int, run: Path, large: int) -> str:
    """The restore of a large model takes the memory of asynchronous saves."""
    model, saving = torch.nn.Linear(1 << 21 if rank < large else 1, 3), Saving()
    components = {"model": holdfast.PerRank(model), "saving": holdfast.PerRank(saving)}
    with opened(run, components, mode="async", rng=False, timeout=300) as manager:
        saving.manager = manager
        manager.save(1).wait()
        before = float(model.weight[0, 0])
        torch.nn.init.zeros_(model.weight)
        manager.restore()
        assert float(model.weight[0, 0]) == before
        manager.save(8).wait()
    return saving.error


@pytest.mark.parametrize("large", [0, 1, 2])
def test_a_save_inside_of_a_restore_is_refused_at_once_on_every_rank(tmp_path: Path, large: int) -> None:
    errors = values(run_ranks(2, save_while_restoring, tmp_path, large, timeout_seconds=120.0))
    for error in errors:
        assert error.startswith("UsageError: ")
        assert "save() was called in the middle of restore()" in error
    assert [one.step for one in holdfast.checkpoints(tmp_path)] == [8, 1]


# Which restore continues the line


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


def saved_steps(manager: holdfast.CheckpointManager, model: Weights, steps: range, base: float) -> list[bool]:
    """Save each step with the value base + step; return which saves were skipped."""
    skipped = []
    for step in steps:
        model.set(base + step)
        skipped.append(manager.save(step, wait=True).skipped)
    return skipped


def lines_of(run: Path) -> list[tuple[str, str | None]]:
    """Return the folder of each checkpoint with that of its parent, the latest first."""
    found = holdfast.checkpoints(run)
    folders = {one.digest: one.folder for one in found}
    return [(one.folder, folders.get(one.parent or "")) for one in found]


def _start_without_progress(folder: Path, strategy: LoadStrategy, mode: Any) -> Any:
    model = Weights()
    with opened(folder, {"model": model}, mode=mode) as manager:
        first = saved_steps(manager, model, range(3), 0.0)
        start = manager.restore(strategy=strategy)
        restored = model.value
        second = saved_steps(manager, model, range(3), 100.0)
        again = manager.save(2, wait=True).skipped
    return first, (start.resumed, start.next_step, restored), second, again


def without_progress(rank: int, folder: Path) -> Any:
    return _start_without_progress(folder, LoadStrategy(progress=False), "sync")


def without_progress_in_the_background(rank: int, folder: Path) -> Any:
    return _start_without_progress(folder, LoadStrategy(progress=False), "async")


def with_a_warm_start(rank: int, folder: Path) -> Any:
    return _start_without_progress(folder, LoadStrategy.warm_start(), "sync")


def with_weights_only(rank: int, folder: Path) -> Any:
    return _start_without_progress(folder, LoadStrategy.weights_only(), "async")


def a_restore_of_the_own_run(rank: int, folder: Path) -> Any:
    """By `latest` and by an older step: both continue the line of what was restored."""
    model = Weights()
    with opened(folder, {"model": model}) as manager:
        saved_steps(manager, model, range(3), 0.0)
    with opened(folder, {"model": model}) as manager:
        latest = manager.restore().step, model.value
        skipped = saved_steps(manager, model, range(2, 4), 100.0)
        older = manager.restore(1).step, model.value
        went_back = saved_steps(manager, model, range(1, 3), 200.0)
    return latest, skipped, older, went_back


def a_restore_of_another_run(rank: int, folder: Path) -> Any:
    other, run, model = folder / "other", folder / "run", Weights(5.0)
    with opened(other, {"model": model}) as manager:
        manager.save(0)
    with opened(run, {"model": model}) as manager:
        saved_steps(manager, model, range(2), 0.0)
        start = manager.restore(other)
        return (start.resumed, start.next_step, model.value), saved_steps(manager, model, range(1, 2), 100.0)


WITHOUT_PROGRESS = [
    without_progress,
    without_progress_in_the_background,
    with_a_warm_start,
    with_weights_only,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


@pytest.fixture(scope="module")
def play(folder: Path) -> Play:
    return run_scenes(2, [*WITHOUT_PROGRESS, a_restore_of_the_own_run, a_restore_of_another_run], folder)


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("scene", WITHOUT_PROGRESS)
def test_a_restore_without_progress_starts_a_new_line_on_all_ranks(play: Play, folder: Path, scene: Any) -> None:
    assert play(scene.__name__) == [([False] * 3, (False, 0, 2.0), [False] * 3, True)] * 2
    assert lines_of(folder / scene.__name__) == [
        ("step-000000002.2", "step-000000001.2"),
        ("step-000000001.2", "step-000000000.2"),
        ("step-000000000.2", None),
        ("step-000000002", "step-000000001"),
        ("step-000000001", "step-000000000"),
        ("step-000000000", None),
    ]


@pytest.mark.guarantee("G1")
def test_a_restore_of_the_own_run_continues_the_line_of_what_was_restored_on_all_ranks(
    play: Play, folder: Path
) -> None:
    assert play("a_restore_of_the_own_run") == [((2, 2.0), [True, False], (1, 1.0), [True, False])] * 2
    assert lines_of(folder / "a_restore_of_the_own_run") == [
        ("step-000000002.2", "step-000000001"),
        ("step-000000003", "step-000000002"),
        ("step-000000002", "step-000000001"),
        ("step-000000001", "step-000000000"),
        ("step-000000000", None),
    ]


@pytest.mark.guarantee("G1")
def test_a_restore_of_another_run_starts_a_new_line_on_all_ranks(play: Play, folder: Path) -> None:
    assert play("a_restore_of_another_run") == [((True, 1, 5.0), [False])] * 2
    assert lines_of(folder / "a_restore_of_another_run" / "run") == [
        ("step-000000001.2", None),
        ("step-000000001", "step-000000000"),
        ("step-000000000", None),
    ]
