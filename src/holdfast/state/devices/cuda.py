"""Devices that torch calls "cuda": those of NVIDIA, and those of AMD in torch's builds for ROCm, less the digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.state.devices.base import DeviceMemory, DigestKernel
from holdfast.state.devices.cuda_digest import CudaDigestKernel

__all__ = ["CudaAccelerator"]

# cudaHostRegisterPortable: page-locked for every device of the process, whichever is current.
_PORTABLE = 1


class CudaAccelerator:
    """CUDA as an `Accelerator`."""

    type = "cuda"

    # torch's own functions where they are what the seam asks for: a copy and a save make many of these calls.
    current_stream = staticmethod(torch.cuda.current_stream)
    new_stream = staticmethod(torch.cuda.Stream)
    use_stream = staticmethod(torch.cuda.stream)
    set_device = staticmethod(torch.cuda.set_device)
    release_cached_memory = staticmethod(torch.cuda.empty_cache)

    def current_streams(self) -> dict[torch.device, Any]:
        if not torch.cuda.is_initialized():
            return {}
        devices = [torch.device(self.type, index) for index in range(torch.cuda.device_count())]
        return {device: torch.cuda.current_stream(device) for device in devices}

    def record_event(self, stream: Any) -> Any:
        # blocking: a thread that waits sleeps, and leaves its processor to the training and to those that digest.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def with_index(self, device: torch.device) -> torch.device:
        return device if device.index is not None else torch.device(self.type, torch.cuda.current_device())

    def empty_page_locked(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, pin_memory=True)

    def page_lock(self, address: int, size_bytes: int) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
        if code != 0:
            raise RuntimeError(f"CUDA error {code}")

    def undo_page_lock(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def memory(self, device: torch.device) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(device)
        # One reading of the statistics for all three, and not flattened: either takes longer than the question to the
        # driver. Before the first use of the device there are none.
        statistics = torch.cuda.memory_stats_as_nested_dict(device)
        reserved = statistics.get("reserved_bytes", {}).get("all", {}).get("current", 0)
        allocated = statistics.get("allocated_bytes", {}).get("all", {})
        current, peak = allocated.get("current", 0), allocated.get("peak", 0)
        return DeviceMemory(int(free), int(total), int(reserved - current), int(reserved - peak))

    def rng_states(self) -> list[torch.Tensor] | None:
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return list(torch.cuda.get_rng_state_all()) if in_use else None

    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        if torch.cuda.is_available():
            for index, state in enumerate(states[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state.cpu(), index)

    def digest_kernel(self, device: torch.device) -> DigestKernel:
        if torch.version.cuda is None:
            raise RuntimeError("torch was built without CUDA")
        return CudaDigestKernel(device)
