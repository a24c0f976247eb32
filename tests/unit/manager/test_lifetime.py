"""A manager is closed once, in the order that loses nothing; after that no call works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import ClosedError
from holdfast.testing import MemoryStorage

CALLS: dict[str, Callable[[holdfast.CheckpointManager], Any]] = {
    "step": lambda manager: manager.step(1),
    "save": lambda manager: manager.save(1),
    "restore": lambda manager: manager.restore(),
    "attach": lambda manager: manager.attach("late", torch.nn.Linear(1, 1)),
    "should_save": lambda manager: manager.should_save(1),
    "should_load": lambda manager: manager.should_load(),
    "report": lambda manager: manager.report(1, {"loss": 1.0}),
    "tag": lambda manager: manager.tag(1, "good"),
    "untag": lambda manager: manager.untag(1, "good"),
    "prune": lambda manager: manager.prune(),
    "poll": lambda manager: manager.poll(),
    "wait": lambda manager: manager.wait(),
}


def opened(run: Any, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}, mode="sync", **options)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_works_after_close(tmp_path: Path, name: str) -> None:
    manager = opened(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(ClosedError, match="build a new one"):
        CALLS[name](manager)


def test_a_forked_child_closes_nothing_of_its_parent(tmp_path: Path) -> None:
    manager = opened(tmp_path)
    manager.save(1)
    child = os.fork()
    if child == 0:
        try:
            manager.close()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    manager.save(2)
    manager.close()
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [2, 1]


def fail_in_block(manager: holdfast.CheckpointManager) -> None:
    with manager:
        manager.save(1)
        raise KeyError("mine")


def test_an_error_that_ends_the_block_is_the_one_that_is_raised() -> None:
    manager = opened("run", storage=MemoryStorage())
    with pytest.raises(KeyError, match="mine"):
        fail_in_block(manager)
    with pytest.raises(ClosedError):
        manager.save(2)
