"""A restore into live host tensors, in the memory in which asynchronous saves are staged: nothing live changes before
all is checked, and the saves after it are right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import CorruptCheckpointError, SaveFailedError, UsageError
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage

MEBI = 1 << 20


class Weights(torch.nn.Module):
    """32 MiB in one tensor, and small ones. `on_load` is called when the values are restored."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.full((8 * MEBI,), value))
        self.small = torch.nn.ParameterList([torch.nn.Parameter(torch.full((7,), value)) for _ in range(3)])

    def set(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def values(self) -> list[list[float]]:
        return [parameter.detach().unique().tolist() for parameter in self.parameters()]


class Calling:
    """A component that calls a function when it is restored."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.function()


def manager_of(run: Any, weights: Weights, **more: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": weights, **more}, mode="async", rng=False, timeout=120)


def arena_of(manager: holdfast.CheckpointManager) -> memoryview:
    arena = manager._run.saver._async.stager._arena
    assert arena is not None
    return arena.memory


def was_lent(manager: holdfast.CheckpointManager) -> bool:
    """Whether the headers that a save had put into the arena must be written again."""
    return manager._run.saver._async.stager._placement is None


def flip_a_bit_in(run: Path) -> None:
    [file] = [path for path in run.rglob("*.safetensors") if path.stat().st_size > 32 * MEBI]
    with file.open("r+b") as opened:
        opened.seek(-MEBI, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-MEBI, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.guarantee("G7")
def test_damage_changes_nothing_live(tmp_path: Path) -> None:
    weights = Weights(1.0)
    with manager_of(tmp_path, weights) as manager:
        manager.save(1).wait()
        flip_a_bit_in(tmp_path)
        weights.set(2.0)
        with pytest.raises(CorruptCheckpointError):
            manager.restore()
        assert was_lent(manager)
        assert weights.values() == [[2.0]] * 4


@pytest.mark.guarantee("G1")
def test_the_save_after_a_restore_is_right(tmp_path: Path) -> None:
    weights = Weights(1.0)
    with manager_of(tmp_path, weights) as manager:
        manager.save(1).wait()
        weights.set(2.0)
        assert manager.restore().step == 1
        assert was_lent(manager)
        assert weights.values() == [[1.0]] * 4
        weights.set(3.0)
        manager.save(2).wait()
    [file] = [path for path in (tmp_path / "step-000000002").rglob("*.safetensors") if path.stat().st_size > MEBI]
    assert load_file(file)["model.large"].unique().tolist() == [3.0], "also its header is there"
    assert holdfast.verify(tmp_path).ok
    other = Weights(0.0)
    with manager_of(tmp_path, other) as manager:
        assert manager.restore().step == 2
    assert other.values() == [[3.0]] * 4


def test_what_is_read_goes_to_the_memory_of_saves_and_from_there_to_the_live_tensors(tmp_path: Path) -> None:
    weights = Weights(1.0)
    with manager_of(tmp_path, weights) as manager:
        manager.save(1).wait()
        arena_of(manager)[:] = bytes(len(arena_of(manager)))
        weights.set(2.0)
        manager.restore()
        staged = torch.frombuffer(arena_of(manager), dtype=torch.uint8)[: weights.large.nbytes].view(torch.float32)
        assert staged.unique().tolist() == [1.0]
        assert weights.values() == [[1.0]] * 4


@pytest.mark.guarantee("G2")
def test_a_save_in_the_middle_of_a_restore_is_an_error_and_the_restore_is_right(tmp_path: Path) -> None:
    weights, errors = Weights(1.0), []

    def save() -> None:
        with pytest.raises(UsageError, match=r"save\(\) was called in the middle of restore\(\)") as caught:
            manager.save(7)
        errors.append(caught.value)

    with manager_of(tmp_path, weights, calling=Calling(save)) as manager:
        manager.save(1).wait()
        weights.set(2.0)
        manager.restore()
        assert len(errors) == 1
        assert weights.values() == [[1.0]] * 4
        manager.save(8).wait()


def test_tensors_that_are_conjugated_when_they_are_read_are_restored(tmp_path: Path) -> None:
    weights = Weights(1.0)
    weights.register_buffer("turned", torch.full((1 << 16,), 1 + 2j).conj())
    with manager_of(tmp_path, weights) as manager:
        manager.save(1).wait()
        weights.set(2.0)
        weights.turned.fill_(5)
        manager.restore()
        assert was_lent(manager)
        assert weights.values() == [[1.0]] * 4
        assert bool((weights.turned == 1 - 2j).all())


@pytest.mark.guarantee("G1")
def test_memory_that_the_writer_of_a_failed_save_may_still_read_is_left_alone() -> None:
    weights, storage = Weights(1.0), MemoryStorage()
    with holdfast.CheckpointManager(
        "run", {"model": weights}, storage=storage, mode="async", rng=False, timeout=120
    ) as manager:
        manager.save(1).wait()
        weights.set(2.0)
        pending = manager.save(2)
        pending.wait()
        latest = manager._run.saver.pending
        assert latest is not None
        latest.error = SaveFailedError("the writer does not respond")
        latest.reported = True
        manager.restore(1)
        assert not was_lent(manager)
        assert weights.values() == [[1.0]] * 4


class StuckDisk(Disk):
    """Reads of the threads of a restore do not return until `goes_on` is set. `reading`: such a read has begun."""

    def __init__(self) -> None:
        self.stuck, self.reading, self.goes_on = False, threading.Event(), threading.Event()

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        if self.stuck and threading.current_thread().name.startswith("holdfast-read"):
            # A system call holds the file that it reads.
            file = os.dup(file)
            self.reading.set()
            self.goes_on.wait(120)
        return super().read_at(file, target, offset)


@pytest.mark.guarantee("G1")
def test_a_restore_that_is_interrupted_twice_ends_when_its_threads_have_and_the_next_save_is_right(
    tmp_path: Path,
) -> None:
    weights, disk = Weights(1.0), StuckDisk()
    storage = LocalStorage(tmp_path, disk=disk)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_twice() -> None:
        assert disk.reading.wait(60)
        for _ in range(2):
            time.sleep(0.3)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)
        disk.goes_on.set()

    with holdfast.CheckpointManager(
        "run", {"model": weights}, storage=storage, mode="async", rng=False, timeout=120
    ) as manager:
        manager.save(1).wait()
        weights.set(2.0)
        disk.stuck = True
        threading.Thread(target=interrupt_twice, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            manager.restore(1)
        assert disk.goes_on.is_set(), "not before the threads have ended"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]
        assert weights.values() == [[2.0]] * 4
        weights.set(3.0)
        manager.save(2).wait()
        [file] = [path for path in (tmp_path / "step-000000002").rglob("*.safetensors") if path.stat().st_size > MEBI]
        assert load_file(file)["model.large"].unique().tolist() == [3.0]


def test_a_forked_child_leaves_the_memory_of_its_parent_alone(tmp_path: Path) -> None:
    weights = Weights(1.0)
    with manager_of(tmp_path, weights) as manager:
        manager.save(1).wait()
        assert manager._run.saver.restoring("restore()", lambda lend, left_bytes: lend() is not None)
        child = os.fork()
        if child == 0:
            is_lent = manager._run.saver.restoring("restore()", lambda lend, left_bytes: lend() is not None)
            os._exit(int(is_lent))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
