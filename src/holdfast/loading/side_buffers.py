"""Hold what was read for live tensors beside them until every rank agrees. Requests enter; filled live tensors leave.

What is held was checked, so it is read and digested once. Where there is no room for that, the caller checks first and
reads again later. Host tensors are held in spare memory, or in new memory if their files are not in the page cache. A
cached file is read twice instead: on a virtual machine new pages cost more than a second read. Knows torch and its
devices; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from holdfast.loading.requests import HELD_FROM_BYTES, READ_SLOTS, ROWS_PIECE_BYTES, WIDENED_BYTES, Request
from holdfast.state.budget import free_for_staging, ranks_here
from holdfast.state.devices import ACCELERATORS, Accelerators
from holdfast.state.memory import PAGE_BYTES

__all__ = ["SideBuffers", "SpareMemory", "room_on"]

_SLAB_BYTES = 1 << 30
# What torch itself aligns device memory to; any type may be seen at such a place.
_ALIGNMENT_BYTES = 512
# Below this in all, spare memory is not asked for.
_WORTH_BYTES = 16 << 20
# The slots that files are read into.
_FOR_READING_BYTES = READ_SLOTS * (ROWS_PIECE_BYTES + WIDENED_BYTES)

SpareMemory = Callable[[], memoryview | None]
"""Returns memory of this process that nothing else uses as long as the side buffers are needed, or None."""


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
        spare_memory: SpareMemory = lambda: None,
        accelerators: Accelerators = ACCELERATORS,
        takes_new: Callable[[Request], bool] = lambda request: True,
    ) -> Self:
        """Take memory for as many of the requests as the room on their devices, or the spare memory, allows. New host
        memory is taken only for those that `takes_new` holds for."""
        buffers = cls(accelerators=accelerators)
        by_device: dict[torch.device, list[Request]] = {}
        for request in requests:
            # One that was made in inference mode takes no copy outside of it, and one that is conjugated or negated
            # when it is read takes none together with others.
            if request.target.is_inference() or request.target.is_conj() or request.target.is_neg():
                buffers.rest.append(request)
            else:
                by_device.setdefault(request.target.device, []).append(request)
        for device, wanted in by_device.items():
            is_host = device.type == "cpu" and accelerators.of(device) is None
            left = buffers._borrow(wanted, spare_memory) if is_host else wanted
            buffers._take(left, device, room(device), takes_new if is_host else lambda request: True)
        return buffers

    def fill(self) -> None:
        """Copy what is held to the live tensors, and release it."""
        by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for live, held in zip(self.live, self.held, strict=True):
            targets, sources = by_device.setdefault(live.device, ([], []))
            targets.append(live)
            sources.append(held)
        # Lists of several devices would be copied tensor by tensor.
        for targets, sources in by_device.values():
            torch._foreach_copy_(targets, sources)
        self.drop()

    def drop(self) -> None:
        """Release what is held. The memory goes back to the devices: not only torch may need it."""
        used = set(self.accelerators.among(held.device for held in self.held).values())
        self.live, self.held, self.requests = [], [], []
        for accelerator in used:
            accelerator.release_cached_memory()

    def _borrow(self, requests: Sequence[Request], spare_memory: SpareMemory) -> list[Request]:
        """Hold large requests in spare memory, and return the others."""
        large = [request for request in requests if request.target.nbytes >= HELD_FROM_BYTES]
        memory = spare_memory() if sum(one.target.nbytes for one in large) >= _WORTH_BYTES else None
        if not memory:
            return list(requests)
        held: list[Request] = []
        left = [request for request in requests if request.target.nbytes < HELD_FROM_BYTES]
        room_bytes = len(memory)
        for request in large:
            needed = _rounded(request.target.nbytes, PAGE_BYTES)
            fits = needed <= room_bytes
            (held if fits else left).append(request)
            room_bytes -= needed if fits else 0
        # Not as new memory: pages of it that hold zeros must not be given back.
        self._hold(held, torch.frombuffer(memory, dtype=torch.uint8), PAGE_BYTES, fresh=False)
        return left

    def _take(
        self,
        requests: Iterable[Request],
        device: torch.device,
        room_bytes: int,
        takes_new: Callable[[Request], bool],
    ) -> None:
        group: list[Request] = []
        size = 0
        for request in requests:
            needed = _rounded(request.target.nbytes, _ALIGNMENT_BYTES)
            if needed > room_bytes or not takes_new(request):
                self.rest.append(request)
                continue
            room_bytes -= needed
            if group and size + needed > _SLAB_BYTES:
                self._hold_in_new(group, size, device)
                group, size = [], 0
            group.append(request)
            size += needed
        if group:
            self._hold_in_new(group, size, device)

    def _hold_in_new(self, requests: list[Request], size_bytes: int, device: torch.device) -> None:
        """Take one piece of memory for all of them: to take it for each would cost more than to fill it."""
        try:
            slab = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except (MemoryError, RuntimeError):  # torch's own errors of that kind are RuntimeErrors
            self.rest += requests
            return
        self._hold(requests, slab, _ALIGNMENT_BYTES, fresh=True)

    def _hold(self, requests: list[Request], slab: torch.Tensor, alignment_bytes: int, *, fresh: bool) -> None:
        start = 0
        for request in requests:
            target = request.target
            held = slab[start : start + target.nbytes].view(target.dtype).view(target.shape)
            start += _rounded(target.nbytes, alignment_bytes)
            self.live.append(target)
            self.held.append(held)
            self.requests.append(replace(request, target=held, fresh=fresh))


def room_on(
    device: torch.device,
    unfilled_bytes: int = 0,
    accelerators: Accelerators = ACCELERATORS,
    free_host_bytes: Callable[[], int] = free_for_staging,
) -> int:
    """Return how many bytes side buffers may take on a device: what is free, but for a tenth of it all, or 2 GiB; none
    on a device whose memory is not known.

    In host memory: half of this rank's share of what is free, less what reading takes and less `unfilled_bytes`, which
    this rank has and whose pages are still to be taken. Half, because live tensors may not have all of their pages yet.
    """
    accelerator = accelerators.of(device)
    if accelerator is None and device.type == "cpu":
        return (free_host_bytes() // ranks_here() - unfilled_bytes - _FOR_READING_BYTES) // 2
    if accelerator is None:
        return 0
    memory = accelerator.memory(device)
    return memory.free + memory.cached - max(memory.total // 10, 2 << 30)


def _rounded(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes
