"""Carry bytes to tensors through a little host memory, used again and again. Knows devices; knows no files.

Each thread fills slots in a ring of its own and copies from them; for an accelerator the ring is page-locked and the
copies run on a stream of their own. Memory is given out again when the copies from it are done.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from holdfast.loading.requests import DEVICE_PIECE_BYTES, READ_PIECE_BYTES, ROWS_PIECE_BYTES, WIDENED_BYTES
from holdfast.state.devices import ACCELERATORS, Accelerator, Accelerators
from holdfast.state.host_buffer import HostBuffer
from holdfast.state.memory import PAGE_BYTES
from holdfast.state.tensors import is_host_memory

__all__ = ["Carrier", "DeviceCarrier", "HostCarrier", "Ring", "Rings", "Slots", "piece_bytes"]

logger = logging.getLogger("holdfast")


def piece_bytes(device: torch.device) -> int:
    """Return how many bytes are read at once for dense tensors of a device."""
    return READ_PIECE_BYTES if device.type == "cpu" else DEVICE_PIECE_BYTES


class Carrier(Protocol):
    """How one thread's bytes get from host memory to tensors of one device."""

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Return host memory to copy from, which begins at a page."""

    def release(self, memory: torch.Tensor) -> None:
        """Release such memory, from which every copy is done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy. May return before it is done; copies are done in their order."""

    def landed(self, source: torch.Tensor) -> torch.Tensor:
        """Return the bytes in separate memory on the device, which can be viewed as any type."""

    def drain(self) -> None:
        """Return when every copy is done."""


class HostCarrier:
    """To host memory, or to a device that has no way of its own: each copy is done when it returns."""

    def __init__(self) -> None:
        self._buffers: dict[int, HostBuffer] = {}

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Return memory as `Carrier.memory` does. It is there as long as this carrier."""
        buffer = HostBuffer(size_bytes)
        self._buffers[buffer.tensor.data_ptr()] = buffer
        return buffer.tensor

    def release(self, memory: torch.Tensor) -> None:
        self._buffers.pop(memory.data_ptr()).close()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if is_host_memory(target) and source.is_contiguous() and source.dtype == target.dtype:
            # torch's own copy would start a team of threads under each of ours.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)

    def landed(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def drain(self) -> None:
        return None


class DeviceCarrier:
    """To an accelerator's device, on a stream of its own, behind everything that `after` had to do until now.

    Made by the thread that uses it.
    """

    def __init__(self, accelerator: Accelerator, device: torch.device, after: Any) -> None:
        self._accelerator = accelerator
        self._device = device
        self._buffers: dict[int, HostBuffer] = {}
        self._stream = accelerator.new_stream(device)
        # The targets may still be in use there, or be memory that was given back while a kernel still reads it.
        self._stream.wait_stream(after)

    def memory(self, size_bytes: int) -> torch.Tensor:
        buffer = HostBuffer(size_bytes)
        buffer.take_pages()
        try:
            buffer.page_lock(self._accelerator)
        except RuntimeError as error:
            # The same copies only take longer.
            logger.debug("%d MiB could not be page-locked for %s: %s", size_bytes >> 20, self._device, error)
        self._buffers[buffer.tensor.data_ptr()] = buffer
        return buffer.tensor

    def release(self, memory: torch.Tensor) -> None:
        self._buffers.pop(memory.data_ptr()).close()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._accelerator.use_stream(self._stream):
            target.copy_(source, non_blocking=True)

    def landed(self, source: torch.Tensor) -> torch.Tensor:
        with self._accelerator.use_stream(self._stream):
            return source.to(self._device, non_blocking=True)

    def drain(self) -> None:
        self._accelerator.record_event(self._stream).synchronize()


class Ring:
    """One thread's memory to fill and to copy from, for one device.

    It is gone through from end to end before a part of it is used again: a disk is slow to write to memory that still
    lies in a processor's cache. One of a device holds one piece: to fill it takes ten times as long as to copy it, and
    to page-lock another as long as to fill it.
    """

    def __init__(self, carrier: Carrier, size_bytes: int) -> None:
        self.carrier = carrier
        self._size_bytes = size_bytes
        self._memory: torch.Tensor | None = None
        self._position = 0

    @contextmanager
    def slot(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Lend bytes to fill and, with the carrier, to copy from until the end of the block."""
        if size_bytes <= self._size_bytes:
            yield self._next(size_bytes)
            return
        memory = self.carrier.memory(size_bytes)
        try:
            yield memory
        finally:
            self.carrier.drain()
            self.carrier.release(memory)

    def close(self) -> None:
        """Release the memory when every copy is done. It stays for good where that cannot be waited for."""
        try:
            self.carrier.drain()
        except BaseException:
            _lost.append(self)
            raise
        if self._memory is not None:
            self.carrier.release(self._memory)
            self._memory = None

    def _next(self, size_bytes: int) -> torch.Tensor:
        if self._memory is None:
            # All of it once: to page-lock as much again would take as long as to fill it.
            self._memory = self.carrier.memory(self._size_bytes)
        start = self._position
        if start + size_bytes > self._size_bytes:
            self.carrier.drain()
            start = 0
        self._position = -(-(start + size_bytes) // PAGE_BYTES) * PAGE_BYTES
        return self._memory[start : start + size_bytes]


_lost: list[Ring] = []


class Slots:
    """Host memory in slots of one size, which some threads fill and others empty. The one that was given back first is
    filled again first, as in a `Ring`."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = HostBuffer(count * size_bytes).tensor
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        for number in range(count):
            self._free.put(memory[number * size_bytes : (number + 1) * size_bytes])

    def take(self) -> torch.Tensor | None:
        """Return a slot, when one is free. After `stop` return None where none is."""
        slot = self._free.get()
        if slot is None:
            self._free.put(None)
        return slot

    def give_back(self, slot: torch.Tensor) -> None:
        """Have a slot filled again: what was in it is not needed any more."""
        self._free.put(slot)

    def stop(self) -> None:
        """Unblock `take` in all threads."""
        self._free.put(None)


class Rings:
    """The rings of several threads, each with one of its own per device. At the end of the block all copies are done.

    Made by the thread whose work on the devices comes before and after.
    """

    def __init__(self, carrier: Callable[[torch.device], Carrier] | None = None) -> None:
        self._carrier = carrier or carriers_after_this_thread()
        self._own = threading.local()
        self._all: list[Ring] = []

    def of(self, device: torch.device) -> Ring:
        """Return the calling thread's ring to a device."""
        rings: dict[torch.device, Ring] | None = getattr(self._own, "rings", None)
        if rings is None:
            rings = self._own.rings = {}
        if device not in rings:
            rings[device] = Ring(self._carrier(device), max(piece_bytes(device), ROWS_PIECE_BYTES) + WIDENED_BYTES)
            self._all.append(rings[device])
        return rings[device]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for ring in self._all:
                stack.callback(ring.close)


def carriers_after_this_thread(accelerators: Accelerators = ACCELERATORS) -> Callable[[torch.device], Carrier]:
    """Return what makes the carrier to a device, whose copies come after all that the calling thread has enqueued."""
    caller = threading.get_ident()
    # A stream is current for one thread only, so it must be asked for here and not where the copies are made.
    streams = {device: stream for kind in accelerators for device, stream in kind.current_streams().items()}

    def carrier(device: torch.device) -> Carrier:
        accelerator = accelerators.of(device)
        if accelerator is not None and device in streams:
            if threading.get_ident() != caller:
                # In a thread of a restore: to go back to device 0 after each copy would take memory there. The caller,
                # who makes the copies where the system refuses threads, keeps the device that it has.
                accelerator.set_device(device)
            return DeviceCarrier(accelerator, device, streams[device])
        return HostCarrier()

    return carrier
