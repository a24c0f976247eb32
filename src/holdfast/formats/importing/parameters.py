"""Name the parameters of an optimizer whose state goes by number. Shapes and names enter; one name per number leaves.

`torch.optim.Optimizer.state_dict` numbers parameters in the order of its groups, and within each group in the order in
which they were given, which is nearly always that of the model. The state of a parameter shows its shape. A naming
counts only where exactly one fits both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from holdfast.ondisk.regions import Shape

__all__ = ["Fits", "Naming", "name_parameters"]

Fits: TypeAlias = Callable[[int, Shape], bool]
"""Whether the state of the parameter with a number can be that of a tensor of a shape."""

# More ways than this to continue are no order any more: the naming counts as ambiguous.
_MAX_WAYS = 2_000


class Naming(NamedTuple):
    """The names of all parameters by number; or, where there is none or more than one, what stands against it."""

    names: dict[int, str]
    problem: str = ""


class _Way(NamedTuple):
    """One assignment, as a linked list: the number and name of its last parameter, and the assignment before."""

    number: int
    name: str
    before: _Way | None


def name_parameters(groups: Sequence[Sequence[int]], fits: Fits, candidates: Mapping[str, Shape]) -> Naming:
    """Return the only naming in which the parameters of each group follow the order of the candidates and every state
    fits the shape of its parameter."""
    count = sum(map(len, groups))
    spare = len(candidates) - count
    if spare < 0:
        return Naming({}, f"it has {count} parameters, and the model {len(candidates)} tensors that may be some")
    ways: dict[tuple[int, ...], list[_Way | None]] = {(0,) * len(groups): [None]}
    for seen, (name, shape) in enumerate(candidates.items()):
        ways = _extended(ways, groups, fits, name, shape, seen + 1 - spare)
        if len(ways) > _MAX_WAYS:
            return Naming({}, "too many orders of its parameters fit the shapes")
        if not ways:
            return Naming({}, f"no order of the model's tensors has the shapes of its state (found at '{name}')")
    found = [_names(way) for way in ways.get(tuple(map(len, groups)), [])]
    if len(found) == 1:
        return Naming(found[0])
    if not found:
        return Naming({}, "no order of the model's tensors has the shapes of its state")
    number = next(number for number in found[0] if found[0][number] != found[1][number])
    return Naming({}, f"its parameter {number} may be '{found[0][number]}' or '{found[1][number]}'")


def _extended(
    ways: Mapping[tuple[int, ...], list[_Way | None]],
    groups: Sequence[Sequence[int]],
    fits: Fits,
    name: str,
    shape: Shape,
    needed: int,
) -> dict[tuple[int, ...], list[_Way | None]]:
    """Return the ways after one more candidate, which is left out or is the next parameter of one of the groups. Two
    ways to the same place are enough to know that there is more than one. `needed`: how many must be named by now."""
    extended: dict[tuple[int, ...], list[_Way | None]] = {}

    def add(place: tuple[int, ...], found: Sequence[_Way | None]) -> None:
        kept = extended.setdefault(place, [])
        kept += found[: 2 - len(kept)]

    for place, found in ways.items():
        named = sum(place)
        if named >= needed:
            add(place, found)
        for index, group in enumerate(groups):
            number = group[place[index]] if place[index] < len(group) else None
            if number is not None and fits(number, shape):
                further = (*place[:index], place[index] + 1, *place[index + 1 :])
                add(further, [_Way(number, name, way) for way in found])
    return extended


def _names(way: _Way | None) -> dict[int, str]:
    names = {}
    while way is not None:
        names[way.number] = way.name
        way = way.before
    return names
