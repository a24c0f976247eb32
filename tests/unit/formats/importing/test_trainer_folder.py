"""A checkpoint folder of the Trainer that a stranger made: links out of it and a damaged `trainer_state.json` are
refused. Folders of the real Trainer are in tests/compat/test_import.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import CorruptCheckpointError, UnsafeContentError
from holdfast.formats.importing.importing import import_checkpoint

FILES = ["model.safetensors", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"]
STATE = {"global_step": 3, "epoch": 1.5, "log_history": [{"loss": 0.5}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the Trainer leaves of a model without a configuration."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    made = tmp_path / "checkpoint-3"
    made.mkdir()
    save_file(model.state_dict(), made / "model.safetensors")
    torch.save(optimizer.state_dict(), made / "optimizer.pt")
    torch.save({"last_epoch": 3}, made / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, made / "rng_state.pth")
    write_state(made, STATE)
    return made


def write_state(folder: Path, state: Any) -> None:
    (folder / "trainer_state.json").write_text(state if isinstance(state, str) else json.dumps(state))


def imported(folder: Path) -> holdfast.Checkpoint:
    return import_checkpoint(folder, folder.parent / "run", parameters=["weight", "bias"])


def test_a_folder_of_regular_files_is_taken(folder: Path) -> None:
    checkpoint = imported(folder)
    assert checkpoint.step == 2
    assert checkpoint.head.epoch == 1
    assert {"model", "optimizer", "scheduler", "trainer_state"} <= set(checkpoint.extra["import"]["components"])


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    private = folder.parent / "private"
    (folder / name).rename(private)
    (folder / name).symlink_to(private)
    with pytest.raises(UnsafeContentError, match="outside of the folder"):
        imported(folder)
    assert not (folder.parent / "run").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_link_inside_of_the_folder_is_followed(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "moved")
    (folder / name).symlink_to("moved")
    assert imported(folder).step == 2


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ('{"global_step": 3, "global_step": 4}', "a name twice"),
        ("[3]", "no JSON object"),
        ({"global_step": True}, "'global_step' is True"),
        ({"global_step": -1}, "'global_step' is -1"),
        ({"global_step": 3.0}, "'global_step' is 3.0"),
        ({"global_step": "3"}, "'global_step' is '3'"),
        ({"global_step": 3, "epoch": True}, "'epoch' is True"),
        ({"global_step": 3, "epoch": -1.0}, "'epoch' is -1.0"),
        ('{"global_step": 3, "epoch": 1e999}', "'epoch' is inf"),
        ('{"global_step": 3, "epoch": NaN}', "'epoch' is nan"),
        ({"global_step": 3, "epoch": 10**400}, "no number of epochs"),
        ('{"global_step": 3, "log_history": ' + "[" * 500 + "]" * 500 + "}", "nested more than 100 levels deep"),
        ('{"global_step": 3, "log_history": ' + '{"a":' * 500 + "1" + "}" * 501, "nested more than 100 levels deep"),
        ('{"global_step": 3, "log_history": ["\\ud800"]}', "surrogate"),
        ('{"global_step": 3, "\\ud800": 1}', "surrogate"),
    ],
)
def test_a_damaged_state_is_refused(folder: Path, state: Any, problem: str) -> None:
    write_state(folder, state)
    with pytest.raises((CorruptCheckpointError, UnsafeContentError), match=problem):
        imported(folder)
    assert not (folder.parent / "run").exists()


def test_a_loss_that_is_no_number_is_kept(folder: Path) -> None:
    write_state(folder, {**STATE, "best_metric": float("nan"), "log_history": [{"loss": float("inf")}]})
    assert imported(folder).step == 2
    assert holdfast.verify(folder.parent / "run").ok
