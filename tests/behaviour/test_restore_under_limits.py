"""A restore where memory is short, and what an interrupt of one says."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage

MEBI = 1 << 20

UNDER_A_LIMIT = """
import gc, os, resource, sys
import torch
import holdfast
from pathlib import Path

run, room_bytes = sys.argv[1], int(sys.argv[2])
holder = {"large": torch.ones(8 << 20)}
with holdfast.CheckpointManager(run, {"holder": holder}, mode="sync", rng=False) as manager:
    manager.save(1)
holder.clear()
for path in Path(run).rglob("*.safetensors"):
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
with holdfast.CheckpointManager(run, {"holder": holder}, mode="sync", rng=False) as manager:
    gc.collect()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20) + room_bytes, resource.RLIM_INFINITY))
    try:
        manager.restore()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert bool((holder["large"] == 1).all())
"""


def restored_with(room_bytes: int, run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", UNDER_A_LIMIT, str(run), str(room_bytes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_restore_from_the_disk_takes_no_more_memory_to_read_through_than_there_is(tmp_path: Path) -> None:
    """With all of its slots it would take 64 MiB."""
    done = restored_with(48 * MEBI, tmp_path)
    assert done.returncode == 0, done.stderr


class InterruptingDisk(Disk):
    """Interrupts the main thread, as Ctrl-C does, when a thread reads after `filling` was set."""

    filling = False

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        count = super().read_at(file, target, offset)
        if self.filling and threading.current_thread() is not threading.main_thread():
            self.filling = False
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
        return count


@pytest.mark.guarantee("G3")
def test_an_interrupt_while_live_tensors_are_filled_says_that_they_may_be_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, model, first = InterruptingDisk(), torch.nn.Linear(1 << 20, 4), [False, True]

    class Late:
        def state_dict(self) -> dict[str, int]:
            return {"n": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            disk.filling = first.pop()

    components: dict[str, Any] = {"model": model, "late": Late()}
    storage = LocalStorage(tmp_path, disk=disk)
    with holdfast.CheckpointManager("run", components, storage=storage, mode="sync", verify="off") as manager:
        manager.save(1)
        with caplog.at_level(logging.WARNING, "holdfast"), pytest.raises(KeyboardInterrupt) as caught:
            manager.restore()
        assert caught.value.__notes__ == [
            "live tensors may have been overwritten in part; restore again before you go on"
        ]
        assert "the restore of step 1 was interrupted, and live tensors may have been overwritten" in caplog.text
        manager.restore()
