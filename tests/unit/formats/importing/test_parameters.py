"""The naming of parameters by order and shape, compared with every naming there is."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from holdfast.formats.importing.parameters import Fits, name_parameters

A, B = (2,), (3, 2)


def by_shape(shapes: dict[int, tuple[int, ...]]) -> Fits:
    """Return the test that compares with shapes that are known; the other parameters fit any."""
    return lambda number, shape: shapes.get(number, shape) == shape


def every_naming(
    groups: list[list[int]], shapes: dict[int, tuple[int, ...]], candidates: dict[str, tuple[int, ...]]
) -> list[dict[int, str]]:
    """Return all namings that keep the order in each group and fit the shapes, found by trying all of them."""
    numbers = [number for group in groups for number in group]
    order = {name: place for place, name in enumerate(candidates)}
    found = []
    for chosen in permutations(candidates, len(numbers)):
        names = dict(zip(numbers, chosen, strict=True))
        in_order = all(
            [order[names[number]] for number in group] == sorted(order[names[number]] for number in group)
            for group in groups
        )
        if in_order and all(candidates[names[number]] == shape for number, shape in shapes.items()):
            found.append(names)
    return found


@pytest.mark.parametrize(
    "groups", [[[0]], [[0, 1]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2]], [[0], [], [1, 2]]], ids=str
)
def test_a_naming_is_given_only_where_it_is_the_only_one(groups: list[list[int]]) -> None:
    numbers = [number for group in groups for number in group]
    checked = {0: 0, 1: 0, 2: 0}
    for count in range(len(numbers), 5):
        for kinds in product((A, B), repeat=count):
            candidates = {f"p{place}": kind for place, kind in enumerate(kinds)}
            for known in product((A, B, None), repeat=len(numbers)):
                shapes = {number: kind for number, kind in zip(numbers, known, strict=True) if kind is not None}
                found = every_naming(groups, shapes, candidates)
                naming = name_parameters(groups, by_shape(shapes), candidates)
                assert naming.names == (found[0] if len(found) == 1 else {}), (candidates, shapes)
                assert bool(naming.problem) == (len(found) != 1)
                checked[min(len(found), 2)] += 1
    assert all(checked.values()), "each of none, one and several was met"


def test_more_parameters_than_tensors_are_no_naming() -> None:
    assert name_parameters([[0, 1]], by_shape({}), {"a": A}).problem == (
        "it has 2 parameters, and the model 1 tensors that may be some"
    )


def test_a_large_model_of_equal_layers_is_named_in_order() -> None:
    candidates = {f"{layer}.{name}": shape for layer in range(2000) for name, shape in (("weight", B), ("bias", A))}
    weights = [name for name in candidates if name.endswith("weight")]
    biases = [name for name in candidates if name.endswith("bias")]
    numbers = dict(enumerate([*weights, *biases]))
    groups = [list(range(2000)), list(range(2000, 4000))]
    shapes = {number: candidates[name] for number, name in numbers.items()}
    naming = name_parameters(groups, by_shape(shapes), candidates)
    assert naming.names == numbers


def test_orders_that_cannot_be_counted_are_ambiguous() -> None:
    candidates = {f"p{place}": A for place in range(400)}
    groups = [list(range(start, start + 100)) for start in range(0, 400, 100)]
    assert (
        name_parameters(groups, by_shape({}), candidates).problem == "too many orders of its parameters fit the shapes"
    )
