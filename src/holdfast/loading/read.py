"""Bring bytes of a checkpoint into tensors' memory, only the ranges that are needed, checked on the way.

Requests (a leaf, the box of it that is wanted, a tensor to fill) enter; damage, if there is any, leaves. A large range
for host memory is read straight into its place. What is for a device, small, or read past the page cache goes through
slots: one read for many neighbours in the file, checked there, and only then copied on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from blake3 import blake3

from holdfast.errors import CorruptCheckpointError, KeyDamagedError, KeyMissingError, StorageError
from holdfast.loading.copy_ring import SLOT_BYTES, Carrier, Rings
from holdfast.loading.gpu_digest import DeviceDigester
from holdfast.loading.targets import Request
from holdfast.ondisk.manifest import MAX_VALUES_BYTES, ChunkRecord, TensorRecord
from holdfast.ondisk.regions import Box, Span, span_of, strides_of, whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem
from holdfast.state.memory import give_back_zeros, prefer_huge_pages
from holdfast.state.tensors import is_dense, memory_at, memory_of, torch_dtype
from holdfast.storage.base import Source, alignment_of
from holdfast.storage.blocks import Region, check, check_in, read_checked, read_unchecked
from holdfast.storage.documents import read_document

logger = logging.getLogger("holdfast")

_MAX_WORKERS = 8
_BATCH_BYTES = 16 << 20
# A piece, widened to whole pages on both sides, fits into a slot.
_PIECE_BYTES = SLOT_BYTES - (64 << 10)
# Up to this size one copy out of a slot costs less than a read of its own.
_SMALL_BYTES = 64 << 10
# So much that nobody wants is read rather than to begin another read.
_GAP_BYTES = 64 << 10
_LARGE_PAGES_FROM_BYTES = 512 << 10
_DEVICE_CHECKS_FROM_BYTES = 256 << 20
_HOST = torch.device("cpu")

OnBytes = Callable[[int], None]
# What says that a file is not what was written. Any other error of the storage says that it cannot be read now.
_DAMAGE = (KeyMissingError, KeyDamagedError)


def read(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    *,
    checked: bool,
    readers: int = 1,
    on_bytes: OnBytes = lambda count: None,
    rings: Rings | None = None,
) -> list[Problem]:
    """Fill every target. With `checked`, give each damage; a target that damage fell into must not be used. A storage
    that cannot be read now is a StorageError, and no damage.

    `readers` is how many processes read this checkpoint now: what they all want is left to the page cache, which has
    it from the disk once. `on_bytes` is told how many more bytes are there, from any thread.
    """
    for request in requests:
        if request.fresh and request.target.is_cpu and request.target.nbytes >= _LARGE_PAGES_FROM_BYTES:
            prefer_huge_pages(request.target.data_ptr(), request.target.nbytes)
    later = DeviceChecks(_devices_that_check(requests) if checked else ())
    jobs = (job for request in requests for job in _fills(request, checkpoint, readers, later))
    with rings or Rings() as rings:
        problems = _run(checkpoint, jobs, checked, on_bytes, rings, later)
    return problems + later.problems()


def check_bytes(
    checkpoint: Checkpoint, requests: Sequence[Request], *, on_bytes: OnBytes = lambda count: None
) -> list[Problem]:
    """The damage that filling these targets would meet. Changes nothing. What it reads stays in the page cache."""
    jobs = (job for request in requests for job in _checks(request, checkpoint))
    with Rings() as rings:
        return _run(checkpoint, jobs, True, on_bytes, rings, DeviceChecks(()))


def check_sizes(checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Problem]:
    """The files that filling these targets would miss, or find of another size. Reads nothing of them."""
    return check_files(
        checkpoint, {overlap.chunk.file for request in requests for overlap in _overlaps(request, checkpoint)}
    )


def check_files(checkpoint: Checkpoint, names: Set[str]) -> list[Problem]:
    """Return which of these files are missing or of another size than the manifest says."""
    with ExitStack() as stack:
        found = [_open(checkpoint, name, stack) for name in sorted(names)]
    return [problem for problem in found if isinstance(problem, Problem)]


def read_values(checkpoint: Checkpoint, name: str, *, checked: bool) -> bytearray:
    """Read a file of values whole. Another size than the manifest says, or, with `checked`, digest, is an error."""
    record = next(file for file in checkpoint.manifest.files if file.name == name)
    data = read_document(checkpoint.storage, checkpoint.key(name), min(record.size_bytes, MAX_VALUES_BYTES))
    if len(data) != record.size_bytes:
        raise CorruptCheckpointError(f"has {len(data)} bytes, the manifest says {record.size_bytes}", file=name)
    if checked and blake3(data).hexdigest() != record.digest:
        raise CorruptCheckpointError("the bytes do not have their digest", file=name)
    return data


def size_of(requests: Iterable[Request]) -> int:
    """How many bytes `on_bytes` will be told of."""
    return sum(request.box.volume * request.leaf.item_bytes for request in requests)


class _Job(NamedTuple):
    """A range of a chunk to read: to an `address` of this process, on by `place`, or, with neither, only to check.

    `once`: no other process wants these bytes, so the page cache need not keep them. `landing`: their place on a
    device that checks them itself, when they are there. `fresh`: the memory at `address` is new.
    """

    leaf: str
    file: str
    region: Region
    start: int
    end: int
    address: int = 0
    place: Callable[[Carrier, torch.Tensor], None] | None = None
    device: torch.device = _HOST
    once: bool = False
    landing: torch.Tensor | None = None
    fresh: bool = False


class DeviceChecks:
    """Bytes that are checked on the device where they have landed, all of them at once: it digests faster than they
    come, and the threads that bring them do nothing else."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-digest")
        # The first time in a process it must be compiled, which takes as long as it takes to read a gigabyte.
        self._digesters = {device: self._pool.submit(DeviceDigester.on, device) for device in devices}
        self._pool.shutdown(wait=False)
        self._landed: dict[torch.device, list[_Block]] = {device: [] for device in self._digesters}

    def takes(self, device: torch.device) -> bool:
        return device in self._digesters

    def add(self, job: _Job, landing: torch.Tensor) -> None:
        self._landed[job.device] += [
            _Block(job, *job.region.block(index), landing) for index in job.region.blocks(job.start, job.end)
        ]

    def problems(self) -> list[Problem]:
        """The damage in what has landed, every copy of which must be done."""
        return [
            problem
            for device, blocks in self._landed.items()
            for block, digest in zip(blocks, self._digests(device, blocks), strict=True)
            if digest.hex() != block.expected
            for problem in _damages(
                block.job, [(block.job.region.start + block.low, block.job.region.start + block.high)]
            )
        ]

    def _digests(self, device: torch.device, blocks: Sequence[_Block]) -> list[bytes]:
        digester = self._digesters[device].result()
        if digester is not None:
            try:
                return digester.digests([block.place for block in blocks])
            except RuntimeError as error:
                logger.warning("%s could not digest what it holds, so the processor does: %s", device, error)
        return [block.digest_on_host() for block in blocks]


class _Block(NamedTuple):
    """A block of a job that has landed on a device."""

    job: _Job
    low: int
    high: int
    landing: torch.Tensor

    @property
    def place(self) -> tuple[int, int]:
        return self.landing.data_ptr() + self.low - self.job.start, self.high - self.low

    @property
    def expected(self) -> str:
        return self.job.region.digests[self.low // self.job.region.block_bytes]

    def digest_on_host(self) -> bytes:
        # Named, because nothing else keeps the memory that is digested.
        host = self.landing[self.low - self.job.start : self.high - self.job.start].cpu()
        return blake3(memory_of(host)).digest()


def _run(
    checkpoint: Checkpoint,
    jobs: Iterable[_Job],
    checked: bool,
    on_bytes: OnBytes,
    rings: Rings,
    later: DeviceChecks,
) -> list[Problem]:
    def act(task: _Task) -> list[Problem]:
        found = _do_batch(task, checked) if isinstance(task, _Batch) else _do_extent(task, checked, rings, later)
        on_bytes(sum(job.end - job.start for job in task.jobs))
        return found

    with ExitStack() as stack:
        files = _Files(checkpoint, stack)
        found = _side_by_side(act, _tasks(jobs, files, checked))
        return files.problems + [problem for problems in found for problem in problems]


def _side_by_side(act: Callable[[_Task], list[Problem]], tasks: Iterator[_Task]) -> list[list[Problem]]:
    """Do the tasks in several threads, which take them one by one. The first error ends them all.

    Each thread makes the task that it does: one that made them for all would keep the interpreter's lock for
    milliseconds at a time, and the others, back from reading or digesting, would wait for it.
    """
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> list[list[Problem]]:
        found: list[list[Problem]] = []
        try:
            while not stop.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return found
                found.append(act(task))
        except BaseException:
            stop.set()
            raise
        return found

    with ThreadPoolExecutor(_workers(), thread_name_prefix="holdfast-read") as pool:
        workers = [pool.submit(work) for _ in range(_workers())]
        try:
            return [problems for worker in workers for problems in worker.result()]
        finally:
            stop.set()


def _workers() -> int:
    """As many as there are cores for this process: what they do most is to digest."""
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)))


class _Files:
    """The files of a checkpoint, opened when they are first wanted. Notes for each leaf what is wrong with its file."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self.problems: list[Problem] = []
        self._checkpoint = checkpoint
        self._stack = stack
        self._sources: dict[str, Source | Problem] = {}

    def source(self, job: _Job) -> Source | None:
        source = self._sources.get(job.file)
        if source is None:
            source = self._sources[job.file] = _open(self._checkpoint, job.file, self._stack)
        if isinstance(source, Problem):
            self.problems.append(Problem(source.file, source.what, job.leaf))
            return None
        return source


def _open(checkpoint: Checkpoint, name: str, stack: ExitStack) -> Source | Problem:
    try:
        source = stack.enter_context(checkpoint.storage.open(checkpoint.key(name)))
    except _DAMAGE as error:
        return Problem(name, error.problem)
    expected = next(file.size_bytes for file in checkpoint.manifest.files if file.name == name)
    if source.size_bytes != expected:
        return Problem(name, f"has {source.size_bytes} bytes, the manifest says {expected}")
    return source


# Grouping: what is read straight, and what goes through a slot


@dataclass(slots=True)
class _Batch:
    """Jobs that are done one by one, in place."""

    jobs: list[_Job] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, job: _Job, source: Source) -> None:
        self.jobs.append(job)
        self.sources.append(source)
        self.size_bytes += job.end - job.start


@dataclass(slots=True)
class _Extent:
    """A range of a file that is read into a slot at once, and the jobs that lie in it."""

    source: Source
    alignment_bytes: int
    low: int
    high: int
    jobs: list[_Job]

    def takes(self, job: _Job, source: Source, low: int, high: int) -> bool:
        """Whether the job can join: whether it goes the same way, from where this ends on, and the slot has room."""
        return (
            source is self.source
            and job.device == self.jobs[0].device
            and low >= self.low
            and low - self.high <= _GAP_BYTES
            and high - self.low <= _PIECE_BYTES
        )

    def range_to_read(self) -> tuple[int, int]:
        """Widened to what the source reads best, except beyond its end."""
        step = self.alignment_bytes
        return self.low // step * step, min(-(-self.high // step) * step, self.source.size_bytes)


_Task = _Batch | _Extent


def _tasks(jobs: Iterable[_Job], files: _Files, checked: bool) -> Iterator[_Task]:
    batch = _Batch()
    extent: _Extent | None = None
    for job in jobs:
        source = files.source(job)
        if source is None:
            continue
        alignment = alignment_of(source) if job.once else 1
        if _goes_straight(job, alignment):
            batch.add(job, source)
            if batch.size_bytes >= _BATCH_BYTES:
                yield batch
                batch = _Batch()
            continue
        low, high = _range_of(job, checked)
        if extent is not None and extent.takes(job, source, low, high):
            extent.jobs.append(job)
            extent.high = max(extent.high, high)
            continue
        if extent is not None:
            yield extent
        extent = _Extent(source, alignment, low, high, [job])
    if batch.jobs:
        yield batch
    if extent is not None:
        yield extent


def _goes_straight(job: _Job, alignment_bytes: int) -> bool:
    if job.place is not None:
        return False
    return job.address == 0 or (alignment_bytes == 1 and job.end - job.start > _SMALL_BYTES)


def _range_of(job: _Job, checked: bool) -> tuple[int, int]:
    """The bytes of the file that a job needs: whole blocks when they are checked."""
    start, end = job.region.whole_blocks(job.start, job.end) if checked else (job.start, job.end)
    return job.region.start + start, job.region.start + end


# Doing


def _do_batch(batch: _Batch, checked: bool) -> list[Problem]:
    problems = []
    for job, source in zip(batch.jobs, batch.sources, strict=True):
        try:
            damaged = _do_straight(job, source, checked)
        except _DAMAGE as error:
            problems.append(_unread(job, error))
        else:
            problems += _damages(job, damaged)
            if checked and not damaged:
                _give_back_zeros(job)
    return problems


def _give_back_zeros(job: _Job) -> None:
    """Let new memory take no more than the bytes that are really there: a file may be nothing but holes, whose digests
    are right, and its leaves larger than the machine's memory."""
    if not job.fresh or job.address == 0:
        return
    region = job.region
    start = None
    for index in region.blocks(job.start, job.end):
        low, high = region.block(index)
        whole_block = job.start <= low and high <= job.end and high - low == region.block_bytes
        if whole_block and region.digests[index] == _digest_of_zeros(region.block_bytes):
            start = low if start is None else start
            continue
        if start is not None:
            give_back_zeros(job.address + start - job.start, low - start)
            start = None
    if start is not None:
        give_back_zeros(job.address + start - job.start, min(high, job.end) - start)


@lru_cache(maxsize=8)
def _digest_of_zeros(size_bytes: int) -> str:
    return blake3(bytes(size_bytes)).hexdigest()


def _do_straight(job: _Job, source: Source, checked: bool) -> list[tuple[int, int]]:
    if job.address == 0:
        return check(source, job.region, job.start, job.end)
    target = memory_at(job.address, job.end - job.start)
    if checked:
        return read_checked(source, job.region, job.start, target)
    read_unchecked(source, job.region, job.start, target)
    return []


def _do_extent(extent: _Extent, checked: bool, rings: Rings, later: DeviceChecks) -> list[Problem]:
    low, high = extent.range_to_read()
    ring = rings.of(extent.jobs[0].device)
    with ring.slot(high - low) as slot:
        memory = memory_of(slot)
        try:
            extent.source.read_into(low, memory)
        except _DAMAGE as error:
            return _do_apart(extent, error, checked, rings, later)
        problems = []
        for job in extent.jobs:
            here = checked and job.landing is None
            damaged = check_in(memory, low, job.region, job.start, job.end) if here else []
            if damaged:
                problems += _damages(job, damaged)
                continue
            start = job.region.start + job.start - low
            _place(job, ring.carrier, slot, start)
            if here:
                _give_back_zeros(job)
            if checked and job.landing is not None:
                later.add(job, job.landing)
    return problems


def _do_apart(extent: _Extent, error: StorageError, checked: bool, rings: Rings, later: DeviceChecks) -> list[Problem]:
    """After an error only what really is not there is damaged, so each job gets a read of its own."""
    if len(extent.jobs) == 1:
        return [_unread(extent.jobs[0], error)]
    alone = (_Extent(extent.source, 1, *_range_of(job, checked), [job]) for job in extent.jobs)
    return [problem for one in alone for problem in _do_extent(one, checked, rings, later)]


def _place(job: _Job, carrier: Carrier, slot: torch.Tensor, start: int) -> None:
    """Hand on a job's bytes, which lie in the slot from `start` on and are sound."""
    size = job.end - job.start
    if job.place is not None:
        job.place(carrier, slot[start : start + size])
    else:
        ctypes.memmove(job.address, slot.data_ptr() + start, size)


def _unread(job: _Job, error: StorageError) -> Problem:
    return Problem(job.file, error.problem, job.leaf, (job.region.start + job.start, job.region.start + job.end))


def _damages(job: _Job, places: Iterable[tuple[int, int]]) -> list[Problem]:
    return [Problem(job.file, "the bytes do not have their digest", job.leaf, place) for place in places]


# From requests to jobs


@dataclass(frozen=True, slots=True)
class _Overlap:
    """What a request and a chunk share: the box in the chunk, the bytes that it spans there, and the same box in the
    request; None when it is all of the request."""

    chunk: ChunkRecord
    region: Region
    inner: Box
    span: Span
    wanted: Box | None


def _overlaps(request: Request, checkpoint: Checkpoint) -> Iterator[_Overlap]:
    item, block_bytes = request.leaf.item_bytes, checkpoint.manifest.block_bytes
    for chunk in request.leaf.chunks:
        box = chunk.box
        region = Region(chunk.start, box.volume * item, block_bytes, chunk.digests)
        if box == request.box:
            yield _Overlap(chunk, region, whole(chunk.sizes), Span(0, box.volume, True), None)
            continue
        shared = box.overlap(request.box)
        if shared is not None:
            inner = shared.relative_to(box)
            yield _Overlap(chunk, region, inner, span_of(inner, chunk.sizes), shared.relative_to(request.box))


def _checks(request: Request, checkpoint: Checkpoint) -> Iterator[_Job]:
    item = request.leaf.item_bytes
    for overlap in _overlaps(request, checkpoint):
        first, last = overlap.span.start * item, (overlap.span.start + overlap.span.length) * item
        for start, end in _pieces(overlap.region, first, last):
            yield _Job(request.leaf.name, overlap.chunk.file, overlap.region, start, end)


def _fills(request: Request, checkpoint: Checkpoint, readers: int, later: DeviceChecks) -> Iterator[_Job]:
    once = readers == 1 or request.box.sizes != request.leaf.shape
    for overlap in _overlaps(request, checkpoint):
        # Only here, where there is a target: a request whose bytes are only checked has none.
        target = request.target if overlap.wanted is None else _narrow(request.target, overlap.wanted)
        if not (overlap.span.dense and is_dense(target)):
            yield from _scattered(request.leaf, overlap, target, once)
        elif target.is_cpu:
            yield from _to_memory(request.leaf, overlap, target, once, request.fresh)
        else:
            # Only what nobody uses yet may hold bytes that are still to be checked.
            lands = request.fresh and later.takes(target.device)
            yield from _to_device(request.leaf, overlap, target, once, lands)


def _to_memory(leaf: TensorRecord, overlap: _Overlap, target: torch.Tensor, once: bool, fresh: bool) -> Iterator[_Job]:
    address = target.data_ptr()
    region, file = overlap.region, overlap.chunk.file
    first = overlap.span.start * leaf.item_bytes
    for start, end in _pieces(region, first, first + overlap.span.length * leaf.item_bytes):
        yield _Job(leaf.name, file, region, start, end, address + start - first, once=once, fresh=fresh)


def _to_device(
    leaf: TensorRecord, overlap: _Overlap, whole_target: torch.Tensor, once: bool, lands: bool
) -> Iterator[_Job]:
    flat = whole_target.view(-1).view(torch.uint8)
    region, file = overlap.region, overlap.chunk.file
    first = overlap.span.start * leaf.item_bytes
    for start, end in _pieces(region, first, first + flat.numel()):
        target = flat[start - first : end - first]
        landing = target if lands and region.whole_blocks(start, end) == (start, end) else None
        place = partial(_copy, target)
        yield _Job(leaf.name, file, region, start, end, place=place, device=flat.device, once=once, landing=landing)


def _devices_that_check(requests: Sequence[Request]) -> list[torch.device]:
    """The devices that get enough for it to pay."""
    sizes: dict[torch.device, int] = {}
    for request in requests:
        if request.fresh and request.target.is_cuda:
            sizes[request.target.device] = sizes.get(request.target.device, 0) + request.target.nbytes
    return [device for device, size in sizes.items() if size >= _DEVICE_CHECKS_FROM_BYTES]


def _scattered(leaf: TensorRecord, overlap: _Overlap, whole_target: torch.Tensor, once: bool) -> Iterator[_Job]:
    """What does not lie in one stretch goes some rows at a time."""
    item = leaf.item_bytes
    dtype = torch_dtype(leaf.dtype)
    chunk, inner = overlap.chunk, overlap.inner
    strides = strides_of(chunk.sizes)
    for part in _row_groups(inner, strides[0] * item if strides else item, overlap.region.block_bytes):
        span = span_of(part, chunk.sizes)
        target = _narrow(whole_target, part.relative_to(inner))
        start, end = span.start * item, (span.start + span.length) * item
        place = partial(_copy_scattered, target, dtype, part.sizes, strides)
        yield _Job(leaf.name, chunk.file, overlap.region, start, end, place=place, device=target.device, once=once)


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
    # In memory of its own: in a slot a value may lie at a place that is no multiple of its size.
    carrier.copy(target, carrier.landed(source).view(dtype).as_strided(sizes, strides))


def _row_groups(box: Box, row_bytes: int, block_bytes: int) -> Iterator[Box]:
    """The box in groups of rows of its first dimension that, with the whole blocks that they touch, fit into a slot.

    Only a row, or a block, that is large itself makes a larger group.
    """
    if not box.sizes:
        yield box
        return
    rows = max(max(_PIECE_BYTES - 2 * block_bytes, _PIECE_BYTES // 2) // row_bytes, 1)
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
