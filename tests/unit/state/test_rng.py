"""The random state of a process is taken, put back and derived for further ranks; what is none is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from holdfast.errors import StateMismatchError
from holdfast.state.rng import RNGState, check_rng_state, get_rng_state, random_state_kept, set_rng_state


@pytest.fixture(autouse=True)
def _kept() -> Any:
    with random_state_kept():
        yield


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_a_state_that_is_put_back_draws_the_same_numbers() -> None:
    state = get_rng_state()
    before = draw()
    assert draw() != before
    set_rng_state(state)
    assert draw() == before


def test_what_draws_inside_of_the_block_changes_nothing() -> None:
    state = get_rng_state()
    expected = draw()
    set_rng_state(state)
    with random_state_kept():
        draw()
    assert draw() == expected


def test_ranks_of_a_larger_world_draw_different_numbers_and_the_same_each_time() -> None:
    state = get_rng_state()
    drawn = []
    for _ in range(2):
        for index in range(3):
            RNGState().load_world_state([state], index, 3)
            drawn.append(draw())
    assert len(set(drawn)) == 3
    assert drawn[:3] == drawn[3:]


@pytest.mark.parametrize(
    "changes",
    [{"python": 1}, {"numpy": {}}, {"torch": [1]}, {"torch": torch.zeros(3)}, {"cuda": 1}, {"more": 1}],
    ids=["python", "numpy", "no tensor", "another size", "devices", "another key"],
)
def test_what_is_no_random_state_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    state = get_rng_state()
    with pytest.raises(StateMismatchError):
        check_rng_state({**state, **changes})
    assert random.getstate() == state["python"]
