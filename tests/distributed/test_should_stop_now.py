"""To ask whether to stop outside of a step: a signal to one rank is known to all in the same call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.testing import values
from tests.distributed.test_async_ranks import steps_of
from tests.ranks import run_ranks


def opened(run: Path, save: holdfast.Trigger | None) -> holdfast.CheckpointManager:
    state = {"model": holdfast.Shared(nn.Linear(2, 2))}
    return holdfast.CheckpointManager(run, state, save=save, mode="sync", rng=False, links=False, timeout=200.0)


def strike(rank: int, struck: int) -> None:
    dist.barrier()
    if rank == struck:
        os.kill(os.getpid(), signal.SIGUSR1)


def evaluate(rank: int, folder: Path, struck: int) -> list[Any]:
    """A signal in an evaluation between two steps, another one before the first step of the next manager."""
    seen: list[Any] = []
    with opened(folder / "run", holdfast.OnSignal("SIGUSR1")) as manager:
        seen += [manager.should_stop_now(), manager.step(0), manager.should_stop_now()]
        strike(rank, struck)
        seen += [manager.should_stop_now(), manager.should_stop, manager.checkpoints() == []]
        seen += [manager.should_stop_now(), manager.step(1), steps_of(folder / "run")]
        seen += [manager.step(2), manager.should_stop_now(), steps_of(folder / "run")]
        strike(rank, struck)
        seen += [manager.should_stop_now(), manager.step(3), steps_of(folder / "run")]
    with opened(folder / "other", holdfast.Every(steps=100) | holdfast.OnSignal("SIGUSR1")) as manager:
        strike(rank, struck)
        seen += [manager.should_stop_now(), manager.save(7).wait().step]
        seen += [manager.step(8), steps_of(folder / "other")]
    return seen


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("struck", [0, 1])
def test_a_signal_to_one_rank_is_known_to_all_in_the_same_call(struck: int, tmp_path: Path) -> None:
    first, second = values(run_ranks(2, evaluate, tmp_path, struck))
    assert first == second
    assert first[:3] == [False, False, False]
    assert first[3:6] == [True, True, True], "and nothing is saved for it"
    assert first[6:9] == [True, True, [1]], "the next step is"
    assert first[9:12] == [True, True, [1]], "once"
    assert first[12:15] == [True, True, [3, 1]], "a second signal asks again"
    assert first[15:] == [True, 7, True, [8, 7]], "a save before the step is not the save of the step"


def ask_apart(rank: int, folder: Path) -> tuple[str, str]:
    with opened(folder / "run", holdfast.OnSignal("SIGUSR1")) as manager:
        try:
            manager.should_stop_now() if rank == 0 else manager.should_load()
        except holdfast.HoldfastError as error:
            return type(error).__name__, error.problem
    return "", ""


def test_ranks_that_do_not_all_ask_are_told_so(tmp_path: Path) -> None:
    (kind, problem), (other_kind, _) = values(run_ranks(2, ask_apart, tmp_path))
    assert kind == other_kind == "RankError"
    assert "should_stop_now" in problem
