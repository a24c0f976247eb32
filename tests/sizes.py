"""What `make test` leaves to `make deep`: long enumerations, and all combinations of parameters.

@pytest.mark.parametrize("cut", some(range(300), 100))
@pytest.mark.parametrize(("placement", "other"), pairs(PLACEMENTS, PLACEMENTS))
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = ["DEEP", "if_deep", "pairs", "some"]

DEEP = os.environ.get("HOLDFAST_DEEP") == "1"
T = TypeVar("T")


def if_deep(*cases: T) -> tuple[T, ...]:
    """Return the cases in a deep run, and else none."""
    return cases if DEEP else ()


def some(cases: Iterable[T], count: int) -> list[T]:
    """Return all cases in a deep run, and else `count` of them, evenly spread, with the first and the last."""
    found = list(cases)
    if DEEP or len(found) <= count:
        return found
    last = len(found) - 1
    return [found[round(index * last / max(count - 1, 1))] for index in range(count)]


def pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations in a deep run, and else some in which any two values of any two parameters meet; of two
    parameters alone, some in which each value is."""
    lists = [list(values) for values in parameters]
    everything = list(itertools.product(*lists))
    if DEEP:
        return everything
    if len(lists) == 2:
        return [tuple(values[row % len(values)] for values in lists) for row in range(max(map(len, lists)))]
    places = list(itertools.product(*(range(len(values)) for values in lists)))
    missing = {pair for place in places for pair in _pairs_in(place)}
    chosen = []
    while missing:
        best = max(range(len(places)), key=lambda row: len(missing.intersection(_pairs_in(places[row]))))
        chosen.append(everything[best])
        missing.difference_update(_pairs_in(places[best]))
    return chosen


def _pairs_in(place: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(place), 2))
