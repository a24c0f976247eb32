"""The first save finds its writer and its arena ready, is right whatever of them there is, and leaves nothing."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.saving.async_saver import AsyncSaver
from holdfast.saving.staging.arena import Arena
from holdfast.testing import MemoryStorage
from tests.behaviour.test_async import belongings, in_a_child, of_others, writers
from tests.leftovers import threads

__all__ = ["of_others"]

pytestmark = pytest.mark.slow


def saver_of(manager: holdfast.CheckpointManager) -> AsyncSaver:
    return manager._saver._async


def arena_of(manager: holdfast.CheckpointManager) -> Arena | None:
    return saver_of(manager).stager._arena


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


def is_ready(manager: holdfast.CheckpointManager, size_bytes: int = 1) -> bool:
    """Return whether the writer runs and the arena has all of its pages."""
    stager = saver_of(manager).stager
    return (
        saver_of(manager).supervisor.writer is not None
        and stager.held_bytes >= size_bytes
        and stager.missing_bytes == 0
    )


def preparing() -> bool:
    return any(thread.startswith("thread holdfast-prepare") for thread in threads() - _of_others)


_of_others: set[str] = set()


@pytest.fixture(autouse=True)
def threads_of_others(of_others: None) -> None:
    _of_others.clear()
    _of_others.update(threads())


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(500, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 500)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors)


def assert_saved(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Restore into other objects, and compare every bit."""
    other, its_optimizer = trained()
    storage = None if isinstance(run, Path) else run
    with holdfast.CheckpointManager(
        run if storage is None else "run",
        {"model": other, "optimizer": its_optimizer},
        storage=storage,
        mode="sync",
        rng=False,
    ) as manager:
        manager.restore(step)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    for one, another in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert one.keys() == another.keys()
        assert all(torch.equal(one[key], another[key]) for key in one)


@pytest.mark.guarantee("G2")
def test_a_first_save_uses_what_is_ready_and_is_right_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    size_bytes = state_bytes(model, optimizer)
    with holdfast.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, rng=False) as manager:
        wait_for(lambda: is_ready(manager, size_bytes))
        arena, (writer,) = arena_of(manager), writers()
        manager.save(1, wait=True)
        assert arena_of(manager) is arena
        assert writers() == [writer]
        assert not preparing()
        assert saver_of(manager).stager.held_bytes <= 1.01 * size_bytes + (2 << 20)
        model[0].weight.data.add_(1)
        manager.save(2, wait=True)
        assert arena_of(manager) is arena
    assert holdfast.verify(tmp_path, 1).ok
    assert_saved(tmp_path, model, optimizer, 2)
    del arena
    assert belongings()[1:] == (0, 0)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("ready", ["nothing", "the writer", "a piece"])
def test_a_save_in_the_middle_uses_what_is_ready_and_makes_the_rest(tmp_path: Path, ready: str) -> None:
    model, optimizer = trained()
    big = nn.Linear(6000, 6000)
    state = {"model": model, "optimizer": optimizer, "big": big}
    with holdfast.CheckpointManager(tmp_path, state, rng=False) as manager:
        stager = saver_of(manager).stager
        if ready == "the writer":
            wait_for(lambda: saver_of(manager).supervisor.writer is not None)
        if ready == "a piece":
            wait_for(lambda: stager.held_bytes > 0)
        found = writers()
        manager.save(1, wait=True)
        assert not preparing()
        assert stager.missing_bytes == 0
        assert ready == "nothing" or writers() == found
    assert holdfast.verify(tmp_path, 1).ok
    read = nn.Linear(6000, 6000)
    with holdfast.CheckpointManager(tmp_path, {"big": read}, mode="sync", rng=False) as manager:
        manager.restore(1, strategy=holdfast.LoadStrategy(only=("big",)))
    assert torch.equal(read.weight, big.weight)


def test_close_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    before = belongings()
    manager = holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(9000, 9000)}, rng=False)
    wait_for(lambda: saver_of(manager).stager.held_bytes > 0)
    manager.close()
    assert not preparing()
    wait_for(lambda: belongings() == before)


def test_close_before_anything_is_ready_starts_nothing(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(9, 9)}, rng=False) as manager:
        assert preparing()
        supervisor = saver_of(manager).supervisor
    assert not preparing()
    assert supervisor.writer is None


@pytest.mark.parametrize("when", ["at once", "a piece", "ready"])
def test_a_manager_that_is_dropped_takes_all_of_it_along_and_the_model_with_it(tmp_path: Path, when: str) -> None:
    before = belongings()
    gone = drop_a_manager(tmp_path, when)
    gc.collect()
    wait_for(lambda: gone() is None)
    wait_for(lambda: not preparing())
    wait_for(lambda: belongings() == before)


def drop_a_manager(run: Path, when: str) -> weakref.ref[nn.Module]:
    model = nn.Linear(6000, 6000)
    manager = holdfast.CheckpointManager(run, {"model": model}, rng=False)
    if when == "a piece":
        wait_for(lambda: saver_of(manager).stager.held_bytes > 0)
    if when == "ready":
        wait_for(lambda: is_ready(manager, 6000 * 6000 * 4))
    return weakref.ref(model)


def test_a_manager_that_is_dropped_at_once_starts_no_writer_later(tmp_path: Path) -> None:
    supervisor = saver_of(holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(9, 9)}, rng=False)).supervisor
    gc.collect()
    wait_for(lambda: not preparing())
    assert supervisor.writer is None


def test_a_program_that_ends_in_the_middle_ends_cleanly(tmp_path: Path) -> None:
    script = """
    import sys, time, torch, holdfast
    manager = holdfast.CheckpointManager(sys.argv[1], {"model": torch.nn.Linear(9000, 9000)}, rng=False)
    stager = manager._saver._async.stager
    while stager.held_bytes == 0:
        time.sleep(0.001)
    print(manager._saver._async.supervisor.writer.process_id)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_for(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


def test_sync_mode_gets_nothing_ready(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(9, 9)}, mode="sync", rng=False) as manager:
        assert not preparing()
        manager.save(1)
        assert belongings()[1:] == (0, 0)


def test_a_staging_limit_keeps_the_arena_from_being_made(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, rng=False, staging_limit_bytes=1 << 20) as manager:
        wait_for(lambda: not preparing())
        assert (arena_of(manager), len(writers())) == (None, 1)
        assert manager.save(1).done()
    assert holdfast.verify(tmp_path, 1).ok


def test_a_low_memory_budget_keeps_the_arena_from_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The share of one rank among very many is next to nothing.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**12))
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(1000, 1000)}, rng=False) as manager:
        wait_for(lambda: not preparing())
        assert arena_of(manager) is None
        assert manager.save(1).done()


def test_an_arena_is_not_kept_for_saves_that_are_not_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, rng=False) as manager:
        wait_for(lambda: is_ready(manager, 4_000_000))
        manager.attach("more", nn.Linear(2000, 2000))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**12))
        assert manager.save(1).done(), "there is no memory to stage it in"
        assert belongings()[1] == 0
    assert holdfast.verify(tmp_path, 1).ok


def test_an_optimizer_whose_state_comes_late_has_room(tmp_path: Path) -> None:
    model = nn.Linear(2000, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, rng=False) as manager:
        wait_for(lambda: saver_of(manager).supervisor.writer is not None)
        assert arena_of(manager) is None, "it waits for the first step"
        model(torch.ones(2000)).sum().backward()
        optimizer.step()
        wait_for(lambda: is_ready(manager, 3 * 2000 * 2000 * 4))
        arena = arena_of(manager)
        manager.save(1, wait=True)
        assert arena_of(manager) is arena


def test_a_state_that_shrinks_gives_memory_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2000, 2000), nn.Linear(2000, 2000))
    with holdfast.CheckpointManager(tmp_path, {"model": model}, rng=False) as manager:
        wait_for(lambda: is_ready(manager, 2 * 2000 * 2000 * 4))
        arena = arena_of(manager)
        del model[1]
        manager.save(1, wait=True)
        assert arena_of(manager) is arena
        assert arena is not None
        assert os.fstat(arena.handle).st_blocks * 512 <= 1.01 * 2001 * 2000 * 4 + (4 << 20)
    assert holdfast.verify(tmp_path, 1).ok


def test_a_component_can_be_attached_meanwhile(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(100, 100)}, rng=False) as manager:
        wait_for(lambda: is_ready(manager))
        manager.attach("more", nn.Linear(3000, 3000))
        wait_for(lambda: is_ready(manager, 3000 * 3000 * 4))
        arena = arena_of(manager)
        manager.save(1, wait=True)
        assert arena_of(manager) is arena


def test_a_writer_that_is_a_thread_is_not_started_early() -> None:
    model, optimizer = trained()
    storage = MemoryStorage()
    state = {"model": model, "optimizer": optimizer}
    with holdfast.CheckpointManager("run", state, storage=storage, mode="async", rng=False) as manager:
        wait_for(lambda: saver_of(manager).stager.held_bytes > 0 and saver_of(manager).stager.missing_bytes == 0)
        assert saver_of(manager).supervisor.writer is None
        assert not any(thread.name == "holdfast-writer" for thread in threading.enumerate())
        manager.save(1, wait=True)
    assert_saved(storage, model, optimizer, 1)


@pytest.mark.guarantee("G6")
def test_a_writer_that_is_killed_before_the_first_save_is_replaced(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(100, 100)}, rng=False) as manager:
        wait_for(lambda: is_ready(manager))
        (writer,) = writers()
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
        assert manager.save(1).wait().step == 1
        assert writers() != [writer]
    assert holdfast.verify(tmp_path, 1).ok


def test_a_forked_child_in_the_middle_has_nothing_of_it_and_ends_cleanly(tmp_path: Path) -> None:
    def arenas_here() -> int:
        handles = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("holdfast-arena" in name for name in [*handles, *maps])

    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(9000, 9000)}, rng=False) as manager:
        wait_for(lambda: saver_of(manager).stager.held_bytes > 0)
        assert in_a_child(arenas_here) == "returned 0"
        assert in_a_child(manager.close) == "returned None"
        child = os.fork()
        if child == 0:
            # The whole way out, with all that is called at the end of a process.
            atexit._run_exitfuncs()
            os._exit(0)
        wait_for(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(writers()) == 1, "it is the parent's"
        manager.save(1, wait=True)
    assert holdfast.verify(tmp_path, 1).ok
