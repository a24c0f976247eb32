"""Find the accelerator of a device by `torch.device.type`. A device enters; its accelerator leaves, or None.

A second kind of accelerator is one file with a class like `CudaAccelerator`, and its name in the last line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.state.devices.base import Accelerator
from holdfast.state.devices.cuda import CudaAccelerator

__all__ = ["ACCELERATORS", "Accelerators"]


class Accelerators:
    """Kinds of accelerators by the type of their devices. A device of any other type is treated as host memory is:
    each copy is done when it returns."""

    def __init__(self, kinds: Iterable[Accelerator]) -> None:
        self._by_type = {kind.type: kind for kind in kinds}

    def __iter__(self) -> Iterator[Accelerator]:
        return iter(self._by_type.values())

    def of(self, device: torch.device) -> Accelerator | None:
        """Return the accelerator of a device; None for the CPU and for devices that have none here."""
        return self._by_type.get(device.type)

    def among(self, devices: Iterable[torch.device]) -> dict[torch.device, Accelerator]:
        """Return those of the devices that have an accelerator, each once, in their order."""
        return {device: kind for device in dict.fromkeys(devices) if (kind := self.of(device)) is not None}

    def rng_states(self) -> dict[str, list[torch.Tensor]]:
        """Return the random states of the devices that are in use, by the type of device."""
        states = {kind.type: kind.rng_states() for kind in self}
        return {name: found for name, found in states.items() if found is not None}

    def set_rng_states(self, states: Mapping[str, Any]) -> None:
        """Set the random states of the devices that have one among `states`; what else is there is not looked at."""
        for kind in self:
            if kind.type in states:
                kind.set_rng_states(states[kind.type])


ACCELERATORS = Accelerators([CudaAccelerator()])
