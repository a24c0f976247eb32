"""Recognise the random state of a process, as Holdfast and as `transformers` store it. Trees enter and leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.formats.source import TensorEntry
from holdfast.state.devices import ACCELERATORS

__all__ = ["as_random_state"]


def as_random_state(value: Any) -> dict[str, Any] | None:
    """Return a random state in the form of `holdfast.get_rng_state`; None for anything else."""
    if not isinstance(value, Mapping):
        return None
    kinds = {accelerator.type for accelerator in ACCELERATORS}
    torch_state = value.get("torch", value.get("cpu"))
    known = {"python", "numpy", "torch", "cpu", *kinds}
    if not {"python", "numpy"} <= value.keys() <= known or not isinstance(torch_state, TensorEntry):
        return None
    state = {"python": value["python"], "numpy": _numpy_state(value["numpy"]), "torch": torch_state}
    for kind in kinds & value.keys():
        devices = value[kind] if isinstance(value[kind], list | tuple) else [value[kind]]
        if not all(isinstance(one, TensorEntry) for one in devices):
            return None
        state[kind] = list(devices)
    return state


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
