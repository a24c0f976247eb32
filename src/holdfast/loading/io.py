"""Read byte ranges of files into memory, in several threads, checked on the way. Jobs enter; damage leaves.

A large range for host memory is read straight into its place. What is for a device, small, or read past the page cache
goes through slots: one read for many neighbours in the file, checked there, and only then copied on. Knows nothing of
leaves and boxes: `read` makes the jobs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from blake3 import blake3

from holdfast.errors import HoldfastError, StorageError
from holdfast.loading.copy_ring import Carrier, Rings, Slots, piece_bytes
from holdfast.loading.files import DAMAGE, Files
from holdfast.loading.gpu_digest import DeviceDigester
from holdfast.loading.requests import GAP_BYTES, READ_SLOTS, SMALL_READ_BYTES, WIDENED_BYTES, rows_bytes
from holdfast.loading.task_threads import in_two_stages, side_by_side
from holdfast.runs.report import Problem
from holdfast.state.budget import free_for_staging, own_processors, ranks_here
from holdfast.state.memory import give_back_zeros
from holdfast.state.tensors import memory_at, memory_of
from holdfast.storage.base import Source, alignment_of
from holdfast.storage.blocks import Region, check, check_in, read_checked, read_unchecked

logger = logging.getLogger("holdfast")

__all__ = ["HOST", "DeviceChecks", "Job", "OnBytes", "run_jobs"]

_MAX_THREADS = 8
# Threads that read past the page cache for host memory, at least.
_FEWEST_READERS = 4
_FEWEST_SLOTS = 2
_BATCH_BYTES = 16 << 20
HOST = torch.device("cpu")

OnBytes = Callable[[int], None]


class Job(NamedTuple):
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
    device: torch.device = HOST
    once: bool = False
    landing: torch.Tensor | None = None
    fresh: bool = False


def run_jobs(
    files: Files,
    jobs: Iterable[Job],
    checked: bool,
    on_bytes: OnBytes,
    rings: Rings,
    later: DeviceChecks,
    *,
    for_devices: bool = False,
) -> list[Problem]:
    """Do the jobs and return the damage. `on_bytes` is called with the bytes of each task that is done, from any
    thread. What lands on a device that checks it is noted in `later`. No thread outlives the call.
    `for_devices`: whether any of them is for memory that is not the host's."""
    tasks = _tasks(jobs, files, checked)
    first = next(tasks, None)
    if first is None:
        return files.problems
    tasks = chain([first], tasks)
    doing = _Doing(checked, on_bytes, rings, later)
    if isinstance(first, _Batch) or not first.waits_for_disk:
        found = side_by_side(doing.do, tasks, _digest_threads())
    elif for_devices:
        # A disk is at its fastest when it is asked for several pieces at once, and most digests are made on the device.
        found = side_by_side(doing.do, tasks, _MAX_THREADS)
    else:
        found = doing.do_in_two_stages(tasks, rows_bytes(files.block_bytes) + WIDENED_BYTES)
    return files.problems + [problem for problems in found for problem in problems]


class _Doing:
    """How the tasks of one call are done."""

    def __init__(self, checked: bool, on_bytes: OnBytes, rings: Rings, later: DeviceChecks) -> None:
        self._checked = checked
        self._on_bytes = on_bytes
        self._rings = rings
        self._later = later

    def do(self, task: _Task) -> list[Problem]:
        if isinstance(task, _Batch):
            found = _do_batch(task, self._checked)
        else:
            found = _do_extent(task, self._checked, self._rings, self._later)
        return self._report(task, found)

    def do_in_two_stages(self, tasks: Iterator[_Task], slot_bytes: int) -> list[list[Problem]]:
        """Read past the page cache in some threads, and check and copy in others: a disk that waits for a digest is
        idle (docs/decisions/0011)."""
        slots = _slots_of(slot_bytes)

        def fetch(task: _Task) -> _Fetched | None:
            # Also for what is not read into it, so that not all tasks wait in memory.
            slot = slots.take()
            if slot is None:
                return None
            if isinstance(task, _Batch) or not task.is_for(slots):
                return _Fetched(task, slot)
            return _Fetched(task, slot, is_read=True, error=_read_extent(task, slot))

        def handle(one: _Fetched) -> list[Problem]:
            found = self._check_and_place(one)
            slots.give_back(one.slot)
            return found

        readers = max(_FEWEST_READERS, _digest_threads())
        return in_two_stages(fetch, handle, tasks, (readers, _digest_threads()), on_stop=slots.stop)

    def _check_and_place(self, one: _Fetched) -> list[Problem]:
        if isinstance(one.task, _Batch) or not one.is_read:
            return self.do(one.task)
        if one.error is None:
            carrier = self._rings.of(HOST).carrier
            found = _place_all(one.task, one.slot, carrier, self._checked, self._later)
        else:
            found = _do_apart(one.task, one.error, self._checked, self._rings, self._later)
        return self._report(one.task, found)

    def _report(self, task: _Task, found: list[Problem]) -> list[Problem]:
        self._on_bytes(sum(job.end - job.start for job in task.jobs))
        return found


def _slots_of(slot_bytes: int) -> Slots:
    """Return the slots for reads past the page cache: fewer where memory is short."""
    room_bytes = free_for_staging() // ranks_here() // 2
    count = max(min(READ_SLOTS, room_bytes // slot_bytes), _FEWEST_SLOTS)
    while True:
        try:
            return Slots(count, slot_bytes)
        except HoldfastError:
            if count == _FEWEST_SLOTS:
                raise
        count = max(count // 2, _FEWEST_SLOTS)


def _digest_threads() -> int:
    """Return the number of threads that digest: as many as this rank has processors, up to a limit."""
    return min(_MAX_THREADS, own_processors())


@dataclass(slots=True)
class _Batch:
    """Jobs that are done one by one, in place."""

    jobs: list[Job] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, job: Job, source: Source) -> None:
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
    jobs: list[Job]

    @property
    def waits_for_disk(self) -> bool:
        """Return whether this is read past the page cache."""
        return self.alignment_bytes > 1

    def takes(self, job: Job, source: Source, low: int, high: int) -> bool:
        """Return whether a job can join: it has the same target device, follows where this ends, and fits into the
        slot."""
        return (
            source is self.source
            and job.device == self.jobs[0].device
            and low >= self.low
            and low - self.high <= GAP_BYTES
            and high - self.low <= piece_bytes(job.device)
        )

    def range_to_read(self) -> tuple[int, int]:
        """Return the range, widened to what the source reads best, except beyond its end."""
        step = self.alignment_bytes
        return self.low // step * step, min(-(-self.high // step) * step, self.source.size_bytes)

    def is_for(self, slots: Slots) -> bool:
        """Return whether this is read past the page cache for host memory, and fits into one of the slots."""
        low, high = self.range_to_read()
        return self.waits_for_disk and self.jobs[0].device == HOST and high - low <= slots.size_bytes


_Task = _Batch | _Extent


def _tasks(jobs: Iterable[Job], files: Files, checked: bool) -> Iterator[_Task]:
    """Group the jobs: what is read straight into its place, and what goes through a slot together."""
    batch = _Batch()
    extent: _Extent | None = None
    for job in jobs:
        source = files.source(job.file, job.leaf)
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


def _goes_straight(job: Job, alignment_bytes: int) -> bool:
    if job.place is not None:
        return False
    return job.address == 0 or (alignment_bytes == 1 and job.end - job.start > SMALL_READ_BYTES)


def _range_of(job: Job, checked: bool) -> tuple[int, int]:
    """Return the bytes of the file that a job needs: whole blocks when they are checked."""
    start, end = job.region.whole_blocks(job.start, job.end) if checked else (job.start, job.end)
    return job.region.start + start, job.region.start + end


def _do_batch(batch: _Batch, checked: bool) -> list[Problem]:
    problems = []
    for job, source in zip(batch.jobs, batch.sources, strict=True):
        try:
            damaged = _do_straight(job, source, checked)
        except DAMAGE as error:
            problems.append(_unread(job, error))
        else:
            problems += _damages(job, damaged)
            if checked and not damaged:
                _give_back_zeros(job)
    return problems


def _give_back_zeros(job: Job) -> None:
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


def _do_straight(job: Job, source: Source, checked: bool) -> list[tuple[int, int]]:
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
        unread = _read_extent(extent, slot)
        if unread is None:
            return _place_all(extent, slot, ring.carrier, checked, later)
    return _do_apart(extent, unread, checked, rings, later)


class _Fetched(NamedTuple):
    """A task, and its slot. `is_read`: its bytes are there, but for an error; otherwise nothing of it is done yet."""

    task: _Task
    slot: torch.Tensor
    is_read: bool = False
    error: StorageError | None = None


def _read_extent(extent: _Extent, slot: torch.Tensor) -> StorageError | None:
    low, high = extent.range_to_read()
    try:
        extent.source.read_into(low, memory_of(slot)[: high - low])
    except DAMAGE as error:
        return error
    return None


def _place_all(
    extent: _Extent, slot: torch.Tensor, carrier: Carrier, checked: bool, later: DeviceChecks
) -> list[Problem]:
    """Check what was read into a slot, and hand the sound jobs on."""
    low, _ = extent.range_to_read()
    memory = memory_of(slot)
    problems: list[Problem] = []
    for job in extent.jobs:
        here = checked and job.landing is None
        damaged = check_in(memory, low, job.region, job.start, job.end) if here else []
        if damaged:
            problems += _damages(job, damaged)
            continue
        _place(job, carrier, slot, job.region.start + job.start - low)
        if here:
            _give_back_zeros(job)
        if checked and job.landing is not None:
            later.add(job, job.landing)
    return problems


def _do_apart(extent: _Extent, error: StorageError, checked: bool, rings: Rings, later: DeviceChecks) -> list[Problem]:
    """Read each job by itself after an error: only what really is not there is damaged."""
    if len(extent.jobs) == 1:
        return [_unread(extent.jobs[0], error)]
    alone = (_Extent(extent.source, 1, *_range_of(job, checked), [job]) for job in extent.jobs)
    return [problem for one in alone for problem in _do_extent(one, checked, rings, later)]


def _place(job: Job, carrier: Carrier, slot: torch.Tensor, start: int) -> None:
    """Hand on a job's bytes, which lie in the slot from `start` on and are sound."""
    size = job.end - job.start
    if job.place is not None:
        job.place(carrier, slot[start : start + size])
    else:
        ctypes.memmove(job.address, slot.data_ptr() + start, size)


def _unread(job: Job, error: StorageError) -> Problem:
    return Problem(job.file, error.problem, job.leaf, (job.region.start + job.start, job.region.start + job.end))


def _damages(job: Job, places: Iterable[tuple[int, int]]) -> list[Problem]:
    return [Problem(job.file, "the bytes do not have their digest", job.leaf, place) for place in places]


class DeviceChecks:
    """Bytes that are checked on the device where they have landed, all of them at once: it digests faster than they
    come, and the threads that bring them do nothing else."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-digest")
        # The first time in a process it must be compiled, which takes as long as it takes to read a gigabyte.
        self._digesters = {device: _digester_on(device, self._pool) for device in devices}
        self._pool.shutdown(wait=False)
        self._landed: dict[torch.device, list[_Block]] = {device: [] for device in self._digesters}

    def takes(self, device: torch.device) -> bool:
        return device in self._digesters

    def add(self, job: Job, landing: torch.Tensor) -> None:
        self._landed[job.device] += [
            _Block(job, *job.region.block(index), landing) for index in job.region.blocks(job.start, job.end)
        ]

    def problems(self) -> list[Problem]:
        """Return the damage in what has landed, every copy of which must be done."""
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


def _digester_on(device: torch.device, pool: ThreadPoolExecutor) -> Future[DeviceDigester | None]:
    """Have a thread make the digester of a device; where the system refuses one, it is made here."""
    try:
        return pool.submit(DeviceDigester.on, device)
    except RuntimeError:
        made: Future[DeviceDigester | None] = Future()
        made.set_result(DeviceDigester.on(device))
        return made


class _Block(NamedTuple):
    """A block of a job that has landed on a device."""

    job: Job
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
