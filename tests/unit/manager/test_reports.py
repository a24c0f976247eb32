"""Metrics that are reported while their save is pending: written as soon as it is committed, or an error."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StorageError
from holdfast.storage.local.local import LocalStorage
from tests.sizes import pairs

_PATIENCE_SECONDS = 300.0


class Stumbling(LocalStorage):
    """A disk that holds back every manifest until it may go on, and on which so many notes cannot be written."""

    def __init__(self, root: Path, failures: int = 0, error: Exception | None = None) -> None:
        super().__init__(root)
        self.error = error or StorageError("no note for now", errno=errno.EIO)
        self.folder = root
        self.failures = failures
        self.tries = 0
        self.refuses_manifests = False
        self.may_go_on = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if key.endswith("manifest.json"):
            assert self.may_go_on.wait(_PATIENCE_SECONDS)
            if self.refuses_manifests:
                raise StorageError("no manifest for now", errno=errno.EIO)
        if key.startswith("notes/"):
            self.tries += 1
            if self.tries <= self.failures:
                raise self.error
        super().put(key, data)


def opened(storage: Stumbling, **options: Any) -> holdfast.CheckpointManager:
    state = {"model": torch.nn.Linear(2, 2)}
    return holdfast.CheckpointManager(storage.folder, state, storage=storage, mode="async", **options)


def reported_while_pending(manager: holdfast.CheckpointManager, storage: Stumbling) -> None:
    manager.save(1)
    assert manager.is_pending
    assert manager.report(1, {"loss": 0.25})
    storage.may_go_on.set()


def test_a_note_that_fails_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    storage = Stumbling(tmp_path, failures=2)
    with opened(storage) as manager:
        reported_while_pending(manager, storage)
    assert storage.tries == 3
    assert holdfast.resolve(tmp_path, 1).metrics == {"loss": 0.25}


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("call", "error"),
    pairs(
        ["save", "report", "wait", "poll", "step", "close"],
        [None, RuntimeError("no note for now"), OSError(5, "no note for now")],
    ),
    ids=repr,
)
def test_a_note_that_keeps_failing_is_raised_by_the_next_call(
    tmp_path: Path, call: str, error: Exception | None
) -> None:
    storage = Stumbling(tmp_path, failures=1000, error=error)
    manager = opened(storage)
    reported_while_pending(manager, storage)
    manager.prune()  # returns when what was reported has been tried
    calls: dict[str, Any] = {
        "save": lambda: manager.save(2),
        "report": lambda: manager.report(1, {"accuracy": 1.0}),
        "wait": manager.wait,
        "poll": manager.poll,
        "step": lambda: manager.step(2),
        "close": manager.close,
    }
    with pytest.raises(holdfast.SaveFailedError, match=r"step 1.*loss.*no note for now"):
        calls[call]()
    if call == "close":
        return
    storage.failures = 0
    assert manager.report(1, {"loss": 0.25})
    manager.save(2, wait=True)
    manager.close()
    assert holdfast.resolve(tmp_path, 1).metrics == {"loss": 0.25}


def test_a_note_that_can_be_written_by_the_time_of_the_next_call_is_no_error(tmp_path: Path) -> None:
    storage = Stumbling(tmp_path, failures=1000)
    with opened(storage) as manager:
        reported_while_pending(manager, storage)
        manager.prune()
        storage.failures = 0
        manager.save(2)
    assert holdfast.resolve(tmp_path, 1).metrics == {"loss": 0.25}


def test_metrics_of_a_save_that_failed_are_added_when_its_step_is_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Stumbling(tmp_path)
    storage.refuses_manifests = True
    with opened(storage) as manager:
        reported_while_pending(manager, storage)
        with pytest.raises(holdfast.HoldfastError):
            manager.wait()
        storage.refuses_manifests = False
        manager.save(2, wait=True)
        manager.save(1, wait=True)
    assert holdfast.resolve(tmp_path, 1).metrics == {"loss": 0.25}
    assert not [text for text in caplog.messages if "were never written" in text]


def test_metrics_of_a_save_that_is_never_committed_are_named_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Stumbling(tmp_path)
    storage.refuses_manifests = True
    with caplog.at_level(logging.WARNING, logger="holdfast"), opened(storage) as manager:
        reported_while_pending(manager, storage)
        with pytest.raises(holdfast.HoldfastError):
            manager.wait()
    assert [text for text in caplog.messages if "loss" in text and "step 1" in text and "were never written" in text]


class HiddenOnceCommitted(Stumbling):
    """The same, and the run cannot be listed from the next commit on, where that is asked for."""

    hides = is_hidden = False

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self.is_hidden = self.is_hidden or (self.hides and key.endswith("manifest.json"))

    def entries(self, folder: str) -> Any:
        if self.is_hidden and not folder:
            raise StorageError("not to be listed for now", errno=errno.EACCES)
        return super().entries(folder)


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("call", ["wait", "close"])
def test_metrics_whose_checkpoint_cannot_be_looked_for_are_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    storage = HiddenOnceCommitted(tmp_path)
    storage.refuses_manifests = True
    manager = opened(storage)
    reported_while_pending(manager, storage)
    with pytest.raises(holdfast.HoldfastError):
        manager.wait()
    storage.refuses_manifests, storage.hides = False, True
    handle = manager.save(1)
    assert handle.wait().step == 1
    # Both return only when the worker thread has tried it.
    ask = manager.close if call == "close" else lambda: (manager._run.housekeeper.wait(), manager.wait())
    with pytest.raises(holdfast.SaveFailedError, match=r"metrics reported of step 1 are not written.*not to be listed"):
        ask()
    storage.hides = storage.is_hidden = False
    if call == "wait":
        manager.save(2, wait=True)
        manager.close()
        assert holdfast.resolve(tmp_path, 1).metrics == {"loss": 0.25}


@pytest.mark.guarantee("G6")
def test_metrics_go_to_the_save_that_they_were_reported_of_where_several_have_its_step(tmp_path: Path) -> None:
    storage = Stumbling(tmp_path)
    with opened(storage) as manager:
        for number in range(3):
            storage.may_go_on.set()
            manager.wait()
            storage.may_go_on.clear()
            manager.save(5, resave=True, progress={"number": number})
            assert manager.report(5, {"loss": float(number)})
        storage.may_go_on.set()
    found = {checkpoint.progress["number"]: checkpoint.metrics for checkpoint in holdfast.checkpoints(tmp_path)}
    assert found == {number: {"loss": float(number)} for number in range(3)}


@pytest.mark.guarantee("G4")
def test_a_cleanup_that_was_submitted_before_the_metrics_of_a_pending_save_does_not_remove_it(tmp_path: Path) -> None:
    storage = Stumbling(tmp_path)
    storage.may_go_on.set()
    removing, go_on = threading.Event(), threading.Event()

    def on_event(event: holdfast.Event) -> None:
        if event.kind == "pruned" and event.step == 1:
            removing.set()
            assert go_on.wait(_PATIENCE_SECONDS)

    keep = holdfast.KeepLast(1) | holdfast.KeepBest("loss", 1)
    with opened(storage, keep=keep, on_event=on_event) as manager:
        for step in range(3):
            manager.save(step, metrics={"loss": 0.9 + step / 100}).wait()
        # A removal that takes long, and behind it the cleanup after step 3.
        assert removing.wait(_PATIENCE_SECONDS)
        manager.save(3, metrics={"loss": 0.95}).wait()
        storage.may_go_on.clear()
        manager.save(4)
        assert manager.report(4, {"loss": 0.1})
        storage.may_go_on.set()
        manager.save(5, metrics={"loss": 0.97}).wait()
        go_on.set()
    assert [(found.step, found.metrics["loss"]) for found in holdfast.checkpoints(tmp_path)] == [(5, 0.97), (4, 0.1)]
    assert holdfast.resolve(tmp_path, "best:loss").step == 4
