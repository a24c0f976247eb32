"""Accelerators behind one seam: everything else asks it, and names no kind of device. Knows torch, no checkpoints."""

from holdfast.state.devices.base import Accelerator, DeviceEvent, DeviceMemory, DeviceStream, DigestKernel
from holdfast.state.devices.registry import ACCELERATORS, Accelerators

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Accelerators",
    "DeviceEvent",
    "DeviceMemory",
    "DeviceStream",
    "DigestKernel",
]
