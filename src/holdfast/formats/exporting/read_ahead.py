"""Read tensors in a thread while others are written. A source and items enter, in order; pieces of bytes leave.

The thread fills one of two buffers, with many small tensors or a part of a large one, while the caller writes from the
other: the memory is the same whatever the tensors' sizes. Bytes are verified, where the source can be, before they
leave.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from holdfast.errors import UsageError
from holdfast.formats.source import Fill, Source
from holdfast.loading.copy_ring import HostCarrier
from holdfast.ondisk.dtypes import element_type
from holdfast.ondisk.regions import Box
from holdfast.state.tensors import memory_of, torch_dtype

if TYPE_CHECKING:
    from holdfast.formats.exporting.export import ExportItem

__all__ = ["ReadAhead", "pieces_in_place"]

_BATCH_BYTES = 32 << 20
_BUFFERS = 2
# Every tensor in a buffer begins at a multiple of this, so that any type can be seen in it.
_ALIGNMENT_BYTES = 64


class ReadAhead:
    """Items of one source, read in their order ahead of the caller, from the first one on that is asked for. Close it,
    or use it in a `with` block."""

    def __init__(self, source: Source, items: Sequence[ExportItem]) -> None:
        self._source = source
        self._batches = _batches(items)
        self._order = [item for item in items if item.size_bytes]
        self._places = {id(item): place for place, item in enumerate(self._order)}
        self._next = 0
        self._read_entries: set[int] = set()
        self._free: SimpleQueue[_Buffer | None] = SimpleQueue()
        self._full: SimpleQueue[_Filled | BaseException] = SimpleQueue()
        self._stopped = threading.Event()
        self._views: Iterator[memoryview] = iter(())
        self._thread: threading.Thread | None = None

    def pieces(self, item: ExportItem) -> Iterator[memoryview]:
        """Yield the bytes of an item. Each piece is valid until the next one is asked for.

        Items should be asked for in the order in which they were given, and each read to its end; further names of a
        tensor may be left out. Any other item is read by the calling thread, only slower.
        """
        if not item.size_bytes:
            return
        place = self._places.get(id(item), -1)
        skipped = self._order[self._next : place] if place >= self._next else []
        if place < self._next or any(id(other.entry) not in self._read_entries for other in skipped):
            yield from pieces_in_place(self._source, item)
            return
        for other in skipped:
            for _ in self._next_item(other):
                pass
        yield from self._next_item(item)

    def _next_item(self, item: ExportItem) -> Iterator[memoryview]:
        if self._thread is None:
            self._start()
        self._next += 1
        self._read_entries.add(id(item.entry))
        left = item.size_bytes
        while left:
            view = next(self._views)
            yield view
            left -= len(view)

    def _start(self) -> None:
        size_bytes = _buffer_bytes(self._order)
        for _ in range(_BUFFERS):
            self._free.put(_Buffer(size_bytes))
        self._views = self._stream()
        self._thread = threading.Thread(target=self._run, name="holdfast-read-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. What it reads at the moment is read to its end."""
        self._stopped.set()
        self._free.put(None)
        # One that Ctrl-C kept from being started reads nothing any more.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        # They refer to this object, which would keep its buffers until the next collection.
        self._views = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stream(self) -> Iterator[memoryview]:
        while True:
            filled = self._full.get()
            if isinstance(filled, BaseException):
                raise filled
            yield from filled.views
            self._free.put(filled.buffer)

    def _run(self) -> None:
        try:
            for batch in self._batches:
                buffer = self._free.get()
                if buffer is None or self._stopped.is_set():
                    return
                self._full.put(_Filled(buffer, buffer.fill(self._source, batch)))
        except BaseException as error:
            self._full.put(error)


def pieces_in_place(source: Source, item: ExportItem) -> Iterator[memoryview]:
    """Yield the bytes of one item, read by the calling thread."""
    buffer = _Buffer(_buffer_bytes([item]))
    for batch in _batches([item]):
        yield from buffer.fill(source, batch)


class _Part(NamedTuple):
    """A box of an item, and where its bytes lie in a buffer: as they are stored, and as they are wanted."""

    item: ExportItem
    box: Box
    stored_start: int
    wanted_start: int


@dataclass(frozen=True, slots=True)
class _Filled:
    buffer: _Buffer
    views: list[memoryview]


def _batches(items: Sequence[ExportItem]) -> Iterator[list[_Part]]:
    """Yield boxes of the items, in order, in groups that fit into a buffer."""
    batch: list[_Part] = []
    stored = wanted = 0
    for item in items:
        largest = max(item.entry.item_bytes, element_type(item.dtype).item_bytes)
        limit = _BATCH_BYTES // largest * item.entry.item_bytes
        for box in item.entry.boxes(limit) if item.size_bytes else ():
            stored_bytes, wanted_bytes = _sizes(item, box)
            if batch and max(stored + stored_bytes, wanted + wanted_bytes) > _BATCH_BYTES:
                yield batch
                batch, stored, wanted = [], 0, 0
            batch.append(_Part(item, box, stored, wanted))
            stored, wanted = _aligned(stored + stored_bytes), _aligned(wanted + wanted_bytes)
    if batch:
        yield batch


def _buffer_bytes(items: Sequence[ExportItem]) -> int:
    """Return how large a buffer these items need."""
    total = 0
    for item in items:
        total += _aligned(max(item.size_bytes, item.entry.size_bytes))
        if total >= _BATCH_BYTES:
            return _BATCH_BYTES
    return total


def _sizes(item: ExportItem, box: Box) -> tuple[int, int]:
    return box.volume * item.entry.item_bytes, box.volume * element_type(item.dtype).item_bytes


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _Buffer:
    """Memory for one batch as it is stored, and, where types are converted, as it is wanted."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._carrier = HostCarrier()
        self._stored: torch.Tensor | None = None
        self._wanted: torch.Tensor | None = None

    def fill(self, source: Source, batch: Sequence[_Part]) -> list[memoryview]:
        """Read a batch and return the bytes of its parts, in their order."""
        if self._stored is None:
            self._stored = self._carrier.memory(self._size_bytes)
        targets = [_tensor(self._stored, part.stored_start, part.item.entry.dtype, part.box) for part in batch]
        source.read([Fill(part.item.entry, part.box, target) for part, target in zip(batch, targets, strict=True)])
        return [self._bytes(part, target) for part, target in zip(batch, targets, strict=True)]

    def _bytes(self, part: _Part, stored: torch.Tensor) -> memoryview:
        if part.item.dtype == part.item.entry.dtype:
            return memory_of(stored)
        if self._wanted is None:
            self._wanted = self._carrier.memory(self._size_bytes)
        wanted = _tensor(self._wanted, part.wanted_start, part.item.dtype, part.box)
        _require_range(part.item, stored, wanted.dtype)
        wanted.copy_(stored)
        return memory_of(wanted)


def _tensor(memory: torch.Tensor, start: int, dtype: str, box: Box) -> torch.Tensor:
    size_bytes = box.volume * element_type(dtype).item_bytes
    return memory[start : start + size_bytes].view(torch_dtype(dtype)).view(box.sizes)


def _require_range(item: ExportItem, stored: torch.Tensor, wanted: torch.dtype) -> None:
    """Raise for a number that lies outside the other type's range, before it is converted: torch makes some of them
    infinite, others NaN or the largest number, whatever the type."""
    own, other = torch.finfo(stored.dtype), torch.finfo(wanted)
    keeps_infinity = _has_infinity(wanted) or not _has_infinity(stored.dtype)
    if other.min <= own.min and own.max <= other.max and keeps_infinity:
        return
    # The eight-bit floats cannot be compared; each of their numbers is one of bfloat16 as well.
    numbers = stored.bfloat16() if stored.itemsize == 1 else stored
    # One pass without memory of its own, which is enough for almost every tensor.
    if _lies_within(numbers, other):
        return
    held = numbers.isfinite() if keeps_infinity else ~numbers.isnan()
    if not _lies_within(numbers[held], other):
        raise UsageError(
            f"numbers of the tensor, which is {item.entry.dtype}, are outside the range of {item.dtype}",
            leaf=item.name,
            advice=f"choose a type with a wider range, such as {'float32' if item.dtype == 'bfloat16' else 'bfloat16'}",
        )


def _lies_within(numbers: torch.Tensor, limits: torch.finfo) -> bool:
    """Return whether no number is outside the limits. The answer is no where there is a NaN."""
    if not numbers.numel():
        return True
    low, high = torch.aminmax(numbers)
    return bool(limits.min <= float(low) and float(high) <= limits.max)


def _has_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(torch.inf).to(dtype).to(torch.float32).isinf())
