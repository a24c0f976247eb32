"""One folder is one run, by whatever path it is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing import MemoryStorage


def manager_of(run: Any, **more: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(3, 2)}, mode="sync", rng=False, **more)


def real_and_link(tmp_path: Path) -> tuple[Path, Path]:
    """A folder, and a path to it through a link, as /scratch -> /lustre/... is."""
    (tmp_path / "lustre" / "user").mkdir(parents=True)
    (tmp_path / "scratch").symlink_to(tmp_path / "lustre" / "user")
    return tmp_path / "lustre" / "user" / "run", tmp_path / "scratch" / "run"


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "the link latest": lambda real, link: f"{link}/latest",
    "the link latest, by the real path": lambda real, link: f"{real}/latest",
    "a checkpoint's folder": lambda real, link: link / "step-000000002",
    "a checkpoint's folder by the real path": lambda real, link: real / "step-000000002",
    "a manifest": lambda real, link: link / "step-000000002" / "manifest.json",
    "a run and a selector": lambda real, link: f"{link}@2",
    "a run and a selector, by the real path": lambda real, link: f"{real}@latest",
    "the run alone": lambda real, link: f"{link}/",
    "a slash at the end": lambda real, link: f"{link}/step-000000002/",
    "a relative path": lambda real, link: os.path.relpath(real / "step-000000002"),
    "a detour": lambda real, link: f"{link}/../run/step-000000002",
    "a URL": lambda real, link: f"file://{link}/step-000000002",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("opened_by", ["link", "real path"])
def test_a_restore_by_any_path_to_the_run_continues_its_line(tmp_path: Path, way: Any, opened_by: str) -> None:
    real, link = real_and_link(tmp_path)
    run = link if opened_by == "link" else real
    with manager_of(run) as manager:
        manager.save(1)
        manager.save(2)
    with manager_of(run, keep=holdfast.KeepLast(1)) as manager:
        assert manager.restore(way(real, link)).step == 2
        manager.save(3)
        manager.prune()
    (third,) = holdfast.checkpoints(run)
    assert third.manifest.line == ((1, 2),), "and so retention knows the others as older ones of the same line"


def test_a_copy_of_a_run_is_another_run(tmp_path: Path) -> None:
    with manager_of(tmp_path / "run") as manager:
        manager.save(1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    with manager_of(tmp_path / "run") as manager:
        assert manager.restore(tmp_path / "copy" / "step-000000001").step == 1
        manager.save(2)
    assert holdfast.resolve(tmp_path / "run", 2).parent is None


def test_a_run_that_is_not_there_yet_is_not_taken_for_another(tmp_path: Path) -> None:
    with manager_of(tmp_path / "other") as manager:
        manager.save(1)
    with manager_of(tmp_path / "new") as manager:
        assert manager.restore(f"{tmp_path}/other@1").step == 1
        manager.save(5)
    assert holdfast.resolve(tmp_path / "new").parent is None


def test_a_storage_without_folders_is_known_by_its_url() -> None:
    memory = MemoryStorage()
    with holdfast.CheckpointManager("run", {"model": torch.nn.Linear(3, 2)}, storage=memory, mode="sync") as manager:
        manager.save(1)
        assert manager.restore(1).step == 1
