"""What a restore on two ranks reports, and which restore continues the line of checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import LoadStrategy
from holdfast.testing import run_ranks, values


def opened(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, **{"mode": "sync", "timeout": 30, **options})


def save_once(rank: int, run: Path) -> None:
    with opened(run, {"model": torch.nn.Linear(2, 2)}, replicas="trust") as manager:
        manager.save(1)


def test_per_rank_state_that_a_changed_number_of_ranks_leaves_as_it_is_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values(run_ranks(2, save_once, tmp_path))
    with opened(tmp_path, {"model": torch.nn.Linear(2, 2)}) as manager:
        result = manager.restore(strategy=LoadStrategy(on_world_change="skip"))
    expected = "rng: its per-rank state is of another number of ranks"
    (line,) = [record for record in caplog.records if "on_world_change='skip'" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert f"1 difference was accepted ({expected})" in line.getMessage()
    assert result.accepted == (expected,)
