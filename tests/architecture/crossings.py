"""Measure, on two ranks, which top-level entries of the package a save and a restore cross, and their agreements.

python -m tests.architecture.crossings        # prints what docs/architecture.md quotes
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.ranks.store import StoreRanks
from holdfast.testing import values
from tests.architecture.imports import SOURCE
from tests.ranks import run_ranks

CALLS = ("first save, sync", "later save, sync", "first save, async", "later save, async", "restore")


@dataclass
class Crossed:
    """What one call used on one rank, on all of its threads.

    entries: the files and folders of src/holdfast that have a function that ran
    modules: the modules with one
    agreements: the labels of the agreements, in order
    """

    entries: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    agreements: list[str] = field(default_factory=list)


class Recorder:
    """Notes each call of a function of the package, on this thread and on all that start later."""

    def __init__(self) -> None:
        self._crossed: Crossed | None = None
        self._root = f"{SOURCE}/"
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def record(self, work: Callable[[], object]) -> Crossed:
        """Return what the work crosses until it returns."""
        self._crossed = crossed = Crossed()
        work()
        self._crossed = None
        return crossed

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        crossed, code = self._crossed, frame.f_code
        if event != "call" or crossed is None or not code.co_filename.startswith(self._root):
            return
        module = code.co_filename.removeprefix(self._root).removesuffix(".py")
        crossed.modules.add(module)
        crossed.entries.add(module.partition("/")[0])
        if code is StoreRanks.decide.__code__:
            crossed.agreements.append(frame.f_locals["label"])


def cross(folder: Path) -> list[dict[str, Crossed]]:
    """Return, for each of two ranks, what each of `CALLS` crosses."""
    return values(run_ranks(2, _record_calls, folder))


def _record_calls(rank: int, folder: Path) -> dict[str, Crossed]:
    recorder = Recorder()
    found: dict[str, Crossed] = {}
    try:
        for mode in ("sync", "async"):
            with holdfast.CheckpointManager(folder / mode, _components(), mode=mode) as manager:
                for name, step in (("first save", 1), ("later save", 2)):
                    found[f"{name}, {mode}"] = recorder.record(lambda manager=manager, step=step: _save(manager, step))
        with holdfast.CheckpointManager(folder / "sync", _components(), mode="sync") as manager:
            found["restore"] = recorder.record(manager.restore)
    finally:
        recorder.stop()
    return found


def _save(manager: holdfast.CheckpointManager, step: int) -> None:
    """Save, and wait for the cleanup after it: else it would count for this save, the next one or none by chance."""
    manager.save(step, wait=True)
    manager._run.housekeeper.wait()


def _components() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, calls in enumerate(cross(Path(folder))):
            for call, crossed in calls.items():
                print(f"rank {rank}, {call}: {len(crossed.entries)} entries {sorted(crossed.entries)},", end=" ")
                print(f"{len(crossed.modules)} modules, {len(crossed.agreements)} agreements {crossed.agreements}")


if __name__ == "__main__":
    main()
