"""What is easily forgotten is said: a restore, the object instead of its state dict, a component on all ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError, UsageError
from holdfast.saving.messages import Inventory, TreeEntry
from holdfast.saving.plan import partly_held


def manager_of(run: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}, mode="sync", **options)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_save_without_a_restore_to_a_run_with_checkpoints_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path / "run") as manager:
        manager.save(300)
    assert warnings_of(caplog) == []
    with manager_of(tmp_path / "run") as manager:
        manager.save(0)
        manager.save(1)
    (text,) = warnings_of(caplog)
    assert "the latest of step 300" in text
    assert "call restore() first" in text


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_restore_or_a_fresh_start_on_purpose_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: Any
) -> None:
    with manager_of(tmp_path / "run") as manager:
        manager.save(300)
    with manager_of(tmp_path / "run", resume=resume) as manager:
        if resume == "auto":
            manager.restore()
        manager.save(301)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    "nest", [lambda one: {"inner": one}, lambda one: {"all": [one]}, lambda one: {"a": {"b": (one,)}}]
)
def test_a_state_dict_is_refused_at_any_place_of_a_dict(tmp_path: Path, nest: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for owner, state in (("optimizer", optimizer.state_dict()), ("scheduler", scheduler.state_dict())):
        with pytest.raises(UsageError, match=f"state_dict\\(\\) of the {owner}"):
            holdfast.CheckpointManager(tmp_path / "run", {"model": model, "trainer": nest(state)})


def test_counters_of_numpy_come_back_as_numbers(tmp_path: Path) -> None:
    with manager_of(tmp_path / "run") as manager:
        manager.save(0, progress={"tokens": numpy.int64(2**60), "share": numpy.float64(0.5), "done": numpy.bool_(True)})
        found = manager.restore().progress
    assert json.loads(json.dumps(found)) == {"tokens": 2**60, "share": 0.5, "done": True}


def test_a_misspelt_selector_names_the_right_one(tmp_path: Path) -> None:
    with manager_of(tmp_path / "run") as manager:
        manager.save(0, tag="release")
        manager.save(0, resave=True)
    for wrong, right in (("lastest", "latest"), ("relaese", "release")):
        with pytest.raises(CheckpointNotFoundError, match=f"steps there are 0; did you mean '{right}'") as caught:
            holdfast.resolve(tmp_path / "run", wrong)
        assert "0, 0" not in str(caught.value)


def test_components_of_some_ranks_are_found() -> None:
    def inventory(*trees: tuple[str, str | None]) -> Inventory:
        entries = tuple(
            TreeEntry(component=name, kind="values", scope=scope, digest="", values=msgspec.Raw(b"{}"))
            for name, scope in trees
        )
        return Inventory(entries, (), ())

    both = [inventory(("a", None), ("b", None), ("c", "rank-00000")), inventory(("a", None))]
    assert partly_held(both) == {"b": [0]}
