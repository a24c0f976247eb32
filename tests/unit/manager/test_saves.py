"""What a manager stores with each checkpoint, and what a save of a committed step does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.manager.saves import Stored
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepBest


def opened(run: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}, mode="sync", rng=False, **options)


def test_what_is_stored_is_checked_and_encoded(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a b c")
    stored = Stored.checked({"lr": 0.1}, [tmp_path / "vocab.txt"], "{name}-{step}", KeepBest("loss", 2))
    assert stored.assets == {"vocab.txt": tmp_path / "vocab.txt"}
    assert isinstance(stored.links, LinkTemplate)
    assert stored.ranking == (("loss", "min"),)
    with pytest.raises(holdfast.UsageError, match="is not there"):
        Stored.checked(None, [tmp_path / "gone.txt"], True, None)


def test_what_a_save_of_a_committed_step_cannot_change_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as manager, caplog.at_level(logging.WARNING, logger="holdfast"):
        manager.save(1, progress={"tokens": 1})
        handle = manager.save(1, progress={"tokens": 2}, metrics={"loss": 0.5}, tag="good")
        assert handle.skipped
        assert "its progress, extra and guards stay as they are" in caplog.text
        found = handle.wait()
        assert (found.progress, found.metrics, found.tags) == ({"tokens": 1}, {"loss": 0.5}, ("good",))


def test_a_step_is_saved_again_where_the_caller_asks_for_it(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(1, progress={"tokens": 1})
        found = manager.save(1, progress={"tokens": 2}, resave=True).wait()
    assert (found.folder, found.progress) == ("step-000000001.2", {"tokens": 2})
