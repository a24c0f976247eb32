"""A checkpoint that was copied or renamed is named as what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import CheckpointManager
from holdfast.cli import app
from holdfast.errors import CorruptCheckpointError, UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(3, 3)}, mode="sync", rng=False) as manager:
        manager.save(1)
    return tmp_path / "run"


def test_a_checkpoint_under_another_name_is_refused_with_the_name_that_it_had(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run / "latest", tmp_path / "final-model"))
    (tmp_path / "link").symlink_to(copy)
    for path in (copy, copy / "manifest.json", tmp_path / "link"):
        for work in (holdfast.resolve, holdfast.peek, holdfast.verify):
            with pytest.raises(UsageError, match=r"under another name.*step-000000001"):
                work(path)
        with CheckpointManager(tmp_path / "new", {"model": torch.nn.Linear(3, 3)}, mode="sync") as manager:
            with pytest.raises(UsageError, match=r"under another name.*step-000000001"):
                manager.restore(path)
    for command in ("verify", "show", "ls"):
        done = CliRunner().invoke(app, [command, str(copy)])
        assert done.exit_code == 2
        assert "under another name" in " ".join(done.output.split())
    copy.rename(tmp_path / "step-000000001")
    assert holdfast.verify(tmp_path / "step-000000001").ok


def test_a_checkpoint_under_the_name_of_another_step_is_refused_with_the_name_that_it_had(run: Path) -> None:
    shutil.copytree(run / "step-000000001", run / "step-000000009")
    with pytest.raises(CorruptCheckpointError, match=r"under another name.*step-000000001"):
        holdfast.resolve(run / "step-000000009")
    (skipped,) = holdfast.examine(run)
    assert "under another name" in skipped.problem


@pytest.mark.parametrize("data", [None, b"", b"{}", b'{"version": 3}'])
def test_a_run_beside_a_file_with_the_name_of_a_manifest_is_a_run(run: Path, data: bytes | None) -> None:
    (run / "manifest.json").write_bytes((run / "latest" / "manifest.json").read_bytes() if data is None else data)
    assert holdfast.resolve(run).step == 1
    if data is not None:
        shutil.rmtree(run / "step-000000001")
        assert not holdfast.is_restart(run)
