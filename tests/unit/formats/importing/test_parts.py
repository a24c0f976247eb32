"""The values of a part are copied to plain dicts and lists, and a part that nests without end is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.importing.parts import own_values


def test_values_come_in_plain_dicts() -> None:
    made = own_values(OrderedDict(a=[OrderedDict(b=1)]))
    assert made == {"a": [{"b": 1}]}
    assert type(made) is dict
    assert type(made["a"][0]) is dict


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": value}], ids=["lists", "dicts"])
def test_values_that_nest_deeper_than_a_checkpoint_can_have_are_refused(wrap: Any) -> None:
    value: Any = 1
    for _ in range(5000):
        value = wrap(value)
    with pytest.raises(CorruptCheckpointError, match="nest more than 100 deep"):
        own_values(value)
