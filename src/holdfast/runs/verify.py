"""Check a checkpoint against its manifest, byte by byte. A checkpoint enters, a report leaves. Knows no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from blake3 import blake3

from holdfast.errors import HoldfastError, KeyDamagedError, KeyMissingError, StorageError, UsageError
from holdfast.ondisk.dtypes import element_type
from holdfast.ondisk.manifest import ChunkRecord, FileRecord, TensorRecord, tensor_file_digest
from holdfast.ondisk.safetensors import header_length, parse_header
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem, Report
from holdfast.storage.base import Source
from holdfast.storage.blocks import Region, check

Depth = Literal["full", "quick"]
_READ_BYTES = 16 << 20

# Errors that mean that a file is not what was written. Any other error means that it cannot be read now.
_DAMAGE = (KeyMissingError, KeyDamagedError)

Found = list[Problem]
Check = Callable[[], tuple[Found, int]]


def verify(
    checkpoint: Checkpoint,
    depth: Depth = "full",
    *,
    on_bytes: Callable[[int], None] | None = None,
    threads: int = 8,
) -> Report:
    """Check every file: that it is there and has its size, and, at full depth, each of its bytes. A storage that cannot
    be read now is a StorageError: nothing is known of the checkpoint then.

    `on_bytes` is called with the number of further bytes checked, from any thread. `threads` is the most
    threads to use.
    """
    if depth not in get_args(Depth):
        raise UsageError(f"depth={depth!r}", advice="use 'full' or 'quick'")
    problems: list[Problem] = []
    checked = 0
    leaves = _leaves_by_file(checkpoint.manifest.tensors)
    with _workers(min(threads, os.cpu_count() or 1)) as pool:
        for file in checkpoint.manifest.files:
            try:
                with checkpoint.storage.open(checkpoint.key(file.name)) as source:
                    found, size = _check_file(
                        file, leaves.get(file.name, []), checkpoint, source, depth, pool, on_bytes
                    )
            except _DAMAGE as error:
                found, size = [Problem(file.name, error.problem)], 0
            problems += found
            checked += size
    return Report(checkpoint.path, checkpoint.step, depth, tuple(problems), checked)


class _Alone:
    """The calling thread in the place of others."""

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(work, items)


@contextmanager
def _workers(count: int) -> Iterator[ThreadPoolExecutor | _Alone]:
    if count == 1:
        yield _Alone()
        return
    with ThreadPoolExecutor(count, thread_name_prefix="holdfast-verify") as pool:
        yield pool


def _check_file(
    file: FileRecord,
    leaves: list[tuple[TensorRecord, ChunkRecord]],
    checkpoint: Checkpoint,
    source: Source,
    depth: Depth,
    pool: ThreadPoolExecutor | _Alone,
    on_bytes: Callable[[int], None] | None,
) -> tuple[Found, int]:
    if source.size_bytes != file.size_bytes:
        what = f"has {source.size_bytes} bytes, the manifest says {file.size_bytes}"
        return [Problem(file.name, what)], 0
    if depth == "quick":
        return [], 0
    if not file.header_bytes:
        checks: Iterable[Check] = [partial(_check_plain, file, source)]
    else:
        checks = _tensor_checks(file, leaves, checkpoint.manifest.block_bytes, source)
    found: Found = []
    checked = 0
    for problems, size in pool.map(lambda one: one(), checks):
        found += problems
        checked += size
        if on_bytes is not None:
            on_bytes(size)
    return found, checked


def _tensor_checks(
    file: FileRecord, leaves: list[tuple[TensorRecord, ChunkRecord]], block_bytes: int, source: Source
) -> Iterator[Check]:
    yield partial(_check_header, file, leaves, source)
    batch: list[tuple[str, Region, int, int]] = []
    size = 0
    for tensor, chunk in leaves:
        region = Region(chunk.start, chunk.box.volume * tensor.item_bytes, block_bytes, chunk.digests)
        step = max(_READ_BYTES // block_bytes, 1) * block_bytes
        for start in range(0, region.size_bytes, step):
            end = min(start + step, region.size_bytes)
            batch.append((tensor.name, region, start, end))
            size += end - start
            if size >= _READ_BYTES:
                yield partial(_check_ranges, file, batch, source)
                batch, size = [], 0
    if batch:
        yield partial(_check_ranges, file, batch, source)


def _check_ranges(file: FileRecord, ranges: list[tuple[str, Region, int, int]], source: Source) -> tuple[Found, int]:
    found: Found = []
    for leaf, region, start, end in ranges:
        try:
            damaged = check(source, region, start, end)
        except _DAMAGE as error:
            found.append(Problem(file.name, error.problem, leaf, (region.start + start, region.start + end)))
            continue
        found += [Problem(file.name, "the bytes do not have their digest", leaf, place) for place in damaged]
    return found, sum(end - start for _, _, start, end in ranges)


def _check_header(
    file: FileRecord, leaves: list[tuple[TensorRecord, ChunkRecord]], source: Source
) -> tuple[Found, int]:
    """Check that the header is the one that was written, and that it agrees with the manifest about each tensor."""
    header = bytearray(file.header_bytes)
    try:
        source.read_into(0, memoryview(header))
        if header_length(bytes(header[:8]), file.size_bytes) != file.header_bytes:
            return [Problem(file.name, "the header's length is not the manifest's", None, (0, 8))], len(header)
        entries = parse_header(bytes(header), file.size_bytes)
    except HoldfastError as error:
        if isinstance(error, StorageError) and not isinstance(error, _DAMAGE):
            raise
        return [Problem(file.name, error.problem, error.leaf, (0, file.header_bytes))], len(header)
    ordered = sorted(leaves, key=lambda leaf: leaf[1].start)
    digests = (digest for _, chunk in ordered for digest in chunk.digests)
    if tensor_file_digest(bytes(header), digests) != file.digest:
        return [Problem(file.name, "the header does not have its digest", None, (0, file.header_bytes))], len(header)
    strange = entries.keys() - {tensor.name for tensor, _ in leaves}
    if strange:
        what = "the header names a tensor that the manifest does not place in this file"
        return [Problem(file.name, what, min(strange), (0, len(header)))], len(header)
    for tensor, chunk in leaves:
        entry = entries.get(tensor.name)
        kind = element_type(tensor.dtype)
        if entry is None or (entry.start, entry.code, entry.shape) != (
            chunk.start,
            kind.code,
            kind.stored_shape(chunk.sizes),
        ):
            return [Problem(file.name, "header and manifest disagree", tensor.name, (0, len(header)))], len(header)
    return [], len(header)


def _check_plain(file: FileRecord, source: Source) -> tuple[Found, int]:
    state = blake3()
    buffer = memoryview(bytearray(min(_READ_BYTES, file.size_bytes)))
    for start in range(0, file.size_bytes, _READ_BYTES):
        piece = buffer[: min(_READ_BYTES, file.size_bytes - start)]
        source.read_into(start, piece)
        state.update(piece)
    if state.hexdigest() != file.digest:
        return [Problem(file.name, "the bytes do not have their digest", None, (0, file.size_bytes))], file.size_bytes
    return [], file.size_bytes


def _leaves_by_file(tensors: Iterable[TensorRecord]) -> dict[str, list[tuple[TensorRecord, ChunkRecord]]]:
    leaves: dict[str, list[tuple[TensorRecord, ChunkRecord]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            leaves.setdefault(chunk.file, []).append((tensor, chunk))
    return leaves
