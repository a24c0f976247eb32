"""Copy the tensors of a file into a few slots of host memory, ahead of the thread that writes them. The layout of a
file and its tensors enter; the bytes of the file leave, slot after slot. Knows torch and accelerators, no kind of them.

One thread copies into the next slots, and another digests what is in a slot while the caller writes it. Memory of a
device is copied by a stream of its own into page-locked slots, so that copies and writes overlap there, too. A slot
begins at a page and has huge pages where the system has them: a disk takes its bytes from where they are, at full
speed.

What is digested and what is written are the same bytes, those in the slot, even if the tensor changes meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from holdfast.errors import HoldfastError
from holdfast.ondisk.files import OnPiece
from holdfast.ondisk.safetensors import SMALL_BYTES, Frame
from holdfast.saving.staging.host_copy import memmove_holding_gil, move
from holdfast.state.devices import ACCELERATORS, Accelerator, Accelerators, DeviceEvent
from holdfast.state.host_buffer import HostBuffer
from holdfast.state.memory import PAGE_BYTES
from holdfast.state.tensors import flat_bytes, is_host_memory
from holdfast.storage.threads import HeldSignals, HelperThread, join_all, start_all

__all__ = ["Ring"]

logger = logging.getLogger("holdfast")

# One slot is being filled, one digested and one written, which is mostly another, and one waits for the disk.
_SLOTS = 4
_SLOT_BYTES = 32 << 20
_FIRST_PART = 16
# A copy of fewer bytes takes less time than to let another thread run in between.
_SHORT_BYTES = 64 << 10

_device_of = attrgetter("device")


class Ring:
    """The slots of one rank, kept from save to save, and the copies into them. One file is read at a time."""

    def __init__(
        self, accelerators: Accelerators = ACCELERATORS, *, slots: int = _SLOTS, slot_bytes: int = _SLOT_BYTES
    ) -> None:
        self._accelerators = accelerators
        self._count = slots
        self._slot_bytes = slot_bytes
        self._slots: _Slots | None = None
        self._streams: dict[torch.device, Any] = {}

    def pieces(self, frame: Frame, tensors: Sequence[torch.Tensor], on_piece: OnPiece) -> Generator[memoryview]:
        """Yield the bytes of a file that holds these tensors, one for each chunk, in order. Each piece is given to
        `on_piece` as well, all of them before this ends, and is valid until the next one is asked for. The copies come
        after all that the calling thread has enqueued on the devices."""
        slots = self._slots = self._slots or _Slots(self._count, self._slot_bytes)
        streams = self._streams_after_this_thread(tensors)
        copier = _Copier(frame, tensors, streams)
        try:
            if frame.size_bytes <= self._slot_bytes:
                yield from _one_by_one(copier, slots, on_piece)
            else:
                slots.page_lock(dict.fromkeys(stream.accelerator for stream in streams.values()))
                yield from _ahead(copier, slots, on_piece)
        finally:
            # The slots are given out again, also after an error: no copy may still be on its way into one.
            copier.wait()
            if slots.is_lost:
                self._slots = None

    def close(self) -> None:
        """Release the memory."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()

    def _streams_after_this_thread(self, tensors: Sequence[torch.Tensor]) -> dict[torch.device, _Stream]:
        """Return the streams that copy from the devices of these tensors, behind the current streams of this thread."""
        found: dict[torch.device, _Stream] = {}
        for device, accelerator in self._accelerators.among(map(_device_of, tensors)).items():
            if device not in self._streams:
                self._streams[device] = accelerator.new_stream(device)
            self._streams[device].wait_stream(accelerator.current_stream(device))
            found[device] = _Stream(accelerator, self._streams[device])
        return found


class _Stream(NamedTuple):
    """The stream that copies from one device."""

    accelerator: Accelerator
    stream: Any

    def record_event(self) -> DeviceEvent:
        event: DeviceEvent = self.accelerator.record_event(self.stream)
        return event


class _Slots:
    """The memory of the slots."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        buffer = HostBuffer(count * slot_bytes)
        self.count = count
        self.slot_bytes = slot_bytes
        self.tensors = buffer.tensor.split(slot_bytes)
        self.views = [buffer.view[start : start + slot_bytes] for start in range(0, count * slot_bytes, slot_bytes)]
        # Whether a thread may work on them.
        self.is_lost = False
        self.close = buffer.close
        self._buffer = buffer
        self._asked: set[Accelerator] = set()

    def page_lock(self, accelerators: Iterable[Accelerator]) -> None:
        """Have these accelerators copy into the slots without waiting, where the system allows it."""
        for accelerator in accelerators:
            if accelerator in self._asked:
                continue
            self._asked.add(accelerator)
            try:
                self._buffer.page_lock(accelerator)
            except RuntimeError as error:
                logger.warning(
                    "%d MiB of memory for saves could not be page-locked (%s): copies from devices will be slower",
                    self._buffer.size_bytes >> 20,
                    error,
                )


class _Segment(NamedTuple):
    """Bytes of one tensor, and their place in a slot."""

    tensor: int
    first: int
    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class _Copier:
    """Copies the header and the tensors of one file into slots, front to back."""

    def __init__(self, frame: Frame, tensors: Sequence[torch.Tensor], streams: dict[torch.device, _Stream]) -> None:
        self.size_bytes = frame.size_bytes
        self._header = frame.header
        self._tensors = tensors
        self._streams = streams
        # Kept first: a tensor may be given other memory before it is copied.
        self._storages = [one.untyped_storage() for one in tensors if is_host_memory(one)]
        self._sizes = [len(frame.header), *(chunk.size_bytes for chunk in frame.chunks)]
        self._addresses = [_address_of(frame.header), *map(self._host_address, tensors)]
        _require_sizes(frame, tensors)
        self._source = 0
        self._done_bytes = 0
        self._dense: tuple[int, torch.Tensor] | None = None

    def use_devices(self) -> None:
        """Prepare the calling thread, which is one of ours: it would use memory of the first device of the machine."""
        for device, stream in self._streams.items():
            stream.accelerator.set_device(device)

    def fill(self, slot: torch.Tensor) -> list[DeviceEvent]:
        """Copy what comes next into a slot, and fill it. The bytes are there when all of these events have passed."""
        position, room, address = 0, slot.numel(), slot.data_ptr()
        others: list[_Segment] = []
        while position < room:
            size_bytes = self._sizes[self._source]
            count = min(size_bytes - self._done_bytes, room - position)
            source = self._addresses[self._source]
            if source:
                copy = memmove_holding_gil if count <= _SHORT_BYTES else move
                copy(address + position, source + self._done_bytes, count)
            elif count:
                others.append(_Segment(self._source - 1, self._done_bytes, position, count))
            position += count
            self._done_bytes += count
            if self._done_bytes == size_bytes:
                self._source, self._done_bytes = self._source + 1, 0
        with torch.no_grad():
            return self._copy(others, slot)

    def wait(self) -> None:
        """Return when no copy is under way."""
        for stream in self._streams.values():
            stream.record_event().synchronize()

    def _host_address(self, tensor: torch.Tensor) -> int:
        """Return where the bytes of a tensor can be read as they are; 0 where torch has to copy them."""
        return tensor.data_ptr() if tensor.device not in self._streams and is_host_memory(tensor) else 0

    def _copy(self, segments: Sequence[_Segment], slot: torch.Tensor) -> list[DeviceEvent]:
        """Copy bytes of tensors that are not in host memory, or not in the order of the file."""
        used: dict[torch.device, _Stream] = {}
        for device, group in groupby(segments, key=lambda segment: self._tensors[segment.tensor].device):
            stream = self._streams.get(device)
            if stream is None:
                self._copy_in_order(group, slot, non_blocking=False)
                continue
            used[device] = stream
            with stream.accelerator.use_stream(stream.stream):
                self._copy_in_order(group, slot, non_blocking=True)
        return [stream.record_event() for stream in used.values()]

    def _copy_in_order(self, segments: Iterable[_Segment], slot: torch.Tensor, *, non_blocking: bool) -> None:
        for run in _runs(segments):
            parts = [self._bytes_of(segment) for segment in run]
            # Small neighbours are joined on the device: to enqueue a copy takes longer than the copy of a few bytes.
            source = torch.cat(parts) if len(parts) > 1 else parts[0]
            slot[run[0].start : run[-1].end].copy_(source, non_blocking=non_blocking)

    def _bytes_of(self, segment: _Segment) -> torch.Tensor:
        if self._dense is None or self._dense[0] != segment.tensor:
            # The copy of a tensor that is not dense is kept for the next slot.
            self._dense = None
            self._dense = segment.tensor, flat_bytes(self._tensors[segment.tensor])
        return self._dense[1][segment.first : segment.first + segment.size_bytes]


def _require_sizes(frame: Frame, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless each tensor has the bytes that its chunk has: they are copied without another look."""
    for chunk, tensor in zip(frame.chunks, tensors, strict=True):
        if tensor.nbytes != chunk.size_bytes:
            raise HoldfastError(
                f"the tensor has {tensor.nbytes} bytes now, and the file was laid out for {chunk.size_bytes}",
                leaf=chunk.leaf,
            )


def _runs(segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    """Yield the segments that can be copied together: small neighbours. Each other one is alone."""
    run: list[_Segment] = []
    for segment in segments:
        if run and (max(segment.size_bytes, run[-1].size_bytes) >= SMALL_BYTES or run[-1].end != segment.start):
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _piece_sizes(size_bytes: int, slot_bytes: int) -> Iterator[int]:
    """Yield the sizes of the pieces of a file: small ones first if there are several, so that the disk begins early."""
    count = slot_bytes if size_bytes <= slot_bytes else max(slot_bytes // _FIRST_PART, PAGE_BYTES)
    while size_bytes:
        count = min(count, slot_bytes, size_bytes)
        yield count
        size_bytes -= count
        count *= 2


def _one_by_one(copier: _Copier, slots: _Slots, on_piece: OnPiece) -> Iterator[memoryview]:
    """Yield the bytes of the file by way of the first slot."""
    slot, view = slots.tensors[0], slots.views[0]
    for count in _piece_sizes(copier.size_bytes, slots.slot_bytes):
        for event in copier.fill(slot[:count]):
            event.synchronize()
        on_piece(view[:count])
        yield view[:count]


def _ahead(copier: _Copier, slots: _Slots, on_piece: OnPiece) -> Iterator[memoryview]:
    """Yield the bytes of the file while one thread fills the slots that come next, and another sees their bytes."""
    read_ahead = _ReadAhead(copier, slots, on_piece)
    # Until the threads have ended: where interrupts come before that, the next save must not use these slots.
    slots.is_lost = True
    try:
        if not read_ahead.start():
            yield from _one_by_one(copier, slots, on_piece)
            return
        while (piece := read_ahead.next()) is not None:
            yield piece
    finally:
        with HeldSignals() as held:
            read_ahead.stop(held)
            slots.is_lost = False


class _Filled(NamedTuple):
    """A slot with so many bytes of the file, which are there when the events have passed."""

    slot: int
    size_bytes: int
    events: Sequence[DeviceEvent]


class _ReadAhead:
    """Two threads that work on the slots: one fills those that are free, one sees what is in them, while the caller has
    it, too. A slot is free again when both are done with it."""

    def __init__(self, copier: _Copier, slots: _Slots, on_piece: OnPiece) -> None:
        self._copier = copier
        self._slots = slots
        self._on_piece = on_piece
        self._free: SimpleQueue[int | None] = SimpleQueue()
        self._to_digest: SimpleQueue[_Filled | None] = SimpleQueue()
        self._to_hand_out: SimpleQueue[_Filled | None] = SimpleQueue()
        self._handed_out: int | None = None
        self._in_use: set[int] = set()
        self._releasing = threading.Lock()
        self._error: BaseException | None = None
        self._copying = HelperThread(target=self._copy, name="holdfast-copy", daemon=True)
        self._digesting = HelperThread(target=self._digest_all, name="holdfast-digest", daemon=True)
        for slot in range(slots.count):
            self._free.put(slot)

    def start(self) -> bool:
        """Start the threads. Return whether they run: at a limit, or at the end of a process, none can be started."""
        start_all((self._digesting, self._copying))
        return self._copying.ident is not None

    def next(self) -> memoryview | None:
        """Return the next bytes of the file, and take the slot of those before back; None when all were seen."""
        if self._handed_out is not None:
            self._release_slot(self._handed_out)
            self._handed_out = None
        filled = self._to_hand_out.get()
        if filled is None:
            self._digesting.wait()
        else:
            _wait_for(filled)
        if self._error is not None:
            raise self._error
        if filled is None:
            return None
        self._handed_out = filled.slot
        return self._view(filled)

    def stop(self, held: HeldSignals) -> None:
        """End the threads, after the slots that are filled. `held`: what holds signals back meanwhile."""
        with suppress(Empty):
            while True:
                self._free.get_nowait()
        self._free.put(None)
        join_all([self._copying], held)
        # The one that copies says when there is no more to digest, if it was started.
        self._to_digest.put(None)
        join_all([self._digesting], held)

    def _copy(self) -> None:
        with self._noted():
            self._copier.use_devices()
            for count in _piece_sizes(self._copier.size_bytes, self._slots.slot_bytes):
                slot = self._free.get()
                if slot is None:
                    break
                filled = _Filled(slot, count, self._copier.fill(self._slots.tensors[slot][:count]))
                self._in_use.add(slot)
                self._to_digest.put(filled)
                self._to_hand_out.put(filled)
        self._to_digest.put(None)
        self._to_hand_out.put(None)

    def _digest_all(self) -> None:
        while (filled := self._to_digest.get()) is not None:
            with self._noted():
                if self._error is None:
                    _wait_for(filled)
                    self._on_piece(self._view(filled))
            self._release_slot(filled.slot)

    def _release_slot(self, slot: int) -> None:
        """Note that one of the two that use a slot is done with it. The second one frees it."""
        with self._releasing:
            first = slot in self._in_use
            self._in_use.discard(slot)
        if not first:
            self._free.put(slot)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an exception of a thread for the caller."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error

    def _view(self, filled: _Filled) -> memoryview:
        return self._slots.views[filled.slot][: filled.size_bytes]


def _wait_for(filled: _Filled) -> None:
    for event in filled.events:
        event.synchronize()


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
