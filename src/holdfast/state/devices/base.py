"""What Holdfast needs of a kind of accelerator: streams, events, page-locked memory, free memory, random state and
digests.

One file beside this one implements it for each kind of device, and `registry` lists them. The methods follow PyTorch's
own names and meaning where it has them, so most are one call of torch. Knows torch; names no kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self

import torch

__all__ = ["Accelerator", "DeviceEvent", "DeviceMemory", "DeviceStream", "DigestKernel"]

DigestKernel = Callable[[int, torch.Tensor, int, torch.Tensor], None]
"""Runs the BLAKE3 kernel in so many threads, after what was launched before: threads, table, level, values. What the
table and the values hold is at the top of `loading.gpu_digest`."""


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether all work before the event is done. Never waits."""

    def synchronize(self) -> None:
        """Return when all work before the event is done. The thread sleeps meanwhile."""


class DeviceStream(Protocol):
    """A queue of work of one device."""

    def wait_event(self, event: Any) -> None:
        """Have the device wait for an event before what is enqueued from now on. The caller does not wait."""

    def wait_stream(self, stream: Self) -> None:
        """Have the device wait for all that another stream was given so far. The caller does not wait."""


class DeviceMemory(NamedTuple):
    """The memory of one device, in bytes.

    `cached` is what torch has reserved and does not use now; `cached_at_peak` is what it would not use either if the
    training were at the peak that it had so far.
    """

    free: int
    total: int
    cached: int
    cached_at_peak: int


class Accelerator(Protocol):
    """One kind of device. All methods may be called from any thread."""

    @property
    def type(self) -> str:
        """Return the `torch.device.type` of these devices, under which their random state is stored."""

    # Streams

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that the calling thread enqueues work of this device on."""

    def current_streams(self) -> dict[torch.device, Any]:
        """Return the current stream of every device that this process can use; none before the first use of any."""

    def new_stream(self, device: torch.device) -> Any:
        """Return another stream of this device."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one, for the calling thread, inside of the block."""

    def record_event(self, stream: Any) -> Any:
        """Return an event after all that the stream was given so far."""

    def set_device(self, device: torch.device) -> None:
        """Make a device the current one, for the calling thread."""

    def with_index(self, device: torch.device) -> torch.device:
        """Return the device with its index: that of the current device where it has none."""

    # Memory

    def empty_page_locked(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in host memory that copies without waiting can use. Raise a RuntimeError if none is left."""

    def page_lock(self, address: int, size_bytes: int) -> None:
        """Have copies use memory of this process as if it were page-locked by torch. Raise a RuntimeError with the
        device library's error where that is refused: copies then are right, and slower."""

    def undo_page_lock(self, address: int) -> None:
        """Undo `page_lock`, before the memory is released."""

    def memory(self, device: torch.device) -> DeviceMemory:
        """Return how much memory of a device is free, and for whom."""

    def release_cached_memory(self) -> None:
        """Return what torch has reserved and does not use to the devices: not only torch may need it."""

    # Random state

    def rng_states(self) -> list[torch.Tensor] | None:
        """Return the random state of every device, in host memory; None where no device is in use."""

    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the random states of the devices, as many as there are here."""

    # Digests

    def digest_kernel(self, device: torch.device) -> DigestKernel:
        """Return the BLAKE3 kernel, compiled for a device. Raise a RuntimeError, or an OSError, where there is none:
        the bytes are digested by the processor then."""
