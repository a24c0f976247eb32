"""Bring bytes of a checkpoint into tensors' memory, only the ranges that are needed, checked on the way.

Requests (a leaf, the box of it that is wanted, a tensor to fill) enter; damage, if there is any, leaves. This module
turns requests into jobs; `io` does them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from holdfast.loading.copy_ring import Carrier, Rings, piece_bytes
from holdfast.loading.files import Files
from holdfast.loading.io import DeviceChecks, Job, OnBytes, run_jobs
from holdfast.loading.requests import HELD_FROM_BYTES, Overlap, Request, overlaps, pieces, row_groups
from holdfast.loading.small_chunks import check_small, read_small
from holdfast.ondisk.manifest import TensorRecord
from holdfast.ondisk.regions import Box, span_of, strides_of
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem
from holdfast.state.devices import ACCELERATORS
from holdfast.state.memory import prefer_huge_pages
from holdfast.state.tensors import is_dense, torch_dtype
from holdfast.storage.base import alignment_of

__all__ = ["check_bytes", "past_cache_test", "read"]

_HUGE_PAGES_FROM_BYTES = 512 << 10
_DEVICE_CHECKS_FROM_BYTES = 256 << 20


def read(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    *,
    checked: bool,
    readers: int = 1,
    on_bytes: OnBytes = lambda count: None,
    rings: Rings | None = None,
) -> list[Problem]:
    """Fill every target and, with `checked`, return the damage; a target that damage fell into must not be used.

    A storage that cannot be read now is a StorageError, and no damage. `readers` is the number of processes that read
    this checkpoint now: what they all want is left to the page cache, which has it from the disk once. `on_bytes` is
    called with the number of further bytes that are there, from any thread.
    """
    for request in requests:
        if request.fresh and request.target.is_cpu and request.target.nbytes >= _HUGE_PAGES_FROM_BYTES:
            prefer_huge_pages(request.target.data_ptr(), request.target.nbytes)
    later = DeviceChecks(_devices_that_check(requests) if checked else ())
    with ExitStack() as stack:
        files = Files(checkpoint, stack)
        damage, rest = read_small(files, requests, checked=checked, once=readers == 1, on_bytes=on_bytes)
        jobs = (job for request in _in_file_order(rest) for job in _fills(request, checkpoint, readers, later))
        rings = stack.enter_context(rings or Rings())
        for_devices = any(not request.target.is_cpu for request in rest)
        problems = run_jobs(files, jobs, checked, on_bytes, rings, later, for_devices=for_devices)
    return damage + problems + later.problems()


def past_cache_test(checkpoint: Checkpoint, readers: int) -> Callable[[Request], bool]:
    """Return a predicate, true for a large request all of whose files are read past the page cache. It looks at a file
    the first time that a request needs it."""
    found: dict[str, bool] = {}

    def look(file: str) -> bool:
        with ExitStack() as stack:
            source = Files(checkpoint, stack).sound(file)
            return source is not None and alignment_of(source) > 1

    def ask(request: Request) -> bool:
        if request.target.nbytes < HELD_FROM_BYTES or not _is_read_once(request, readers):
            return False
        files = {overlap.chunk.file for overlap in overlaps(request, checkpoint)}
        for file in files - found.keys():
            found[file] = look(file)
        return all(found[file] for file in files)

    return ask


def check_bytes(
    checkpoint: Checkpoint, requests: Sequence[Request], *, on_bytes: OnBytes = lambda count: None
) -> list[Problem]:
    """Return the damage that filling these targets would meet. Changes nothing; the bytes stay in the page cache."""
    with ExitStack() as stack:
        files = Files(checkpoint, stack)
        damage, rest = check_small(files, requests, on_bytes=on_bytes)
        jobs = (job for request in _in_file_order(rest) for job in _checks(request, checkpoint))
        return damage + run_jobs(files, jobs, True, on_bytes, stack.enter_context(Rings()), DeviceChecks(()))


def _in_file_order(requests: Iterable[Request]) -> list[Request]:
    """Return the requests as their bytes lie in the files: a disk reads neighbours together, and a state dict has small
    tensors between large ones."""
    return sorted(requests, key=lambda one: next(((chunk.file, chunk.start) for chunk in one.leaf.chunks), ("", 0)))


def _checks(request: Request, checkpoint: Checkpoint) -> Iterator[Job]:
    item = request.leaf.item_bytes
    for overlap in overlaps(request, checkpoint):
        first, last = overlap.span.start * item, (overlap.span.start + overlap.span.length) * item
        for start, end in pieces(overlap.region, first, last):
            yield Job(request.leaf.name, overlap.chunk.file, overlap.region, start, end)


def _fills(request: Request, checkpoint: Checkpoint, readers: int, later: DeviceChecks) -> Iterator[Job]:
    once = _is_read_once(request, readers)
    for overlap in overlaps(request, checkpoint):
        # Only here, where there is a target: a request whose bytes are only checked has none.
        target = request.target if overlap.wanted is None else _narrow(request.target, overlap.wanted)
        if not (overlap.span.dense and is_dense(target)):
            yield from _scattered(request.leaf, overlap, target, once)
        elif target.dtype != torch_dtype(request.leaf.dtype):
            yield from _converted(request.leaf, overlap, target, once)
        elif target.is_cpu:
            yield from _to_memory(request.leaf, overlap, target, once, request.fresh)
        else:
            # Only memory that nothing uses yet may hold bytes that are still to be checked.
            lands = request.fresh and later.takes(target.device)
            yield from _to_device(request.leaf, overlap, target, once, lands)


def _is_read_once(request: Request, readers: int) -> bool:
    """Return whether no other process wants these bytes, so that the page cache need not keep them."""
    return readers == 1 or request.box.sizes != request.leaf.shape


def _to_memory(leaf: TensorRecord, overlap: Overlap, target: torch.Tensor, once: bool, fresh: bool) -> Iterator[Job]:
    address = target.data_ptr()
    region, file = overlap.region, overlap.chunk.file
    first = overlap.span.start * leaf.item_bytes
    for start, end in pieces(region, first, first + overlap.span.length * leaf.item_bytes, piece_bytes(target.device)):
        yield Job(leaf.name, file, region, start, end, address + start - first, once=once, fresh=fresh)


def _converted(leaf: TensorRecord, overlap: Overlap, target: torch.Tensor, once: bool) -> Iterator[Job]:
    """Yield jobs for a target of another floating type: each piece is converted on its way out of the slot."""
    item, dtype = leaf.item_bytes, torch_dtype(leaf.dtype)
    region, file = overlap.region, overlap.chunk.file
    if region.block_bytes % item:
        yield from _scattered(leaf, overlap, target, once)
        return
    flat = target.view(-1)
    first = overlap.span.start * item
    for start, end in pieces(region, first, first + overlap.span.length * item):
        part = flat[(start - first) // item : (end - first) // item]
        place = partial(_copy_scattered, part, dtype, tuple(part.shape), (1,))
        yield Job(leaf.name, file, region, start, end, place=place, device=flat.device, once=once)


def _to_device(
    leaf: TensorRecord, overlap: Overlap, whole_target: torch.Tensor, once: bool, lands: bool
) -> Iterator[Job]:
    # Not `view(-1)`: one element may have any stride.
    flat = whole_target.as_strided((whole_target.numel(),), (1,)).view(torch.uint8)
    region, file = overlap.region, overlap.chunk.file
    first = overlap.span.start * leaf.item_bytes
    for start, end in pieces(region, first, first + flat.numel(), piece_bytes(flat.device)):
        target = flat[start - first : end - first]
        landing = target if lands and region.whole_blocks(start, end) == (start, end) else None
        place = partial(_copy, target)
        yield Job(leaf.name, file, region, start, end, place=place, device=flat.device, once=once, landing=landing)


def _devices_that_check(requests: Sequence[Request]) -> list[torch.device]:
    """Return the devices that get so many bytes that checking them there saves time."""
    sizes: dict[torch.device, int] = {}
    for request in requests:
        if request.fresh and not request.target.is_cpu:
            sizes[request.target.device] = sizes.get(request.target.device, 0) + request.target.nbytes
    return [device for device in ACCELERATORS.among(sizes) if sizes[device] >= _DEVICE_CHECKS_FROM_BYTES]


def _scattered(leaf: TensorRecord, overlap: Overlap, whole_target: torch.Tensor, once: bool) -> Iterator[Job]:
    """Read a range that is not contiguous, some rows at a time."""
    item = leaf.item_bytes
    dtype = torch_dtype(leaf.dtype)
    chunk, inner = overlap.chunk, overlap.inner
    strides = strides_of(chunk.sizes)
    for part in row_groups(inner, strides[0] * item if strides else item, overlap.region.block_bytes):
        span = span_of(part, chunk.sizes)
        target = _narrow(whole_target, part.relative_to(inner))
        start, end = span.start * item, (span.start + span.length) * item
        place = partial(_copy_scattered, target, dtype, part.sizes, strides)
        yield Job(leaf.name, chunk.file, overlap.region, start, end, place=place, device=target.device, once=once)


def _copy(target: torch.Tensor, carrier: Carrier, source: torch.Tensor) -> None:
    carrier.copy(target, source)


def _copy_scattered(
    target: torch.Tensor,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    carrier: Carrier,
    source: torch.Tensor,
) -> None:
    # In separate memory: in a slot a value may lie at a place that is no multiple of its size.
    carrier.copy(target, carrier.landed(source).view(dtype).as_strided(sizes, strides))


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, size)
    return tensor
