"""A disk that is full: the run on it can still be leased, and pruned. On a real file system of a few megabytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import CheckpointManager, KeepLast
from holdfast.cli import app
from holdfast.errors import StorageError
from holdfast.runs.catalog import Catalog
from holdfast.runs.heartbeat import Heartbeat
from holdfast.runs.lease import Lease
from holdfast.storage.local.local import LocalStorage

ROOT = Path(__file__).parents[2]
SIZE_BYTES = 8 << 20

# A training whose process ends without a word: its claim stays, and an attempt that nothing committed.
TRAINING = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import holdfast, torch
from holdfast.runs.catalog import Catalog
from holdfast.storage.local.local import LocalStorage

manager = holdfast.CheckpointManager(sys.argv[1], {{"model": torch.nn.Linear(64, 64)}}, mode="sync", rng=False)
for step in (1, 2, 3):
    manager.save(step)
Catalog(LocalStorage(sys.argv[1])).attempts.claim(4, 1, lease=1)
os._exit(0)
"""


def mounted(path: Path, kind: str, image: Path) -> None:
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(path)]
    else:
        image.touch()
        os.truncate(image, SIZE_BYTES)
        made = subprocess.run([f"mkfs.{kind}", "-q", "-m", "0", str(image)], capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"no {kind} can be made here: {made.stderr.decode()}")
        command = ["mount", "-o", "loop", str(image), str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.decode()}")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("only root can mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    mounted(path, request.param, tmp_path / "image")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filling").open("wb", buffering=0) as file:
        for size_bytes in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size_bytes)
        os.fsync(file.fileno())
    with pytest.raises(OSError, match="No space"):
        (disk / "more").write_bytes(b"x")
    (disk / "more").unlink(missing_ok=True)


def trained(run: Path) -> None:
    subprocess.run([sys.executable, "-c", TRAINING, str(run)], check=True)


@pytest.mark.guarantee("G4")
def test_a_run_on_a_full_disk_can_be_pruned(disk: Path) -> None:
    run = disk / "run"
    trained(run)
    # As a training of more than a few seconds leaves it.
    Heartbeat.of_lease(LocalStorage(run), 1).beat()
    fill(disk)
    done = CliRunner().invoke(app, ["prune", str(run), "--keep-last", "1", "--yes"])
    assert done.exit_code == 0, done.output
    assert "freed" in done.output
    assert [found.step for found in holdfast.checkpoints(run)] == [3]
    assert holdfast.verify(run).ok
    with CheckpointManager(run, {"model": torch.nn.Linear(64, 64)}, mode="sync", rng=False) as manager:
        manager.restore()
    assert LocalStorage(run).free_bytes() > 1 << 14


@pytest.mark.guarantee("G4")
def test_a_run_that_was_released_can_be_pruned_again_and_again_on_a_full_disk(disk: Path) -> None:
    run = disk / "run"
    for step in (1, 2, 3, 4, 5):
        with CheckpointManager(run, {"model": torch.nn.Linear(64, 64)}, mode="sync", rng=False) as manager:
            manager.restore()
            manager.save(step)
    for count in (4, 3, 2, 1):
        (disk / "filling").unlink(missing_ok=True)
        fill(disk)
        holdfast.prune(run, KeepLast(count))
        assert len(holdfast.checkpoints(run)) == count


def test_where_no_room_can_be_made_the_error_says_what_to_remove(disk: Path) -> None:
    run = disk / "run"
    trained(run)
    for folder in range(20):
        Catalog(LocalStorage(run)).attempts.claim(100 + folder, 1, lease=1)
    fill(disk)
    with pytest.raises(StorageError, match=r"remove any file that is no part of a run.*holdfast prune"):
        holdfast.prune(run, KeepLast(1))
    assert [found.step for found in holdfast.checkpoints(run)] == [3, 2, 1]
    (disk / "filling").unlink()
    holdfast.prune(run, KeepLast(1))
    assert [found.step for found in holdfast.checkpoints(run)] == [3]


@pytest.mark.guarantee("G13")
def test_a_process_that_lives_gives_heartbeats_on_a_full_disk(disk: Path) -> None:
    storage = LocalStorage(disk / "run")
    lease = Lease.acquire(storage)
    fill(disk)
    before = {entry.name for entry in storage.entries("lease")}
    assert Heartbeat.of_lease(storage, lease.number, token=lease.token).beat()
    assert {entry.name for entry in storage.entries("lease")} - before
    (disk / "filling").unlink()
    lease.release()
