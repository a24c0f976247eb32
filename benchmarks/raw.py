"""What the machine itself can do with files: the limits of every table. Knows nothing of torch and of checkpoints.

Each loop is the fastest plain one that was found on two cores and ext4, for 1.49 GB, medians of four rounds in turns:

- Writes past the page cache, with fsync: one thread, pieces of 8 MiB, from one buffer of anonymous huge pages, 0.38 s.
  Pieces of 2 to 256 MiB, two and four threads, and `fallocate` first take 0.39 to 0.49 s; a source as large as the
  state takes as long. From shared memory in pages of 4 KiB, as `mmap(-1)` gives it, the same loop takes 0.69 s: every
  page is pinned and mapped for the device by itself.
- Reads past the page cache: one thread, pieces of 8 MiB, into one such buffer, 0.46 s. Two and four threads take
  0.48 s, and a target as large as the state 0.49 to 0.51 s.
- Reads of what is in the page cache: two threads into huge pages that are in use, 0.09 to 0.11 s; one thread 0.12 s;
  copies from a mapping 0.15 s, or 0.11 s of a file that was written through the page cache. Both are measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
from blake3 import blake3

PIECE_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 4096
_MAPPED_BYTES = 64 << 20
DIGEST_BYTES = 256 << 10

Piece = tuple[Path, int, int]


def huge_pages(size_bytes: int) -> memoryview:
    """Return private memory in huge pages, where the system has them, every page of it touched."""
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    view = memoryview(memory)[start : start + size_bytes]
    zeros = bytes(PIECE_BYTES)
    for position in range(0, size_bytes, PIECE_BYTES):
        part = view[position : position + PIECE_BYTES]
        part[:] = zeros[: len(part)]
    return view


def random_piece() -> memoryview:
    """Return one piece of huge pages with random content, as the source of a write."""
    view = huge_pages(PIECE_BYTES)
    view[:] = os.urandom(PIECE_BYTES)
    return view


def write(path: Path, size_bytes: int, source: memoryview) -> None:
    """Write this many bytes, in whole blocks, past the page cache; return when they and the name are durable."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    left = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    while left:
        left -= os.write(handle, source[: min(left, len(source))])
    os.fsync(handle)
    os.close(handle)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_direct(files: Sequence[Path], buffers: Sequence[memoryview]) -> None:
    """Read files past the page cache, with a thread for each buffer, into memory that is used again."""
    free: queue.Queue[memoryview] = queue.Queue()
    for buffer in buffers:
        free.put(buffer)

    def one(piece: Piece) -> None:
        buffer = free.get()
        read_piece(piece, buffer, os.O_RDONLY | os.O_DIRECT)
        free.put(buffer)

    for_each(one, pieces(files), len(buffers))


def read_direct_to(files: Sequence[Path], target: memoryview) -> None:
    """Read files past the page cache in one thread, each piece to a place of its own, where the bytes stay."""
    for number, piece in enumerate(pieces(files)):
        read_piece(piece, target[number * PIECE_BYTES : (number + 1) * PIECE_BYTES], os.O_RDONLY | os.O_DIRECT)


def read_direct_checked(files: Sequence[Path], buffers: Sequence[memoryview], target: memoryview) -> None:
    """Do what `read_direct` does in four threads, while two others digest what was read, block by block, and copy it to
    its place: all that a verified load of files that are not in the page cache must do on two processors."""
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    filled: queue.SimpleQueue[tuple[memoryview, memoryview] | None] = queue.SimpleQueue()

    def read(placed: tuple[Piece, int]) -> None:
        piece, place = placed
        buffer = free.get()
        read_piece(piece, buffer, os.O_RDONLY | os.O_DIRECT)
        filled.put((buffer, target[place : place + piece[2]]))

    def check() -> None:
        while (one := filled.get()) is not None:
            buffer, place = one
            for start in range(0, len(place), DIGEST_BYTES):
                blake3(buffer[start : min(start + DIGEST_BYTES, len(place))]).digest()
            numpy.copyto(numpy.frombuffer(place, numpy.uint8), numpy.frombuffer(buffer, numpy.uint8)[: len(place)])
            free.put(buffer)

    checking = [threading.Thread(target=check) for _ in range(2)]
    for thread in checking:
        thread.start()
    for_each(read, with_places(pieces(files, len(buffers[0]))), 4)
    for _ in checking:
        filled.put(None)
    for thread in checking:
        thread.join()


def read_cached(files: Sequence[Path], target: memoryview, threads: int) -> None:
    """Read files through the page cache to their places in one target."""

    def one(placed: tuple[Piece, int]) -> None:
        piece, place = placed
        read_piece(piece, target[place : place + piece[2]], os.O_RDONLY)

    for_each(one, with_places(pieces(files)), threads)


def read_and_digest(files: Sequence[Path], target: memoryview, threads: int) -> None:
    """Do what `read_cached` does, and digest each block while it is in the processor's cache: what no verified load can
    do without."""

    def one(placed: tuple[Piece, int]) -> None:
        (path, position, size), place = placed
        for start in range(0, size, DIGEST_BYTES):
            count = min(DIGEST_BYTES, size - start)
            part = target[place + start : place + start + count]
            read_piece((path, position + start, count), part, os.O_RDONLY)
            blake3(part).digest()

    for_each(one, with_places(pieces(files)), threads)


def copy_mapped(path: Path, target: memoryview, threads: int) -> None:
    """Copy a file from a mapping of it: less work than a read where the page cache has it in large pieces."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    source, place = numpy.frombuffer(mapped, numpy.uint8), numpy.frombuffer(target, numpy.uint8)

    def one(position: int) -> None:
        part = source[position : position + _MAPPED_BYTES]
        numpy.copyto(place[position : position + len(part)], part)

    for_each(one, range(0, len(source), _MAPPED_BYTES), threads)


def for_each(work: Callable[[Any], object], items: Iterable[Any], threads: int) -> None:
    """Do the work with every item. One thread is the caller's own: a pool would cost it a hand-over for each."""
    if threads == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))


def pieces(files: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    return [
        (path, position, min(piece_bytes, size - position))
        for path, size in ((path, path.stat().st_size) for path in files)
        for position in range(0, size, piece_bytes)
    ]


def with_places(found: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Return each piece with its place in the one target that all files share."""
    placed, place = [], 0
    for piece in found:
        placed.append((piece, place))
        place += piece[2]
    return placed


def read_piece(piece: Piece, view: memoryview, flags: int) -> None:
    path, position, _ = piece
    handle = os.open(path, flags)
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], position + done)
        done += count
        if count == 0 or (flags & os.O_DIRECT and count % _BLOCK_BYTES):
            break  # the end of the file
    os.close(handle)


# The page cache


def files_of(folder: Path) -> list[Path]:
    """Return every file at or under a path."""
    found = folder.rglob("*") if folder.is_dir() else [folder]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def warm(files: Sequence[Path]) -> None:
    """Bring files into the page cache, unless they are there: what was written or read past it is not."""
    if cached_share(files) < 1.0:
        buffer = memoryview(bytearray(PIECE_BYTES))
        for piece in pieces(files):
            read_piece(piece, buffer[: piece[2]], os.O_RDONLY)


def cool(files: Sequence[Path]) -> None:
    """Let the page cache forget files, and fail if it does not: a limit would be measured against memory."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    share = cached_share(files)
    if share > 0.01:
        raise SystemExit(f"{share:.0%} of {files[0].parent} stayed in the page cache; there is no cold read of it")


def cached_share(files: Sequence[Path]) -> float:
    """Return which part of some files is in the page cache."""
    cached, pages = 0, 0
    for path in files:
        found = _cached_pages(path)
        cached += sum(found)
        pages += len(found)
    return cached / pages if pages else 1.0


def _cached_pages(path: Path) -> bytes:
    """Return one byte for each page of a file: whether the page cache has it."""
    size = path.stat().st_size
    if size == 0:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(mapped)
        failed = _mincore(ctypes.addressof(start), size, found)
        del start  # it keeps the mapping open
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        return bytes(byte & 1 for byte in found.raw)


_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
