"""Enums, dataclasses and NamedTuples are registered by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.ondisk import codec
from tests.unit.ondisk.codec.values import MyDict, UnregisteredDataclass

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def test_a_name_belongs_to_one_class() -> None:
    first = dataclasses.make_dataclass("First", ["x"])
    second = dataclasses.make_dataclass("Second", ["x"])
    assert codec.register_type(first, "test.first") is first
    assert codec.register_type(first, "test.first") is first
    with pytest.raises(UsageError, match=r"test\.first"):
        codec.register_type(second, "test.first")
    codec.register_type(first, "test.first.old")
    assert codec.encode(first(1), path="x", on_tensor=None)["$type"]["name"] == "test.first"  # type: ignore[index, call-overload]
    old: Any = {"$type": {"name": "test.first.old", "fields": {"x": 1}}}
    assert codec.decode(old, path="x", tensor=None) == first(1)


@pytest.mark.parametrize(
    "cls", [int, MyDict, dataclasses.make_dataclass("Mixed", ["x"], bases=(dict,)), UnregisteredDataclass(), torch.Size]
)
def test_only_enums_dataclasses_and_named_tuples_can_be_registered(cls: Any) -> None:
    with pytest.raises(UsageError, match="is not an enum"):
        codec.register_type(cls, "test.refused")
