"""What a restore gives back beside the state is decoded before any live object changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import StateMismatchError
from holdfast.runs.annotations import Note, encode_note, note_key

SAVE = """
import dataclasses, sys, torch, holdfast

@dataclasses.dataclass
class Schedule:
    warmup: int

holdfast.register_type(Schedule, "tests.Schedule")
with holdfast.CheckpointManager(sys.argv[1], {"model": torch.nn.Linear(2, 2)}, config={"s": Schedule(3)}) as manager:
    manager.save(1, wait=True)
"""


@pytest.mark.guarantee("G7")
def test_a_config_of_a_class_that_is_not_registered_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVE, str(tmp_path)], check=True, timeout=120)
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with (
        CheckpointManager(tmp_path, {"model": model}) as manager,
        pytest.raises(StateMismatchError, match="registered"),
    ):
        manager.restore()
    assert torch.equal(model.weight, before)


@pytest.mark.guarantee("G3")
def test_a_note_whose_metrics_cannot_be_decoded_stops_no_restore(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}) as manager:
        found = manager.save(1, metrics={"loss": 1.0}).wait()
    note = Note(checkpoint=found.digest, created="now", metrics={"loss": {"$int": "no number"}})
    path = tmp_path / note_key(found.folder, 1)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode_note(note))
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}) as manager:
        assert manager.restore().metrics == {"loss": 1.0}


@pytest.mark.guarantee("G11")
def test_the_folder_above_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    with CheckpointManager(tmp_path / "real" / "run", {"model": torch.nn.Linear(2, 2)}) as manager:
        manager.save(1, wait=True)
    with CheckpointManager(f"{tmp_path}/link/../run", {"model": torch.nn.Linear(2, 2)}) as manager:
        assert manager.restore().resumed
    assert not (tmp_path / "run").exists()


def test_a_file_with_the_name_of_a_checkpoint_blocks_no_start(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}, mode="sync") as manager:
        manager.save(1)
    (tmp_path / "step-000000000").write_text("")
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}, mode="sync") as manager:
        assert manager.restore().step == 1
        manager.save(2)
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [2, 1]
