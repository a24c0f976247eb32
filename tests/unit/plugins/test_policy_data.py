"""Policies as plain data: which policy they make, and what is said of a mistake."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.manager.triggers import At, Every, OnLastStep, OnSignal, TimeLimit
from holdfast.plugins.config import CheckpointConfig
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepTagged


def message(**values: Any) -> str:
    with pytest.raises(holdfast.UsageError) as caught:
        CheckpointConfig.from_dict(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("every_steps", "500", "'save.every_steps' takes a whole number above 0, not '500' (str)"),
        ("every_steps", 0, "'save.every_steps' takes a whole number above 0, not 0 (int)"),
        ("every_epochs", 1.5, "'save.every_epochs' takes a whole number above 0, not 1.5 (float)"),
        ("every_minutes", -1, "'save.every_minutes' takes a positive number of minutes, not -1 (int)"),
        ("at", 5, "'save.at' takes a list of steps, not 5 (int)"),
        ("at", [-1], "'save.at' takes a list of steps, not [-1] (list)"),
        ("at", [True], "'save.at' takes a list of steps"),
        ("at", [], "'save.at': At() names no step"),
        ("on_signal", [], "'save.on_signal' takes the name of a signal, or a list of names, not [] (list)"),
        ("on_signal", 15, "'save.on_signal' takes the name of a signal, or a list of names, not 15 (int)"),
        ("on_signal", ["SIGTREM"], "'save.on_signal': "),
        ("time_limit", "soon", "'save.time_limit': TimeLimit(limit='soon') is no time that passes"),
        ("time_limit", ["01:00:00"], "'save.time_limit' takes a text such as '03:50:00', '3h50m' or '90s', {limit, be"),
        ("time_limit", 230, "not 230 (int); write seconds as '90s', and a time in quotes: YAML reads 3:50 as the numb"),
        ("time_limit", "3:50", "'save.time_limit': TimeLimit(limit='3:50') is no time that passes; write '03:50:00'"),
        ("time_limit", {}, "'save.time_limit' has nothing in it; give limit or before_end, or true"),
        (
            "time_limit",
            {"limit": 230},
            "'save.time_limit.limit' takes a text such as '03:50:00', '3h50m' or '90s', not",
        ),
        ("time_limit", {"limit": "1h", "before_end": True}, "'save.time_limit.before_end' takes a text such as"),
        ("time_limit", {"limit": "1h", "befor_end": "5m"}, "did you mean 'save.time_limit.before_end'?"),
        ("time_limit", {"limit": "1h", "before_end": "soon"}, "'save.time_limit': TimeLimit(before_end='soon') is no"),
        ("on_last_step", 0, "'save.on_last_step' takes a whole number above 0, not 0 (int)"),
    ],
)
def test_a_wrong_value_of_save_is_named(key: str, value: Any, expected: str) -> None:
    assert expected in message(save={key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("last", 0, "'keep.last' takes a whole number above 0, not 0 (int)"),
        ("last", -1, "'keep.last' takes a whole number above 0, not -1 (int)"),
        ("best", "val_loss", "'keep.best' takes {metric, n, mode}, or a list of these, not 'val_loss' (str)"),
        ("best", [], "'keep.best' takes {metric, n, mode}, or a list of these, not [] (list)"),
        ("best", ["val_loss"], "'keep.best[0]' takes {metric, n, mode}, not 'val_loss' (str)"),
        ("best", {"n": 2}, "'keep.best' has no 'metric'"),
        ("best", {"metric": ""}, "'keep.best.metric' takes a text, not '' (str)"),
        ("best", {"metric": "x", "n": 0}, "'keep.best.n' takes a whole number above 0, not 0 (int)"),
        ("best", {"metric": "x", "mode": "low"}, "'keep.best.mode' takes one of 'min', 'max', not 'low' (str)"),
        ("every_steps", True, "'keep.every_steps' takes a whole number above 0, not True (bool)"),
        ("every_minutes", "60", "'keep.every_minutes' takes a positive number of minutes, not '60' (str)"),
        ("tagged", 1, "'keep.tagged' takes true or false, not 1 (int)"),
        ("all", None, "'keep.all' takes true or false, not None (NoneType)"),
    ],
)
def test_a_wrong_value_of_keep_is_named(key: str, value: Any, expected: str) -> None:
    assert expected in message(keep={key: value})


def test_the_time_limit_of_the_job_needs_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert "'save.time_limit': TimeLimit() has no limit" in message(save={"time_limit": True})
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    assert CheckpointConfig(save={"time_limit": True}).save == TimeLimit()
    early = CheckpointConfig.from_toml("save.time_limit.before_end = 00:10:00")
    assert early.save == CheckpointConfig(save={"time_limit": {"before_end": "10m"}}).save == TimeLimit(before_end=600)
    assert CheckpointConfig(save={"time_limit": False, "every_steps": 5}).save == Every(steps=5)


@pytest.mark.parametrize(
    ("data", "policy"),
    [
        ({"every_steps": 500}, Every(steps=500)),
        ({"every_epochs": 2}, Every(epochs=2)),
        ({"every_minutes": 0.5}, Every(minutes=0.5)),
        ({"at": [1, 2]}, At(1, 2)),
        ({"on_signal": ["SIGTERM", "SIGINT"]}, OnSignal("SIGTERM", "SIGINT")),
        ({"on_signal": "SIGTERM"}, OnSignal("SIGTERM")),
        ({"time_limit": "03:50:00"}, TimeLimit("03:50:00")),
        ({"time_limit": "90s"}, TimeLimit(90)),
        ({"time_limit": {"limit": "03:50:00"}}, TimeLimit("03:50:00")),
        ({"time_limit": {"limit": "3h50m", "before_end": "10m"}}, TimeLimit("03:50:00", before_end="00:10:00")),
        ({"on_last_step": 1000}, OnLastStep(1000)),
        ({"every_steps": 5, "at": [7], "on_last_step": 9}, Every(steps=5) | At(7) | OnLastStep(9)),
    ],
)
def test_save_as_plain_data_is_the_policy_it_says(data: dict[str, Any], policy: Any) -> None:
    assert CheckpointConfig(save=data).save == CheckpointConfig(save=policy).save == policy


@pytest.mark.parametrize(
    ("data", "policy"),
    [
        ({"last": 3}, KeepLast(3)),
        ({"best": {"metric": "loss"}}, KeepBest("loss")),
        ({"best": {"metric": "accuracy", "n": 2, "mode": "max"}}, KeepBest("accuracy", 2, "max")),
        ({"best": [{"metric": "a"}, {"metric": "b", "n": 4}]}, KeepBest("a") | KeepBest("b", 4)),
        ({"every_steps": 10}, KeepEvery(steps=10)),
        ({"every_minutes": 60}, KeepEvery(minutes=60)),
        ({"tagged": True}, KeepTagged()),
        ({"all": True}, KeepAll()),
        ({"last": 1, "tagged": False}, KeepLast(1)),
        ({"last": 1, "best": {"metric": "a"}, "tagged": True}, KeepLast(1) | KeepBest("a") | KeepTagged()),
    ],
)
def test_keep_as_plain_data_is_the_policy_it_says(data: dict[str, Any], policy: Any) -> None:
    assert CheckpointConfig(keep=data).keep == CheckpointConfig(keep=policy).keep == policy
