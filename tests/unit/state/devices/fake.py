"""An accelerator over host memory that does its work as late as it may: when something waits for it.

Copies that are made on one of its streams happen when an event after them is waited for, so what changed in between is
copied changed, as on a device that is far behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.state.devices import DeviceMemory, DigestKernel

LATE = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
GIBI = 1 << 30


class FakeStream:
    """A queue of work. That of the training does its work at once; others when an event of theirs is waited for."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.work: list[Callable[[], Any]] = []
        self.done = 0
        self._at_once = at_once
        # Several threads may wait for the same event, as they may for one of a device.
        self._running = threading.RLock()

    def add(self, work: Callable[[], Any]) -> None:
        self.work.append(work)
        if self._at_once:
            self.run(len(self.work))

    def run(self, position: int) -> None:
        with self._running:
            while self.done < position:
                self.done += 1
                self.work[self.done - 1]()

    def wait_event(self, event: FakeEvent) -> None:
        self.add(event.synchronize)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(FakeEvent(stream))


class FakeEvent:
    """A point in a stream's work."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._position = len(stream.work)

    def query(self) -> bool:
        return self._stream.done >= self._position

    def synchronize(self) -> None:
        self._stream.run(self._position)


class _OnStream(TorchDispatchMode):
    """Puts the copies that the calling thread makes onto a stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function not in LATE:
            return function(*arguments, **(named or {}))
        self._stream.add(lambda: function(*arguments, **(named or {})))
        return arguments[0] if function is torch.ops.aten.copy_.default else None


class FakeAccelerator:
    """The accelerator. `calls` is what was asked of it for host memory; `refuses`: it page-locks none."""

    def __init__(self, kind: str = "cpu", *, free: int = 64 * GIBI, cached: int = 0, refuses: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.streams: list[FakeStream] = []
        self.training_stream = FakeStream(at_once=True)
        self.free = free
        self.cached = cached
        self.states: list[torch.Tensor] | None = None
        self._kind = kind
        self._refuses = refuses

    @property
    def type(self) -> str:
        return self._kind

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.training_stream

    def current_streams(self) -> dict[torch.device, FakeStream]:
        return {torch.device(self.type): self.training_stream}

    def new_stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def use_stream(self, stream: FakeStream) -> TorchDispatchMode:
        return _OnStream(stream)

    def record_event(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(stream)

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device))

    def with_index(self, device: torch.device) -> torch.device:
        return device

    def empty_page_locked(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._refuses:
            raise RuntimeError("no page-locked memory is left")
        self.calls.append(("empty_page_locked", tuple(sizes)))
        return torch.empty(sizes, dtype=dtype)

    def page_lock(self, address: int, size_bytes: int) -> None:
        if self._refuses:
            raise RuntimeError("error 2 of this device")
        self.calls.append(("page_lock", (address, size_bytes)))

    def undo_page_lock(self, address: int) -> None:
        self.calls.append(("undo_page_lock", address))

    def memory(self, device: torch.device) -> DeviceMemory:
        return DeviceMemory(self.free, 80 * GIBI, self.cached, cached_at_peak=self.cached // 2)

    def release_cached_memory(self) -> None:
        self.calls.append(("release_cached_memory", None))

    def rng_states(self) -> list[torch.Tensor] | None:
        return self.states

    def set_rng_states(self, states: Sequence[torch.Tensor]) -> None:
        self.states = list(states)

    def digest_kernel(self, device: torch.device) -> DigestKernel:
        raise RuntimeError("this device has no kernel")
