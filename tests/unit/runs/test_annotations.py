"""Notes on checkpoints go with what they are about, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import CheckpointNotFoundError
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.retention import KeepAll, KeepLast
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import (
    HERE,
    Meeting,
    Run,
    attempt,
    folder,
)


def note_on(run: Run, checkpoint: Checkpoint, **said: Any) -> None:
    """By another process, which does not know what is being removed."""
    Catalog(run.storage).annotations.add(checkpoint, **said)


def test_notes_go_with_what_they_are_about_also_those_that_came_too_late() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    first, second = run.save(1), run.save(2)
    note_on(run, first, metrics={"loss": 1.0})
    note_on(run, second, metrics={"loss": 2.0})
    run.keeper.clean_up()
    note_on(run, first, tag="gold")
    assert len(run.catalog.annotations.names()) == 2
    run.keeper.clean_up()
    (left,) = run.catalog.scan().checkpoints
    assert (left.step, left.metrics) == (2, {"loss": 2.0})
    assert [name[: len(second.folder)] for name in run.catalog.annotations.names()] == [second.folder]


def test_a_note_on_the_one_that_had_the_folder_before_goes_and_its_successors_stays() -> None:
    run = Run(MemoryStorage(), KeepAll())
    first = run.save(1)
    second = replace(run.save(2), digest=first.digest)  # as if another had been committed there before
    note_on(run, second, tag="stale")
    note_on(run, run.catalog.read(folder(2)), tag="gold")
    run.keeper.clean_up()
    assert run.catalog.scan().checkpoints[0].tags == ("gold",)
    assert len(run.catalog.annotations.names()) == 1


def test_a_note_whose_name_is_given_again_is_read_again() -> None:
    run = Run(MemoryStorage(), KeepAll())
    first = run.save(1)
    note_on(run, replace(first, digest="0" * 64), tag="stale")
    assert run.catalog.scan().checkpoints[0].tags == ()
    (name,) = run.catalog.annotations.names()
    run.storage.delete(f"notes/{name}")
    note_on(run, first, tag="gold")
    assert run.catalog.annotations.names() == [name]
    assert run.catalog.scan().checkpoints[0].tags == ("gold",)
    run.keeper.clean_up()
    assert run.catalog.annotations.names() == [name]


def test_a_note_on_what_is_under_way_or_cannot_be_read_stays() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    damaged = run.save(1)
    second = run.save(2)
    run.storage.delete(damaged.key("manifest.json"))
    run.storage.put(damaged.key("manifest.json"), b"{")
    under_way = attempt(run, 7, HERE, lease=run.saver.lease)
    run.storage.put(f"notes/{under_way}--000008.json", b"{}")
    run.storage.put("notes/mine.json", b"{}")
    run.storage.put(f"notes/{second.folder}--000009.json", b"no note")
    note_on(run, damaged, tag="gold")
    before = run.catalog.annotations.names()
    run.keeper.clean_up()
    assert len(before) == 4
    assert run.catalog.annotations.names() == before


class Nth(Meeting):
    """Right before the nth operation something happens, once. While the lease is looked at nobody can save."""

    left = 0

    def _meet(self, operation: str, number: int = 0) -> None:
        self.left -= "lease" not in operation
        if self.left == 0 and "lease" not in operation:
            self.do()


def test_a_note_on_what_is_committed_at_any_moment_of_a_cleanup_stays() -> None:
    moment, happened = 0, True
    while happened:
        moment += 1
        storage = Nth(MemoryStorage())
        run = Run(storage, KeepLast(2))
        first = run.save(1)
        run.save(2)
        note_on(run, replace(first, digest="0" * 64), tag="stale")
        storage.left, storage.do = moment, lambda run=run: note_on(run, run.save(3), tag="gold")
        run.keeper.clean_up()
        happened = storage.left < 0
        if happened:
            run.keeper.clean_up()
            assert run.catalog.scan().checkpoints[0].tags == ("gold",), moment
            assert len(run.catalog.annotations.names()) == 1, moment
        # Its heartbeat has the storage, and that has the run.
        run.die()
    assert moment > 8


def test_what_is_said_of_one_that_was_removed_meanwhile_names_its_step(run: Run) -> None:
    run.keep(KeepLast(1))
    first = run.save(1)
    run.save(2)
    run.keeper.clean_up()
    with pytest.raises(CheckpointNotFoundError, match="step 1: step-000000001 was removed meanwhile") as caught:
        run.keeper.annotate(first, tag="gold")
    assert caught.value.step == 1
    assert run.catalog.annotations.names() == []
