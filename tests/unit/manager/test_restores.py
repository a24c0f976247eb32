"""A fresh start says what it passed over, and no advice repeats what was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError, HoldfastError
from holdfast.testing import MemoryStorage


def manager_of(storage: Any, **more: Any) -> holdfast.CheckpointManager:
    state = {"model": torch.nn.Linear(4, 2)}
    return holdfast.CheckpointManager("run", state, storage=storage, mode="sync", rng=False, **more)


def test_a_fresh_start_lists_the_attempts_that_it_passed_over() -> None:
    memory = MemoryStorage()
    memory.put("step-000000007/attempt.json", b"{}")
    with manager_of(memory) as manager:
        result = manager.restore()
    assert not result.resumed
    assert result.rejected == ("step-000000007: was never committed",)


def test_a_start_that_never_resumes_lists_all_that_it_passed_over() -> None:
    memory = MemoryStorage()
    with manager_of(memory) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    memory.put("step-000000007/attempt.json", b"{}")
    for folder, old, new in (("step-000000002", b'"step":2', b'"step":9'), ("step-000000003", b't":1,', b't":99,')):
        data = memory.read(f"{folder}/manifest.json", 1 << 20)
        memory.delete(f"{folder}/manifest.json")
        memory.put(f"{folder}/manifest.json", data.replace(old, new, 1))
    with manager_of(memory, resume="never") as manager:
        result = manager.restore()
    assert not result.resumed
    reasons = {text.partition(": ")[0]: text for text in result.rejected}
    assert list(reasons) == ["step-000000001", "step-000000002", "step-000000003", "step-000000007"]
    assert "resume='never'" in reasons["step-000000001"]
    assert "digest" in reasons["step-000000002"]
    assert "format 99" in reasons["step-000000003"]
    assert "never committed" in reasons["step-000000007"]
    json.dumps(result.rejected)


def test_the_advice_is_never_to_do_what_was_done() -> None:
    memory = MemoryStorage()
    with manager_of(memory, resume="required") as manager:
        with pytest.raises(CheckpointNotFoundError, match="resume='auto'"):
            manager.restore()


def test_an_empty_run_that_was_named_by_its_path_is_no_reason_to_speak_of_resume(tmp_path: Any) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(4, 2)}, mode="sync") as manager:
        (tmp_path / "other").mkdir()
        with pytest.raises(CheckpointNotFoundError) as caught:
            manager.restore(tmp_path / "other")
    assert "resume=" not in str(caught.value)
    assert "check the path" in str(caught.value)


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("below", ["", "exp1"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_behind_a_link_to_nowhere_is_no_fresh_start(tmp_path: Path, mode: Any, below: str) -> None:
    """The volume is not mounted: what was saved there is still there once it is."""
    (tmp_path / "runs").symlink_to(tmp_path / "volume" / "runs")
    run = tmp_path / "runs" / below

    def opened() -> holdfast.CheckpointManager:
        return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(4, 2)}, mode=mode, rng=False)

    for work in (
        lambda: opened().restore(),
        lambda: opened().should_load(),
        lambda: opened().save(0).wait(),
        lambda: opened().checkpoints(),
        lambda: holdfast.is_restart(run),
        lambda: holdfast.peek(run),
        lambda: holdfast.checkpoints(run),
    ):
        with pytest.raises(HoldfastError, match=f"{tmp_path / 'runs'}.* link to|{tmp_path / 'runs'} points to"):
            work()
    assert not (tmp_path / "volume").exists()
