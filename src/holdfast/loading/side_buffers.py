"""Hold what was read for live tensors beside them until every rank agrees. Requests enter; filled live tensors leave.

What is held was checked, so it is read and digested once. Where there is no room for that, the caller checks first and
reads again later. Knows torch and its devices; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from holdfast.loading.requests import Request
from holdfast.state.devices import ACCELERATORS, Accelerators

__all__ = ["SideBuffers", "room_on"]

_SLAB_BYTES = 1 << 30
# What torch itself aligns device memory to; any type may be seen at such a place.
_ALIGNMENT_BYTES = 512


@dataclass(slots=True)
class SideBuffers:
    """Live tensors and the memory that stands in for them. `rest` are the requests that there was no room for."""

    live: list[torch.Tensor] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    rest: list[Request] = field(default_factory=list)
    accelerators: Accelerators = ACCELERATORS

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        room: Callable[[torch.device], int],
        accelerators: Accelerators = ACCELERATORS,
    ) -> Self:
        """Take memory for as many of the requests as the room on their devices allows."""
        buffers = cls(accelerators=accelerators)
        by_device: dict[torch.device, list[Request]] = {}
        for request in requests:
            # One that was made in inference mode takes no copy outside of it.
            if request.target.is_inference():
                buffers.rest.append(request)
            else:
                by_device.setdefault(request.target.device, []).append(request)
        for device, wanted in by_device.items():
            buffers._take(wanted, device, room(device))
        return buffers

    def fill(self) -> None:
        """Copy what is held to the live tensors, and release it."""
        if self.live:
            torch._foreach_copy_(self.live, self.held)
        self.drop()

    def drop(self) -> None:
        """Release what is held. The memory goes back to the devices: not only torch may need it."""
        used = set(self.accelerators.among(held.device for held in self.held).values())
        self.live, self.held, self.requests = [], [], []
        for accelerator in used:
            accelerator.release_cached_memory()

    def _take(self, requests: Iterable[Request], device: torch.device, room_bytes: int) -> None:
        group: list[Request] = []
        size = 0
        for request in requests:
            needed = _rounded(request.target.nbytes)
            if needed > room_bytes:
                self.rest.append(request)
                continue
            room_bytes -= needed
            if group and size + needed > _SLAB_BYTES:
                self._hold(group, size, device)
                group, size = [], 0
            group.append(request)
            size += needed
        if group:
            self._hold(group, size, device)

    def _hold(self, requests: list[Request], size_bytes: int, device: torch.device) -> None:
        """Take one piece of memory for all of them: to take it for each would cost more than to fill it."""
        try:
            slab = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except (MemoryError, RuntimeError):  # torch's own errors of that kind are RuntimeErrors
            self.rest += requests
            return
        start = 0
        for request in requests:
            target = request.target
            held = slab[start : start + target.nbytes].view(target.dtype).view(target.shape)
            start += _rounded(target.nbytes)
            self.live.append(target)
            self.held.append(held)
            self.requests.append(replace(request, target=held, fresh=True))


def room_on(device: torch.device, accelerators: Accelerators = ACCELERATORS) -> int:
    """Return how many bytes side buffers may take on a device: what is free, but for a tenth of it all, or 2 GiB.

    None in host memory: there the page cache has what was read, and new pages can cost far more than to read it again,
    where a virtual machine must get them from its host.
    """
    accelerator = accelerators.of(device)
    if accelerator is None:
        return 0
    memory = accelerator.memory(device)
    return memory.free + memory.cached - max(memory.total // 10, 2 << 30)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
