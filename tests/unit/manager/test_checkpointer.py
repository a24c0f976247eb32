"""State dicts saved without a manager, by one process: what comes back, what is refused, and when."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.errors import ClosedError, StorageError, UsageError
from holdfast.testing import MemoryStorage, SlowStorage


def bits(value: Any) -> Any:
    """A state as something that is equal only where every bit is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    return type(value).__name__, repr(value)


def state_dict(seed: int) -> dict[str, Any]:
    """What `dcp.async_save` takes: nested dicts, a tensor and a number on top, dotted keys."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"][0],
        "numbers": {"step": 3 + seed, "rate": 0.1 * seed, "name": f"run {seed}", "none": None, "list": [1, seed]},
        "top": torch.randn(5),
        "count": 17 + seed,
        "flat.first.weight": torch.randn(6, 4),
        "flat.second": torch.randn(3).bfloat16(),
        "7 is no name": torch.randn(2),
    }


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["auto", "sync", "async", "async_pinned", "async_device"])
def test_dcp_reads_back_what_was_saved_whatever_became_of_the_tensors(mode: Any, tmp_path: Path) -> None:
    expected = []
    with holdfast.AsyncCheckpointer(tmp_path, mode=mode) as checkpointer:
        for step in (1, 2, 3):
            live = state_dict(step)
            expected.append(copy.deepcopy(live))
            checkpointer.save(step, live, metrics={"loss": 1.0 / step}, progress={"tokens": step})
            live["top"].zero_()
            live["model"]["0.weight"].zero_()
    for step, wanted in enumerate(expected, start=1):
        found = state_dict(99)
        dcp.load(found, storage_reader=holdfast.HoldfastReader(tmp_path, step))
        assert bits(found) == bits(wanted)
        assert holdfast.verify(tmp_path, step).ok
    assert holdfast.resolve(tmp_path, "best:loss").step == 3
    assert holdfast.resolve(tmp_path, 2).progress["tokens"] == 2


def test_a_save_is_pending_until_it_is_waited_for_and_a_tag_names_it() -> None:
    storage = SlowStorage(MemoryStorage(), delay_seconds=0.05)
    with holdfast.AsyncCheckpointer("run", storage=storage, mode="async") as checkpointer:
        handle = checkpointer.save(1, {"t": torch.ones(3)}, tag="good", extra={"note": "by hand"})
        assert checkpointer.is_pending
        assert handle.staged()
        checkpointer.wait_for_staging()
        checkpointer.wait()
        assert not checkpointer.is_pending
        assert handle.wait().tags == ("good",)
        assert handle.wait().extra["note"] == "by hand"
        assert checkpointer.save(2, {"t": torch.ones(3)}, wait=True).done()
        assert checkpointer.save(2, {"t": torch.ones(3)}).skipped


def test_a_step_that_is_saved_once_more_is_a_later_checkpoint_of_it(tmp_path: Path) -> None:
    with holdfast.AsyncCheckpointer(tmp_path, mode="sync") as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
        handle = checkpointer.save(1, {"t": torch.zeros(3)}, resave=True)
        assert not handle.skipped
        assert handle.wait().sequence == 2
    found = {"t": torch.ones(3)}
    dcp.load(found, storage_reader=holdfast.HoldfastReader(tmp_path))
    assert torch.equal(found["t"], torch.zeros(3))


def test_saves_that_continue_from_a_checkpoint_are_of_its_line(tmp_path: Path) -> None:
    for step in range(1, 5):
        with holdfast.AsyncCheckpointer(tmp_path / "run", mode="sync") as checkpointer:
            if step > 1:
                checkpointer.continue_from(holdfast.resolve(tmp_path / "run"))
            checkpointer.save(step, {"t": torch.ones(3)})
    holdfast.prune(tmp_path / "run", holdfast.KeepLast(2))
    assert [found.step for found in holdfast.checkpoints(tmp_path / "run")] == [4, 3]
    with (
        holdfast.AsyncCheckpointer(tmp_path / "other", mode="sync") as checkpointer,
        pytest.raises(UsageError, match="is not a checkpoint of the run"),
    ):
        checkpointer.continue_from(holdfast.resolve(tmp_path / "run"))


class Position:
    """Has a state of its own, and counts how often it was asked for it."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at, "where": torch.full((2,), self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def objects(seed: int) -> dict[str, Any]:
    """What `dcp.async_save` takes besides: objects on top, also under keys that are no names, and dicts beside them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "position": Position(seed),
        "7 is no name": Position(seed),
        "data.position": Position(seed),
        "data.count": seed,
        "plain": {"weight": torch.full((3,), seed)},
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_objects_with_a_state_are_taken_as_pytorch_takes_them(mode: Any, tmp_path: Path) -> None:
    live = objects(1)
    wanted = copy.deepcopy({key: value.state_dict() for key, value in live.items() if hasattr(value, "state_dict")})
    with holdfast.AsyncCheckpointer(tmp_path, mode=mode) as checkpointer:
        checkpointer.save(1, live)
        for parameter in live["model"].parameters():
            parameter.data.zero_()
        live["position"].at = 99
        checkpointer.save(2, live)
    assert live["data.position"].asked == 3, "once for what is wanted, once for each save"
    for step, at in ((1, 1), (2, 99)):
        found = objects(5)
        dcp.load(found, storage_reader=holdfast.HoldfastReader(tmp_path, step))
        assert (found["position"].at, found["7 is no name"].at, found["data.position"].at) == (at, 1, 1)
        assert (found["data.count"], found["plain"]["weight"].tolist()) == (1, [1, 1, 1])
        assert (float(found["model"][0].weight.detach().abs().sum()) == 0.0) == (step == 2)
        if step == 1:
            assert bits(found["model"].state_dict()) == bits(wanted["model"])
            assert bits(found["optimizer"].state_dict()["state"]) == bits(wanted["optimizer"]["state"])
            assert found["optimizer"].param_groups[0]["lr"] == 0.1


def test_the_note_of_a_state_dict_is_no_key_that_a_user_can_give(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holdfast.AsyncCheckpointer(run) as checkpointer:
        with pytest.raises(UsageError, match=r"extra has the key 'dcp'.*use another key"):
            checkpointer.save(1, {"t": torch.ones(3)}, extra={"dcp": 1})
        assert not run.exists()
        checkpointer.save(1, {"t": torch.ones(3)}, progress={"dcp": 1}, extra={"note": 1})
    with holdfast.CheckpointManager(run, {"model": nn.Linear(2, 2)}) as manager:
        with pytest.raises(UsageError, match="extra has the key 'dcp'"):
            manager.save(2, extra={"dcp": {"loose": "model", "flat": []}})
    assert holdfast.resolve(run).extra["note"] == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({}, "empty"),
        ({"a": {"b": nn.Linear(1, 1)}}, r"a\.b.*put its state_dict\(\) in its place"),
        ({"a": nn.Linear}, "state.a"),
        ({1: torch.ones(2)}, "texts as keys"),
        ([torch.ones(2)], "mapping"),
        (None, "mapping"),
        ({"a": {"b": object()}}, r"a\.b"),
        ({"top": object()}, "top"),
        ({"a": {"it": iter(())}}, r"a\.it"),
    ],
    ids=[
        "empty",
        "an object further in",
        "a class",
        "a number as key",
        "a list",
        "none",
        "an object",
        "an object on top",
        "an iterator",
    ],
)
@pytest.mark.guarantee("G6")
def test_what_cannot_be_saved_is_refused_before_a_file_is_touched_and_the_next_save_works(
    bad: Any, says: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with holdfast.AsyncCheckpointer(run) as checkpointer:
        with pytest.raises(UsageError, match=says):
            checkpointer.save(1, bad)
        assert not run.exists()
        checkpointer.poll()
        checkpointer.wait()
        assert checkpointer.save(1, {"t": torch.ones(3)}).wait().step == 1


@pytest.mark.parametrize("step", [-1, 1.5, True, "1"])
def test_a_step_that_is_none_is_refused(step: Any, tmp_path: Path) -> None:
    with holdfast.AsyncCheckpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="step"):
        checkpointer.save(step, {"t": torch.ones(3)})


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "quick"},
        {"timeout": 0},
        {"timeout": "1"},
        {"staging_limit_bytes": -1},
        {"on_event": 3},
        {"replicas": "ignore"},
    ],
)
def test_an_option_that_is_none_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        holdfast.AsyncCheckpointer(tmp_path, **options)


def test_what_is_asked_after_close_is_an_error_and_close_may_be_called_again(tmp_path: Path) -> None:
    checkpointer = holdfast.AsyncCheckpointer(tmp_path)
    checkpointer.save(1, {"t": torch.ones(3)})
    checkpointer.close()
    checkpointer.close()
    for call in (lambda: checkpointer.save(2, {"t": torch.ones(3)}), checkpointer.poll, checkpointer.wait):
        with pytest.raises(ClosedError, match="the checkpointer was closed; build a new one"):
            call()
    with checkpointer:
        pass
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1]


def test_a_failure_behind_the_training_is_raised_once_and_the_next_save_works() -> None:
    class Full(MemoryStorage):
        full = False

        def create(self, key: str, size_bytes: int) -> Any:
            if self.full:
                raise StorageError("the disk is full", errno=28, file=key)
            return super().create(key, size_bytes)

    storage = Full()
    with holdfast.AsyncCheckpointer("run", storage=storage, mode="async") as checkpointer:
        storage.full = True
        checkpointer.save(1, {"t": torch.ones(3)})
        with pytest.raises(StorageError, match=r"step 1.*the disk is full"):
            checkpointer.wait()
        storage.full = False
        checkpointer.poll()
        assert checkpointer.save(2, {"t": torch.ones(3)}).wait().step == 2
    assert [found.step for found in holdfast.checkpoints(storage)] == [2]


def test_a_state_dict_that_changes_its_structure_from_save_to_save_is_right_each_time(tmp_path: Path) -> None:
    states = [
        {"a": torch.ones(3)},
        {"a": torch.ones(3), "b": {"c": torch.arange(5), "n": 1}},
        {"b": {"c": torch.arange(6), "n": 2}},
        {"b": {"c": torch.arange(6.0), "n": "text"}},
        {"b": {"c": 5, "n": torch.ones(2)}},
        {"a": torch.zeros(3)},
    ]
    with holdfast.AsyncCheckpointer(tmp_path, mode="async") as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, state)
    for step, state in enumerate(states):
        found = copy.deepcopy(state)
        _blank(found)
        dcp.load(found, storage_reader=holdfast.HoldfastReader(tmp_path, step))
        assert bits(found) == bits(state)


def _blank(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, dict):
            _blank(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(77)
        else:
            state[key] = "to be replaced"


# What a manager does that fails where only a save behind the training has to stage


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_fails_while_it_is_staged_is_told_of_once_and_the_next_works(mode: Any, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    model = nn.Linear(3, 3)
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}, assets=[assets], mode=mode) as manager:
        (assets / ".tmp-no-key").write_text("a")
        with pytest.raises(holdfast.HoldfastError, match="no safe file name"):
            manager.save(1)
        manager.poll()
        manager.wait()
        (assets / ".tmp-no-key").unlink()
        assert manager.save(2).wait().step == 2
        assert [event.kind for event in manager.events if event.step == 1].count("failed") == 1


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_asset_that_is_gone_when_it_is_saved_is_an_error(mode: Any, tmp_path: Path) -> None:
    asset = tmp_path / "config.yaml"
    asset.write_text("a: 1")
    with holdfast.CheckpointManager(tmp_path / "run", {"model": nn.Linear(3, 3)}, assets=[asset], mode=mode) as manager:
        asset.unlink()
        with pytest.raises(holdfast.HoldfastError, match=r"config\.yaml"):
            manager.save(1)


def test_the_note_of_a_state_dict_is_not_shown(tmp_path: Path) -> None:
    with holdfast.AsyncCheckpointer(tmp_path) as checkpointer:
        saved = checkpointer.save(1, {"t": torch.ones(3)}, extra={"note": "by hand"}).wait()
    assert dict(saved.extra) == dict(holdfast.resolve(tmp_path).extra) == {"note": "by hand"}
    assert "loose" not in CliRunner().invoke(app, ["show", str(tmp_path), "--json"]).stdout
