"""A leader that is stopped for a while, with the store of torch.distributed in its own process and in another one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast.errors import RankError
from holdfast.testing import values
from tests.distributed.scenes import caught
from tests.distributed.test_async_ranks import (
    DEATH_TIMEOUT_SECONDS,
    GRACE_SECONDS,
    manager_of,
    note,
    noted,
    own_writer,
    steps_of,
    stop,
    wait_for,
)
from tests.distributed.test_failures import sharded_model
from tests.ranks import run_ranks
from tests.sizes import if_deep

# The save that fails on one rank takes the other one as long to give up.
PATIENCE_SECONDS = 100.0


def stop_the_leader_before_its_save(rank: int, run: Path, notes: Path, mode: str, hosted: bool) -> Any:
    """Save once, stop the leader, save on the follower, let the leader go on and save the same, then save together."""
    if hosted:
        dist.init_process_group("gloo")
    note(notes, f"trainer-{rank}", os.getpid())
    manager = manager_of(
        run, {"model": holdfast.Shared(sharded_model(1))}, mode=mode, timeout=DEATH_TIMEOUT_SECONDS, links=False
    )
    manager.save(1, wait=True)
    threads = set(threading.enumerate())
    if rank == 0:
        note(notes, "ready", 0)
        wait_for(lambda: (notes / "go").exists(), PATIENCE_SECONDS)
    else:
        wait_for(lambda: (notes / "ready").exists())
        stop(noted(notes, "trainer-0"))
    begin = time.monotonic()
    error = caught(lambda: manager.save(2, wait=True))
    seconds = time.monotonic() - begin
    if rank == 1:
        note(notes, "go", 0)
        os.kill(noted(notes, "trainer-0"), signal.SIGCONT)
    return error, seconds, save_together(rank, notes, manager), set(threading.enumerate()) <= threads


def stop_the_leader_before_its_commit(rank: int, run: Path, notes: Path, mode: str, hosted: bool) -> Any:
    """Do the same with a save that both ranks have staged. The leader's writer is stopped first, so that it cannot have
    committed before its trainer is stopped."""
    if hosted:
        dist.init_process_group("gloo")
    note(notes, f"trainer-{rank}", os.getpid())
    manager = manager_of(
        run, {"model": holdfast.Shared(sharded_model(1))}, mode=mode, timeout=DEATH_TIMEOUT_SECONDS, links=False
    )
    manager.save(1, wait=True)
    threads = set(threading.enumerate())
    writer = own_writer()
    if rank == 0:
        stop(writer)
        note(notes, "writer-0", writer)
    else:
        wait_for(lambda: (notes / "writer-0").exists())
    handle = manager.save(2)
    if rank == 0:
        note(notes, "ready", 0)
        wait_for(lambda: (notes / "go").exists(), PATIENCE_SECONDS)
    else:
        wait_for(lambda: (notes / "ready").exists())
        stop(noted(notes, "trainer-0"))
    begin = time.monotonic()
    error = caught(handle.wait)
    seconds = time.monotonic() - begin
    if rank == 1:
        note(notes, "go", 0)
        os.kill(noted(notes, "writer-0"), signal.SIGCONT)
        os.kill(noted(notes, "trainer-0"), signal.SIGCONT)
    return error, seconds, save_together(rank, notes, manager), set(threading.enumerate()) <= threads


def save_together(rank: int, notes: Path, manager: holdfast.CheckpointManager) -> list[bool]:
    """Save twice more once both ranks are through with the save before, as ranks that train together are."""
    note(notes, f"through-{rank}", 0)
    wait_for(lambda: (notes / f"through-{1 - rank}").exists(), PATIENCE_SECONDS)
    saved = [manager.save(step, wait=True).step == step for step in (3, 4)]
    manager.close()
    return saved


def kill_the_leader(rank: int, run: Path, mode: str, while_saving: bool) -> Any:
    """Save once, kill the leader, which hosts the store, and make every call on the other rank."""
    dist.init_process_group("gloo")
    manager = manager_of(
        run,
        {"model": holdfast.Shared(sharded_model(1))},
        mode=mode,
        timeout=DEATH_TIMEOUT_SECONDS,
        links=False,
        save=holdfast.Every(steps=1),
    )
    manager.save(1, wait=True)
    dist.barrier()
    calls = {
        "save": lambda: manager.save(2, wait=True),
        "restore": lambda: manager.restore(),
        "report": lambda: manager.report(1, {"loss": 1.0}),
        "tag": lambda: manager.tag(1, "milestone"),
        "prune": lambda: manager.prune(),
        "step": lambda: manager.step(3),
    }
    if rank == 0 and while_saving:
        stop(own_writer())
        note(run.parent / "notes", "writer", own_writer())
        manager.save(2)
        wait_for(lambda: (run.parent / "notes" / "staged").exists(), PATIENCE_SECONDS)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if while_saving:
        handle = manager.save(2)
        note(run.parent / "notes", "staged", 0)
        calls = {"wait": handle.wait, **calls}
    errors, begin = {}, time.monotonic()
    for name, call in calls.items():
        errors[name] = caught(call)
    return errors, time.monotonic() - begin, caught(manager.close)


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(("mode", "while_saving"), [("async", True), *if_deep(("sync", False), ("async", False))])
def test_a_leader_that_is_killed_with_the_store_is_named_by_every_call(
    mode: str, while_saving: bool, tmp_path: Path
) -> None:
    try:
        outcomes = run_ranks(2, kill_the_leader, tmp_path / "run", mode, while_saving, backend=None)
    finally:
        if while_saving:
            # It was stopped, and would outlive all tests.
            os.kill(int((tmp_path / "notes" / "writer").read_text()), signal.SIGKILL)
    assert outcomes[0].exit_code == -signal.SIGKILL
    errors, seconds, _ = outcomes[1].unwrap()
    for name, error in errors.items():
        assert isinstance(error, RankError), (name, error)
        assert error.ranks == (0,), name
        assert "127.0.0.1:" in str(error), name
        assert "which rank 0 hosts" in str(error), name
    if while_saving:
        assert "not committed so far" in str(errors["wait"])
    assert seconds < 2 * DEATH_TIMEOUT_SECONDS + GRACE_SECONDS + 20


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    ("scene", "mode", "hosted"),
    [
        (stop_the_leader_before_its_commit, "async", True),
        *if_deep(
            (stop_the_leader_before_its_save, "sync", True),
            (stop_the_leader_before_its_save, "async", True),
            (stop_the_leader_before_its_save, "async", False),
        ),
    ],
)
def test_a_leader_that_is_stopped_is_named_in_time_and_the_run_goes_on_when_it_continues(
    scene: Any, mode: str, hosted: bool, tmp_path: Path
) -> None:
    backend = None if hosted else "gloo"
    outcomes = run_ranks(2, scene, tmp_path / "run", tmp_path / "notes", mode, hosted, backend=backend)
    (_, _, leader_saved, leader_clean), (error, seconds, saved, clean) = values(outcomes)
    assert isinstance(error, RankError)
    assert error.ranks == (0,)
    assert "rank 0" in str(error)
    # Twice the time after the last sign of it, and what a busy machine adds.
    assert seconds < 2 * DEATH_TIMEOUT_SECONDS + GRACE_SECONDS + 20
    assert saved == leader_saved == [True, True]
    assert clean, "no thread is left of it"
    assert leader_clean
    assert steps_of(tmp_path / "run")[:2] == [4, 3]
