"""Copy chunks from devices into the arena by streams of their own, while the training goes on. Knows accelerators, no
kind of them.

Nothing torn can come of it: what an optimizer of the state owns is changed by its `step` alone, which waits, on the
device, for the copy; everything else is cloned, or copied, in the order of the training's own stream, before anything
can change it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from holdfast.ondisk.safetensors import SMALL_BYTES
from holdfast.saving.staging.arena import Arena
from holdfast.saving.staging.chunks import BYTE, Chunk, Placement, copy_all, copy_now
from holdfast.saving.staging.step_hooks import owned_places
from holdfast.state.devices import ACCELERATORS, Accelerator, Accelerators
from holdfast.storage.threads import Latch

__all__ = ["AsyncMode", "DeviceCopier", "Staging", "best_mode", "room_for_clone"]

logger = logging.getLogger("holdfast")

AsyncMode = Literal["async", "async_pinned", "async_device"]

_FIRST_GROUP_BYTES = 256 << 20
# While two threads take turns with the interpreter, a device gets its work late: until the training has some enqueued
# ahead, it is left alone. Few copies take no time worth that.
_HEAD_START_SECONDS = 0.03
_FEW_COPIES = 64
# What a clone on the device leaves free: an allocator needs room to move, and other libraries take some, too.
_DEVICE_RESERVE_BYTES = 1 << 30


class Staging:
    """One save on its way into the arena. Its copies are enqueued by the first thread that needs them: the one that
    finishes the save, or the training, if its optimizer steps before that."""

    def __init__(self, arena: Arena, end: int) -> None:
        self._arena = arena
        self._end = end
        self._lock = threading.Lock()
        self._sending: Callable[[], list[tuple[Any, int]]] | None = None
        self._is_sent = Latch()
        self._is_sent.set()
        self._head_start_seconds = 0.0
        self._groups: list[tuple[Any, int]] = []
        self._failure: BaseException | None = None

    def send_later(self, sending: Callable[[], list[tuple[Any, int]]], head_start_seconds: float) -> None:
        """Have the copies enqueued by `sending`. It returns an event for each group of copies, and how far the arena is
        filled after that event; it holds what it copies from. `head_start_seconds`: how long a thread that finishes
        beside the training leaves the interpreter to it before that."""
        self._sending, self._head_start_seconds = sending, head_start_seconds
        self._is_sent = Latch()

    def send(self) -> None:
        """Enqueue the copies, if they are not; return when they are. `finish` raises what that raises."""
        with self._lock:
            if self._is_sent.is_set():
                return
            try:
                self._groups = self._sending() if self._sending is not None else []
            except Exception as error:
                self._failure = error
            except BaseException as error:
                # An interrupt of the training, which must get it as well.
                self._failure = error
                raise
            finally:
                self._is_sent.set()

    def cancel(self) -> None:
        """Give up the copies that are not enqueued yet: they will not be."""
        with self._lock:
            self._sending = None
            self._is_sent.set()

    def finish_beside_training(self) -> None:
        """As `finish`, after the head start of the training, which may enqueue the copies itself meanwhile."""
        self._is_sent.wait(self._head_start_seconds)
        self.finish()

    def finish(self) -> None:
        """Return when the arena holds everything. The writer follows meanwhile."""
        self.send()
        if self._failure is not None:
            raise self._failure
        for event, position in self._groups:
            event.synchronize()
            self._arena.staged = max(position, self._arena.staged)
        self._arena.staged = self._end
        # What the copies were made from is held until here.
        self._sending, self._groups = None, []


class _Copy(NamedTuple):
    """A copy from a device: where to, what, and how far the arena is filled when this and all before it are done."""

    target: torch.Tensor
    source: torch.Tensor
    end: int


_end_of = attrgetter("end")


@dataclass(frozen=True, slots=True)
class _SourceDevices:
    """The device of each source and, by their indices: those in host memory, runs that are copied as one, the rest."""

    devices: list[torch.device]
    used: dict[torch.device, Accelerator]
    here: list[int]
    runs: list[tuple[int, int]]
    singles: list[int]


class DeviceCopier:
    """The copies from devices into one arena, and what they keep from save to save: streams and batches of chunks."""

    def __init__(self, accelerators: Accelerators = ACCELERATORS) -> None:
        self._accelerators = accelerators
        # Those that were tried, and whether they are locked.
        self._page_locks: dict[tuple[Arena, Accelerator], bool] = {}
        self._devices: dict[torch.device, Accelerator] = {}
        self._batches: dict[tuple[int, int], _DeviceBatch] = {}
        self._source_devices: _SourceDevices | None = None
        self._streams: dict[torch.device, Any] = {}
        self._staging: Staging | None = None
        self._reading: dict[torch.device, Accelerator] = {}
        self._logged_no_room = False

    def start(
        self,
        sources: list[torch.Tensor],
        placement: Placement,
        optimizers: Sequence[torch.optim.Optimizer],
        staging: Staging,
        *,
        clones: bool,
    ) -> None:
        """Start the copies of a save. `clones`: from clones on the device where there is room for them.

        In the order of the training's stream small chunks are gathered, and what may change is cloned. The copies to
        the arena then are made by other streams.
        """
        views = placement.views
        where = self._where(sources, placement)
        self.page_lock(placement.arena, where.used)
        gathered, singles = self._gather(sources, placement, where.runs), where.singles
        cloned = clones and self._clone(sources, singles)
        if not cloned:
            owned = owned_places(optimizers)
            loose = [index for index in singles if (sources[index].data_ptr(), sources[index].nbytes) not in owned]
            if not self._clone(sources, loose):
                # No room for clones: the training's own stream makes these copies, and the training waits for them.
                copy_now([views[index] for index in loose], [sources[index] for index in loose])
                singles = _without(singles, loose)
        if not cloned:
            # A tensor can be given another memory before it is copied. This is the memory that it has now.
            for index in singles:
                sources[index] = sources[index].detach()
        copy_all([views[index] for index in where.here], [sources[index] for index in where.here])
        ready = {device: kind.record_event(kind.current_stream(device)) for device, kind in where.used.items()}

        def send() -> list[tuple[Any, int]]:
            copies = [_Copy(views[index], sources[index], placement.chunks[index].end) for index in singles]
            return self._send(sorted([*gathered, *copies], key=_end_of), where.used, ready)

        # Not now: that takes as long as all the rest of this, and meanwhile the training can go on.
        staging.send_later(send, _HEAD_START_SECONDS if len(singles) + len(gathered) > _FEW_COPIES else 0.0)
        self._staging, self._reading = (None, {}) if cloned else (staging, where.used)

    def wait_for_staging(self) -> None:
        """Make the current stream of every device wait for the copies that still read. The CPU goes on at once."""
        if self._staging is not None:
            self._staging.send()
            for device, accelerator in self._reading.items():
                accelerator.current_stream(device).wait_stream(self._stream(device, accelerator))
            # Not before: an interrupt must not let the next step begin without the wait.
            self._staging = None

    def cancel(self) -> None:
        """Give up what is being staged: the save has failed."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.cancel()

    def forget_placement(self) -> None:
        """Forget what depends on where the chunks lie in the arena."""
        self._batches, self._source_devices = {}, None

    def page_lock(self, arena: Arena, used: Mapping[torch.device, Accelerator]) -> None:
        """Page-lock an arena for copies from these devices. It is tried once."""
        self._devices = dict(used)
        for accelerator in dict.fromkeys(used.values()):
            if (arena, accelerator) not in self._page_locks:
                try:
                    accelerator.page_lock(arena.address, arena.size_bytes)
                    self._page_locks[arena, accelerator] = True
                except RuntimeError as error:
                    self._page_locks[arena, accelerator] = False
                    logger.warning("the arena could not be page-locked (%s): copies will be slower", error)

    def set_devices(self) -> None:
        """Make a device that the copies use the calling thread's current one: a new thread begins at the first device,
        and any call there takes memory of that"""
        for device, accelerator in self._devices.items():
            accelerator.set_device(device)

    def release(self, arena: Arena) -> None:
        """Release an arena that is about to be closed."""
        self._staging = None
        for (locked, accelerator), is_locked in self._page_locks.items():
            if locked is arena and is_locked:
                accelerator.undo_page_lock(arena.address)
        self._page_locks = {key: is_locked for key, is_locked in self._page_locks.items() if key[0] is not arena}

    def _send(
        self, copies: list[_Copy], used: dict[torch.device, Accelerator], ready: dict[torch.device, Any]
    ) -> list[tuple[Any, int]]:
        """Enqueue the copies, with an event after each group of them."""
        streams = {device: self._stream(device, accelerator) for device, accelerator in used.items()}
        for device, event in ready.items():
            streams[device].wait_event(event)
        # What the training's own stream copied, or gathered, is there when it has come to this place.
        groups: list[tuple[Any, int]] = [(event, 0) for event in ready.values()]
        for first, last in _groups([copy.end for copy in copies], _FIRST_GROUP_BYTES):
            for device, accelerator in used.items():
                stream = streams[device]
                mine = [copy for copy in copies[first:last] if copy.source.device == device]
                with accelerator.use_stream(stream), torch.no_grad():
                    copy_now([copy.target for copy in mine], [copy.source for copy in mine])
                # Only the last device's event counts for the arena: all of them have passed this place then.
                end = copies[last - 1].end if device == list(used)[-1] else 0
                groups.append((accelerator.record_event(stream), end))
        return groups

    def _where(self, sources: list[torch.Tensor], placement: Placement) -> _SourceDevices:
        """Return where the sources lie, and how they are copied; found anew when one of them has moved."""
        devices = [source.device for source in sources]
        if self._source_devices is None or devices != self._source_devices.devices:
            used = self._accelerators.among(devices)
            runs = list(_runs([device if device in used else None for device in devices], placement.chunks))
            self._source_devices = _SourceDevices(
                devices,
                used,
                here=[index for index, device in enumerate(devices) if device not in used],
                runs=[(first, last) for first, last in runs if last - first > 1],
                singles=[first for first, last in runs if last - first == 1 and devices[first] in used],
            )
        return self._source_devices

    def _gather(
        self, sources: list[torch.Tensor], placement: Placement, runs: Sequence[tuple[int, int]]
    ) -> list[_Copy]:
        """Copy small neighbours on a device together, so that each run of them is one copy to the arena. A device's
        queue is short, and to enqueue a copy costs more than its few bytes do."""
        copies: list[_Copy] = []
        for first, last in runs:
            batch = self._batches.get((first, last))
            if batch is None or batch.device != sources[first].device:
                batch = _DeviceBatch(placement.arena, placement.chunks[first:last], sources[first].device)
                self._batches[first, last] = batch
            batch.take(sources[first:last])
            copies.append(_Copy(batch.target, batch.memory, placement.chunks[last - 1].end))
        return copies

    def _clone(self, sources: list[torch.Tensor], indices: Sequence[int]) -> bool:
        """Put clones in the place of some sources, in the order of the training's stream, where there is room."""
        needed: dict[torch.device, int] = {}
        for index in indices:
            device = sources[index].device
            needed[device] = needed.get(device, 0) + sources[index].nbytes
        used = self._accelerators.among(needed)
        if any(room_for_clone(device, used[device]) < count for device, count in needed.items()):
            if not self._logged_no_room:
                self._logged_no_room = True
                logger.info("no room for a clone on the device: the copy goes straight to host memory")
            return False
        clones = [torch.empty_like(sources[index]) for index in indices]
        copy_all(clones, [sources[index] for index in indices])
        for index, clone in zip(indices, clones, strict=True):
            sources[index] = clone
        return True

    def _stream(self, device: torch.device, accelerator: Accelerator) -> Any:
        if device not in self._streams:
            self._streams[device] = accelerator.new_stream(device)
        return self._streams[device]


def _runs(devices: Sequence[torch.device | None], chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks that can be copied as one: small, on one device, next to each other. None: not on any."""
    first = 0
    for index in range(1, len(devices) + 1):
        if index == len(devices) or not _belongs(index, devices, chunks):
            yield first, index
            first = index


def _belongs(index: int, devices: Sequence[torch.device | None], chunks: Sequence[Chunk]) -> bool:
    one, other = chunks[index - 1], chunks[index]
    small = max(one.end - one.start, other.end - other.start) < SMALL_BYTES
    return small and one.end == other.start and devices[index] is not None and devices[index] == devices[index - 1]


def best_mode(memory: Sequence[torch.Tensor], accelerators: Accelerators = ACCELERATORS) -> tuple[AsyncMode, str]:
    """Return the best asynchronous mode for a state, and why."""
    sizes: dict[torch.device, int] = {}
    for tensor in memory:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
    used = accelerators.among(sizes)
    if not used:
        return "async", "the state is in host memory"
    # Twice the room: what the training takes at its peak is only known as far as it has come.
    if all(room_for_clone(device, accelerator) > 2 * sizes[device] for device, accelerator in used.items()):
        return "async_device", "the devices have room for a clone of the state"
    return "async_pinned", "the devices have no room for a clone of the state"


def room_for_clone(device: torch.device, accelerator: Accelerator) -> int:
    """Return how many bytes a clone may take on a device: what is free even when the training is at its peak."""
    memory = accelerator.memory(device)
    return memory.free + memory.cached_at_peak - _DEVICE_RESERVE_BYTES


def _without(indices: Sequence[int], left_out: Sequence[int]) -> list[int]:
    """Return the indices that are not left out, in one pass over each: there may be thousands of either."""
    gone = set(left_out)
    return [index for index in indices if index not in gone]


class _DeviceBatch:
    """Memory on a device in which small chunks lie next to each other, as they will in the arena."""

    def __init__(self, arena: Arena, chunks: Sequence[Chunk], device: torch.device) -> None:
        start, end = chunks[0].start, chunks[-1].end
        self.device = device
        self.memory = torch.empty(end - start, dtype=BYTE, device=device)
        self.target = torch.frombuffer(arena.memory[start:end], dtype=BYTE)
        self._views = [chunk.on(self.memory[chunk.start - start : chunk.end - start]) for chunk in chunks]

        by_type: dict[torch.dtype, list[int]] = {}
        for index, view in enumerate(self._views):
            by_type.setdefault(view.dtype, []).append(index)
        self._groups = [([self._views[index] for index in group], group) for group in by_type.values()]

    def take(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy the sources into the batch, in the order of the current stream. One kernel serves many of one type."""
        for views, group in self._groups:
            torch._foreach_copy_(views, [sources[index] for index in group])


def _groups(ends: Sequence[int], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks, the first about that large together, each next one twice as large: a disk is slower than
    a device's copies, so the writer falls behind, and needs updates less and less often."""
    first, limit = 0, size_bytes
    for index, end in enumerate(ends):
        if end >= limit:
            yield first, index + 1
            size_bytes *= 2
            first, limit = index + 1, end + size_bytes
    if first < len(ends):
        yield first, len(ends)
