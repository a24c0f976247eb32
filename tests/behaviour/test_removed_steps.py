"""Saving a step that is committed while its checkpoint is being removed, by retention or by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import KeyMissingError
from holdfast.storage.base import Source
from holdfast.testing import MemoryStorage

MANIFEST = "step-000000001/manifest.json"


class Removing(MemoryStorage):
    """A storage on which the manifest of step 1 is removed, or damaged, after it was opened `lasts` times."""

    def __init__(self) -> None:
        super().__init__()
        self.lasts: int | None = None
        self.was_missed = False
        self.end: Callable[[], None] = lambda: self.delete(MANIFEST)

    def open(self, key: str) -> Source:  # type: ignore[override]
        # Only the save itself counts: cleanup reads manifests in a thread of its own.
        counts = key == MANIFEST and self.lasts is not None and threading.current_thread() is threading.main_thread()
        try:
            found = super().open(key)
        except KeyMissingError:
            self.was_missed |= counts
            raise
        if counts and self.lasts is not None:
            self.lasts -= 1
            if self.lasts == 0:
                self.end()
        return found

    def damage(self) -> None:
        self.delete(MANIFEST)
        self.put(MANIFEST, b"{}")


def two_saves(storage: Removing, model: torch.nn.Module) -> holdfast.CheckpointManager:
    manager = holdfast.CheckpointManager("run", {"model": model}, storage=storage, mode="sync", timeout=30)
    manager.save(1)
    manager.save(2)
    return manager


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("said", [{}, {"tag": "kept"}, {"metrics": {"loss": 1.0}}])
@pytest.mark.parametrize("lasts", range(1, 7))
def test_a_step_whose_checkpoint_goes_during_its_save_is_there_already_or_saved_again(
    lasts: int, said: dict[str, Any]
) -> None:
    storage, model = Removing(), torch.nn.Linear(2, 2)
    with two_saves(storage, model) as manager:
        storage.lasts = lasts
        handle = manager.save(1, **said)
        gone = storage.lasts <= 0
        storage.lasts = None
        assert handle.skipped is not storage.was_missed, "a save that found the checkpoint gone does not count on it"
        if gone and not handle.skipped:
            found = holdfast.resolve(storage, 1)
            assert found.folder == "step-000000001.2"
            assert (found.tags, found.metrics) == (tuple(said.get("tag", "").split()), said.get("metrics", {}))
        elif gone:
            found = handle.wait()
            assert (found.step, found.folder) == (1, "step-000000001")
            with pytest.raises(holdfast.CheckpointNotFoundError, match="removed since"):
                _ = found.progress
        else:
            assert handle.skipped
            assert handle.wait().folder == "step-000000001"


def test_a_step_whose_manifest_is_damaged_is_saved_again() -> None:
    storage, model = Removing(), torch.nn.Linear(2, 2)
    with two_saves(storage, model) as manager:
        storage.damage()
        assert not manager.save(1).skipped
    assert holdfast.resolve(storage, 1).folder == "step-000000001.2"


def test_a_step_that_is_still_there_is_not_written_again(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}, mode="sync") as manager:
        manager.save(1)
        assert manager.save(1, tag="kept").skipped
    assert holdfast.resolve(tmp_path, 1).tags == ("kept",)
