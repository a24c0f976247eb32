"""A context has what the call takes that it stands for, and is checked when it is made."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.manager.manager import CheckpointManager
from holdfast.plugins.contexts import LoadContext, SaveContext


def test_a_save_context_hands_over_every_argument_of_a_save() -> None:
    parameters = inspect.signature(CheckpointManager.save).parameters
    assert SaveContext(step=1).arguments.keys() == parameters.keys() - {"self", "step", "wait"}
    for name, value in SaveContext(step=1).arguments.items():
        assert value == parameters[name].default, name


def test_a_save_context_hands_over_what_it_was_given() -> None:
    given: dict[str, Any] = {
        "metrics": {"loss": 1.0},
        "progress": {"seen": 1},
        "extra": {"a": 2},
        "guards": {"data": "b"},
        "tag": "good",
        "epoch": 3,
        "resave": True,
    }
    assert SaveContext(step=1, **given).arguments.items() >= given.items()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": -1}, "-1"),
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": True}, "epoch=True"),
        ({"tag": "a b"}, "a b"),
        ({"wait": 1}, "wait=1"),
        ({"resave": "yes"}, "resave='yes'"),
        ({"components": ("model",)}, "without resave=True"),
        ({"components": "model", "resave": True}, "components='model'"),
        ({"progress": {1: 2}}, "progress is a mapping"),
        ({"state": {}}, "state is empty"),
        ({"state": ["model"]}, "state is a mapping"),
    ],
)
def test_a_save_context_that_cannot_be_meant_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SaveContext(**{"step": 1, **wrong})


def test_a_context_is_a_value() -> None:
    context = SaveContext(step=1)
    assert context == SaveContext(step=1)
    with pytest.raises(FrozenInstanceError):
        context.step = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("context", "where"),
    [
        (LoadContext(selector=5), 5),
        (LoadContext(source="runs/a"), "runs/a"),
        (LoadContext(source="runs/a", selector="best:loss"), "runs/a@best:loss"),
    ],
)
def test_source_and_selector_become_one_place(context: LoadContext, where: object) -> None:
    assert context.where == where
    assert context.is_explicit
    assert not LoadContext().is_explicit
