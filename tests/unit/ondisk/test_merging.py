"""Encoded values of two ranks made one."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest

from holdfast.ondisk.codec import decode, encode
from holdfast.ondisk.merging import references, union_of


def united(first: Any, second: Any) -> Any:
    encoded = [encode(value, path="m", on_tensor=None) for value in (first, second)]
    return decode(union_of(*encoded), path="m", tensor=None)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"x": 1, "y": 2}}),
        ({0: {"x": 1}}, {1: {"x": 2}, 0: {"y": 3}}, {0: {"x": 1, "y": 3}, 1: {"x": 2}}),
        ({}, {3: 1}, {3: 1}),
        ({3: 1}, {}, {3: 1}),
        ({"a": 1}, {3: 1}, {"a": 1, 3: 1}),
        ({"a": 1}, OrderedDict(b=2), {"a": 1, "b": 2}),
        (OrderedDict(a=1), OrderedDict(b=2), OrderedDict(a=1, b=2)),
        (OrderedDict(a=1), {"b": 2}, OrderedDict(a=1, b=2)),
        (defaultdict(list, a=[1]), {"b": 2}, defaultdict(list, {"a": [1], "b": 2})),
        ({"a": [1, 2]}, {"a": [3, 4, 5]}, {"a": [1, 2]}),
        ({"a": [{"x": 1}]}, {"a": [{"y": 2}, {"z": 3}]}, {"a": [{"x": 1, "y": 2}, {"z": 3}]}),
        ({"a": 1}, {"a": {"x": 2}}, {"a": 1}),
        ({"a": (1,)}, {"a": (2, 3)}, {"a": (1,)}),
        ({"a": 1}, {"$b": 2}, {"a": 1, "$b": 2}),
    ],
)
def test_a_union_has_what_either_has_and_the_first_counts(first: Any, second: Any, expected: Any) -> None:
    found = united(first, second)
    assert found == expected
    assert type(found) is type(expected)


def test_tensors_of_both_lists_are_in_the_union() -> None:
    first, second = ({"a": [{"$tensor": f"a.{place}"} for place in range(count)]} for count in (1, 3))
    assert list(references(union_of(first, second))) == ["a.0", "a.1", "a.2"]
