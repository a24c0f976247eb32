"""Calls that one rank makes alone: they fail there, and the next ones that all ranks make work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import RankError
from holdfast.testing import values
from tests.distributed.scenes import Holder, caught, meet
from tests.ranks import run_ranks
from tests.sizes import if_deep

# A call that one rank makes alone ends after this time, on a follower five seconds later.
TIMEOUT_SECONDS = 4.0
# To import all that a save and a restore need can take longer than that, the first time.
FIRST_TIMEOUT_SECONDS = 200.0
CALLS: dict[str, Callable[[holdfast.CheckpointManager], Any]] = {
    "save": lambda manager: manager.save(100, wait=True),
    "restore": lambda manager: manager.restore(),
    "report": lambda manager: manager.report(1, {"loss": 0.5}),
    "tag": lambda manager: manager.tag(1, "milestone"),
    "prune": lambda manager: manager.prune(),
}


def call_alone(rank: int, folder: str, alone: int, calls: tuple[str, ...], mode: Any) -> tuple[list[Any], list[Any]]:
    """Save on all ranks, make calls on one rank, then make others on all ranks."""
    tracker = Holder(a=1)
    state = {"tracker": tracker}
    with holdfast.CheckpointManager(
        f"{folder} before", state, mode=mode, timeout=FIRST_TIMEOUT_SECONDS, rng=False
    ) as first:
        first.save(1, wait=True)
        first.restore()
        meet("ready")
    manager = holdfast.CheckpointManager(folder, state, mode=mode, timeout=TIMEOUT_SECONDS, rng=False)
    manager.save(1, wait=True)
    meet("saved")
    mistaken = [caught(lambda call=call: CALLS[call](manager)) for call in calls] if rank == alone else []
    errors = []
    for step in (2, 3):
        meet(f"before {step}")
        errors.append(caught(lambda step=step: manager.save(step, wait=True)))
    errors.append(caught(lambda: manager.report(3, {"loss": 1.0})))
    errors.append(caught(lambda: manager.restore()))
    manager.close()
    return mistaken, errors


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("size", "alone", "calls", "mode"),
    [
        (2, 1, ("restore", "save"), "sync"),
        (2, 0, ("restore", "report", "tag", "prune"), "async"),
        (4, 0, ("save", "report"), "async"),
        *if_deep(
            (2, 0, ("save",), "sync"),
            (2, 0, ("save", "save"), "async"),
            (2, 1, ("save",), "async"),
            (2, 1, ("report",), "sync"),
            (4, 2, ("save",), "sync"),
        ),
    ],
)
def test_after_calls_that_one_rank_made_alone_the_next_save_of_all_ranks_works(
    size: int, alone: int, calls: tuple[str, ...], mode: str, tmp_path: Path
) -> None:
    outcomes = values(run_ranks(size, call_alone, str(tmp_path / "run"), alone, calls, mode))
    silent = tuple(rank for rank in range(size) if rank != alone) if alone == 0 else (0,)
    assert len(outcomes[alone][0]) == len(calls)
    for error in outcomes[alone][0]:
        assert isinstance(error, RankError)
        assert error.ranks == silent
        assert "did not answer" in str(error)
    assert [errors for _, errors in outcomes] == [[None] * 4] * size
    assert [checkpoint.step for checkpoint in holdfast.checkpoints(tmp_path / "run")] == [3, 2, 1]


def save_some_calls_apart(rank: int, folder: str, alone: int, mode: Any) -> list[tuple[int, Any]]:
    """Save in a loop in which one rank saves once more, and nothing else keeps the ranks together."""
    manager = holdfast.CheckpointManager(folder, {"tracker": Holder(a=1)}, mode=mode, rng=False)
    steps = range(0 if rank == alone else 1, 8)
    seen = [(step, caught(lambda step=step: manager.save(step, wait=True))) for step in steps]
    manager.close()
    return seen


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("size", "alone", "mode"),
    [(2, 1, "async"), (4, 0, "sync"), *if_deep((2, 0, "sync"), (4, 0, "async"), (4, 1, "sync"))],
)
def test_ranks_that_are_one_save_apart_are_told_so_and_save_together_again(
    size: int, alone: int, mode: str, tmp_path: Path
) -> None:
    outcomes = values(run_ranks(size, save_some_calls_apart, str(tmp_path / "run"), alone, mode))
    for outcome in outcomes:
        failed = [step for step, error in outcome if error is not None]
        assert all(isinstance(error, RankError) for _, error in outcome if error is not None)
        assert max(failed) <= 2
    first = outcomes[alone][0][1]
    assert "'save of step 0'" in str(first)
    assert "'save of step 1'" in str(first)
    assert [checkpoint.step for checkpoint in holdfast.checkpoints(tmp_path / "run")][:5] == [7, 6, 5, 4, 3]
