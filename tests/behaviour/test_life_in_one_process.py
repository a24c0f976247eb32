"""The life of a run in one process: when `step` saves and stops, what stays, what is said later, whose run it is."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import At, Every, KeepBest, KeepEvery, KeepLast, OnLastStep, OnSignal, TimeLimit
from holdfast.errors import (
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    GuardMismatchError,
    RunInUseError,
    SaveFailedError,
    StorageError,
    UsageError,
)
from holdfast.runs.readers import reading
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import FullStorage, MemoryStorage, SlowStorage
from tests.distributed.test_failures import FailingStorage

MODES = ("sync", "async")
Metrics = Callable[[int], Any]
LIMIT = TimeLimit("365-00:00:00")


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Weights:
    """A component whose value tells which step it is of."""

    def __init__(self, value: float = 0.0) -> None:
        self.weight = torch.full((300,), value)

    @property
    def value(self) -> float:
        assert len(set(self.weight.tolist())) == 1, "torn"
        return self.weight[0].item()

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def no_metrics(step: int) -> None:
    """What a loop says that measures nothing."""


def opened(run: Any, weights: Any = None, **options: Any) -> holdfast.CheckpointManager:
    state = {"weights": weights if weights is not None else Weights()}
    return holdfast.CheckpointManager(run, state, rng=False, **{"mode": "sync", "timeout": 30, **options})


def trained(run: Any, steps: int, *, start: int = 0, metrics: Metrics = no_metrics, **options: Any) -> list[int]:
    """A loop of that many steps: the steps at which it was asked to stop."""
    weights = Weights()
    with opened(run, weights, **options) as manager:
        return steps_done(manager, weights, range(start, start + steps), metrics)


def steps_done(
    manager: holdfast.CheckpointManager, weights: Weights, steps: range, metrics: Metrics = no_metrics
) -> list[int]:
    stops = []
    for step in steps:
        weights.weight.fill_(float(step))
        if manager.step(step, metrics=metrics(step), progress={"seen": step}):
            stops.append(step)
    return stops


def steps_of(run: Any) -> list[int]:
    return [checkpoint.step for checkpoint in holdfast.checkpoints(run)]


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


def value_at(run: Any, selector: str | int = "latest") -> float:
    weights = Weights(-1.0)
    with opened(run, weights) as manager:
        manager.restore(selector)
    return weights.value


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def strike(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def damage(folder: Path) -> None:
    """Change one byte of the tensors of a checkpoint."""
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


# When it saves


@pytest.mark.parametrize("mode", MODES)
def test_step_saves_when_it_is_time_and_each_checkpoint_is_the_state_of_its_step(tmp_path: Path, mode: Any) -> None:
    stops = trained(tmp_path, 11, mode=mode, save=Every(steps=4) | At(5) | OnLastStep(11))
    assert stops == []
    assert steps_of(tmp_path) == [10, 8, 5, 4]
    for step in steps_of(tmp_path):
        assert value_at(tmp_path, step) == step
        assert holdfast.resolve(tmp_path, step).progress == {"seen": step}


def test_without_save_step_saves_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", 5) == []
    assert not (tmp_path / "run").exists()


def test_step_passes_on_all_that_is_said(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(steps=1)) as manager:
        manager.step(1, metrics={"loss": torch.tensor(0.5)}, progress={"tokens": 3}, extra={"note": ["a"]})
    found = holdfast.resolve(tmp_path)
    assert (found.metrics, found.progress, found.extra) == ({"loss": 0.5}, {"tokens": 3}, {"note": ["a"]})


def test_epochs_end_once_and_again_after_a_restart_only_when_they_do(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        for step, epoch in enumerate([0, 0, 1, 1, 2, 2]):
            assert not manager.step(step, epoch=epoch)
    assert steps_of(tmp_path) == [4, 2]
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        assert manager.restore().next_step == 5
        for step, epoch in ((5, 2), (6, 2), (7, 3)):
            manager.step(step, epoch=epoch)
    assert steps_of(tmp_path) == [7, 4, 2]


def test_a_save_that_names_no_epoch_has_the_last_one_that_was_named(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        manager.step(9, epoch=1)
        manager.save(12)
        manager.save(14, epoch=2)
    assert [found.epoch for found in holdfast.checkpoints(tmp_path)] == [2, 1, 1]
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        manager.restore(12)
        manager.step(19, epoch=2)
        manager.save(20)
    assert [(found.step, found.epoch) for found in holdfast.checkpoints(tmp_path)][:2] == [(20, 2), (19, 2)]


def test_what_a_save_says_of_a_step_that_is_committed_is_added_to_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, save=Every(steps=1), keep=KeepLast(1)) as manager:
        manager.step(1, metrics={"loss": 2.0})
        assert manager.save(1, tag="release", metrics={"acc": 0.5}).skipped
        assert "stay as they are" not in caplog.text
        assert manager.save(1, progress={"seen": 5}).skipped
        assert "stay as they are" in caplog.text
        manager.step(2)
        manager.prune()
    latest, released = holdfast.checkpoints(tmp_path)
    assert (latest.step, released.step, released.tags) == (2, 1, ("release",))
    assert released.metrics == {"loss": 2.0, "acc": 0.5}


@pytest.mark.parametrize("mode", MODES)
def test_what_goes_on_between_two_steps_can_be_saved_and_is_not_repeated(tmp_path: Path, mode: Any) -> None:
    evaluation = Weights()
    with opened(tmp_path, evaluation, mode=mode, save=Every(steps=500)) as manager:
        manager.step(500)
        for batch in (1, 2):
            evaluation.weight.fill_(batch)
            assert not manager.save(500, resave=True).skipped
    assert steps_of(tmp_path) == [500, 500, 500]
    evaluation = Weights(-1.0)
    with opened(tmp_path, evaluation) as manager:
        assert manager.restore().next_step == 501
    assert evaluation.value == 2.0


def test_step_keeps_guards(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(steps=1)) as manager:
        manager.step(1, guards={"vocabulary": 5})
        with pytest.raises(GuardMismatchError, match="vocabulary: 5 in the checkpoint, 7 now"):
            manager.restore(guards={"vocabulary": 7})
        assert manager.restore(guards={"vocabulary": 5}).resumed


def test_a_manager_that_is_dropped_leaves_nobody_deaf_to_signals(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    manager = opened(tmp_path, save=OnSignal("SIGTERM"))
    strike()
    assert heard == [signal.SIGTERM]
    del manager
    gc.collect()
    handler = signal.getsignal(signal.SIGTERM)
    strike()
    assert heard == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is not handler, "and what was there before is back"


def test_an_epoch_that_ends_with_the_first_step_after_a_restart_is_saved(tmp_path: Path) -> None:
    """Stopped one step before the end of an epoch, as a signal may have it."""
    with opened(tmp_path, save=Every(epochs=1) | At(1)) as manager:
        for step, epoch in ((0, 0), (1, 0)):
            manager.step(step, epoch=epoch)
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        assert manager.restore().next_step == 2
        manager.step(2, epoch=1)
    assert steps_of(tmp_path) == [2, 1]


def test_a_loop_that_names_no_epoch_to_a_trigger_that_needs_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = ""
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        try:
            for step in range(5):
                manager.step(step)
        except UsageError as error:
            said = str(error)
    assert "epoch" in said + caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_two_tiers_write_once_where_both_fall_on_one_step(tmp_path: Path, mode: Any) -> None:
    """Rolling: every 2 steps, the last one stays. Persistent: every 6 steps, all stay."""
    seen: list[holdfast.Event] = []
    trained(
        tmp_path,
        15,
        mode=mode,
        save=Every(steps=2) | Every(steps=6),
        keep=KeepLast(1) | KeepEvery(steps=6),
        on_event=seen.append,
    )
    assert [event.step for event in seen if event.kind == "committed"] == [2, 4, 6, 8, 10, 12, 14]
    assert [event.step for event in seen if event.kind == "pruned"] == [2, 4, 8, 10]
    assert steps_of(tmp_path) == [14, 12, 6]
    assert folders(tmp_path) == ["step-000000006", "step-000000012", "step-000000014"]


# Asking


def test_should_save_is_a_question_and_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "run", save=Every(steps=2) | LIMIT) as manager:
        for _ in range(3):
            assert manager.should_save(2, epoch=1, metrics={"loss": 1.0})
            assert not manager.should_save(3)
        assert steps_of(tmp_path / "run") == []
        assert manager.should_save(2)
        manager.save(2)
        assert manager.should_save(2), "it is about the step, not about what was done"
        assert manager.save(2).skipped


def test_a_loop_of_should_save_and_save_saves_once_per_epoch(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(epochs=1)) as manager:
        for step, epoch in enumerate([0, 1, 1, 1, 2, 2]):
            if manager.should_save(step, epoch=epoch):
                manager.save(step)
    assert steps_of(tmp_path) == [4, 1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda manager: manager.should_save(-1), "step"),
        (lambda manager: manager.should_save("3"), "step"),
        (lambda manager: manager.should_save(1, epoch=-1), "epoch"),
        (lambda manager: manager.should_save(1, epoch=True), "epoch"),
        (lambda manager: manager.should_save(1, metrics={"loss": "low"}), "loss"),
        (lambda manager: manager.step(1.5), "step"),
        (lambda manager: manager.step(1, epoch=0.5), "epoch"),
        (lambda manager: manager.step(1, metrics={"loss": "low"}), "loss"),
        (lambda manager: manager.report(-1, {"loss": 1}), "step"),
        (lambda manager: manager.report(1, {"loss": "low"}), "loss"),
        (lambda manager: manager.tag(1, "best"), "tag"),
        (lambda manager: manager.tag(1, ""), "tag"),
        (lambda manager: manager.untag(1, "7"), "tag"),
    ],
    ids=range(13),
)
def test_what_cannot_be_meant_is_an_error_that_says_what(
    tmp_path: Path, call: Callable[[holdfast.CheckpointManager], Any], said: str
) -> None:
    with opened(tmp_path, save=Every(steps=1)) as manager:
        with pytest.raises(UsageError, match=said):
            call(manager)
    assert steps_of(tmp_path) == []


def test_metrics_that_are_none_are_an_error_of_ours(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        with pytest.raises(UsageError, match="metrics"):
            manager.report(1, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"save": 500}, {"save": KeepLast(1)}, {"keep": 3}, {"keep": Every(steps=1)}, {"links": 1}, {"links": "{nothing"}],
    ids=str,
)
def test_policies_that_are_none_are_errors_at_construction(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        opened(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_closed_manager_answers_nothing(tmp_path: Path) -> None:
    manager = opened(tmp_path, save=Every(steps=1))
    manager.step(1)
    manager.close()
    manager.close()
    for call in (
        lambda: manager.step(2),
        lambda: manager.should_save(2),
        lambda: manager.report(1, {"loss": 1}),
        lambda: manager.tag(1, "one"),
        manager.prune,
    ):
        with pytest.raises(ClosedError):
            call()


# Stopping


@pytest.mark.parametrize("mode", MODES)
def test_a_signal_saves_the_step_at_hand_stops_and_leaves_the_handlers_as_they_were(tmp_path: Path, mode: Any) -> None:
    seen: list[int] = []

    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, mine)
    weights = Weights()
    with opened(tmp_path, weights, mode=mode, save=Every(steps=1000) | OnSignal("SIGTERM")) as manager:
        assert steps_done(manager, weights, range(0, 3)) == []
        strike()
        weights.weight.fill_(3.0)
        assert manager.step(3, metrics={"loss": 1.0}) is True
        assert steps_of(tmp_path) == [3], "committed when it returns"
        assert not manager.is_pending
        assert signal.getsignal(signal.SIGTERM) is not mine
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine
    assert value_at(tmp_path) == 3.0
    assert holdfast.verify(tmp_path).ok


class Striking(Weights):
    """A component in whose `state_dict` the process gets a signal."""

    def state_dict(self) -> dict[str, Any]:
        strike()
        return super().state_dict()


class StrikingStorage(LocalStorage):
    """A disk at which the process gets a signal whenever it is used, as long as `armed`."""

    armed = False

    def put(self, key: str, data: bytes) -> None:
        self._strike()
        super().put(key, data)

    def create(self, key: str, size_bytes: int) -> Any:
        self._strike()
        return super().create(key, size_bytes)

    def sync(self, folder: str) -> None:
        self._strike()
        super().sync(folder)

    def _strike(self) -> None:
        if self.armed:
            strike()


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", MODES)
def test_more_signals_in_the_middle_of_the_save_change_nothing(tmp_path: Path, mode: Any) -> None:
    """One at every point where the save uses the disk, in every event, and while the state is taken."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    weights, storage = Striking(), StrikingStorage(tmp_path)
    with opened(
        tmp_path,
        weights,
        mode=mode,
        storage=storage,
        save=Every(steps=1000) | OnSignal("SIGTERM"),
        on_event=lambda event: strike(),
    ) as manager:
        assert steps_done(manager, weights, range(1, 3)) == []
        storage.armed = True
        strike()
        assert steps_done(manager, weights, range(3, 5)) == [3, 4], "whoever goes on is told again"
        storage.armed = False
    assert steps_of(tmp_path) == [4, 3]
    assert value_at(tmp_path) == 4.0
    assert all(holdfast.verify(tmp_path, step).ok for step in (3, 4))


@pytest.mark.parametrize("mode", MODES)
def test_sigint_stops_the_loop_and_is_no_keyboard_interrupt(tmp_path: Path, mode: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    weights = Weights()
    with opened(tmp_path, weights, mode=mode, save=OnSignal("SIGINT")) as manager:
        strike(signal.SIGINT)
        assert steps_done(manager, weights, range(1, 2)) == [1]
    assert steps_of(tmp_path) == [1]
    with pytest.raises(KeyboardInterrupt):
        strike(signal.SIGINT)


def test_a_signal_that_came_is_also_an_answer_of_should_save(tmp_path: Path) -> None:
    with opened(tmp_path, save=OnSignal("SIGTERM")) as manager:
        assert not manager.should_save(1)
        strike()
        assert manager.should_save(1)


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_of_should_save_and_save_is_told_to_stop_and_saves_once_for_it(tmp_path: Path, mode: Any) -> None:
    with opened(tmp_path, mode=mode, save=At(1) | OnSignal("SIGTERM")) as manager:
        for step in range(6):
            if step == 3:
                assert not manager.should_stop
                strike()
            if manager.should_save(step):
                manager.save(step)
            assert manager.should_stop == (step >= 3)
    assert steps_of(tmp_path) == [3, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_goes_on_after_a_signal_saves_again_only_for_another_one(
    tmp_path: Path, mode: Any, second: signal.Signals
) -> None:
    weights = Weights()
    with opened(tmp_path, weights, mode=mode, save=OnSignal("SIGTERM", "SIGINT")) as manager:
        strike()
        assert steps_done(manager, weights, range(1, 4)) == [1, 2, 3]
        strike(second)
        assert steps_done(manager, weights, range(4, 6)) == [4, 5]
    assert steps_of(tmp_path) == [4, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_saved_already_stops_without_a_second_write(tmp_path: Path, mode: Any) -> None:
    weights = Weights()
    with opened(tmp_path, weights, mode=mode, save=Every(steps=1) | OnSignal("SIGTERM")) as manager:
        manager.step(1)
        strike()
        assert manager.step(1) is True
    assert folders(tmp_path) == ["step-000000001"]


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", MODES)
def test_the_last_save_is_tried_once_more_when_it_fails(tmp_path: Path, mode: Any) -> None:
    storage = FailingOnce(tmp_path)
    weights = Weights()
    with opened(tmp_path, weights, mode=mode, storage=storage, save=OnSignal("SIGTERM")) as manager:
        steps_done(manager, weights, range(1, 3))
        storage.armed = True
        strike()
        assert steps_done(manager, weights, range(3, 4)) == [3]
    assert storage.failures == 1
    assert steps_of(tmp_path) == [3]


class FailingOnce(FailingStorage):
    """A disk that refuses one tensor file, and has recovered when it is asked again."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "create", ".safetensors")
        self.failures = 0

    def fail(self, key: str) -> None:
        self.armed = False
        self.failures += 1
        super().fail(key)


def test_a_last_save_that_fails_twice_is_an_error(tmp_path: Path) -> None:
    storage = FailingStorage(tmp_path, "create", ".safetensors")
    manager = opened(tmp_path, storage=storage, save=OnSignal("SIGTERM"))
    storage.armed = True
    strike()
    with pytest.raises(StorageError):
        manager.step(3)
    storage.armed = False
    assert manager.step(4) is True, "the next step still knows that it is to stop"
    manager.close()
    assert steps_of(tmp_path) == [4]


@pytest.mark.guarantee("G6")
def test_a_failure_that_nobody_heard_of_does_not_cost_the_last_save(tmp_path: Path) -> None:
    """Saved behind the training, failed there, and then the signal: there is no other time to save this."""
    storage = FailingOnce(tmp_path)
    weights = Weights()
    manager = opened(tmp_path, weights, mode="async", storage=storage, save=At(2) | OnSignal("SIGTERM"))
    storage.armed = True
    manager.step(2)
    wait_for(lambda: not manager.is_pending)
    assert storage.failures == 1
    strike()
    try:
        stopped = manager.step(3)
    finally:
        manager.close()
    assert stopped
    assert steps_of(tmp_path) == [3]


def test_a_failure_behind_the_training_is_raised_by_the_next_step_once(tmp_path: Path) -> None:
    storage = FailingOnce(tmp_path)
    with opened(tmp_path, mode="async", storage=storage, save=Every(steps=2)) as manager:
        storage.armed = True
        manager.step(2)
        wait_for(lambda: not manager.is_pending)
        with pytest.raises(StorageError) as raised:
            manager.step(3)
        assert raised.value.step == 2
        assert manager.step(3) is False
        manager.step(4)
    assert steps_of(tmp_path) == [4]


@pytest.mark.parametrize("mode", MODES)
def test_a_time_limit_that_is_over_saves_and_stops(tmp_path: Path, mode: Any) -> None:
    weights = Weights()
    with opened(tmp_path, weights, mode=mode, save=TimeLimit(0.001)) as manager:
        assert steps_done(manager, weights, range(7, 8)) == [7]
        assert steps_of(tmp_path) == [7]


@pytest.mark.guarantee("G6")
def test_a_time_limit_that_is_over_while_a_save_is_under_way_commits_both(tmp_path: Path) -> None:
    weights, storage = Weights(), SlowStorage(MemoryStorage("memory://slow"), 0.02)
    with opened(
        "run", weights, mode="async", storage=storage, save=Every(steps=3) | OnSignal("SIGTERM") | LIMIT
    ) as manager:
        assert steps_done(manager, weights, range(0, 4)) == []
        assert manager.is_pending
        strike()
        assert steps_done(manager, weights, range(4, 5)) == [4]
        assert steps_of(storage.inner) == [4, 3]
    assert value_at(storage.inner, 3) == 3.0
    assert value_at(storage.inner, 4) == 4.0


@pytest.mark.parametrize(
    "wrong",
    [{"weights": object()}, {"config": object()}, {"assets": ["/nowhere"]}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_manager_that_could_not_be_made_leaves_the_handlers_as_they_were(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with pytest.raises(holdfast.HoldfastError):
        opened(tmp_path, save=OnSignal("SIGTERM"), **wrong)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


# What stays


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("mode", MODES)
def test_what_no_policy_keeps_goes_after_the_next_save(tmp_path: Path, mode: Any) -> None:
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.2, 6: 0.9}
    trained(
        tmp_path,
        6,
        start=1,
        mode=mode,
        save=Every(steps=1),
        keep=KeepLast(2) | KeepBest("loss", 1) | KeepEvery(steps=4),
        metrics=lambda step: {"loss": losses[step]},
    )
    assert steps_of(tmp_path) == [6, 5, 4, 2]
    assert folders(tmp_path) == [f"step-00000000{step}" for step in (2, 4, 5, 6)]
    assert os.readlink(tmp_path / "latest") == "step-000000006"
    assert os.readlink(tmp_path / "best") == "step-000000002"


def test_what_would_be_done_is_shown_with_its_reasons_and_not_done(tmp_path: Path) -> None:
    trained(tmp_path, 4, start=1, save=Every(steps=1), metrics=lambda step: {"loss": 1 / step})
    with opened(tmp_path, keep=KeepLast(1) | KeepBest("loss", 1, "max")) as manager:
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        planned = manager.retention()
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
        assert [(decision.step, decision.keep) for decision in planned] == [
            (4, True),
            (3, False),
            (2, False),
            (1, True),
        ]
        assert "among the last 1" in planned[0].reasons
        assert "loss" in planned[3].reasons[0]
        assert planned == holdfast.retention(tmp_path, KeepLast(1) | KeepBest("loss", 1, "max"))
        assert manager.prune() == planned
    assert steps_of(tmp_path) == [4, 1]


@pytest.mark.parametrize("mode", MODES)
def test_prune_does_it_now_and_waits_for_what_is_under_way(tmp_path: Path, mode: Any) -> None:
    with opened(tmp_path, mode=mode, keep=KeepLast(1)) as manager:
        for step in (1, 2, 3):
            manager.save(step)
        decided = manager.prune()
        assert steps_of(tmp_path) == [3]
        assert decided[0].step == 3
        assert decided[0].keep
        assert [decision.step for decision in manager.prune()] == [3]
        assert sorted({event.step for event in manager.events if event.kind == "pruned"}) == [1, 2]


def test_without_keep_prune_keeps_everything(tmp_path: Path) -> None:
    trained(tmp_path, 3, start=1, save=Every(steps=1))
    with opened(tmp_path) as manager:
        assert all(decision.keep for decision in manager.prune())
    assert steps_of(tmp_path) == [3, 2, 1]


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("mode", MODES)
def test_what_is_being_read_stays_until_the_reader_is_done(tmp_path: Path, mode: Any) -> None:
    with opened(tmp_path, mode=mode, keep=KeepLast(1)) as manager:
        manager.save(1, wait=True)
        with reading(LocalStorage(tmp_path), "step-000000001"):
            manager.save(2, wait=True)
            decided = manager.prune()
            assert steps_of(tmp_path) == [2, 1]
            assert {decision.step: decision.reasons for decision in decided}[1] == ("a process is reading it",)
            assert value_at(tmp_path, 1) == 0.0
        manager.prune()
        assert folders(tmp_path) == ["step-000000002"]


@pytest.mark.guarantee("G4")
def test_what_is_being_read_stays_also_when_its_pruner_died_and_another_one_comes(tmp_path: Path) -> None:
    """A reader came between the pruner's look and the un-commit, and read the manifest; then the pruner was killed."""
    trained(tmp_path, 2, start=1, save=Every(steps=1))
    with reading(LocalStorage(tmp_path), "step-000000001"):
        (tmp_path / "step-000000001" / "manifest.json").unlink()
        with opened(tmp_path, save=Every(steps=100)) as manager:
            manager.prune()
        assert list((tmp_path / "step-000000001").glob("*.safetensors")), "somebody reads these bytes"
    with opened(tmp_path, save=Every(steps=100)) as manager:
        manager.prune()
    # The word that it was given up stays: the process that wrote it, this one, lives.
    assert not list((tmp_path / "step-000000001").glob("*.safetensors"))


@pytest.mark.guarantee("G4")
def test_a_restart_removes_nothing_before_it_knows_what_is_sound(tmp_path: Path) -> None:
    """Killed between the commit of step 2 and the removal of step 1; then a byte of step 2 goes bad."""
    trained(tmp_path, 2, start=1, save=Every(steps=1))
    damage(tmp_path / "step-000000002")
    weights = Weights(-1.0)
    with opened(tmp_path, weights, save=Every(steps=1), keep=KeepLast(1)) as manager:
        manager._run.housekeeper.wait()
        assert manager.restore().step == 1
    assert weights.value == 1.0


def test_a_restart_removes_what_the_last_run_had_no_time_to_and_clears_its_debris(tmp_path: Path) -> None:
    trained(tmp_path, 3, start=1, save=Every(steps=1))
    (tmp_path / "step-000000001" / "manifest.json").unlink()  # un-committed, and killed there
    shutil.copytree(tmp_path / "step-000000003", half := tmp_path / "step-000000004")
    (half / "manifest.json").unlink()  # written, and killed there
    for folder in (tmp_path / "step-000000001", half):
        by_a_process_that_is_gone(folder)
    with opened(tmp_path, save=Every(steps=1), keep=KeepLast(1)) as manager:
        assert manager.restore().step == 3
        manager.prune()
        assert folders(tmp_path) == ["step-000000003"]


def by_a_process_that_is_gone(folder: Path) -> None:
    """As if another process of this machine had begun an attempt, and were dead."""
    record = json.loads((folder / "attempt.json").read_text())
    del record["digest"]
    (folder / "attempt.json").write_text(json.dumps({**record, "process": 2**22 + 1, "birth": 1}))


def test_an_attempt_of_a_process_that_lives_is_cleared_but_stays_closed(tmp_path: Path) -> None:
    """Without the word that it was given up, whoever began it could still commit it."""
    trained(tmp_path, 2, start=1, save=Every(steps=1))
    (tmp_path / "step-000000001" / "manifest.json").unlink()
    with opened(tmp_path, save=Every(steps=1)) as manager:
        manager.prune()
    assert sorted(path.name for path in (tmp_path / "step-000000001").iterdir()) == ["attempt.json", "manifest.json"]
    assert steps_of(tmp_path) == [2]
    with pytest.raises(CheckpointNotFoundError):
        holdfast.resolve(tmp_path, 1)


@pytest.mark.guarantee("G4")
def test_what_the_training_continues_from_stays_whatever_is_newer(tmp_path: Path) -> None:
    trained(tmp_path, 5, start=1, save=Every(steps=1))
    with opened(tmp_path, keep=KeepLast(1)) as manager:
        manager.restore(2)
        decided = {decision.step: decision for decision in manager.prune()}
        assert decided[2].reasons == ("this training continues from it",)
        assert steps_of(tmp_path) == [5, 2]


def test_a_component_that_is_attached_late_finds_its_state_though_others_were_saved_since(tmp_path: Path) -> None:
    late = Weights(7.0)
    with holdfast.CheckpointManager(tmp_path, {"weights": Weights(), "late": late}, rng=False, mode="sync") as manager:
        manager.save(1)
    late = Weights(0.0)
    with opened(tmp_path, keep=KeepLast(1)) as manager:
        manager.restore()
        for step in (2, 3):
            manager.save(step)
        manager.prune()
        assert manager.attach("late", late)
    assert late.value == 7.0


# Links


def test_links_are_made_anew_when_they_are_gone_or_stale(tmp_path: Path) -> None:
    trained(tmp_path, 3, start=1, save=Every(steps=1), keep=KeepBest("loss", 9), metrics=lambda step: {"loss": step})
    (tmp_path / "latest").unlink()
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-000000003")
    with opened(tmp_path, save=Every(steps=100), keep=KeepBest("loss", 9)) as manager:
        manager.prune()
    assert os.readlink(tmp_path / "latest") == "step-000000003"
    assert os.readlink(tmp_path / "best") == "step-000000001"


@pytest.mark.parametrize("mode", MODES)
def test_without_links_there_are_none(tmp_path: Path, mode: Any) -> None:
    trained(tmp_path, 2, start=1, mode=mode, save=Every(steps=1), keep=KeepBest("loss", 1), links=False)
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == []


def test_a_template_names_each_checkpoint_that_is_there(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    trained(
        run,
        3,
        start=1,
        save=Every(steps=1),
        keep=KeepLast(2),
        links="{name}--{loss:.3f}-{step}-{seen}",
        metrics=lambda step: {"loss": step / 8},
    )
    links = {path.name: os.readlink(path) for path in run.iterdir() if path.is_symlink()}
    assert links == {
        "latest": "step-000000003",
        "tiny--0.250-2-2": "step-000000002",
        "tiny--0.375-3-3": "step-000000003",
    }


# What is said later


@pytest.mark.parametrize("mode", MODES)
def test_best_means_what_is_kept_as_the_best_also_to_those_who_only_read(tmp_path: Path, mode: Any) -> None:
    keep = KeepBest("acc", 1, mode="max") | KeepBest("loss", 1)
    with opened(tmp_path, mode=mode, keep=keep) as manager:
        for step, acc in ((1, 0.5), (2, 0.9), (3, 0.1)):
            manager.save(step, metrics={"acc": acc, "loss": step})
        manager.prune()
        assert [manager.peek(selector).step for selector in ("best", "best:acc", "best:loss", "best:acc:min")] == [
            2, 2, 1, 3,
        ]  # fmt: skip
    assert os.readlink(tmp_path / "best") == "step-000000002"
    assert holdfast.resolve(tmp_path, "best").step == 2
    assert holdfast.resolve(f"{tmp_path}@best:acc").step == 2
    with opened(tmp_path, keep=KeepBest("acc", 1, mode="min")) as manager:
        assert manager.restore("best").step == 3, "what this training keeps by counts from its start"


@pytest.mark.parametrize("mode", MODES)
def test_who_starts_afresh_loses_nothing_of_the_start_before(tmp_path: Path, mode: Any) -> None:
    trained(tmp_path, 5, start=1001, mode=mode, save=Every(steps=1), keep=KeepLast(3))
    trained(tmp_path, 5, start=1, mode=mode, save=Every(steps=1), keep=KeepLast(2), resume="never")
    assert steps_of(tmp_path) == [5, 4, 1005, 1004, 1003]
    with opened(tmp_path, mode=mode, keep=KeepLast(2)) as manager:
        reasons = {decision.step: decision.reasons for decision in manager.retention()}
        assert reasons[1005] == ("of another start of the run",)
        manager.restore(4)
        manager.save(6)
        manager.prune()
    assert steps_of(tmp_path) == [6, 5, 4, 1005, 1004, 1003], "a line that was left stays, with 5"
    holdfast.prune(tmp_path, KeepLast(2))
    assert steps_of(tmp_path) == [6, 4], "who asks for it by name has it removed"


def test_who_asks_for_the_best_by_a_metric_that_is_misspelled_is_told_which_there_are(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(1)
    with pytest.raises(CheckpointNotFoundError, match=r"'best:loss' finds no checkpoint.*no checkpoint has a metric"):
        holdfast.resolve(tmp_path, "best:loss")
    with opened(tmp_path) as manager:
        manager.save(2, metrics={"val_loss": 1.0, "acc": 0.5})
    with pytest.raises(CheckpointNotFoundError, match="the metrics there are acc, val_loss"):
        holdfast.resolve(tmp_path, "best:loss")


def test_who_prunes_by_a_metric_that_is_misspelled_is_told(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        for step in range(3):
            manager.save(step, metrics={"val_loss": step})
    for ask in (holdfast.prune, holdfast.retention):
        with pytest.raises(UsageError, match=r"no checkpoint has the metric 'vall_loss'.*there are: val_loss"):
            ask(tmp_path, KeepBest("vall_loss", 1))
    assert steps_of(tmp_path) == [2, 1, 0]


def test_links_that_would_lead_nowhere_go_also_where_none_are_wanted(tmp_path: Path) -> None:
    with opened(tmp_path, keep=KeepLast(1) | KeepBest("v")) as manager:
        manager.save(1, metrics={"v": 1})
        manager.prune()
    assert (tmp_path / "best").is_symlink()
    with opened(tmp_path, keep=KeepLast(1), links=False) as manager:
        manager.restore()
        manager.save(2)
        manager.prune()
    assert steps_of(tmp_path) == [2]
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("mode", MODES)
def test_the_best_so_far_stays_after_a_resume_in_which_nothing_is_better(tmp_path: Path, mode: Any) -> None:
    with opened(tmp_path, mode=mode, keep=KeepBest("loss", 1)) as manager:
        for step, loss in ((1, 0.25), (2, 0.5)):
            manager.save(step, metrics={"loss": loss}, wait=True)
    with opened(tmp_path, mode=mode, keep=KeepBest("loss", 1)) as manager:
        assert manager.restore().step == 2
        for step in (3, 4):
            manager.save(step, metrics={"loss": float(step)}, wait=True)
        manager.prune()
        assert steps_of(tmp_path) == [4, 1]
        assert os.readlink(tmp_path / "best") == "step-000000001"
        assert manager.peek("best").step == 1
        manager.save(5, metrics={"loss": 0.125}, wait=True)
        manager.prune()
    assert steps_of(tmp_path) == [5]


@pytest.mark.parametrize("mode", MODES)
def test_late_metrics_change_the_ranking_the_link_and_the_selector(tmp_path: Path, mode: Any) -> None:
    with opened(tmp_path, mode=mode, keep=KeepBest("loss", 1)) as manager:
        for step in (1, 2):
            manager.save(step, metrics={"loss": 1.0 + step}, wait=True)
        assert steps_of(tmp_path) == [2, 1]
        assert manager.report(2, {"loss": 0.5, "accuracy": 3})
        manager.prune()
        assert os.readlink(tmp_path / "best") == "step-000000002"
        assert steps_of(tmp_path) == [2]
        assert holdfast.resolve(tmp_path, "best:loss").metrics == {"loss": 0.5, "accuracy": 3}


def test_metrics_may_come_while_the_save_is_still_under_way(tmp_path: Path) -> None:
    storage = SlowStorage(MemoryStorage("memory://slow"), 0.02)
    with opened("run", mode="async", storage=storage) as manager:
        manager.save(1)
        assert manager.is_pending
        assert manager.report(1, {"loss": 0.25})
    assert holdfast.resolve(storage.inner, 1).metrics == {"loss": 0.25}


def test_metrics_of_a_step_that_is_not_there_are_no_error_and_said_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as manager:
        manager.save(1)
        with caplog.at_level(logging.WARNING, "holdfast"):
            assert manager.report(2, {"loss": 1.0}) is False
    assert "step 2" in caplog.text


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("mode", MODES)
def test_a_tagged_checkpoint_stays_until_the_tag_is_taken_back(tmp_path: Path, mode: Any) -> None:
    with opened(tmp_path, mode=mode, keep=KeepLast(1)) as manager:
        manager.save(1, tag="release", wait=True)
        manager.save(2)
        manager.tag("latest", "candidate")
        manager.save(3, wait=True)
        manager.prune()
        assert steps_of(tmp_path) == [3, 2, 1]
        assert holdfast.resolve(tmp_path, "candidate").step == 2
        assert holdfast.resolve(tmp_path, 1).tags == ("release",)
        with pytest.raises(CheckpointNotFoundError):
            manager.untag(1, "candidate")
        manager.untag("release", "release")
        manager.untag(2, "candidate")
        manager.prune()
        assert steps_of(tmp_path) == [3]
        with pytest.raises(CheckpointNotFoundError):
            manager.tag(1, "gone")


class Halting(LocalStorage):
    """A disk that stands still in the middle of the removal of step 1, until it may go on or a second is over: what is
    said meanwhile waits for the removal."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.halted, self.may_go_on = threading.Event(), threading.Event()

    def delete(self, key: str) -> None:
        if key.startswith("step-000000001/"):
            self.halted.set()
            self.may_go_on.wait(1)
        super().delete(key)


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("how", ["tag", "report"])
def test_what_is_said_while_others_are_being_removed_counts(tmp_path: Path, how: str) -> None:
    """`tag` has returned: from then on that checkpoint stays, whatever the housekeeper has in mind."""
    trained(tmp_path, 3, start=1, save=Every(steps=1))
    storage = Halting(tmp_path)
    with opened(tmp_path, storage=storage, keep=KeepLast(1) | KeepBest("loss", 1)) as manager:
        manager.restore()
        manager.save(4, metrics={"loss": 5.0})
        assert storage.halted.wait(300)
        if how == "tag":
            manager.tag(2, "precious")
        else:
            assert manager.report(2, {"loss": 1.0})
        storage.may_go_on.set()
        manager.prune()
    assert steps_of(tmp_path) == [4, 2]


class Vanishing(LocalStorage):
    """Step 1 is removed by somebody right after its manifest was read once more."""

    about_to_go = False

    def open(self, key: str) -> Any:
        source = super().open(key)
        if self.about_to_go and key == "step-000000001/manifest.json":
            self.about_to_go = False
            self.delete(key)
        return source


@pytest.mark.parametrize("selector", [1, "step-000000001", "precious"])
def test_a_tag_on_what_was_removed_meanwhile_says_of_which_step(tmp_path: Path, selector: str | int) -> None:
    storage = Vanishing(tmp_path)
    with opened(tmp_path, storage=storage) as manager:
        manager.save(1, tag="precious")
        manager.save(2)
        storage.about_to_go = True
        with pytest.raises(CheckpointNotFoundError, match="step 1: step-000000001 was removed meanwhile") as caught:
            manager.tag(selector, "gold")
        assert caught.value.step == 1
        assert not isinstance(caught.value, StorageError)


def test_a_report_on_what_was_removed_meanwhile_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = Vanishing(tmp_path)
    with opened(tmp_path, storage=storage) as manager, caplog.at_level(logging.WARNING, "holdfast"):
        manager.save(1)
        manager.save(2)
        storage.about_to_go = True
        assert manager.report(1, {"loss": 1.0}) is False
    assert "step 1 any more" in caplog.text


def test_tags_and_late_metrics_are_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, save=Every(steps=1)) as manager:
        manager.step(1, metrics={"loss": 2.0})
        manager.tag(1, "first")
        manager.tag(1, "second")
        manager.untag(1, "first")
        manager.report(1, {"loss": 1.0})
    with opened(tmp_path) as manager:
        (found,) = manager.checkpoints()
        assert (found.tags, dict(found.metrics)) == (("second",), {"loss": 1.0})
        assert manager.restore("second").step == 1


def test_a_restore_says_what_was_said_later(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(1, metrics={"loss": 2.0})
        manager.tag(1, "first")
        manager.report(1, {"loss": 1.0})
        start = manager.restore()
    assert dict(start.metrics) == {"loss": 1.0}
    assert start.checkpoint is not None
    assert start.checkpoint.tags == ("first",)


# Whose run it is


@pytest.mark.guarantee("G13")
def test_a_run_that_another_process_writes_is_refused_when_the_manager_is_made_and_by_the_first_save(
    tmp_path: Path,
) -> None:
    def hold() -> Any:
        manager = opened(tmp_path, save=Every(steps=1))
        manager.step(1)
        return manager

    other = in_another_process(hold)
    try:
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(RunInUseError) as raised:
            opened(tmp_path, save=Every(steps=1) | OnSignal("SIGTERM"))
        assert signal.getsignal(signal.SIGTERM) is before
        assert (raised.value.process, raised.value.host) == (other, os.uname().nodename)
        assert raised.value.age_seconds >= 0
        with opened(tmp_path) as manager:
            assert manager.restore().step == 1, "to read needs no permission"
            with pytest.raises(RunInUseError):
                manager.save(2)
            with pytest.raises(RunInUseError):
                manager.prune()
        assert steps_of(tmp_path) == [1]
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    with opened(tmp_path, save=Every(steps=1)) as manager:
        manager.restore()
        manager.step(2)
    assert steps_of(tmp_path) == [2, 1]


def in_another_process(work: Callable[[], Any]) -> int:
    """A child that has done the work and lives on."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = work()
            os.write(tell, b"1")
            while True:
                signal.pause()
        finally:
            del kept
            os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"1"
    os.close(told)
    return child


@pytest.mark.guarantee("G13")
def test_of_two_managers_of_one_process_the_later_one_writes_and_the_earlier_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path, save=Every(steps=1))
    first.step(1)
    second = opened(tmp_path, save=Every(steps=1))
    assert "did not close it" in caplog.text
    second.restore()
    second.step(2)
    with pytest.raises(RunInUseError):
        first.step(3)
    first.close()
    second.step(4)
    second.close()
    assert steps_of(tmp_path) == [4, 2, 1]


class Meeting(LocalStorage):
    """A disk on which two that want to lay down a claim to the run meet, where there are two."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.barrier = threading.Barrier(2)

    def entries(self, folder: str) -> Any:
        found = super().entries(folder)
        if folder == "lease" and not found:
            try:
                self.barrier.wait(1.0)
            except threading.BrokenBarrierError:
                pass
        return found


@pytest.mark.guarantee("G13")
def test_a_manager_does_not_take_its_run_from_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`tag` has the housekeeper become the writer, behind; `save` does the same, in front."""
    trained(tmp_path, 1, start=1, save=Every(steps=1))
    for old in (tmp_path / "lease").iterdir():
        old.unlink()
    with opened(tmp_path, storage=Meeting(tmp_path)) as manager:
        manager.tag(1, "one")
        manager.save(2)
        manager.prune()
    assert "did not close it" not in caplog.text
    assert len(list((tmp_path / "lease").glob("*.json"))) == 1


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("how", ["tag", "report"])
def test_who_only_says_something_of_a_checkpoint_does_not_keep_others_from_training(tmp_path: Path, how: str) -> None:
    """An evaluation beside the training, or before it: it lives on when the training starts."""
    trained(tmp_path, 1, start=1, save=Every(steps=1))

    def evaluate() -> Any:
        manager = opened(tmp_path)
        manager.restore()
        if how == "tag":
            manager.tag(1, "evaluated")
        else:
            manager.report(1, {"accuracy": 0.5})
        manager._run.housekeeper.wait()
        return manager

    other = in_another_process(evaluate)
    try:
        trained(tmp_path, 1, start=2, save=Every(steps=1))
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert steps_of(tmp_path) == [2, 1]


# How it comes back


def test_resume_required_wants_a_checkpoint_and_never_takes_none(tmp_path: Path) -> None:
    with opened(tmp_path, resume="required") as manager:
        assert manager.should_load(), "a loop that does not restore then would start afresh without a word"
        with pytest.raises(CheckpointNotFoundError):
            manager.restore()
    trained(tmp_path, 3, start=1, save=Every(steps=1))
    weights = Weights(-1.0)
    with opened(tmp_path, weights, resume="required") as manager:
        assert manager.should_load()
        assert manager.restore().step == 3
    with opened(tmp_path, weights := Weights(-1.0), resume="never", save=Every(steps=1)) as manager:
        assert not manager.should_load()
        start = manager.restore()
        assert (start.resumed, start.next_step, weights.value) == (False, 0, -1.0)
        weights.weight.fill_(10.0)
        manager.step(1)
    assert holdfast.resolve(tmp_path).folder == "step-000000001.2"
    assert value_at(tmp_path) == 10.0
    assert steps_of(tmp_path) == [1, 3, 2, 1], "the old line is not in its way, and is not lost"


def test_should_load_is_so_also_of_what_is_damaged(tmp_path: Path) -> None:
    trained(tmp_path, 1, start=1, save=Every(steps=1))
    damage(tmp_path / "step-000000001")
    with opened(tmp_path) as manager:
        assert manager.should_load()
        with pytest.raises(CorruptCheckpointError):
            manager.restore()


@pytest.mark.parametrize("mode", MODES)
def test_a_rollback_goes_on_in_a_line_of_its_own(tmp_path: Path, mode: Any) -> None:
    trained(tmp_path, 5, start=1, mode=mode, save=Every(steps=1))
    weights = Weights(-1.0)
    with opened(tmp_path, weights, mode=mode, save=Every(steps=1)) as manager:
        start = manager.restore(2)
        assert (start.resumed, start.next_step, weights.value) == (True, 3, 2.0)
        assert holdfast.resolve(tmp_path).step == 5, "until the new line has something"
        weights.weight.fill_(30.0)
        manager.step(3)
        manager.wait()
        assert holdfast.resolve(tmp_path).folder == "step-000000003.2"
        weights.weight.fill_(40.0)
        manager.step(4)
    assert [(found.step, found.folder) for found in holdfast.checkpoints(tmp_path)] == [
        (4, "step-000000004.2"),
        (3, "step-000000003.2"),
        (5, "step-000000005"),
        (4, "step-000000004"),
        (3, "step-000000003"),
        (2, "step-000000002"),
        (1, "step-000000001"),
    ]
    assert os.readlink(tmp_path / "latest") == "step-000000004.2"
    assert value_at(tmp_path) == 40.0
    assert value_at(tmp_path, 3) == 30.0
    third = holdfast.resolve(tmp_path / "step-000000003.2")
    assert third.parent == holdfast.resolve(tmp_path / "step-000000002").digest
    with opened(tmp_path, mode=mode, save=Every(steps=1), keep=KeepLast(3)) as manager:
        assert manager.restore().next_step == 5
        manager.step(5)
    kept = [found.folder for found in holdfast.checkpoints(tmp_path)]
    last = ["step-000000005.3", "step-000000004.2", "step-000000003.2"]
    left = ["step-000000005", "step-000000004", "step-000000003"]
    assert kept == [*last, *left], "the last three of the line, and what it went back from"


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_newest_one_is_passed_over_kept_aside_and_not_counted(tmp_path: Path, mode: Any) -> None:
    trained(tmp_path, 3, start=1, mode=mode, save=Every(steps=1))
    damage(tmp_path / "step-000000003")
    weights = Weights(-1.0)
    with opened(tmp_path, weights, mode=mode, save=Every(steps=1)) as manager:
        start = manager.restore()
        assert (start.step, weights.value) == (2, 2.0)
        assert len(start.rejected) == 1
        assert start.rejected[0].startswith("step-000000003: ")
    with opened(tmp_path, weights, mode=mode, save=Every(steps=1), keep=KeepLast(2)) as manager:
        start = manager.restore()
        assert start.step == 2
        assert "found damaged before" in start.rejected[0]
        assert steps_done(manager, weights, range(3, 5)) == []
        manager.wait()
        decided = {decision.folder: decision for decision in manager.prune()}
    assert sorted(folder for folder, decision in decided.items() if decision.keep) == [
        "step-000000003",
        "step-000000003.2",
        "step-000000004",
    ]
    assert "damaged, kept for inspection" in decided["step-000000003"].reasons[0]
    assert folders(tmp_path) == ["step-000000003", "step-000000003.2", "step-000000004"]
    assert value_at(tmp_path) == 4.0
    assert value_at(tmp_path, 3) == 3.0, "the sound one of that step"


@pytest.mark.guarantee("G4")
def test_a_full_disk_costs_the_save_and_nothing_that_is_kept(tmp_path: Path) -> None:
    storage = FullStorage(MemoryStorage("memory://full"), 4 << 20)
    with opened("run", storage=storage, save=Every(steps=1), keep=KeepLast(1)) as manager:
        manager.step(1)
        storage.room_bytes = 100
        with pytest.raises(StorageError):
            manager.step(2)
        assert steps_of(storage.inner) == [1]
        storage.room_bytes = 4 << 20
        manager.step(3)
    assert steps_of(storage.inner) == [3]


class SavesItself:
    """A component whose state saves the manager that is saving it."""

    manager: holdfast.CheckpointManager | None = None

    def state_dict(self) -> dict[str, int]:
        if self.manager is not None:
            with pytest.raises(holdfast.UsageError, match=r"save\(\) was called in the middle of save\(\)"):
                self.manager.save(7)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_inside_of_a_save_is_refused_and_the_outer_one_is_right(tmp_path: Path, mode: str) -> None:
    component = SavesItself()
    with holdfast.CheckpointManager(tmp_path, {"own": component}, mode=mode) as manager:
        component.manager = manager
        assert manager.save(1).wait().step == 1
        assert manager.save(2).wait().step == 2
        assert manager.save(2, resave=True, components=("own",)).wait().step == 2
        assert [found.step for found in manager.checkpoints()] == [2, 2, 1]


class Calls:
    """A component that calls something in its `state_dict` or its `load_state_dict`, and notes what that raises."""

    def __init__(self) -> None:
        self.in_state_dict: Callable[[], object] = lambda: None
        self.in_load: Callable[[], object] = lambda: None
        self.errors: list[str] = []

    def _call(self, act: Callable[[], object]) -> None:
        try:
            act()
        except holdfast.UsageError as error:
            self.errors.append(str(error))

    def state_dict(self) -> dict[str, int]:
        self._call(self.in_state_dict)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._call(self.in_load)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("size", [3, 1 << 22])
def test_no_call_inside_of_another_mixes_two_states(tmp_path: Path, mode: str, size: int) -> None:
    """A checkpoint that such a call makes has some components of one step and some of another, with right digests."""
    model, component = torch.nn.Linear(size, 1, bias=False), Calls()
    torch.nn.init.ones_(model.weight)
    with holdfast.CheckpointManager(tmp_path, {"calls": component, "model": model}, mode=mode) as manager:
        manager.save(1).wait()
        torch.nn.init.zeros_(model.weight)
        component.in_state_dict = lambda: manager.restore(1)
        manager.save(2).wait()
        assert not model.weight.any()
        component.in_state_dict = lambda: manager.attach("more", Calls())
        manager.save(3).wait()
        component.in_state_dict = lambda: None
        component.in_load = lambda: manager.save(50)
        manager.restore(1)
        component.in_load = lambda: manager.restore(2)
        manager.restore(1)
        component.in_load = lambda: manager.save(3, resave=True, components=("model",))
        manager.restore(1)
        assert model.weight.all()
        assert [found.step for found in manager.checkpoints()] == [3, 2, 1]
    texts = ["restore() was called in the middle of save()", "attach() was called in the middle of save()"]
    texts += [f"{name}() was called in the middle of restore()" for name in ("save", "restore", "save")]
    assert [text in error for text, error in zip(texts, component.errors, strict=True)] == [True] * 5


@pytest.mark.guarantee("G6")
def test_saves_of_a_callback_and_of_the_training_take_turns(tmp_path: Path) -> None:
    """Two of them at once took each other's place, and neither was committed."""
    holder = {"step": torch.zeros(1)}
    handles: list[holdfast.SaveHandle] = []

    def also_save(event: holdfast.Event) -> None:
        if event.kind == "committed" and event.step is not None and event.step < 1000:
            handles.append(manager.save(1000 + event.step))

    state = {"holder": holder}
    with holdfast.CheckpointManager(tmp_path, state, mode="async", on_event=also_save, timeout=60) as manager:
        for step in range(1, 11):
            holder["step"].fill_(step)
            handles.append(manager.save(step))
        manager.wait()
    found = {handle.wait().step for handle in handles}
    assert found == {one.step for one in holdfast.checkpoints(tmp_path)} == {*range(1, 11), *range(1001, 1011)}


@pytest.mark.guarantee("G2")
def test_a_wait_and_a_restore_wait_for_the_save_of_a_callback_too(tmp_path: Path) -> None:
    """A restore beside it would change what it still copies."""
    holder = {"step": torch.zeros(1)}

    def also_save(event: holdfast.Event) -> None:
        if event.kind == "committed" and event.step is not None and event.step < 1000:
            manager.save(1000 + event.step)

    state = {"holder": holder}
    with holdfast.CheckpointManager(tmp_path, state, mode="async", on_event=also_save, timeout=60) as manager:
        for step in range(1, 6):
            manager.save(step)
            manager.wait()
            assert not manager.is_pending
            manager.save(100 + step)
            assert manager.restore().step == 1100 + step


@pytest.mark.parametrize("wait", ["handle", "manager", "save", "restore", "close", "part"])
def test_a_callback_that_waits_for_its_own_save_is_refused_and_does_not_hang(wait: str, tmp_path: Path) -> None:
    holder, errors = {"step": torch.zeros(1)}, list[str]()

    def save_and_wait(event: holdfast.Event) -> None:
        if event.kind != "committed" or event.step != 1:
            return
        handle = manager.save(2)
        waits: dict[str, Callable[[], object]] = {
            "handle": handle.wait,
            "manager": manager.wait,
            "save": lambda: manager.save(3),
            "restore": manager.restore,
            "close": manager.close,
            "part": lambda: manager.save(2, resave=True, components=["holder"]),
        }
        try:
            waits[wait]()
        except UsageError as error:
            errors.append(str(error))

    with holdfast.CheckpointManager(tmp_path, {"holder": holder}, mode="async", on_event=save_and_wait) as manager:
        manager.save(1)
        manager.wait()
        assert ["begins when the callback has returned" in error for error in errors] == [True]
        assert [one.step for one in manager.checkpoints()] == [2, 1]
        manager.save(4).wait()
    assert holdfast.resolve(tmp_path).step == 4


@pytest.mark.parametrize("call", ["close", "prune"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_callback_of_a_removal_cannot_wait_for_the_removals(mode: Any, call: str, tmp_path: Path) -> None:
    errors = []

    def close(event: holdfast.Event) -> None:
        if event.kind == "pruned":
            try:
                getattr(manager, call)()
            except UsageError as error:
                errors.append(str(error))

    holder, keep = {"step": torch.zeros(1)}, holdfast.KeepLast(1)
    with holdfast.CheckpointManager(tmp_path, {"holder": holder}, mode=mode, keep=keep, on_event=close) as manager:
        for step in (1, 2):
            manager.save(step).wait()
        manager._run.housekeeper.wait()
        assert ["the thread that it runs in" in error for error in errors] == [True]
        manager.save(3).wait()


def test_a_manager_is_not_closed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    component = Calls()
    with holdfast.CheckpointManager(tmp_path, {"calls": component}, mode="async") as manager:
        component.in_state_dict = manager.close
        manager.save(1).wait()
        assert "close() was called in the middle of save()" in component.errors[0]
        component.in_state_dict = lambda: None
        manager.save(2).wait()


def test_a_save_that_waits_while_another_thread_closes_the_manager_is_refused(tmp_path: Path) -> None:
    component, errors = Calls(), []

    def save() -> None:
        try:
            manager.save(2)
        except ClosedError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=lambda: manager.close()), threading.Thread(target=save)]
    manager = holdfast.CheckpointManager(tmp_path, {"calls": component}, mode="async")

    def start_both() -> None:
        for thread in threads:
            thread.start()
            thread.join(0.2)

    component.in_state_dict = start_both
    manager.save(1)
    for thread in threads:
        thread.join(60)
    assert len(errors) == 1
    assert [one.step for one in holdfast.checkpoints(tmp_path)] == [1]


def test_weights_of_a_run_are_those_of_the_save_that_this_process_has_pending(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 1000)
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}, mode="async") as manager:
        for step in range(1, 6):
            with torch.no_grad():
                model.bias.fill_(step)
            manager.save(step)
            found = manager.peek() if step % 2 else holdfast.peek(tmp_path / "run")
            assert found is not None
            assert found.step == step
            manager.save(step, resave=True)
            other = torch.nn.Linear(1000, 1000)
            if step % 2:
                holdfast.load_weights(other, tmp_path / "run")
            else:
                target = tmp_path / f"{step}.safetensors"
                holdfast.export(tmp_path / "run", target, format="safetensors")
                holdfast.load_weights(other, target)
            assert other.bias[0].item() == step


def test_a_save_of_another_thread_waits_for_the_restore_that_is_under_way(tmp_path: Path) -> None:
    component, other = Calls(), {"value": torch.ones(1)}
    thread = threading.Thread(target=lambda: manager.save(2).wait())
    with holdfast.CheckpointManager(tmp_path, {"calls": component, "other": other}, mode="async") as manager:
        manager.save(1).wait()
        other["value"].zero_()
        component.in_load = lambda: (thread.start(), thread.join(0.2))
        manager.restore()
        thread.join(60)
        component.in_load = lambda: None
        other["value"].zero_()
        manager.restore(2)
        assert other["value"].item() == 1, "all of it is of after the restore"


def test_a_restore_of_another_run_waits_for_its_save_in_the_same_process(tmp_path: Path) -> None:
    holder = {"value": torch.zeros(1 << 22)}
    with holdfast.CheckpointManager(tmp_path / "a", {"holder": holder}, mode="async") as first:
        first.save(1).wait()
        with holdfast.CheckpointManager(tmp_path / "b", {"holder": holder}, mode="async") as second:
            for step in range(2, 6):
                holder["value"].fill_(step)
                first.save(step)
                assert second.restore(tmp_path / "a").checkpoint.step == step
                assert holder["value"][-1].item() == step


class RemovedStorage(LocalStorage):
    """A storage of which another process removes the folder of a save that is under way, or its tensors, cuts them
    short or puts another file in their place, once its files are written and looked at."""

    doomed = ""
    harm = "the folder"

    def _stamp(self, key: str) -> tuple[int, str]:
        found = super()._stamp(key)
        # The values are written, and looked at, after the tensors.
        if self.doomed and key == f"{self.doomed}/shared.json":
            path, self.doomed = Path(self.url) / self.doomed, ""
            if self.harm == "the folder":
                shutil.rmtree(path)
            elif self.harm == "a file":
                next(path.glob("*.safetensors")).unlink()
            elif self.harm == "a part of a file":
                os.truncate(next(path.glob("*.safetensors")), 100)
            else:
                tensors = next(path.glob("*.safetensors"))
                shutil.copy(tensors, path / "copy")
                os.replace(path / "copy", tensors)
        return found


@pytest.mark.guarantee("G4")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        ("the folder", "step-000000002 was removed while the save was written"),
        ("a file", "rank-00000.safetensors of rank 0 is not there any more"),
        ("a part of a file", "rank-00000.safetensors of rank 0 was changed after it was written"),
        ("a copy in its place", "rank-00000.safetensors of rank 0 was changed after it was written"),
    ],
)
def test_a_save_whose_files_were_removed_by_hand_fails_and_costs_no_checkpoint(
    tmp_path: Path, mode: str, harm: str, problem: str
) -> None:
    storage, holder = RemovedStorage(tmp_path), {"value": torch.ones(3)}
    storage.harm = harm
    with holdfast.CheckpointManager(
        "run", {"holder": holder}, storage=storage, mode=mode, keep=KeepLast(1), rng=False
    ) as manager:
        manager.save(1).wait()
        storage.doomed = "step-000000002"
        with pytest.raises(SaveFailedError, match=problem):
            manager.save(2).wait()
        assert [found.step for found in manager.checkpoints()] == [1]
        assert manager.restore().step == 1
        manager.save(3).wait()
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [3]
    assert holdfast.verify(tmp_path).ok


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_thread_of_a_manager_is_left_when_close_returns(
    mode: Any, tmp_path: Path, new_threads: Callable[[], list[str]]
) -> None:
    for _ in range(5):
        manager = holdfast.CheckpointManager(
            tmp_path, {"model": torch.nn.Linear(3, 3)}, mode=mode, keep=holdfast.KeepLast(1)
        )
        manager.restore()
        manager.save(1)
        manager.save(2)
        manager.close()
        assert new_threads() == []
