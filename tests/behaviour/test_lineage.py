"""The line of a manager: what it restored and saved since. Each start has its own, and annotations stay on it."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Every, KeepLast, LoadStrategy
from holdfast.errors import StorageError
from holdfast.testing import MemoryStorage

MODES = ("sync", "async")
_PATIENCE_SECONDS = 300.0


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


def saved_steps(manager: holdfast.CheckpointManager, model: Weights, steps: Iterable[int], base: float) -> list[bool]:
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


# What is said of a step later


class Gated(MemoryStorage):
    """A storage on which everything of step 7 waits for the gate, and then fails, as long as it is `closed`."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.gate = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if self.closed and key.startswith("step-000000007"):
            assert self.gate.wait(_PATIENCE_SECONDS)
            raise StorageError("no room for step 7", errno=errno.EIO, file=key)
        super().put(key, data)


def losses(run: Any) -> dict[int, Any]:
    return {found.sequence: found.metrics.get("loss") for found in holdfast.checkpoints(run)}


def two_steps_saved(run: Any, **options: Any) -> None:
    """Save steps 5 and 7, with the sequence numbers 1 and 2."""
    with opened(run, **options) as manager:
        manager.save(5, metrics={"loss": 5.0})
        manager.save(7, metrics={"loss": 7.0})


@pytest.mark.guarantee("G6")
def test_a_report_never_changes_a_checkpoint_of_another_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two_steps_saved(tmp_path)
    with opened(tmp_path) as manager:
        manager.restore(5)
        manager.save(6)
        with caplog.at_level(logging.WARNING, logger="holdfast"):
            assert manager.report(7, {"loss": -100.0}) is False
        assert [text for text in caplog.messages if "step 7" in text and "line" in text]
        assert manager.report(5, {"loss": 4.0}), "what was restored is on the line"
        assert manager.report(6, {"loss": 6.0})
    assert losses(tmp_path) == {1: 4.0, 2: 7.0, 3: 6.0}


def test_a_report_of_a_manager_that_neither_restored_nor_saved_goes_to_the_newest_of_the_step(tmp_path: Path) -> None:
    two_steps_saved(tmp_path)
    two_steps_saved(tmp_path)
    with opened(tmp_path) as manager:
        assert manager.report(7, {"loss": 1.0})
    assert losses(tmp_path) == {1: 5.0, 2: 7.0, 3: 5.0, 4: 1.0}


def test_a_report_of_a_manager_that_found_nothing_to_restore_goes_to_what_others_saved_since(tmp_path: Path) -> None:
    with opened(tmp_path) as evaluator:
        assert not evaluator.restore().resumed
        two_steps_saved(tmp_path)
        assert evaluator.report(7, {"loss": 1.0})
    assert losses(tmp_path) == {1: 5.0, 2: 1.0}


def test_a_report_of_a_fresh_start_leaves_the_old_start_as_it_is(tmp_path: Path) -> None:
    two_steps_saved(tmp_path)
    with opened(tmp_path, resume="never") as manager:
        manager.restore()
        assert manager.report(7, {"loss": 1.0}) is False
    assert losses(tmp_path) == {1: 5.0, 2: 7.0}


def test_a_report_after_a_warm_start_goes_to_what_was_restored_or_saved_since(tmp_path: Path) -> None:
    two_steps_saved(tmp_path)
    with opened(tmp_path) as manager:
        manager.restore(7, strategy=LoadStrategy.weights_only())
        assert manager.report(7, {"loss": 1.0}), "an evaluation of weights that were restored alone"
        assert manager.report(5, {"loss": -1.0}) is False
        manager.save(7)
        assert manager.report(7, {"loss": 2.0})
    assert losses(tmp_path) == {1: 5.0, 2: 1.0, 3: 2.0}


@pytest.mark.guarantee("G6")
def test_metrics_of_a_save_that_failed_are_not_added_to_another_line(caplog: pytest.LogCaptureFixture) -> None:
    storage = Gated()
    two_steps_saved("run", storage=storage)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        with opened("run", storage=storage, mode="async") as manager:
            manager.restore(5)
            manager.save(6).wait()
            storage.closed = True
            manager.save(7)
            assert manager.report(7, {"loss": -100.0})
            storage.gate.set()
            with pytest.raises(holdfast.HoldfastError):
                manager.wait()
            storage.closed = False
            manager.save(8).wait()
    assert losses(storage) == {1: 5.0, 2: 7.0, 3: None, 4: None}
    assert [text for text in caplog.messages if "step 7" in text and "were never written" in text]


def test_metrics_of_a_save_that_failed_are_dropped_when_another_line_begins(caplog: pytest.LogCaptureFixture) -> None:
    storage = Gated()
    two_steps_saved("run", storage=storage)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        with opened("run", storage=storage, mode="async") as manager:
            manager.restore(5)
            storage.closed = True
            manager.save(7)
            assert manager.report(7, {"loss": -100.0})
            storage.gate.set()
            with pytest.raises(holdfast.HoldfastError):
                manager.wait()
            storage.closed = False
            manager.restore(5)
            manager.save(7).wait()
    assert losses(storage) == {1: 5.0, 2: 7.0, 3: None}, "the state that was measured is gone"
    assert len([text for text in caplog.messages if "step 7" in text and "were never written" in text]) == 1


def test_a_tag_by_step_goes_to_the_own_line_first_and_else_to_the_newest(tmp_path: Path) -> None:
    two_steps_saved(tmp_path)
    two_steps_saved(tmp_path)
    with opened(tmp_path) as manager:
        manager.restore("step-000000005")
        manager.tag(5, "mine")
        manager.tag(7, "other")
        manager.untag(5, "mine")
        manager.tag("5", "mine-as-well")
        assert {found.sequence: found.tags for found in manager.checkpoints()} == {
            1: ("mine-as-well",),
            2: (),
            3: (),
            4: ("other",),
        }


def damage(folder: Path) -> None:
    """Flip a bit of a manifest, and again: it is whole."""
    data = bytearray((folder / "manifest.json").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "manifest.json").write_bytes(data)


def move(folder: Path) -> None:
    """Move a folder out of the run, or back."""
    elsewhere = folder.parent.parent / f"{folder.name}.away"
    source, target = (folder, elsewhere) if folder.is_dir() else (elsewhere, folder)
    source.rename(target)


def change_format(folder: Path) -> None:
    """Make a manifest one of a newer format, or the other way round."""
    path, old, new = folder / "manifest.json", b'{"holdfast_format":1,', b'{"holdfast_format":9,'
    data = path.read_bytes()
    path.write_bytes(data.replace(old, new) if data.startswith(old) else data.replace(new, old))


@pytest.fixture(params=[damage, move, change_format])
def run_with_numbers_given_twice(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run that was continued while its two newest checkpoints, of steps 3 and 4, could not be seen; now they can."""
    run, model = tmp_path / "run", Weights()
    with opened(run, model) as manager:
        saved_steps(manager, model, range(5), 0.0)
    hidden = [run / f"step-{step:09}" for step in (3, 4)]
    for folder in hidden:
        request.param(folder)
    with opened(run, model) as manager:
        assert manager.restore().step == 2
        assert [manager.save(step).wait().sequence for step in (10, 11)] == [4, 5], "the numbers are given again"
    for folder in hidden:
        request.param(folder)
    assert sorted(found.sequence for found in holdfast.checkpoints(run)) == [1, 2, 3, 4, 4, 5, 5]
    return run


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_saved_though_a_checkpoint_of_another_line_has_a_number_of_this_one(
    run_with_numbers_given_twice: Path, mode: Any
) -> None:
    run, model = run_with_numbers_given_twice, Weights()
    with opened(run, model, mode=mode) as manager:
        assert manager.restore().step == 11
        assert saved_steps(manager, model, (3, 4), 100.0) == [False, False]
        assert manager.save(10).skipped, "which is on this line"
    assert value_at(run) == (4, 104.0)


@pytest.mark.guarantee("G4")
def test_retention_keeps_a_checkpoint_of_another_line_that_has_a_number_of_this_one(
    run_with_numbers_given_twice: Path,
) -> None:
    run, model = run_with_numbers_given_twice, Weights()
    with opened(run, model, keep=holdfast.KeepLast(1)) as manager:
        assert manager.restore().step == 11
        manager.save(12)
        manager.prune()
        assert [found.step for found in manager.checkpoints()] == [12, 4, 3]
        assert not manager.report(4, {"loss": 1.0}), "it is no checkpoint of this training"


@pytest.mark.guarantee("G4")
def test_a_checkpoint_from_a_continued_copy_of_the_run_is_of_another_line(tmp_path: Path) -> None:
    run, copy, model = tmp_path / "run", tmp_path / "copy", Weights()
    with opened(run, model) as manager:
        saved_steps(manager, model, range(2), 0.0)
    shutil.copytree(run, copy, symlinks=True)
    for folder, steps in ((copy, (7,)), (run, (2, 3))):
        with opened(folder, model) as manager:
            manager.restore()
            saved_steps(manager, model, steps, 10.0)
    shutil.move(copy / "step-000000007", run)
    with opened(run, model, keep=holdfast.KeepLast(1)) as manager:
        assert manager.restore().step == 3
        assert saved_steps(manager, model, (7,), 100.0) == [False]
        manager.prune()
        assert [found.folder for found in manager.checkpoints()] == ["step-000000007.2", "step-000000007"]
    assert value_at(run) == (7, 107.0)


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("start", "back"),
    [
        (2, lambda manager: manager.restore(2)),
        (0, lambda manager: manager.restore(strategy=LoadStrategy(progress=False))),
    ],
    ids=["after going back", "after a warm start"],
)
def test_steps_are_saved_after_a_first_save_that_was_asked_for_again(
    tmp_path: Path, mode: Any, start: int, back: Any
) -> None:
    model = Weights()
    with opened(tmp_path, model, mode=mode) as manager:
        saved_steps(manager, model, range(1, 6), 0.0)
        back(manager)
        model.set(100.0 + start)
        manager.save(start, resave=True, wait=True)
        assert saved_steps(manager, model, range(start + 1, 6), 100.0) == [False] * (5 - start)
    assert value_at(tmp_path) == (5, 105.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_saved_in_whose_folder_a_checkpoint_of_another_line_was_put(tmp_path: Path, mode: Any) -> None:
    run, other, model = tmp_path / "run", tmp_path / "other", Weights()
    with opened(other, model) as manager:
        saved_steps(manager, model, (3,), 50.0)
    with opened(run, model, mode=mode) as manager:
        saved_steps(manager, model, (2, 3, 4), 0.0)
        shutil.rmtree(run / "step-000000003")
        shutil.copytree(other / "step-000000003", run / "step-000000003")
        assert saved_steps(manager, model, (3,), 100.0) == [False]
    assert value_at(run) == (3, 103.0)
