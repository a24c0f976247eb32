"""The parts of a manager hold each other so that one that is dropped is gone at once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch

import holdfast
from holdfast.manager.triggers import Every
from holdfast.runs.retention import KeepLast


def test_a_manager_that_is_dropped_is_gone_without_the_garbage_collector(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        manager = holdfast.CheckpointManager(
            tmp_path, {"model": torch.nn.Linear(2, 2)}, save=Every(steps=1), keep=KeepLast(1), mode="sync"
        )
        manager.step(1)
        manager._run.housekeeper.wait()
        parts = [weakref.ref(manager), weakref.ref(manager._run.saver), weakref.ref(manager._run.components)]
        del manager
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
