"""A place among ranks is given or found, and states that do not belong together are refused."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.data.positions import Place, count_in, require_place, require_same, states_by_rank
from holdfast.errors import StateMismatchError, UsageError


def state(rank: int, size: int, **more: Any) -> dict[str, Any]:
    return {"kind": "Some", "epoch": 0, "rank": rank, "size": size, **more}


def test_without_a_process_group_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Place.of(None, None) == Place(0, 1)
    assert Place.of(2, 3) == Place(2, 3)


def test_several_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="init_process_group"):
        Place.of(None, None)
    assert Place.of(1, 4) == Place(1, 4)


@pytest.mark.parametrize(("rank", "size"), [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0), (True, 2), (0.0, 2)])
def test_a_place_that_is_none_is_refused(rank: Any, size: Any) -> None:
    with pytest.raises(UsageError):
        Place.of(rank, size)


@pytest.mark.parametrize("value", [None, -1, 2**63, True, 1.0, "1", [1]])
def test_what_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(StateMismatchError, match="no live object was changed"):
        count_in({"count": value}, "count")


@pytest.mark.parametrize(
    "strange",
    [
        None,
        [],
        {},
        {"_num_yielded": 3},
        state(0, 2) | {"kind": "Other"},
        state(2, 2),
        state(0, 0),
        state(0, 1) | {"epoch": -1},
        state(0, 1) | {"epoch": 2**63},
        state(0, 1) | {"seed": 8},
        state(0, 1) | {"seed": True},
        state(0, 1),
    ],
)
def test_what_is_no_state_of_this_loader_is_refused(strange: Any) -> None:
    with pytest.raises(StateMismatchError):
        require_same(strange, "Some", {"seed": 1})


def test_a_state_of_the_same_data_is_taken() -> None:
    require_same(state(1, 2, seed=1), "Some", {"seed": 1})
    require_place(state(1, 2), Place(1, 2))


@pytest.mark.parametrize("place", [Place(0, 2), Place(1, 3)])
def test_the_state_of_another_rank_is_refused(place: Place) -> None:
    with pytest.raises(StateMismatchError, match="PerRank"):
        require_place(state(1, 2), place)


def test_ranks_that_read_the_same_data_count_once() -> None:
    found = states_by_rank([state(1, 2), state(0, 2), state(1, 2)])
    assert found == [state(0, 2), state(1, 2)]


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        ([state(0, 2)], "rank 1 of 2 is missing"),
        ([state(0, 10**15)], "rank 1 of 1000000000000000 is missing"),
        ([state(0, 2), state(1, 3)], r"\[2, 3\]"),
        ([state(0, 1, count=1), state(0, 1, count=2)], "two states of rank 0 of 1 differ"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(states: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(StateMismatchError, match=problem):
        states_by_rank(states)
