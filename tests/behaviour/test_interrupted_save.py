"""A save that is interrupted at any moment either counts, for the training and for retention, or leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import holdfast
from holdfast.runs.catalog import Catalog
from holdfast.testing import MemoryStorage
from tests.interrupting import interrupt_everywhere
from tests.unit.runs.scene import Meeting


class Training:
    """A training that saves in sync mode and keeps the last checkpoint alone."""

    def __init__(self) -> None:
        self.inner = MemoryStorage()
        self.storage = Interrupted(self.inner)
        self.events: list[tuple[str, int | None]] = []
        self.step = 0
        model: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
        self.manager = holdfast.CheckpointManager(
            "run",
            model,
            storage=self.storage,
            mode="sync",
            rng=False,
            keep=holdfast.KeepLast(1),
            on_event=lambda event: self.events.append((event.kind, event.step)),
        )

    def save(self) -> None:
        self.step += 1
        self.events.clear()
        self.storage.operations.clear()
        self.manager.save(self.step)

    def is_saving(self) -> bool:
        """Return whether the first file is begun, and the commit was not announced so far. What follows that is the
        cleanup of the run."""
        begun = f"create step-{self.step:09d}/rank-00000.safetensors"
        return begun in self.storage.operations and ("committed", self.step) not in self.events

    def committed(self) -> list[int]:
        return [found.step for found in Catalog(self.inner).scan().checkpoints]

    def debris(self) -> list[str]:
        """Return the folders that hold no committed checkpoint."""
        scan = Catalog(self.inner).scan()
        return [*scan.attempts, *scan.closed]


class Interrupted(Meeting):
    """A storage that is interrupted before or after an operation."""

    strike = ("", "")

    def _act(self, operation: str, action: Callable[[], Any], *, size_bytes: int = 0) -> Any:
        if self.strike == ("before", operation):
            raise KeyboardInterrupt
        result = super()._act(operation, action, size_bytes=size_bytes)
        if self.strike == ("after", operation):
            raise KeyboardInterrupt
        return result


@contextmanager
def training() -> Iterator[Training]:
    begun = Training()
    with begun.manager:
        begun.save()
        yield begun


# Python ignores an interrupt that comes while it frees a generator.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_a_save_leaves_nothing_that_stays() -> None:
    counts = {True: 0, False: 0}
    with training() as one:
        for place in interrupt_everywhere(one.save, only_if=one.is_saving):
            interrupted = one.step
            is_committed = interrupted in one.committed()
            files = one.inner.entries(f"step-{interrupted:09d}")
            assert is_committed or not any(file.name.endswith(".safetensors") for file in files), place
            assert not is_committed or ("failed", interrupted) not in one.events, place
            one.save()
            one.manager._run.housekeeper.wait()
            assert one.committed() == [one.step], place
            assert one.debris() == [], place
            counts[is_committed] += 1
    assert counts[True] > 20, counts
    assert counts[False] > 50, counts


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_save_is_committed_if_its_manifest_is_there(when: str) -> None:
    with training() as one:
        one.storage.strike = when, "put step-000000002/manifest.json"
        with pytest.raises(KeyboardInterrupt):
            one.save()
        one.storage.strike = "", ""
        assert one.committed()[0] == (2 if when == "after" else 1)
        one.save()
        newest = Catalog(one.inner).scan().checkpoints[0]
        assert newest.head.line == (((1, 2),) if when == "after" else ((1, 1),))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_interrupted_while_it_makes_its_folder_leaves_none(when: str) -> None:
    with training() as one:
        one.storage.strike = when, "put step-000000002/attempt.json"
        with pytest.raises(KeyboardInterrupt):
            one.save()
        one.save()
        one.manager._run.housekeeper.wait()
        assert one.committed() == [3]
        assert one.debris() == []
