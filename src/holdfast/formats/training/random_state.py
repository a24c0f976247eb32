"""Recognise the random state of a process, as Holdfast and as `transformers` store it. Trees enter and leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.formats.source import TensorEntry

__all__ = ["as_random_state"]


def as_random_state(value: Any) -> dict[str, Any] | None:
    """Return a random state in the form of `holdfast.get_rng_state`; None for anything else."""
    if not isinstance(value, Mapping):
        return None
    torch_state = value.get("torch", value.get("cpu"))
    known = {"python", "numpy", "torch", "cpu", "cuda"}
    if not {"python", "numpy"} <= value.keys() <= known or not isinstance(torch_state, TensorEntry):
        return None
    state = {"python": value["python"], "numpy": _numpy_state(value["numpy"]), "torch": torch_state}
    devices = value.get("cuda")
    if devices is None:
        return state
    listed = list(devices) if isinstance(devices, list | tuple) else [devices]
    return {**state, "cuda": listed} if all(isinstance(one, TensorEntry) for one in listed) else None


def _numpy_state(value: Any) -> Any:
    """Return the state of NumPy's generator as a dict, of which NumPy also has a tuple."""
    if not isinstance(value, tuple) or len(value) != 5:
        return value
    name, key, position, has_gauss, gauss = value
    return {
        "bit_generator": name,
        "state": {"key": key, "pos": position},
        "has_gauss": has_gauss,
        "gauss": gauss,
    }
