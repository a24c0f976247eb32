"""Descriptions of live objects: which class, with which schedulers inside, and the form of values."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from holdfast.state.descriptions import description_of, differing_values, is_described


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])


def sequential() -> torch.optim.lr_scheduler.SequentialLR:
    schedulers, owner = torch.optim.lr_scheduler, optimizer()
    parts = [schedulers.ConstantLR(owner, 1.0, 2), schedulers.StepLR(owner, 1, gamma=0.1)]
    return schedulers.SequentialLR(owner, parts, [2])


def test_a_scheduler_is_described_with_those_inside_of_it() -> None:
    assert description_of(sequential()) == "SequentialLR(ConstantLR,StepLR)"
    assert description_of(optimizer()) == "AdamW"


def test_a_checkpoint_that_names_the_outer_scheduler_alone_is_accepted_by_that_name() -> None:
    scheduler = sequential()
    assert is_described(scheduler, "SequentialLR")
    assert is_described(scheduler, "SequentialLR(ConstantLR,StepLR)")
    for other in ("SequentialLR(ConstantLR)", "SequentialLR(ConstantLR,StepLR,StepLR)", "SequentialLR(((", "StepLR"):
        assert not is_described(scheduler, other)
    assert not is_described(optimizer(), "AdamW(StepLR)")


@pytest.mark.parametrize(
    ("live", "saved", "found"),
    [
        (1, 2.5, []),
        (None, [1], []),
        ([1], {"a": 1}, [("x", "a dict", "a list")]),
        ({"a": 1, "b": 1}, {"a": [1]}, [("x.a", "a list", "a plain value")]),
        ([1, torch.zeros(2)], [1, torch.zeros(3)], [("x.1", "float32 [3]", "float32 [2]")]),
        (numpy.zeros(2), numpy.zeros(2, numpy.int8), [("x", "array int8 [2]", "array float64 [2]")]),
    ],
    ids=["plain values", "none fits any", "a list for a dict", "inside of a dict", "another shape", "another type"],
)
def test_values_of_another_form_are_named_with_their_path(live: Any, saved: Any, found: Any) -> None:
    assert list(differing_values(live, saved, "x")) == found
