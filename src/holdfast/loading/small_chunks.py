"""Read very many small chunks of a file at once. Requests enter; damage, and the requests that are left, leave.

A model of 20,000 small tensors spends more time on the records of each than on its bytes. Whole chunks in host memory
that lie side by side in a file need none of these records: they are read together, digested one after the other, and
copied to their places. One thread does it: the digest of so few bytes does not release the GIL.
Whatever is not of this kind is left to `io`, and so is a file that is not there or has another size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from blake3 import blake3

from holdfast.errors import StorageError
from holdfast.loading.copy_ring import HostCarrier
from holdfast.loading.files import DAMAGE, Files
from holdfast.loading.requests import GAP_BYTES, READ_PIECE_BYTES, SMALL_READ_BYTES, WIDENED_BYTES, Request
from holdfast.runs.report import Problem
from holdfast.state.tensors import is_dense, memory_of, torch_dtype
from holdfast.storage.base import Source, alignment_of

__all__ = ["check_small", "read_small"]

# Fewer chunks than this gain nothing here.
_FEWEST = 16
_SLOT_BYTES = READ_PIECE_BYTES + WIDENED_BYTES

OnBytes = Callable[[int], None]


class _Chunk(NamedTuple):
    """A whole chunk: its range in the file, its one digest, the address of its memory (0: only to check), and the
    number of its request."""

    start: int
    end: int
    digest: str
    address: int
    number: int


def read_small(
    files: Files, requests: Sequence[Request], *, checked: bool, once: bool, on_bytes: OnBytes
) -> tuple[list[Problem], list[Request]]:
    """Fill the targets of requests for small chunks. Return the damage, and the requests that are still to be read.

    With `once`, no other process wants these bytes, so the page cache need not keep them.
    """
    return _Reading(files, requests, checked, once, on_bytes).run(_for_memory)


def check_small(files: Files, requests: Sequence[Request], *, on_bytes: OnBytes) -> tuple[list[Problem], list[Request]]:
    """Check the bytes of small chunks and change nothing. Return the damage, and the requests still to be checked."""
    return _Reading(files, requests, True, False, on_bytes).run(lambda request: 0)


def _for_memory(request: Request) -> int | None:
    """Return the address of a target in host memory that takes the bytes as they are stored; None for any other."""
    target: torch.Tensor = request.target
    if target.is_cpu and target.dtype == torch_dtype(request.leaf.dtype) and is_dense(target):
        return int(target.data_ptr())
    return None


class _Reading:
    """The small chunks of some requests, from one checkpoint."""

    def __init__(self, files: Files, requests: Sequence[Request], checked: bool, once: bool, on_bytes: OnBytes) -> None:
        self._files = files
        self._requests = requests
        self._checked = checked
        self._once = once
        self._on_bytes = on_bytes
        self._problems: list[Problem] = []
        self._done: set[int] = set()

    def run(self, address_of: Callable[[Request], int | None]) -> tuple[list[Problem], list[Request]]:
        """Read run after run. Return the damage, and the requests that were not among them."""
        carrier, slot = HostCarrier(), None
        for file, chunks in self._by_file(address_of).items():
            runs = list(_runs(chunks))
            source = self._files.sound(file) if runs else None
            if source is not None:
                slot = carrier.memory(_SLOT_BYTES) if slot is None else slot
                step = alignment_of(source) if self._once else 1
                for run in runs:
                    self._read(run, file, source, slot, step)
        if not self._done:
            return [], list(self._requests)
        return self._problems, [one for number, one in enumerate(self._requests) if number not in self._done]

    def _by_file(self, address_of: Callable[[Request], int | None]) -> dict[str, list[_Chunk]]:
        """Return the small chunks that are wanted whole, by their file."""
        found: dict[str, list[_Chunk]] = {}
        if len(self._requests) < _FEWEST:
            return found
        largest = min(SMALL_READ_BYTES, self._files.block_bytes)
        for number, request in enumerate(self._requests):
            leaf, box = request.leaf, request.box
            if len(leaf.chunks) != 1:
                continue
            chunk = leaf.chunks[0]
            if len(chunk.digests) != 1 or chunk.sizes != box.sizes or chunk.offsets != box.offsets:
                continue
            size = box.volume * leaf.item_bytes
            address = address_of(request) if size <= largest else None
            if address is not None:
                found.setdefault(chunk.file, []).append(
                    _Chunk(chunk.start, chunk.start + size, chunk.digests[0], address, number)
                )
        return found

    def _read(self, run: list[_Chunk], file: str, source: Source, slot: torch.Tensor, step: int) -> None:
        """Read a run, widened to multiples of `step`, into the slot, and copy what is sound there to its place."""
        low = run[0].start // step * step
        high = min(-(-run[-1].end // step) * step, source.size_bytes)
        memory = memory_of(slot)
        try:
            source.read_into(low, memory[: high - low])
        except DAMAGE as error:
            self._read_apart(run, file, source, slot, error)
            return
        first = slot.data_ptr() - low
        for start, end, digest, address, number in run:
            if self._checked and blake3(memory[start - low : end - low]).hexdigest() != digest:
                leaf = self._requests[number].leaf.name
                self._problems.append(Problem(file, "the bytes do not have their digest", leaf, (start, end)))
            elif address:
                ctypes.memmove(address, first + start, end - start)
        self._done.update([chunk.number for chunk in run])
        self._on_bytes(sum([chunk.end - chunk.start for chunk in run]))

    def _read_apart(
        self, run: list[_Chunk], file: str, source: Source, slot: torch.Tensor, error: StorageError
    ) -> None:
        """Read each chunk by itself after an error: only what really is not there is damaged."""
        if len(run) > 1:
            # Not widened: the bytes beside a chunk are none of its own.
            for chunk in run:
                self._read([chunk], file, source, slot, 1)
            return
        [chunk] = run
        leaf = self._requests[chunk.number].leaf.name
        self._problems.append(Problem(file, error.problem, leaf, (chunk.start, chunk.end)))
        self._done.add(chunk.number)


def _runs(chunks: list[_Chunk]) -> Iterator[list[_Chunk]]:
    """Yield the chunks of a file that lie so close together that one read is best, where there are enough of them."""
    run: list[_Chunk] = []
    for chunk in sorted(chunks):
        if run and (chunk.start - run[-1].end > GAP_BYTES or chunk.end - run[0].start > READ_PIECE_BYTES):
            if len(run) >= _FEWEST:
                yield run
            run = []
        run.append(chunk)
    if len(run) >= _FEWEST:
        yield run
