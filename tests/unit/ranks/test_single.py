"""One process agrees with itself, and raises its own errors unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.ranks.base import on_leader
from holdfast.ranks.single import Alone


def fail(error: BaseException) -> Any:
    raise error


def test_alone_a_process_agrees_with_itself() -> None:
    alone = Alone()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.decide("work", lambda: 2, lambda answers: answers * 2, sends=int, returns=list[int]) == [2, 2]
    with pytest.raises(UsageError) as caught:
        on_leader(alone, "work", lambda: fail(UsageError("no")), returns=int)
    assert caught.value.rank is None
