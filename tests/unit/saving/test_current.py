"""The warning that saves take longer than the time between them: for what recurs, never for the start of the writer."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import SaveFailedError
from holdfast.saving.call_guard import CallGuard
from holdfast.saving.current import CurrentSave, SlowSaveWarning
from holdfast.saving.outcome import InterruptedSaveError
from holdfast.saving.pending import PendingSave
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage

LONG, SHORT = 1.0, 0.01


def test_a_wait_for_the_save_that_started_the_writer_does_not_count() -> None:
    waits = SlowSaveWarning()
    assert not any(waits.is_due(LONG, 0.0, at_start=True) for _ in range(10))


def test_the_third_notable_wait_in_a_row_is_warned_of_and_no_other() -> None:
    waits = SlowSaveWarning()
    told = [waits.is_due(LONG, LONG, at_start=index == 0) for index in range(10)]
    assert told == [index == 3 for index in range(10)]


@pytest.mark.parametrize(("waited", "between"), [(SHORT, 0.0), (LONG, 60.0)])
def test_a_wait_that_is_short_or_a_small_part_of_the_time_is_none_to_warn_of(waited: float, between: float) -> None:
    waits = SlowSaveWarning()
    assert not any(waits.is_due(waited, between, at_start=False) for _ in range(10))


def test_a_wait_in_between_that_is_not_notable_begins_the_count_anew() -> None:
    waits = SlowSaveWarning()
    told = [waits.is_due(SHORT if index % 3 == 2 else LONG, 0.0, at_start=False) for index in range(12)]
    assert not any(told)


class Gate(LocalStorage):
    """A disk on which every manifest waits until somebody asks for the next save."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_go_on = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if key.endswith("manifest.json"):
            assert self.may_go_on.wait(300)
        super().put(key, data)


def test_the_first_saves_of_a_short_run_are_no_warning_however_long_the_start_took(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second save waits for the first one, which ends when the gate opens."""
    storage = Gate(tmp_path)
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        with holdfast.CheckpointManager(tmp_path, state, storage=storage, mode="async") as manager:
            manager.save(1)
            opening = threading.Timer(0.2, storage.may_go_on.set)
            opening.start()
            handle = manager.save(2)
            opening.join()
            assert handle.wait().step == 2
    assert not [text for text in caplog.messages if "saves take longer" in text]


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("interrupted", "error", "is_reported_later"),
    [
        (False, InterruptedSaveError("KeyboardInterrupt", step=1), True),
        (True, InterruptedSaveError("KeyboardInterrupt", step=1), False),
        (True, SaveFailedError("no room is left", step=1), True),
    ],
)
def test_a_failure_by_an_interrupt_that_the_caller_has_got_is_not_raised_by_the_next_save(
    interrupted: bool, error: SaveFailedError, is_reported_later: bool
) -> None:
    """A second interrupt, of the wait for the failed save, leaves the first one's failure behind."""
    current = CurrentSave(MemoryStorage(), 0, CallGuard("run", 60))
    current.latest = pending = PendingSave(1, 0, lambda event: None)
    pending.interrupted = interrupted
    pending.fail(error)
    assert (current.unreported_error is error) == is_reported_later
