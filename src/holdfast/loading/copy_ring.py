"""Carry bytes to tensors through a few slots of host memory, used again and again. Knows devices; knows no files.

Each thread fills a slot of its own and copies from it; for an accelerator the slots are page-locked and the copy runs
on a stream of its own. A slot is given out again when the copies from it are done.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from holdfast.loading.requests import DEVICE_PIECE_BYTES, HOST_PIECE_BYTES, READ_PIECE_BYTES
from holdfast.state.devices import ACCELERATORS, Accelerator, Accelerators, DeviceEvent
from holdfast.state.host_buffer import HostBuffer
from holdfast.state.tensors import is_host_memory

__all__ = ["Carrier", "DeviceCarrier", "HostCarrier", "Ring", "Rings", "piece_bytes"]

logger = logging.getLogger("holdfast")

# A piece is widened to whole pages on both sides.
_WIDENED_BYTES = 64 << 10


def piece_bytes(device: torch.device) -> int:
    """Return how many bytes are read at once for dense tensors of a device."""
    return HOST_PIECE_BYTES if device.type == "cpu" else DEVICE_PIECE_BYTES


class Carrier(Protocol):
    """How one thread's bytes get from host memory to tensors of one device."""

    slots: int

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Bytes of host memory to copy from, which begin at a page."""

    def release(self, memory: torch.Tensor) -> None:
        """Release such memory, from which every copy is done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy. May return before it is done; copies are done in their order."""

    def landed(self, source: torch.Tensor) -> torch.Tensor:
        """Return the bytes in separate memory on the device, which can be viewed as any type."""

    def mark(self) -> Any:
        """Return a point after all copies so far."""

    def wait(self, mark: Any) -> None:
        """Return when every copy before the mark is done."""


class HostCarrier:
    """To host memory, or to a device that has no way of its own: each copy is done when it returns."""

    slots = 1

    def __init__(self) -> None:
        self._buffers: dict[int, HostBuffer] = {}

    def memory(self, size_bytes: int) -> torch.Tensor:
        """As of `Carrier`, for as long as this carrier is there."""
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

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None


class DeviceCarrier:
    """To an accelerator's device, on a stream of its own, behind everything that `after` had to do until now.

    Made by the thread that uses it.
    """

    # To fill a slot takes ten times as long as to copy it, and to page-lock another as long as to fill it.
    slots = 1

    def __init__(self, accelerator: Accelerator, device: torch.device, after: Any) -> None:
        self._accelerator = accelerator
        self._device = device
        self._buffers: dict[int, HostBuffer] = {}
        # For this thread, which is one of ours: to go back to device 0 after each copy would take memory there.
        accelerator.set_device(device)
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

    def mark(self) -> DeviceEvent:
        event: DeviceEvent = self._accelerator.record_event(self._stream)
        return event

    def wait(self, mark: DeviceEvent) -> None:
        mark.synchronize()


class Ring:
    """One thread's slots for one device."""

    def __init__(self, carrier: Carrier, slot_bytes: int) -> None:
        self.carrier = carrier
        self._slot_bytes = slot_bytes
        self._slots: list[torch.Tensor] = []
        self._marks: list[Any] = []
        self._turn = 0

    @contextmanager
    def slot(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Bytes to fill and, with the carrier, to copy from until the end of the block."""
        if size_bytes > self._slot_bytes:
            memory = self.carrier.memory(size_bytes)
            try:
                yield memory
            finally:
                self.drain()
                self.carrier.release(memory)
            return
        turn = self._next_turn()
        try:
            yield self._slots[turn][:size_bytes]
        finally:
            self._marks[turn] = self.carrier.mark()

    def drain(self) -> None:
        """Return when every copy is done."""
        self.carrier.wait(self.carrier.mark())

    def close(self) -> None:
        """Release the slots when every copy is done. They stay for good where that cannot be waited for."""
        try:
            self.drain()
        except BaseException:
            _lost.append(self)
            raise
        while self._slots:
            self.carrier.release(self._slots.pop())

    def _next_turn(self) -> int:
        turn = self._turn
        self._turn = (turn + 1) % self.carrier.slots
        if turn == len(self._slots):
            self._slots.append(self.carrier.memory(self._slot_bytes))
            self._marks.append(None)
        else:
            self.carrier.wait(self._marks[turn])
        return turn


_lost: list[Ring] = []


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
            rings[device] = Ring(self._carrier(device), max(piece_bytes(device), READ_PIECE_BYTES) + _WIDENED_BYTES)
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
    # A stream is current for one thread only, so it must be asked for here and not where the copies are made.
    streams = {device: stream for kind in accelerators for device, stream in kind.current_streams().items()}

    def carrier(device: torch.device) -> Carrier:
        accelerator = accelerators.of(device)
        if accelerator is not None and device in streams:
            return DeviceCarrier(accelerator, device, streams[device])
        return HostCarrier()

    return carrier
