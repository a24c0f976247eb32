"""A file is what was streamed into it, whatever the pieces; a sink that met an error says it once and keeps nothing."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.storage.base import WRITE_PIECE_BYTES
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.page_cache import PageCache
from holdfast.storage.local.streaming import FileSink

SIZES = [0, 1, 4095, 4096, 1 << 20, (1 << 20) + 1, WRITE_PIECE_BYTES, 3 * WRITE_PIECE_BYTES + 5000]


class RefusingCache(PageCache):
    """No O_DIRECT, as on many network file systems."""

    def set_direct(self, file: int, direct: bool) -> None:
        raise OSError(errno.EINVAL, "no O_DIRECT here")


class Refusing(Disk):
    cache = RefusingCache()


class Failing(Disk):
    """The disk fails once, in the middle of a large file."""

    failed = False

    def write_at(self, file: int, data: memoryview, offset: int) -> int:
        if offset >= WRITE_PIECE_BYTES and not self.failed:
            self.failed = True
            raise OSError(errno.EIO, "bad sector")
        return super().write_at(file, data, offset)


def sink_into(path: Path, size_bytes: int, disk: Disk) -> FileSink:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    return FileSink(disk, handle, str(path), size_bytes, discard=path.unlink)


def pieces_of(data: memoryview, manner: str) -> list[memoryview]:
    if manner == "one":
        return [data]
    draw = random.Random(len(data))
    pieces, start = [], 0
    while start < len(data):
        count = 4096 * draw.randint(1, 900) if manner == "pages" else draw.randint(1, 3_000_000)
        pieces.append(data[start : start + count])
        start += count
    return pieces


@pytest.mark.parametrize("disk", [Disk(), Refusing()], ids=["direct", "refused"])
@pytest.mark.parametrize("manner", ["one", "pages", "odd"])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_what_was_streamed_into_it(size: int, manner: str, disk: Disk, tmp_path: Path) -> None:
    memory = mmap.mmap(-1, max(size, 1))
    memory[:size] = random.Random(size).randbytes(size)
    with sink_into(tmp_path / "file", size, disk) as sink:
        for piece in pieces_of(memoryview(memory)[:size], manner):
            sink.write(piece)
    assert (tmp_path / "file").read_bytes() == memory[:size]


@pytest.mark.parametrize("written", [0, 99, 101, WRITE_PIECE_BYTES + 1])
def test_a_file_of_another_size_than_was_announced_is_refused_and_removed(written: int, tmp_path: Path) -> None:
    sink = sink_into(tmp_path / "file", 100, Disk())
    sink.write(bytes(written))
    with pytest.raises(StorageError, match=f"{written} bytes were written, but 100 were announced"):
        sink.close()
    assert not (tmp_path / "file").exists()
    with pytest.raises(StorageError, match="it was given up before"):
        sink.write(b"x")


@pytest.mark.parametrize("manner", ["pages", "odd"])
def test_an_error_of_the_disk_is_raised_once_and_the_file_is_removed(manner: str, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    memory = mmap.mmap(-1, 6 * WRITE_PIECE_BYTES)
    sink = sink_into(tmp_path / "file", 6 * WRITE_PIECE_BYTES, Failing())

    def stream() -> None:
        for piece in pieces_of(memoryview(memory), manner):
            sink.write(piece)
        sink.close()

    with pytest.raises(StorageError, match="bad sector") as caught:
        stream()
    assert caught.value.errno == errno.EIO
    for call in (lambda: sink.write(b"x"), sink.close):
        with pytest.raises(StorageError, match="it was given up before"):
            call()
    sink.abort()
    assert not (tmp_path / "file").exists()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_block_that_raises_leaves_no_file(tmp_path: Path) -> None:
    def work() -> Any:
        with sink_into(tmp_path / "file", 3 * WRITE_PIECE_BYTES, Disk()) as sink:
            sink.write(bytes(2 * WRITE_PIECE_BYTES))
            raise KeyError("in the caller")

    with pytest.raises(KeyError, match="in the caller"):
        work()
    assert not (tmp_path / "file").exists()


def test_a_dropped_sink_that_its_own_thread_collects_ends_the_thread_and_then_closes_the_file(tmp_path: Path) -> None:
    dropped, closed = threading.Event(), threading.Event()

    class Collecting(Disk):
        def write_at(self, file: int, data: memoryview, offset: int) -> int:
            if threading.current_thread().name == "holdfast-sink":
                dropped.wait(60)
                # As any allocation in this thread may do.
                gc.collect()
                assert not closed.is_set(), "it still writes to the file"
            return super().write_at(file, data, offset)

        def close(self, file: int) -> None:
            super().close(file)
            closed.set()

    gc.disable()
    try:
        sink: Any = sink_into(tmp_path / "file", 64 << 20, Collecting())
        sink.write(bytes(2 * WRITE_PIECE_BYTES + 1))
        # As by the traceback of an error.
        sink.cycle = sink
        threads = [one for one in threading.enumerate() if one.name == "holdfast-sink"]
        del sink
        dropped.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        gc.enable()
    assert threads
    assert closed.is_set()
    assert (tmp_path / "file").stat().st_size == 2 * WRITE_PIECE_BYTES
