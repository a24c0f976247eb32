"""Small tensors that are stored in place, as a text in the manifest."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import CorruptCheckpointError, UnsupportedFormatError
from holdfast.ondisk.inline import tensor_of_text
from holdfast.state.tensors import inline_text

LARGE = 2**62


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "shape",
    [f"0,{LARGE},{LARGE}", f"{LARGE},0,{LARGE}", f"0,{2**63 - 1}", f"0,{2**64}", f"0,{10**30}", "0," + "9" * 4000],
)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_an_empty_tensor_in_place_whose_shape_no_tensor_can_have_is_damage(shape: str, dtype: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="stored in place"):
        tensor_of_text(f"data:{dtype}:{shape}:")


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0, 2), (0, 2**40)])
def test_an_empty_tensor_in_place_comes_back_in_its_shape(shape: tuple[int, ...]) -> None:
    restored = tensor_of_text(inline_text("x", torch.empty(shape, dtype=torch.int16)))
    assert (restored.shape, restored.dtype) == (shape, torch.int16)


def test_an_unknown_element_type_of_a_tensor_in_place_is_no_damage() -> None:
    with pytest.raises(UnsupportedFormatError, match="float7"):
        tensor_of_text("data:float7:0:")
