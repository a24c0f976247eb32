"""Bring bytes of a checkpoint into tensors' memory, only the ranges that are needed, checked on the way.

Requests (a leaf, the box of it that is wanted, a tensor to fill) enter; damage, if there is any, leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.catalog import Checkpoint
from holdfast.errors import StorageError
from holdfast.records.boxes import Box, Span, span_of, strides_of, whole
from holdfast.records.manifest import ChunkRecord, TensorRecord
from holdfast.records.report import Problem
from holdfast.records.targets import Request
from holdfast.storage.base import Source
from holdfast.storage.blocks import Region, check, read_checked, read_unchecked
from holdfast.tensors import is_host_memory, memory_of, torch_dtype

_PIECE_BYTES = 16 << 20


def read(checkpoint: Checkpoint, requests: Sequence[Request], *, checked: bool) -> list[Problem]:
    """Fill every target. With `checked`, give each damage; a target that damage fell into must not be used."""
    return _run(checkpoint, (job for request in requests for job in _fills(request, checkpoint)), checked)


def check_bytes(checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Problem]:
    """The damage that filling these targets would meet. Changes nothing."""
    return _run(checkpoint, (job for request in requests for job in _checks(request, checkpoint)), True)


def check_sizes(checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Problem]:
    """The files that filling these targets would miss, or find of another size. Reads nothing of them."""
    names = {overlap.chunk.file for request in requests for overlap in _overlaps(request, checkpoint)}
    with ExitStack() as stack:
        found = [_open(checkpoint, name, stack) for name in sorted(names)]
    return [problem for problem in found if isinstance(problem, Problem)]


@dataclass(frozen=True, slots=True)
class _Job:
    """A range of a chunk to read: into `target`, through a scratch and `place`, or, with neither, only to check."""

    leaf: str
    file: str
    region: Region
    start: int
    end: int
    target: memoryview | None = None
    place: Callable[[torch.Tensor], None] | None = None


def _run(checkpoint: Checkpoint, jobs: Iterable[_Job], checked: bool) -> list[Problem]:
    problems: list[Problem] = []
    with ExitStack() as stack:
        sources: dict[str, Source | Problem] = {}

        def batches() -> Iterator[list[tuple[_Job, Source]]]:
            batch: list[tuple[_Job, Source]] = []
            size = 0
            for job in jobs:
                source = sources.get(job.file)
                if source is None:
                    source = sources[job.file] = _open(checkpoint, job.file, stack)
                if isinstance(source, Problem):
                    problems.append(Problem(source.file, source.what, job.leaf))
                    continue
                batch.append((job, source))
                size += job.end - job.start
                if size >= _PIECE_BYTES:
                    yield batch
                    batch, size = [], 0
            if batch:
                yield batch

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="holdfast-read") as pool:
            for found in pool.map(partial(_do_batch, checked=checked), batches()):
                problems += found
    return problems


def _open(checkpoint: Checkpoint, name: str, stack: ExitStack) -> Source | Problem:
    try:
        source = stack.enter_context(checkpoint.storage.open(checkpoint.key(name)))
    except StorageError as error:
        return Problem(name, error.problem)
    expected = next(file.size_bytes for file in checkpoint.manifest.files if file.name == name)
    if source.size_bytes != expected:
        return Problem(name, f"has {source.size_bytes} bytes, the manifest says {expected}")
    return source


def _do_batch(batch: list[tuple[_Job, Source]], *, checked: bool) -> list[Problem]:
    problems = []
    for job, source in batch:
        try:
            damaged = _do(job, source, checked)
        except StorageError as error:
            place = (job.region.start + job.start, job.region.start + job.end)
            problems.append(Problem(job.file, error.problem, job.leaf, place))
            continue
        problems += [Problem(job.file, "the bytes do not have their digest", job.leaf, place) for place in damaged]
    return problems


def _do(job: _Job, source: Source, checked: bool) -> list[tuple[int, int]]:
    if job.target is None and job.place is None:
        return check(source, job.region, job.start, job.end)
    scratch = None
    target = job.target
    if target is None:
        scratch = torch.empty(job.end - job.start, dtype=torch.uint8)
        target = memory_of(scratch)
    if checked:
        damaged = read_checked(source, job.region, job.start, target)
    else:
        damaged = []
        read_unchecked(source, job.region, job.start, target)
    if scratch is not None and job.place is not None and not damaged:
        job.place(scratch)
    return damaged


@dataclass(frozen=True, slots=True)
class _Overlap:
    """What a request and a chunk share: the box in the chunk, the bytes that it spans there, and its tensor."""

    chunk: ChunkRecord
    region: Region
    inner: Box
    span: Span
    target: torch.Tensor


def _overlaps(request: Request, checkpoint: Checkpoint) -> Iterator[_Overlap]:
    item, block_bytes = request.leaf.item_bytes, checkpoint.manifest.block_bytes
    for chunk in request.leaf.chunks:
        box = chunk.box
        region = Region(chunk.start, box.volume * item, block_bytes, chunk.digests)
        if box == request.box:
            yield _Overlap(chunk, region, whole(chunk.sizes), Span(0, box.volume, True), request.target)
            continue
        shared = box.overlap(request.box)
        if shared is not None:
            inner = shared.relative_to(box)
            target = _narrow(request.target, shared.relative_to(request.box))
            yield _Overlap(chunk, region, inner, span_of(inner, chunk.sizes), target)


def _checks(request: Request, checkpoint: Checkpoint) -> Iterator[_Job]:
    item = request.leaf.item_bytes
    for overlap in _overlaps(request, checkpoint):
        first, last = overlap.span.start * item, (overlap.span.start + overlap.span.length) * item
        for start, end in _pieces(overlap.region, first, last):
            yield _Job(request.leaf.name, overlap.chunk.file, overlap.region, start, end)


def _fills(request: Request, checkpoint: Checkpoint) -> Iterator[_Job]:
    item = request.leaf.item_bytes
    for overlap in _overlaps(request, checkpoint):
        if overlap.span.dense and is_host_memory(overlap.target):
            memory = memory_of(overlap.target)
            first = overlap.span.start * item
            for start, end in _pieces(overlap.region, first, first + len(memory)):
                part = memory[start - first : end - first]
                yield _Job(request.leaf.name, overlap.chunk.file, overlap.region, start, end, target=part)
        else:
            yield from _scattered(request.leaf, overlap)


def _scattered(leaf: TensorRecord, overlap: _Overlap) -> Iterator[_Job]:
    """What does not lie in one stretch, or not in host memory, goes through a scratch, some rows at a time."""
    item = leaf.item_bytes
    dtype = torch_dtype(leaf.dtype)
    chunk, inner = overlap.chunk, overlap.inner
    strides = strides_of(chunk.sizes)
    for part in _row_groups(inner, strides, item):
        span = span_of(part, chunk.sizes)
        rows = Box(tuple(a - b for a, b in zip(part.offsets, inner.offsets, strict=True)), part.sizes)

        place = partial(_place, _narrow(overlap.target, rows), dtype, part.sizes, strides)
        start = span.start * item
        yield _Job(leaf.name, chunk.file, overlap.region, start, start + span.length * item, place=place)


def _place(
    target: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], scratch: torch.Tensor
) -> None:
    target.copy_(scratch.view(dtype).as_strided(sizes, strides))


def _row_groups(box: Box, strides: tuple[int, ...], item_bytes: int) -> Iterator[Box]:
    """The box in groups of rows of its first dimension, none of which spans much more than a piece."""
    if not box.sizes:
        yield box
        return
    rows = max(_PIECE_BYTES // (strides[0] * item_bytes), 1)
    for row in range(0, box.sizes[0], rows):
        size = min(rows, box.sizes[0] - row)
        yield Box((box.offsets[0] + row, *box.offsets[1:]), (size, *box.sizes[1:]))


def _pieces(region: Region, start: int, end: int) -> Iterator[tuple[int, int]]:
    """A range in pieces that end on block boundaries, so that no block is read twice."""
    step = max(_PIECE_BYTES // region.block_bytes, 1) * region.block_bytes
    while start < end:
        stop = min((start // step + 1) * step, end)
        yield start, stop
        start = stop


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, size)
    return tensor
