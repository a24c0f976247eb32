"""A checkpoint that a person moved to another disk and linked back: not followed, and never silently left out."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import CheckpointManager, KeepLast
from holdfast.cli import app
from holdfast.errors import CorruptCheckpointError
from holdfast.runs.catalog import Catalog
from holdfast.storage.base import StorageFeatures
from holdfast.storage.local.links import LocalLinks
from holdfast.storage.local.local import LocalStorage

MODES = ("sync", "async")


def opened(run: Path, mode: str = "sync", **more: Any) -> CheckpointManager:
    return CheckpointManager(run, {"model": torch.nn.Linear(3, 3)}, mode=mode, rng=False, **more)  # type: ignore[arg-type]


def made(tmp_path: Path, steps: int, linked: int, name: str = "") -> tuple[Path, Path]:
    """A run of which one step was moved to another disk, and where it lies there."""
    run = tmp_path / "run"
    with opened(run) as manager:
        manager.restore()
        for step in range(steps):
            manager.save(step)
        manager.tag(linked, "release")
    folder = f"step-{linked:09d}"
    moved = tmp_path / "disk2" / (name or folder)
    moved.parent.mkdir()
    shutil.move(run / folder, moved)
    (run / folder).symlink_to(moved)
    return run, moved


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert "This is a bug" not in done.output, done.output
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("mode", MODES)
def test_a_restore_that_falls_back_says_which_link_it_passed_over(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, moved = made(tmp_path, 4, linked=3)
    with caplog.at_level(logging.WARNING, "holdfast"), opened(run, mode) as manager:
        result = manager.restore()
        assert result.step == 2
        (text,) = result.rejected
        assert text.startswith("step-000000003: ")
        assert f"symbolic link to {moved}, which is not followed" in text
        assert "move the folder back into the run" in text
        assert f"rejected {text}" in caplog.messages
        # The step is saved again under the next name, as often as it is asked for.
        assert manager.save(3).wait().folder == "step-000000003.2"
        assert manager.save(4).wait().folder == "step-000000004"
    assert os.readlink(run / "step-000000003") == str(moved)
    assert (moved / "manifest.json").exists()


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_nothing_but_a_linked_checkpoint_is_no_fresh_start(tmp_path: Path, mode: str) -> None:
    run, moved = made(tmp_path, 1, linked=0)
    assert holdfast.is_restart(run)
    with opened(run, mode) as manager:
        assert manager.should_load()
        with pytest.raises(CorruptCheckpointError, match=f"symbolic link to {moved}"):
            manager.restore()


@pytest.mark.guarantee("G3")
def test_the_commands_name_the_link_and_report_damage(tmp_path: Path) -> None:
    run, moved = made(tmp_path, 4, linked=3)
    for arguments in (("ls", run), ("verify", run, "--all"), ("doctor", run), ("doctor", run, "--fix")):
        code, text = command(*arguments)
        assert code == 1, f"{arguments}: {text}"
        assert "symbolic link" in text, arguments
        assert str(moved) in text.replace(" ", ""), arguments
    code, text = command("prune", run, "--keep-last", 2, "--yes")
    assert code == 0, text
    assert [found.step for found in holdfast.checkpoints(run)] == [2, 1]
    assert os.readlink(run / "step-000000003") == str(moved)
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        holdfast.resolve(run, 3)
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        holdfast.resolve(run, "step-000000003")
    assert holdfast.resolve(moved).step == 3


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("mode", MODES)
def test_retention_goes_on_beside_a_linked_checkpoint_with_a_tag(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, moved = made(tmp_path, 4, linked=0)
    (run / "mine").symlink_to("step-000000000")
    notes = sorted(path.name for path in (run / "notes").iterdir())
    with caplog.at_level(logging.WARNING, "holdfast"), opened(run, mode, keep=KeepLast(2)) as manager:
        assert manager.restore().step == 3
        for step in range(4, 8):
            manager.save(step)
    assert not [text for text in caplog.messages if "tidied" in text or "cleanup" in text]
    assert [found.step for found in holdfast.checkpoints(run)] == [7, 6]
    assert sorted(path.name for path in (run / "notes").iterdir()) == notes
    assert os.readlink(run / "mine") == "step-000000000"
    # Moved back, it is what it was.
    (run / "step-000000000").unlink()
    shutil.move(moved, run / "step-000000000")
    assert holdfast.resolve(run, "release").step == 0


def test_a_link_with_the_name_of_a_step_is_never_removed(tmp_path: Path) -> None:
    run, _ = made(tmp_path, 4, linked=3)
    (run / "step-000000009").symlink_to("step-000000008")
    with opened(run, keep=KeepLast(1)) as manager:
        manager.restore()
        manager.save(4)
    command("doctor", run, "--fix")
    assert os.readlink(run / "step-000000009") == "step-000000008"


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_takes_the_next_name_when_something_else_has_the_place_of_its_folder(
    tmp_path: Path, mode: str, kind: str
) -> None:
    run = tmp_path / "run"
    with opened(run, mode) as manager:
        manager.restore()
        manager.save(0).wait()
        place = run / "step-000000010"
        if kind == "file":
            place.write_text("x")
        elif kind == "link":
            place.symlink_to("/etc")
        else:
            os.mkfifo(place)
        assert manager.save(10).wait().folder == "step-000000010.2"
        assert manager.save(11).wait().folder == "step-000000011"
    assert place.is_symlink() or not place.is_dir()


def test_a_momentary_error_of_the_listing_of_links_is_tried_again(tmp_path: Path) -> None:
    run, _ = made(tmp_path, 2, linked=1)

    class Once(LocalStorage):
        failed = False

        @property
        def features(self) -> StorageFeatures:
            return replace(super().features, links=FailingLinks(self))

    class FailingLinks(LocalLinks):
        def __init__(self, storage: Once) -> None:
            self.storage = storage

        def targets(self) -> dict[str, str]:
            if not self.storage.failed:
                self.storage.failed = True
                raise holdfast.StorageError("it failed", errno=5, file="")
            links = LocalStorage(run).features.links
            assert links is not None
            return links.targets()

    assert [skipped.folder for skipped in Catalog(Once(run)).scan().damaged] == ["step-000000001"]
