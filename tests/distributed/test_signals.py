"""A signal to one rank of a real training: at which step all of them save and stop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.testing import values
from tests.distributed.test_async_ranks import steps_of
from tests.ranks import run_ranks

STRUCK_STEP = 5
MOST_STEPS = 100_000
# As docs/guide.md promises it.
LONGEST_DELAY_SECONDS = 0.1


def train_until_stopped(rank: int, run: Path, struck: int) -> Any:
    """Train in step with the other rank. Return where it stopped, and when each step began and returned."""
    state = {"model": holdfast.Shared(nn.Linear(2, 2))}
    times = []
    with holdfast.CheckpointManager(
        run, state, save=holdfast.OnSignal("SIGUSR1"), mode="sync", rng=False, links=False, timeout=200.0
    ) as manager:
        for step in range(MOST_STEPS):
            dist.barrier()
            if rank == struck and step == STRUCK_STEP:
                os.kill(os.getpid(), signal.SIGUSR1)
            # The clock of one machine is the same in every process.
            begin = time.monotonic()
            stops = manager.step(step)
            times.append((begin, time.monotonic()))
            if stops:
                return step, times
    return None, times


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("struck", [0, 1])
def test_a_signal_to_one_rank_saves_and_stops_all_ranks_within_the_promised_time(struck: int, tmp_path: Path) -> None:
    outcomes = values(run_ranks(2, train_until_stopped, tmp_path / "run", struck))
    (stopped, leader_times), (other, other_times) = outcomes
    assert stopped == other
    assert steps_of(tmp_path / "run") == [stopped]
    if struck == 0:
        assert stopped == STRUCK_STEP
        return
    assert stopped >= STRUCK_STEP
    passed_on = other_times[STRUCK_STEP][1]
    late = [step for step, (begin, _) in enumerate(leader_times) if begin > passed_on + LONGEST_DELAY_SECONDS]
    assert late in ([], [stopped]), "no step that began later went on"
