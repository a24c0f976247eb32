"""Compare the stored form of state with what a model, an optimizer or a tensor must have. Changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError, HoldfastError, StateMismatchError
from holdfast.ondisk.codec import Json
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.regions import Cut
from holdfast.state.tensors import dtype_name, torch_dtype, whole_shape

__all__ = [
    "CAST",
    "fits",
    "is_castable",
    "is_castable_form",
    "list_of",
    "names_of",
    "object_of",
    "other_form",
    "unlike",
]

CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The types that convert to each other."""


def fits(leaf: TensorRecord, tensor: torch.Tensor, cut: Cut | None = None) -> bool:
    # A torch.Size is a tuple; there may be very many of them.
    shape = tensor.shape if cut is None else cut.shape
    return shape == leaf.shape and tensor.dtype == torch_dtype(leaf.dtype)


def is_castable(leaf: TensorRecord, tensor: torch.Tensor, cut: Cut | None = None) -> bool:
    """Return whether a tensor has the shape of a leaf, and both are of types that convert to each other. Eight-bit
    floats do not: what they stand for depends on scales, of which a conversion knows nothing."""
    return whole_shape(tensor, cut) == leaf.shape and {tensor.dtype, torch_dtype(leaf.dtype)} <= CAST


def is_castable_form(before: str, now: str) -> bool:
    """Return whether two forms of a tensor, such as `float32 [2, 3]`, differ only in types that convert to each
    other."""
    (one, shape), (other, same) = (form.partition(" ")[::2] for form in (before, now))
    names = {str(dtype).removeprefix("torch.") for dtype in CAST}
    return bool(shape) and shape == same and {one, other} <= names


def other_form(leaf: TensorRecord, tensor: torch.Tensor, name: str = "", cut: Cut | None = None) -> str:
    was, now = f"{leaf.dtype} {list(leaf.shape)}", f"{dtype_name(tensor)} {list(whole_shape(tensor, cut))}"
    return f"{name or leaf.name}: {was} in the checkpoint, {now} now"


def object_of(value: Json, tree: TreeRecord) -> dict[str, Json]:
    if not isinstance(value, dict) or any(key.startswith("$") for key in value):
        raise unlike(tree, f"the values of '{tree.name}' have no names")
    return value


def list_of(value: Json, tree: TreeRecord) -> list[Any]:
    if not isinstance(value, list):
        raise unlike(tree, f"the values of '{tree.name}' are not what an optimizer has")
    return value


def names_of(value: Json, tree: TreeRecord) -> list[str]:
    names = list_of(value, tree)
    if not all(isinstance(name, str) for name in names):
        raise unlike(tree, f"the values of '{tree.name}' name parameters by something else")
    return names


def unlike(tree: TreeRecord, problem: str) -> HoldfastError:
    """Return the error for values that are not those of a model or an optimizer: damage, unless they were saved as the
    values of some other object."""
    if tree.kind != "values":
        return CorruptCheckpointError(problem, file=tree.file)
    of = f" of {tree.type}" if tree.type else ""
    return StateMismatchError(
        f"the state was saved as the plain values{of}, and the component is a model or an optimizer now: {problem}",
        component=tree.component,
        advice=f"restore it into an object like the saved one, or leave it out with skip=({tree.component!r},)",
    )
