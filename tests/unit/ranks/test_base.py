"""What is built on `decide`: work of the leader alone, and work of all."""

from __future__ import annotations

import pytest

from holdfast.ranks.base import Ranks, on_leader, together
from holdfast.testing.simulation import simulate_ranks

SIZES = (1, 2, 3, 5)


@pytest.mark.parametrize("size", SIZES)
def test_what_the_leader_does_is_done_once_and_known_to_all(size: int) -> None:
    done: list[int] = []

    def work(ranks: Ranks) -> str:
        return on_leader(ranks, "once", lambda: done.append(ranks.rank) or "done", returns=str)

    assert simulate_ranks(size, work, timeout_seconds=5) == ["done"] * size
    assert done == [0]


@pytest.mark.parametrize("size", SIZES)
def test_what_all_do_is_known_to_all_in_the_order_of_the_ranks(size: int) -> None:
    def work(ranks: Ranks) -> list[int]:
        return together(ranks, "all", lambda: 10 * ranks.rank, sends=int)

    assert simulate_ranks(size, work, timeout_seconds=5) == [[10 * rank for rank in range(size)]] * size
