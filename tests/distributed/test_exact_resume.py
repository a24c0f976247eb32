"""G8: a resumed run has the same losses, bit for bit, as one that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import holdfast
from holdfast.testing import values
from tests.distributed.training import build
from tests.ranks import run_ranks

BEFORE, AFTER = 7, 9


def train_twice(rank: int, size: int, form: str, run: str) -> tuple[list[float], list[float], tuple[str, ...], int]:
    """Train without a break; then, with new objects and another random state, resume from the middle of it."""
    torch.use_deterministic_algorithms(True)
    first = build(form, rank, size)
    with holdfast.CheckpointManager(run, first.state) as manager:
        assert not manager.restore().resumed
        first.steps(BEFORE)
        manager.save(BEFORE - 1, progress={"tokens_seen": 2**40 + 1})
        uninterrupted = first.steps(AFTER)
    second = build(form, rank, size, seed=77)
    torch.manual_seed(31337 + rank)
    numpy.random.seed(5)
    with holdfast.CheckpointManager(run, second.state) as manager:
        start = manager.restore()
        assert (start.resumed, start.next_step, start.progress["tokens_seen"]) == (True, BEFORE, 2**40 + 1)
        return uninterrupted, second.steps(AFTER), start.restored, second.scheduler.last_epoch


@pytest.mark.guarantee("G8")
def test_one_process_resumes_exactly(tmp_path: Path) -> None:
    uninterrupted, resumed, _, _ = train_twice(0, 1, "plain", str(tmp_path / "run"))
    assert resumed == uninterrupted


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(("form", "size"), [("ddp", 2), ("fsdp", 2), ("mesh", 4)])
def test_ranks_resume_exactly(form: str, size: int, tmp_path: Path) -> None:
    for rank, (uninterrupted, resumed, restored, epochs) in enumerate(
        values(run_ranks(size, train_twice, size, form, str(tmp_path / "run")))
    ):
        assert resumed == uninterrupted, f"rank {rank} of {form}"
        assert set(restored) == {"model", "optimizer", "scheduler", "loader", "rng"}
        assert epochs == BEFORE + AFTER
    assert holdfast.verify(tmp_path / "run").ok
