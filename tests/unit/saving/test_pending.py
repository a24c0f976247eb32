"""A pending save by itself: which threads may wait for it, and when its failure is reported."""

from __future__ import annotations

import pytest

from holdfast.errors import SaveFailedError, UsageError
from holdfast.runs.events import Event
from holdfast.saving.outcome import Saved
from holdfast.saving.pending import PendingSave


def test_the_thread_that_carries_a_save_out_can_ask_for_its_outcome_and_not_wait_for_it() -> None:
    pending = PendingSave(3, 0, lambda event: None)
    saved = Saved("step-000000003", "d" * 64)
    assert not pending.wait(0), "any other thread may wait"
    pending.mark_worker()
    with pytest.raises(UsageError, match=r"step 3.*called wait\(\) on the save that reports this event"):
        pending.wait()
    pending.mark_saved(saved)
    assert pending.result() is saved
    assert not pending.done(), "other threads go on when all that follows is done"
    pending.succeed(saved)
    assert pending.done()


def test_a_failure_is_an_event_after_it_is_certain_and_only_the_first_counts() -> None:
    told: list[tuple[Event, bool]] = []
    pending = PendingSave(3, 0, lambda event: told.append((event, pending.done())))
    first = SaveFailedError("the disk is full", step=3)
    pending.fail(first)
    pending.fail(SaveFailedError("something else", step=3))
    assert [(event.kind, event.error, done) for event, done in told] == [("failed", str(first), True)]
    with pytest.raises(SaveFailedError, match="the disk is full"):
        pending.result()
    assert pending.reported
