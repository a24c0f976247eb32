"""Tags and metrics that come after a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError


def opened(run: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}, mode="sync", rng=False, **options)


def test_a_step_means_the_checkpoint_on_the_line_of_this_manager(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(1)
        manager.save(2)
    with opened(tmp_path) as other, opened(tmp_path) as manager:
        assert other.restore(2).step == 2
        manager.restore(1)
        manager.save(2)
        other.tag(2, "first")
        manager.tag(2, "second")
        assert manager.report(2, {"loss": 0.5})
    tags = {found.folder: (found.tags, dict(found.metrics)) for found in holdfast.checkpoints(tmp_path)}
    assert tags["step-000000002"] == (("first",), {})
    assert tags["step-000000002.2"] == (("second",), {"loss": 0.5})


def test_a_tag_that_is_not_there_cannot_be_removed_and_metrics_must_be_some(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(1)
        with pytest.raises(CheckpointNotFoundError, match="'1' has no tag 'good'"):
            manager.untag(1, "good")
        with pytest.raises(holdfast.UsageError, match="give numbers by name"):
            manager.report(1, {})
        assert not manager.report(7, {"loss": 1.0})


def test_a_process_that_only_annotates_does_not_become_the_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(1)
    with opened(tmp_path) as reader, opened(tmp_path, save=holdfast.Every(steps=1)) as writer:
        reader.restore()
        reader.tag(1, "good")
        reader.report(1, {"loss": 1.0})
        writer.restore()
        writer.step(2)
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [2, 1]
