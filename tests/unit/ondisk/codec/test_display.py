"""Stored forms are shown without torch or numpy, also malformed ones."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.ondisk import codec
from holdfast.ondisk.codec.decoding import DECODERS
from holdfast.ondisk.codec.display import _SHOWN
from tests.unit.ondisk.codec import values
from tests.unit.ondisk.codec.values import BOTTOMLESS, Color, Rate

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def test_every_tag_is_in_the_table_of_the_package() -> None:
    assert all(f'{{"{tag}":' in (codec.__doc__ or "") for tag in DECODERS)
    assert DECODERS.keys() == _SHOWN.keys()


def test_plain_reads_well_without_types() -> None:
    def shown(value: object) -> Any:
        return codec.plain(codec.encode(value, path="root", on_tensor=lambda name, tensor: name))

    assert shown({"a": (1, 2.0, {3})}) == {"a": [1, 2.0, [3]]}
    assert shown({1: "x", (2, 3): "y"}) == {"1": "x", "[2, 3]": "y"}
    assert shown({1: "x", "1": "y"}) == [[1, "x"], ["1", "y"]]
    assert shown([torch.zeros(1), float("nan"), -float("inf")]) == ["<tensor root.0>", "nan", "-inf"]
    assert shown([np.float32(0.5), np.float64("nan"), np.int64(-3), np.str_("x")]) == [0.5, "nan", -3, "x"]
    assert shown([np.zeros((2, 3)), b"abc", 2**70]) == ["<array <f8 (2, 3)>", "<3 bytes>", str(2**70)]
    assert shown([Color.RED, Rate(1.0)]) == [f"{values.__name__}.Color.RED", {"value": 1.0, "unit": "Hz"}]
    assert shown([torch.bfloat16, torch.Size([2])]) == ["bfloat16", [2]]
    assert shown(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)) == "2024-01-01T00:00:00Z"
    assert codec.plain({"$foo": 1}) == {"$foo": 1}
    assert codec.plain({"$tuple": 1}) == "<malformed $tuple>"


def test_typed_says_what_plain_leaves_out() -> None:
    def shown(value: object) -> Any:
        return codec.typed(codec.encode(value, path="root", on_tensor=lambda name, tensor: name))

    assert shown((1, [2, "2"])) == "tuple([1, [2, '2']])"
    assert shown({"a": {3}, "b": None}) == "{'a': set([3]), 'b': None}"
    assert shown({1: "x"}) == "dict([[1, 'x']])"
    assert shown([np.float32(0.5), 0.5, Decimal("0.5")]) == "[numpy <f4 0.5, 0.5, decimal('0.5')]"
    assert codec.typed({"$foo": 1}) == "{'$foo': 1}"
    assert codec.typed({"$scalar": 1}) == "scalar(1)"
    assert codec.typed(BOTTOMLESS).count("[") == codec.MAX_DEPTH + 1
