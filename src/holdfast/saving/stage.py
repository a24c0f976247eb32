"""Copy a rank's part of a save into the arena, where it lies as its files will. Knows torch, devices and their streams.

Host memory is copied in the call. Device memory is copied by a stream of its own, into page-locked memory, while the
training goes on; nothing torn can come of it, because
- what an optimizer of the state owns is changed by its `step` alone, which waits, on the device, for the copy;
- everything else is cloned, or copied, in the order of the training's own stream, before anything can change it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from holdfast.errors import HoldfastError
from holdfast.ondisk.files import PlainFile
from holdfast.ondisk.safetensors import SMALL_BYTES
from holdfast.saving.files import FileLayout
from holdfast.saving.staging.arena import PAGE_BYTES, Arena
from holdfast.saving.staging.budget import own_processors
from holdfast.saving.staging.host_copy import Move, move_all
from holdfast.saving.writer import messages as images
from holdfast.saving.writer.messages import Image, PlainImage
from holdfast.state.tensors import any_sharded, is_host_memory, is_sharded, plain_parts, torch_dtype

logger = logging.getLogger("holdfast")

Place = tuple[int, int]
Mode = Literal["sync", "async", "async_pinned", "async_device"]
ChosenMode = Literal["auto", "sync", "async", "async_pinned", "async_device"]

_BYTE = torch.uint8
_QUEUE_COPIES = 800
_FIRST_GROUP_BYTES = 256 << 20
_SLACK_BYTES = 1 << 20
_PORTABLE = 1
# What a clone on the device leaves free: an allocator needs room to move, and other libraries take some, too.
_DEVICE_RESERVE_BYTES = 1 << 30


def arena_bytes(files: Iterable[FileLayout]) -> int:
    """The room that the tensor files of a rank take in an arena."""
    return sum(_aligned(file.frame.size_bytes) for file in files)


class Staging:
    """One save on its way into the arena."""

    def __init__(self, arena: Arena, end: int) -> None:
        self._arena = arena
        self._end = end
        self._sending: Callable[[], list[tuple[Any, int]]] | None = None
        self._groups: list[tuple[Any, int]] = []
        self._sent = threading.Event()
        self._sent.set()

    def send(self, sending: Callable[[], list[tuple[Any, int]]], count: int) -> None:
        """Have so many copies enqueued. A device's queue takes about a thousand of them, and whoever enqueues more
        waits: that shall be whoever finishes, and not the training. (Fewer are enqueued at once: two threads that take
        turns with the interpreter cost the training more than it takes.) `sending` gives an event for each group of
        copies, and how far the arena is filled when that has come; it holds what it copies from."""
        self._sending = sending
        if count <= _QUEUE_COPIES:
            self._groups = sending()
        else:
            self._sent.clear()

    def wait_until_sent(self) -> None:
        self._sent.wait()

    def cancel(self) -> None:
        """Let nobody wait for copies that have not been sent: they will not be."""
        self._sending = None
        self._sent.set()

    def finish(self) -> None:
        """Return when the arena holds everything. The writer follows meanwhile."""
        try:
            if not self._sent.is_set() and self._sending is not None:
                self._groups = self._sending()
        finally:
            self._sent.set()
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


@dataclass(frozen=True, slots=True)
class _Whereabouts:
    """The device of each source and, by their indices: those in host memory, runs that are copied as one, the rest."""

    devices: list[torch.device]
    used: list[torch.device]
    here: list[int]
    runs: list[tuple[int, int]]
    singles: list[int]


class Stager:
    """The arena of one rank and the ways into it."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._registered = False
        self._files: Sequence[FileLayout] = ()
        self._images: tuple[Image, ...] = ()
        self._chunks: list[_Chunk] = []
        self._views: list[torch.Tensor] = []
        self._order: list[int] = []
        self._special: list[int] = []
        self._tensor_bytes = 0
        self._small: list[int] = []
        self._large: list[int] = []
        self._trays: dict[tuple[int, int], _Tray] = {}
        self._whereabouts: _Whereabouts | None = None
        self._streams: dict[torch.device, Any] = {}
        self._staging: Staging | None = None
        self._reading: list[torch.device] = []
        self._said_no_room = False

    @property
    def capacity_bytes(self) -> int:
        return self._arena.size_bytes if self._arena is not None else 0

    def arrange(self, files: Sequence[FileLayout], plain: Sequence[PlainFile]) -> tuple[Arena, tuple[Image, ...]]:
        """The arena with a place for these files; grown, or laid out anew, only when it must be."""
        plain_bytes = sum(_aligned(file.size_bytes) for file in plain)
        if files is not self._files:
            self._images = tuple(_images(files))
            self._tensor_bytes = arena_bytes(files)
            self._forget_places()
        needed = self._tensor_bytes + plain_bytes
        if self._arena is None or self._arena.size_bytes < needed:
            self.close()
            # A little more than is needed: the values that are no tensors grow now and then.
            self._arena = Arena.make(_aligned(needed + plain_bytes // 4 + _SLACK_BYTES))
        if not self._views:
            self._lay_out(files)
        self._files = files
        return self._arena, self._images

    def stage_plain(self, plain: Sequence[PlainFile]) -> tuple[PlainImage, ...]:
        """Copy the files that are no tensor files."""
        arena = self._require_arena()
        images, position = [], self._tensor_bytes
        for file in plain:
            end = position
            for piece in file.pieces():
                arena.memory[end : end + len(piece)] = piece
                end += len(piece)
            images.append(PlainImage(file.name, position, end - position))
            position = _aligned(end)
        return tuple(images)

    def stage(self, memory: Sequence[torch.Tensor], mode: Mode, optimizers: Sequence[torch.optim.Optimizer]) -> Staging:
        """Copy what is in host memory, and send the copies of devices on their way. The optimizers wait for those of
        what is theirs before they change it."""
        arena = self._require_arena()
        sources = [memory[part] for part in self._order]
        for index in self._special:
            sources[index] = _copyable(sources[index])
        staging = Staging(arena, self._tensor_bytes)
        with torch.no_grad():
            if is_on_device(sources):
                self._register(arena)
                self._send_copies(sources, mode, optimizers, staging)
            else:
                self._copy(sources, arena)
        return staging

    def before_update(self) -> None:
        """Make the current stream of every device wait for the copies that still read. The CPU goes on at once."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.wait_until_sent()
            for device in self._reading:
                torch.cuda.current_stream(device).wait_stream(self._stream(device))

    def cancel(self) -> None:
        """Give up what is being staged: the save has failed."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.cancel()

    def close(self) -> None:
        """Give the memory back."""
        self._forget_places()
        self._staging = None
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(arena.address)
            self._registered = False
        arena.close()

    def _require_arena(self) -> Arena:
        if self._arena is None:
            raise HoldfastError("there is no arena yet")
        return self._arena

    def _forget_places(self) -> None:
        self._views, self._chunks, self._order, self._special = [], [], [], []
        self._small, self._large, self._trays, self._whereabouts = [], [], {}, None

    def _lay_out(self, files: Sequence[FileLayout]) -> None:
        """The headers in their places, and a tensor over the place of each chunk that is not empty."""
        arena = self._require_arena()
        self._forget_places()
        for file, image in zip(files, self._images, strict=True):
            arena.memory[image.start : image.start + image.header_bytes] = file.frame.header
            for part, framed, place in zip(file.parts, file.frame.chunks, image.chunks, strict=True):
                if place.size_bytes:
                    start = image.start + place.start
                    chunk = _Chunk(start, start + place.size_bytes, torch_dtype(framed.kind.name), framed.box.sizes)
                    if chunk.dtype.is_complex or not _copies(chunk.dtype):
                        self._special.append(len(self._order))
                    (self._small if place.size_bytes < SMALL_BYTES else self._large).append(len(self._order))
                    self._order.append(part)
                    self._chunks.append(chunk)
                    self._views.append(chunk.on(torch.frombuffer(arena.memory[chunk.start : chunk.end], dtype=_BYTE)))

    def _copy(self, sources: list[torch.Tensor], arena: Arena) -> None:
        """Small tensors in one call of torch, large ones as bytes, by several threads."""
        moves: list[Move] = []
        others = self._small.copy()
        for index in self._large:
            source, chunk = sources[index], self._chunks[index]
            if is_host_memory(source):
                moves.append(Move(arena.address + chunk.start, source.data_ptr(), chunk.end - chunk.start))
            else:
                others.append(index)
        _copy_all([self._views[index] for index in others], [sources[index] for index in others])

        def note(address: int) -> None:
            arena.staged = address - arena.address

        move_all(moves, threads=_copying_threads(), on_progress=note)
        arena.staged = self._tensor_bytes

    # Devices

    def _send_copies(
        self,
        sources: list[torch.Tensor],
        mode: Mode,
        optimizers: Sequence[torch.optim.Optimizer],
        staging: Staging,
    ) -> None:
        """In the order of the training's stream: small chunks are gathered, and what may change is cloned. The copies
        to the arena then are made by streams of our own."""
        where = self._where(sources)
        gathered, singles = self._gather(sources, where.runs), where.singles
        cloned = mode == "async_device" and self._clone(sources, singles)
        if not cloned:
            owned = owned_places(optimizers)
            loose = [index for index in singles if (sources[index].data_ptr(), sources[index].nbytes) not in owned]
            if not self._clone(sources, loose):
                # No room for clones: the training's own stream makes these copies, and the training waits for them.
                _copy_now([self._views[index] for index in loose], [sources[index] for index in loose])
                singles = _without(singles, loose)
        copies = [_Copy(self._views[index], sources[index], self._chunks[index].end) for index in singles]
        copies = sorted([*gathered, *copies], key=lambda copy: copy.end)
        _copy_all([self._views[index] for index in where.here], [sources[index] for index in where.here])
        ready = {device: _event(torch.cuda.current_stream(device)) for device in where.used}
        staging.send(lambda: self._send(copies, ready), len(copies))
        self._staging, self._reading = (None, []) if cloned else (staging, list(ready))

    def _send(self, copies: list[_Copy], ready: dict[torch.device, Any]) -> list[tuple[Any, int]]:
        """Enqueue the copies, with an event after each group of them."""
        for device, event in ready.items():
            self._stream(device).wait_event(event)
        # What the training's own stream copied, or gathered, is there when it has come to this place.
        groups: list[tuple[Any, int]] = [(event, 0) for event in ready.values()]
        for first, last in _groups([copy.end for copy in copies], _FIRST_GROUP_BYTES):
            for device in ready:
                stream = self._stream(device)
                mine = [copy for copy in copies[first:last] if copy.source.device == device]
                with torch.cuda.stream(stream), torch.no_grad():
                    _copy_now([copy.target for copy in mine], [copy.source for copy in mine])
                # Only the last device's event says how far the arena is: all of them have passed this place then.
                groups.append((_event(stream), copies[last - 1].end if device == list(ready)[-1] else 0))
        return groups

    def _where(self, sources: list[torch.Tensor]) -> _Whereabouts:
        """Where the sources lie, and what follows from it; found anew when one of them has moved."""
        devices = [source.device for source in sources]
        if self._whereabouts is None or devices != self._whereabouts.devices:
            runs = list(self._runs(sources))
            self._whereabouts = _Whereabouts(
                devices,
                used=[device for device in dict.fromkeys(devices) if device.type == "cuda"],
                here=[index for index, source in enumerate(sources) if not source.is_cuda],
                runs=[(first, last) for first, last in runs if last - first > 1],
                singles=[first for first, last in runs if last - first == 1 and sources[first].is_cuda],
            )
        return self._whereabouts

    def _gather(self, sources: list[torch.Tensor], runs: Sequence[tuple[int, int]]) -> list[_Copy]:
        """Copy small neighbours on a device together, so that each run of them is one copy to the arena. A device's
        queue is short, and to enqueue a copy costs more than its few bytes do."""
        copies: list[_Copy] = []
        for first, last in runs:
            tray = self._trays.get((first, last))
            if tray is None or tray.device != sources[first].device:
                tray = _Tray(self._require_arena(), self._chunks[first:last], sources[first].device)
                self._trays[first, last] = tray
            tray.take(sources[first:last])
            copies.append(_Copy(tray.target, tray.memory, self._chunks[last - 1].end))
        return copies

    def _runs(self, sources: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
        """Ranges of chunks that can be copied as one: small, on one device, next to each other."""
        first = 0
        for index in range(1, len(sources) + 1):
            if index == len(sources) or not self._belongs(index, sources):
                yield first, index
                first = index

    def _belongs(self, index: int, sources: list[torch.Tensor]) -> bool:
        one, other = self._chunks[index - 1], self._chunks[index]
        small = max(one.end - one.start, other.end - other.start) < SMALL_BYTES
        before, source = sources[index - 1], sources[index]
        return small and one.end == other.start and source.is_cuda and before.is_cuda and source.device == before.device

    def _clone(self, sources: list[torch.Tensor], indices: Sequence[int]) -> bool:
        """Put clones in the place of some sources, in the order of the training's stream, where there is room."""
        needed: dict[torch.device, int] = {}
        for index in indices:
            device = sources[index].device
            needed[device] = needed.get(device, 0) + sources[index].nbytes
        if any(room_for_clone(device) < count for device, count in needed.items()):
            if not self._said_no_room:
                self._said_no_room = True
                logger.info("no room for a clone on the device: the copy goes straight to host memory")
            return False
        clones = [torch.empty_like(sources[index]) for index in indices]
        _copy_all(clones, [sources[index] for index in indices])
        for index, clone in zip(indices, clones, strict=True):
            sources[index] = clone
        return True

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _register(self, arena: Arena) -> None:
        if self._registered:
            return
        code = torch.cuda.cudart().cudaHostRegister(arena.address, arena.size_bytes, _PORTABLE)
        if int(code) == 0:
            self._registered = True
        else:
            logger.warning("the arena could not be page-locked (CUDA error %d): copies will be slower", int(code))


def _copying_threads() -> int:
    """This rank's share of the cores, whatever torch computes with: the training stands still meanwhile."""
    return max(own_processors(), int(torch.get_num_threads()))


def _event(stream: Any) -> Any:
    # blocking: a thread that waits sleeps, and leaves its processor to the training.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def room_for_clone(device: torch.device) -> int:
    """The bytes that a clone may take on a device: what is free even when the training is at its peak."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + cached - _DEVICE_RESERVE_BYTES)


def is_on_device(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of them is in a device's memory. There may be very many, so no generator asks them."""
    return any(map(attrgetter("is_cuda"), tensors))


def changes_in_step_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing but `step`, which runs the hooks that wait for copies, can change what the optimizer owns.

    One that never called `Optimizer.__init__` runs no hooks. One with public methods of its own may change its tensors
    in them, as the first step of SAM and `train()` and `eval()` of schedule-free optimizers do. What these own is
    cloned, or copied in the order of the training's stream.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not getattr(type(optimizer).step, "hooked", False):
        return False
    own = [kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
    return names <= set(dir(torch.optim.Optimizer))


def owned_places(optimizers: Iterable[torch.optim.Optimizer]) -> set[Place]:
    """Where the tensors lie that only an optimizer's step changes: its parameters and its state."""
    tensors: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = [part for tensor in tensors for _, part in plain_parts(tensor)]
    if any_sharded(tensors):
        tensors = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]
    # A tensor's memory. Its beginning alone would take a longer tensor over the same memory for this one.
    return {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors}


def _images(files: Sequence[FileLayout]) -> Iterator[Image]:
    start = 0
    for file in files:
        frame = file.frame
        places = tuple(
            images.Place(chunk.leaf, begin, chunk.size_bytes, chunk.box.offsets, chunk.box.sizes)
            for chunk, begin in zip(frame.chunks, frame.starts, strict=True)
        )
        yield Image(file.name, start, frame.size_bytes, len(frame.header), places)
        start += _aligned(frame.size_bytes)


_KNOWN_TO_COPY: dict[torch.dtype, bool] = {}


def _copies(dtype: torch.dtype) -> bool:
    """Whether torch can copy tensors of this type; some of the newest are only names for bytes so far."""
    if dtype not in _KNOWN_TO_COPY:
        try:
            torch.empty(2, dtype=dtype).copy_(torch.empty(2, dtype=dtype))
            _KNOWN_TO_COPY[dtype] = True
        except (RuntimeError, NotImplementedError):
            _KNOWN_TO_COPY[dtype] = False
    return _KNOWN_TO_COPY[dtype]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each into each; many small ones in one call, which a loop would spend most of its time between."""
    if not targets:
        return
    torch._foreach_copy_(list(targets), list(sources))


def _without(indices: Sequence[int], left_out: Sequence[int]) -> list[int]:
    """Return the indices that are not left out, in one pass over each: there may be thousands of either."""
    gone = set(left_out)
    return [index for index in indices if index not in gone]


def _copy_now(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy in the order of the current stream, without waiting for it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


class _Chunk(NamedTuple):
    """A chunk's place in the arena, its type and its sizes."""

    start: int
    end: int
    dtype: torch.dtype
    sizes: tuple[int, ...]

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """These bytes as what `_copyable` makes of a tensor of this type."""
        if not _copies(self.dtype):
            return memory
        if self.dtype.is_complex:
            return memory.view(self.dtype.to_real()).view(*self.sizes, 2)
        return memory.view(self.dtype).view(self.sizes)


class _Tray:
    """Memory on a device in which small chunks lie next to each other, as they will in the arena."""

    def __init__(self, arena: Arena, chunks: Sequence[_Chunk], device: torch.device) -> None:
        start, end = chunks[0].start, chunks[-1].end
        self.device = device
        self.memory = torch.empty(end - start, dtype=_BYTE, device=device)
        self.target = torch.frombuffer(arena.memory[start:end], dtype=_BYTE)
        self._views = [chunk.on(self.memory[chunk.start - start : chunk.end - start]) for chunk in chunks]

        by_type: dict[torch.dtype, list[int]] = {}
        for index, view in enumerate(self._views):
            by_type.setdefault(view.dtype, []).append(index)
        self._groups = [([self._views[index] for index in group], group) for group in by_type.values()]

    def take(self, sources: Sequence[torch.Tensor]) -> None:
        """Gather them, in the order of the current stream. One kernel serves many tensors of one type."""
        for views, group in self._groups:
            torch._foreach_copy_(views, [sources[index] for index in group])


def _copyable(source: torch.Tensor) -> torch.Tensor:
    if source.is_complex():
        # A file aligns complex numbers to their halves, and torch's own copy ends the process over such an address.
        return torch.view_as_real(source.resolve_conj()).resolve_neg()
    return source if _copies(source.dtype) else source.contiguous().view(torch.uint8).reshape(-1)


def _groups(ends: Sequence[int], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks, the first about that large together, each next one twice as large: a disk is slower than a
    device's copies, so its writer falls behind, and needs to hear less and less often that there is more."""
    first, limit = 0, size_bytes
    for index, end in enumerate(ends):
        if end >= limit:
            yield first, index + 1
            size_bytes *= 2
            first, limit = index + 1, end + size_bytes
    if first < len(ends):
        yield first, len(ends)


def _aligned(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES
