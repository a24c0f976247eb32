"""Reads that fail for a moment are repeated, those that fail for good are not, and no error is taken for another."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path

import pytest

from holdfast.errors import KeyDamagedError, KeyMissingError, StorageError
from holdfast.storage.base import Storage, StorageFeatures, features_of, folder_names
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.retrying import PAUSES_SECONDS, RetryingStorage, with_retries
from holdfast.testing import FlakyStorage, MemoryStorage, StorageContract


class TestRetryingStorage(StorageContract):
    def make(self, tmp_path: Path) -> Storage:
        return with_retries(LocalStorage(tmp_path / "run"))


def stored() -> MemoryStorage:
    memory = MemoryStorage()
    memory.put("folder/key", b"0123456789")
    return memory


def read_all(storage: Storage) -> tuple[bytes, bytes, list[str]]:
    target = bytearray(4)
    with storage.open("folder/key") as source:
        source.read_into(3, memoryview(target))
    return storage.read("folder/key", 100), bytes(target), [entry.name for entry in storage.entries("folder")]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ESHUTDOWN])
def test_every_kind_of_read_that_fails_a_few_times_gives_the_right_bytes(code: int) -> None:
    flaky = FlakyStorage(stored(), "*", times=2, errno=code)
    assert read_all(with_retries(flaky)) == (b"0123456789", b"3456", ["key"])
    assert [flaky.reads.count(name) for name in ("read folder/key", "read_into folder/key 3-7")] == [3, 3]


def test_a_read_that_fails_for_ever_ends_after_a_bounded_number_of_attempts_and_names_the_file() -> None:
    flaky = FlakyStorage(stored(), "read folder/key", times=None)
    with pytest.raises(
        StorageError, match=r"file memory:///?folder/key: .*EIO.*does not mean that anything is damaged"
    ):
        with_retries(flaky).read("folder/key", 100)
    assert flaky.reads.count("read folder/key") == len(PAUSES_SECONDS) + 1


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_what_no_second_read_changes_is_not_read_a_second_time(code: int) -> None:
    flaky = FlakyStorage(stored(), "read folder/key", times=None, errno=code)
    with pytest.raises(StorageError) as caught:
        with_retries(flaky).read("folder/key", 100)
    assert caught.value.errno == code
    assert flaky.reads.count("read folder/key") == 1


def test_a_key_that_is_missing_or_damaged_is_said_at_once() -> None:
    flaky = FlakyStorage(stored())
    storage = with_retries(flaky)
    with pytest.raises(KeyMissingError):
        storage.read("folder/other", 100)
    with pytest.raises(KeyDamagedError):
        storage.read("folder/key", 3)
    assert len(flaky.reads) == 2


class StaleDisk(Disk):
    """Handles of files that were opened before `forget` was called fail for ever, as those of a file server that
    restarted do."""

    def __init__(self) -> None:
        self.stale: set[int] = set()
        self.opened: list[int] = []

    def forget(self) -> None:
        self.stale.update(self.opened)

    def open_file(self, folder: int, name: str) -> int:
        self.opened.append(super().open_file(folder, name))
        return self.opened[-1]

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        if file in self.stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().read_at(file, target, offset)


def test_a_handle_that_the_file_server_forgot_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    disk = StaleDisk()
    local = LocalStorage(tmp_path, disk=disk)
    local.put("key", b"0123456789")
    target = bytearray(10)
    with with_retries(local).open("key") as source:
        disk.forget()
        source.read_into(0, memoryview(target))
    assert bytes(target) == b"0123456789"


def test_a_file_that_was_replaced_by_another_size_meanwhile_is_damaged(tmp_path: Path) -> None:
    disk = StaleDisk()
    local = LocalStorage(tmp_path, disk=disk)
    local.put("key", b"0123456789")
    with with_retries(local).open("key") as source:
        disk.forget()
        (tmp_path / "key").unlink()
        (tmp_path / "key").write_bytes(b"012345")
        with pytest.raises(KeyDamagedError, match="had 10 bytes and has 6 now"):
            source.read_into(0, memoryview(bytearray(4)))


def test_threads_that_share_a_source_all_read_on_after_an_error() -> None:
    flaky = FlakyStorage(stored(), "read_into *", times=1)
    got: list[bytes] = []
    with with_retries(flaky).open("folder/key") as source:

        def work(place: int) -> None:
            target = bytearray(1)
            source.read_into(place, memoryview(target))
            got.append(bytes(target))

        threads = [threading.Thread(target=work, args=(place,)) for place in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert b"".join(sorted(got)) == b"0123456789"


def test_it_declares_what_the_inner_storage_declares(tmp_path: Path) -> None:
    storage = with_retries(LocalStorage(tmp_path))
    assert isinstance(storage, RetryingStorage)
    assert storage.features.reopens_by_url
    assert storage.features.links is not None
    assert features_of(with_retries(MemoryStorage())) == StorageFeatures()
    assert with_retries(storage) is storage
    assert pickle.loads(pickle.dumps(storage)).url == str(tmp_path)


class Stumbling(Disk):
    """A disk whose first listings of folders fail."""

    def __init__(self, failures: int, code: int = errno.EIO) -> None:
        self.failures, self.code = failures, code

    def list_folders(self, folder: int) -> list[str]:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(self.code, os.strerror(self.code))
        return super().list_folders(folder)


@pytest.mark.guarantee("G3")
def test_a_listing_of_folders_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert list(folder_names(with_retries(LocalStorage(tmp_path, disk=Stumbling(1))), "")) == ["folder"]
    with pytest.raises(StorageError) as caught:
        folder_names(with_retries(LocalStorage(tmp_path, disk=Stumbling(1, errno.EACCES))), "")
    assert caught.value.errno == errno.EACCES
