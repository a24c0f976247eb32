"""The half of a save behind the training, by itself: who may wait for it, and what its thread does."""

from __future__ import annotations

import threading

import pytest

from holdfast.background import Backstage, PendingSave, Saved, as_save_error
from holdfast.errors import HoldfastError, SaveFailedError, StorageError, UsageError
from holdfast.records.events import Event


def test_whoever_carries_a_save_out_can_ask_for_its_outcome_and_not_wait_for_it() -> None:
    pending = PendingSave(3, 0, lambda event: None)
    saved = Saved("step-000000003", "d" * 64)
    assert not pending.wait(0), "any other thread may wait"
    pending.mark_worker()
    with pytest.raises(UsageError, match=r"step 3.*waits for the save that it is told of"):
        pending.wait()
    pending.mark_saved(saved)
    assert pending.result() is saved
    assert not pending.done(), "the others are told when all that follows is done"
    pending.succeed(saved)
    assert pending.done()


def test_a_failure_is_told_after_it_is_certain_and_only_the_first_counts() -> None:
    told: list[tuple[Event, bool]] = []
    pending = PendingSave(3, 0, lambda event: told.append((event, pending.done())))
    first = SaveFailedError("the disk is full", step=3)
    pending.fail(first)
    pending.fail(SaveFailedError("something else", step=3))
    assert [(event.kind, event.error, done) for event, done in told] == [("failed", str(first), True)]
    with pytest.raises(SaveFailedError, match="the disk is full"):
        pending.result()
    assert pending.heard


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyError("x"), SaveFailedError), (HoldfastError("x"), SaveFailedError), (StorageError("x"), StorageError)],
)
def test_every_failure_is_an_error_of_ours_that_names_the_step(error: Exception, kind: type) -> None:
    found = as_save_error(error, 7)
    assert type(found) is kind
    assert "step 7" in str(found)


def test_a_backstage_does_one_thing_after_another_and_ends_after_the_last() -> None:
    done: list[int] = []
    threads: set[int] = set()
    backstage = Backstage()
    for number in range(50):
        backstage.do(lambda number=number: (done.append(number), threads.add(threading.get_ident())))
    backstage.wait()
    assert done == list(range(50))
    assert len(threads) == 1
    backstage.stop()
    backstage.stop()


def test_a_backstage_goes_on_after_work_that_ends_by_an_error(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    backstage = Backstage()

    def leave() -> None:
        raise SystemExit("a callback left")

    backstage.do(leave)
    backstage.do(lambda: done.append(1))
    backstage.wait()
    assert done == [1]
    assert "a callback left" in caplog.text
    backstage.stop()
