"""Reads past the page cache: when they are made, and that the bytes are the same whatever the system refuses."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage.base import alignment_of
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.local.page_cache import PageCache
from holdfast.testing import MemoryStorage

MEBIBYTE = 1 << 20
SIZE = 17 * MEBIBYTE + 1234


class CacheDisk(Disk):
    """A disk of whose files `cached` of 32 probed bytes are in the page cache. Counts the reads past the cache."""

    def __init__(self, cached: int = 0, *, refuse: str = "", code: int = errno.EINVAL, short: int = 1 << 40) -> None:
        self.cache = ProbedCache(cached, self._fail)
        self.direct: set[int] = set()
        self.direct_reads: list[tuple[int, int]] = []
        self._refuse = refuse
        self._code = code
        self._short = short

    def reopen_file(self, file: int) -> int:
        self._fail("reopen_file")
        handle = super().reopen_file(file)
        self.direct.add(handle)
        return handle

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        if file in self.direct:
            assert offset % 4096 == 0
            assert len(target) % 4096 == 0
            self._fail("read_at")
            count = super().read_at(file, target[: self._short], offset)
            self.direct_reads.append((offset, count))
            return count
        return super().read_at(file, target, offset)

    def close(self, handle: int) -> None:
        self.direct.discard(handle)
        super().close(handle)

    def _fail(self, method: str) -> None:
        if method == self._refuse:
            raise OSError(self._code, os.strerror(self._code))


class ProbedCache(PageCache):
    """The page cache of such a disk."""

    def __init__(self, cached: int, fail: Callable[[str], None]) -> None:
        self.probes = 0
        self._cached = cached
        self._fail = fail

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        self._fail("cache.read_at")
        self.probes += 1
        if self.probes > self._cached:
            raise BlockingIOError(errno.EAGAIN, "it is not in the cache")
        return len(target)

    def set_direct(self, file: int, direct: bool) -> None:
        self._fail("cache.set_direct")


def written(folder: Path, size: int = SIZE) -> bytes:
    data = os.urandom(size)
    (folder / "key").write_bytes(data)
    return data


def read_all(disk: Disk, folder: Path) -> tuple[int, bytes]:
    with LocalStorage(folder, disk=disk).open("key") as source:
        alignment = alignment_of(source)
        buffer = mmap.mmap(-1, source.size_bytes)
        source.read_into(0, memoryview(buffer))
        return alignment, buffer[:]


def test_a_large_cold_file_is_read_past_the_cache_but_for_its_end(tmp_path: Path) -> None:
    data = written(tmp_path)
    disk = CacheDisk()
    assert read_all(disk, tmp_path) == (4096, data)
    assert sum(count for _, count in disk.direct_reads) == SIZE // 4096 * 4096
    assert disk.direct == set(), "and the second handle is closed"


@pytest.mark.parametrize(("cached", "alignment"), [(0, 4096), (8, 4096), (9, 1), (32, 1)])
def test_a_file_that_is_in_the_cache_is_read_from_there(tmp_path: Path, cached: int, alignment: int) -> None:
    data = written(tmp_path)
    assert read_all(CacheDisk(cached), tmp_path) == (alignment, data)


def test_a_small_file_is_not_asked_about(tmp_path: Path) -> None:
    data = written(tmp_path, MEBIBYTE)
    disk = CacheDisk()
    assert read_all(disk, tmp_path) == (1, data)
    assert disk.cache.probes == 0


def test_the_question_is_asked_once(tmp_path: Path) -> None:
    written(tmp_path)
    disk = CacheDisk(32)
    with LocalStorage(tmp_path, disk=disk).open("key") as source:
        assert [alignment_of(source) for _ in range(3)] == [1, 1, 1]
    assert disk.cache.probes == 32


def test_who_does_not_ask_reads_through_the_cache(tmp_path: Path) -> None:
    data = written(tmp_path)
    disk = CacheDisk()
    with LocalStorage(tmp_path, disk=disk).open("key") as source:
        buffer = bytearray(source.size_bytes)
        source.read_into(0, memoryview(buffer))
    assert buffer == data
    assert disk.cache.probes == 0
    assert disk.direct_reads == []


@pytest.mark.parametrize("refused", ["cache.read_at", "reopen_file", "cache.set_direct"])
def test_a_system_that_refuses_is_read_through_the_cache(tmp_path: Path, refused: str) -> None:
    data = written(tmp_path)
    disk = CacheDisk(refuse=refused, code=errno.EOPNOTSUPP)
    assert read_all(disk, tmp_path) == (1, data)
    assert disk.direct == set()


def test_a_file_system_that_refuses_each_read_is_read_through_the_cache(tmp_path: Path) -> None:
    data = written(tmp_path)
    assert read_all(CacheDisk(refuse="read_at"), tmp_path) == (4096, data)


@pytest.mark.parametrize("short", [4096, 8192 + 1, 100])
def test_short_reads_are_continued(tmp_path: Path, short: int) -> None:
    data = written(tmp_path)
    assert read_all(CacheDisk(short=short), tmp_path)[1] == data


def test_a_failing_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(StorageError, match="key"):
        read_all(CacheDisk(refuse="read_at", code=errno.EIO), tmp_path)


def test_a_file_that_was_cut_short_meanwhile_is_an_error(tmp_path: Path) -> None:
    written(tmp_path)
    with LocalStorage(tmp_path, disk=CacheDisk()).open("key") as source:
        assert alignment_of(source) == 4096
        os.truncate(tmp_path / "key", 5 * MEBIBYTE + 7)
        buffer = mmap.mmap(-1, SIZE)
        with pytest.raises(StorageError, match="ends before"):
            source.read_into(0, memoryview(buffer))


def test_ranges_that_are_not_aligned_are_read_as_well(tmp_path: Path) -> None:
    data = written(tmp_path)
    disk = CacheDisk()
    with LocalStorage(tmp_path, disk=disk).open("key") as source:
        assert alignment_of(source) == 4096
        for offset, size in ((1, 5), (4095, 8194), (4096, 4096), (8192, 5000), (SIZE - 3, 3)):
            buffer = mmap.mmap(-1, size)
            source.read_into(offset, memoryview(buffer))
            assert buffer[:] == data[offset : offset + size]


def test_the_real_disk_tells_cold_from_warm(tmp_path: Path) -> None:
    data = written(tmp_path)
    assert read_all(Disk(), tmp_path) == (1, data), "it was just written through the cache"
    handle = os.open(tmp_path / "key", os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    assert read_all(Disk(), tmp_path)[1] == data, "whatever this file system answers"


def test_a_source_that_says_nothing_takes_any_range() -> None:
    storage = MemoryStorage()
    storage.put("key", b"abc")
    assert alignment_of(storage.open("key")) == 1
