"""The element types of the format agree with torch's and with what safetensors can name."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import UnsupportedFormatError
from holdfast.ondisk.dtypes import ELEMENT_TYPES, STORED_CODES, element_type


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_an_element_is_as_large_as_torchs(name: str) -> None:
    assert element_type(name).item_bytes == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_the_stored_form_has_as_many_bytes_as_the_tensor(name: str) -> None:
    kind = element_type(name)
    count = 1
    for size in kind.stored_shape((3, 5)):
        count *= size
    assert count * STORED_CODES[kind.code] == 15 * kind.item_bytes
    assert len(kind.stored_offsets((1, 2))) == len(kind.stored_shape((3, 5)))


def test_an_added_dimension_starts_at_zero() -> None:
    assert element_type("complex128").stored_shape((3,)) == (3, 2)
    assert element_type("complex128").stored_offsets((1,)) == (1, 0)
    assert element_type("float32").stored_offsets((1,)) == (1,)


def test_an_unknown_type_asks_for_a_newer_version() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"'float4'.*newer version"):
        element_type("float4")
