"""A restore into live host tensors, in the memory in which asynchronous saves are staged: nothing live changes before
all is checked, and the saves after it are right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import CorruptCheckpointError, SaveFailedError, UsageError
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
        with pytest.raises(UsageError, match="while the same manager restores") as caught:
            manager.save(7)
        errors.append(caught.value)

    with manager_of(tmp_path, weights, calling=Calling(save)) as manager:
        manager.save(1).wait()
        weights.set(2.0)
        manager.restore()
        assert len(errors) == 1
        assert weights.values() == [[1.0]] * 4
        manager.save(8).wait()


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


def test_a_forked_child_leaves_the_memory_of_its_parent_alone(tmp_path: Path) -> None:
    weights = Weights(1.0)
    with manager_of(tmp_path, weights) as manager:
        manager.save(1).wait()
        with manager._run.saver.spare_memory() as here:
            assert here() is not None
        child = os.fork()
        if child == 0:
            with manager._run.saver.spare_memory() as there:
                os._exit(0 if there() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
