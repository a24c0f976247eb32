"""The local storage: the contract on a disk, on a RAM disk and on disks that refuse, and what only it promises."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import KeyExistsError, KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry, Storage, folder_names
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.local.page_cache import PageCache
from holdfast.testing import StorageContract
from tests.interrupting import interrupt_everywhere

MEBIBYTE = 1 << 20
RAM = Path("/dev/shm")


class FailingDisk(Disk):
    """Raises an error number from the methods that are named; a method may be spared for its first calls."""

    def __init__(self, code: int, *methods: str, spare: int = 0) -> None:
        self.calls: list[str] = []
        self._code = code
        self._methods = methods
        self._spare = spare

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value):
            return value
        self.calls.append(name)
        if name in self._methods and self.calls.count(name) > self._spare:
            return self._fail
        return value

    def _fail(self, *args: object, **named: object) -> object:
        raise OSError(self._code, os.strerror(self._code))


class UndirectedCache(PageCache):
    def set_direct(self, file: int, direct: bool) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class UndirectedDisk(Disk):
    """Knows no O_DIRECT, as many network file systems."""

    cache = UndirectedCache()


class ShortDisk(Disk):
    """Writes and reads a few bytes at a time, as a system may."""

    def write_at(self, file: int, data: memoryview, offset: int) -> int:
        return super().write_at(file, data[:300_001], offset)

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        return super().read_at(file, target[:300_001], offset)


class LocalContract(StorageContract):
    """A folder is listed at once, so that few keys are enough; another process opens it by its path."""

    many_keys = 40

    def reopen(self, storage: Storage) -> Storage:
        return LocalStorage(storage.url)


class TestOnADisk(LocalContract):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run")


@pytest.mark.skipif(not RAM.is_dir(), reason="no RAM disk here")
class TestOnARamDisk(LocalContract):
    many_keys = StorageContract.many_keys

    @pytest.fixture(autouse=True)
    def _ram_folder(self) -> Iterator[None]:
        self.folder = RAM / f"holdfast-{uuid.uuid4().hex}"
        yield
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(self.folder)


class TestWithoutUnnamedFiles(LocalContract):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, disk=FailingDisk(errno.EOPNOTSUPP, "create_unnamed"))


class TestWithoutProc(LocalContract):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, disk=FailingDisk(errno.ENOENT, "link_unnamed"))


class TestWithoutLinks(LocalContract):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, disk=FailingDisk(errno.EPERM, "create_unnamed", "link"))


class TestWithoutDirect(LocalContract):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, disk=UndirectedDisk())


class TestWithShortCalls(LocalContract):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, disk=ShortDisk())


# The root


def test_nothing_is_made_before_something_is_written(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b")
    assert storage.entries("") == []
    assert storage.free_bytes() > 0
    storage.sync("")
    storage.delete("key")
    with pytest.raises(KeyMissingError):
        storage.read("key", 1)
    assert list(tmp_path.iterdir()) == []
    storage.put("key", b"x")
    assert (tmp_path / "a" / "b" / "key").read_bytes() == b"x"


def test_the_names_above_the_root_are_synced_when_they_are_made(tmp_path: Path) -> None:
    disk = FailingDisk(0)
    LocalStorage(tmp_path / "a" / "b", disk=disk).put("key", b"x")
    made = [call for call in disk.calls if call in ("make_folder", "fsync_folder")]
    assert made == ["make_folder", "fsync_folder", "make_folder", "fsync_folder"]


def test_the_root_may_be_a_link_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    LocalStorage(tmp_path / "link").put("key", b"x")
    assert (tmp_path / "real" / "key").read_bytes() == b"x"


def test_a_root_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(StorageError, match="link to a folder that does not exist"):
        LocalStorage(tmp_path / "link").put("key", b"x")


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_root_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(tmp_path / "file" / below)
    for call in (lambda: storage.put("key", b"x"), lambda: storage.entries(""), lambda: storage.read("key", 1)):
        with pytest.raises(StorageError, match="no folder") as caught:
            call()
        assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize("root", ["", "nul\0byte", b"bytes"])
def test_a_root_that_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(UsageError):
        LocalStorage(root)


def test_it_can_be_pickled_and_shows_its_path(tmp_path: Path) -> None:
    storage = pickle.loads(pickle.dumps(LocalStorage(tmp_path / "run")))
    assert repr(storage) == f"LocalStorage({str(tmp_path / 'run')!r})"
    assert storage.url == str(tmp_path / "run")


# Links and special files


def test_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    storage = LocalStorage(root)
    calls = (
        lambda: storage.put("folder/new", b"x"),
        lambda: storage.create("folder/new", 1),
        lambda: storage.read("folder/key", 10),
        lambda: storage.entries("folder"),
        lambda: storage.sync("folder"),
        lambda: storage.delete("folder/key"),
    )
    for call in calls:
        with pytest.raises(StorageError, match="folder"):
            call()
    assert os.listdir(outside) == ["key"]


def test_a_link_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    storage = LocalStorage(tmp_path / "root")
    storage.put("key", b"x")
    (tmp_path / "root" / "link").symlink_to("../secret")
    (tmp_path / "root" / "dangling").symlink_to("../new")
    assert storage.entries("") == [Entry("key", 1)]
    with pytest.raises(StorageError, match="link"):
        storage.read("link", 10)
    for name in ("link", "dangling"):
        with pytest.raises(KeyExistsError):
            storage.put(name, b"x")
        with pytest.raises(KeyExistsError):
            storage.create(name, 1)
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not (tmp_path / "new").exists()


def test_a_fifo_or_a_socket_is_no_key_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        storage = LocalStorage(tmp_path)
        assert storage.entries("") == []
        with pytest.raises(StorageError, match="no regular file"):
            storage.open("fifo")
        with pytest.raises(StorageError):
            storage.open("socket")


def test_names_that_cannot_be_keys_are_not_listed(tmp_path: Path) -> None:
    for name in (".tmp-0123", "back\\slash"):
        (tmp_path / name).write_bytes(b"x")
    with open(os.fsencode(tmp_path) + b"/\xff\xfe", "wb"):
        pass
    assert LocalStorage(tmp_path).entries("") == []


def test_a_key_below_a_key_is_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("key", b"x")
    with pytest.raises(StorageError, match="folder is needed"):
        storage.put("key/below", b"x")


# The order of the calls


def test_put_syncs_before_it_names_and_once_more_after(tmp_path: Path) -> None:
    disk = FailingDisk(0)
    LocalStorage(tmp_path, disk=disk).put("key", b"x")
    wanted = ["create_unnamed", "write_at", "fsync_file", "link_unnamed", "fsync_file"]
    assert [call for call in disk.calls if call in wanted] == wanted


@pytest.mark.parametrize("refused", [("create_unnamed",), ("create_unnamed", "link")])
def test_the_temporary_name_is_synced_before_it_is_the_key(tmp_path: Path, refused: tuple[str, ...]) -> None:
    disk = FailingDisk(errno.EOPNOTSUPP, *refused)
    LocalStorage(tmp_path, disk=disk).put("key", b"x")
    naming = "rename_exclusive" if "link" in refused else "link"
    assert disk.calls.index("create_file") < disk.calls.index("fsync_file") < disk.calls.index(naming)
    assert "rename" not in disk.calls
    assert os.listdir(tmp_path) == ["key"]


def test_sync_goes_from_the_folder_up_to_the_parent_of_the_root(tmp_path: Path) -> None:
    synced: list[str] = []

    class Recording(Disk):
        def fsync_folder(self, folder: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{folder}"))
            super().fsync_folder(folder)

    storage = LocalStorage(tmp_path / "root", disk=Recording())
    storage.put("a/b/key", b"x")
    synced.clear()
    storage.sync("a/b")
    root = str(tmp_path / "root")
    assert synced == [f"{root}/a/b", f"{root}/a", root, str(tmp_path)]
    synced.clear()
    storage.sync("a")
    assert synced == [f"{root}/a", root]


def test_a_folder_that_others_remove_many_times_before_it_is_filled_is_filled(tmp_path: Path) -> None:
    class Emptied(Disk):
        """Another process deletes the only key of the folder right before each of the first fifty names is made."""

        removals = 50

        def link_unnamed(self, file: int, folder: int, name: str) -> None:
            if self.removals:
                self.removals -= 1
                (tmp_path / "a").rmdir()
            super().link_unnamed(file, folder, name)

    storage = LocalStorage(tmp_path, disk=Emptied())
    storage.put("a/key", b"x")
    assert storage.read("a/key", 1) == b"x"


def test_a_lost_answer_of_a_file_server_is_not_taken_for_another_writer(tmp_path: Path) -> None:
    class Forgetful(FailingDisk):
        def link(self, folder: int, name: str, new_folder: int, new_name: str) -> None:
            super().link(folder, name, new_folder, new_name)
            raise FileExistsError(errno.EEXIST, "made by the first try, whose answer was lost")

    storage = LocalStorage(tmp_path, disk=Forgetful(errno.EOPNOTSUPP, "create_unnamed"))
    storage.put("key", b"x")
    assert storage.read("key", 1) == b"x"
    with pytest.raises(KeyExistsError):
        LocalStorage(tmp_path, disk=FailingDisk(errno.EOPNOTSUPP, "create_unnamed")).put("key", b"y")


def test_direct_writes_that_are_refused_one_by_one_become_ordinary(tmp_path: Path) -> None:
    class Noting(PageCache):
        direct = False

        def set_direct(self, file: int, direct: bool) -> None:
            self.direct = direct

    class Picky(Disk):
        cache = Noting()

        def write_at(self, file: int, data: memoryview, offset: int) -> int:
            if self.cache.direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().write_at(file, data, offset)

    data = os.urandom(20 * MEBIBYTE + 5)
    _stream(LocalStorage(tmp_path, disk=Picky()), "key", data)
    assert (tmp_path / "key").read_bytes() == data


# Errors


def test_a_full_disk_is_said_with_the_bytes_that_were_wanted(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        storage = LocalStorage(small)
        assert storage.free_bytes() <= 4 * MEBIBYTE
        for size_bytes in (5 * MEBIBYTE, 50 * MEBIBYTE):
            with pytest.raises(StorageError, match=f"{size_bytes} bytes.*ENOSPC.*full") as caught:
                _stream(storage, "big", bytes(size_bytes))
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.file == str(small / "big")
        with pytest.raises(StorageError, match="ENOSPC"):
            storage.put("big", bytes(5 * MEBIBYTE))
        storage.put("small", b"there is room again")
        assert [entry.name for entry in storage.entries("")] == ["small"]
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_a_read_only_disk_is_said(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(mounted)], capture_output=True).returncode:
        pytest.skip("cannot mount a read-only file system here")
    try:
        storage = LocalStorage(mounted)
        for call in (
            lambda: storage.put("key", b"x"),
            lambda: storage.put("folder/key", b"x"),
            lambda: storage.create("key", 1),
            lambda: storage.features.links.point("latest", "folder"),
        ):
            with pytest.raises(StorageError, match="read-only") as caught:
                call()
            assert caught.value.errno == errno.EROFS
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("method", ["write_at", "fsync_file", "create_file"])
@pytest.mark.parametrize("size_bytes", [1, 2 * MEBIBYTE, 30 * MEBIBYTE])
def test_an_error_of_a_sink_names_the_file(tmp_path: Path, code: int, method: str, size_bytes: int) -> None:
    storage = LocalStorage(tmp_path, disk=FailingDisk(code, method))
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        _stream(storage, "key", bytes(size_bytes))
    _require_useful(caught.value, code, tmp_path / "key")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("method", ["create_unnamed", "write_at", "fsync_file"])
def test_an_error_of_put_names_the_file(tmp_path: Path, code: int, method: str) -> None:
    storage = LocalStorage(tmp_path, disk=FailingDisk(code, method))
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        storage.put("key", b"x")
    _require_useful(caught.value, code, tmp_path / "key")


@pytest.mark.parametrize("spare", [0, 1])
def test_a_failed_sync_of_put_is_final(tmp_path: Path, spare: int) -> None:
    disk = FailingDisk(errno.EIO, "fsync_file", spare=spare)
    with pytest.raises(StorageError, match="EIO"):
        LocalStorage(tmp_path, disk=disk).put("key", b"x")
    assert disk.calls.count("fsync_file") == spare + 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size_bytes", [1, 2 * MEBIBYTE, 30 * MEBIBYTE])
def test_a_failed_sync_of_a_sink_is_final(tmp_path: Path, size_bytes: int) -> None:
    disk = FailingDisk(errno.EIO, "fsync_file")
    sink = LocalStorage(tmp_path, disk=disk).create("key", size_bytes)
    sink.write(bytes(size_bytes))
    with pytest.raises(StorageError, match="EIO"):
        sink.close()
    with pytest.raises(StorageError, match="given up"):
        sink.close()
    assert disk.calls.count("fsync_file") == 1


def test_a_failed_sync_of_a_folder_is_an_error_but_a_refused_one_is_not(tmp_path: Path) -> None:
    LocalStorage(tmp_path).put("folder/key", b"x")
    with pytest.raises(StorageError, match="EIO"):
        LocalStorage(tmp_path, disk=FailingDisk(errno.EIO, "fsync_folder")).sync("folder")
    LocalStorage(tmp_path, disk=FailingDisk(errno.EINVAL, "fsync_folder")).sync("folder")


def test_an_error_behind_the_back_of_the_caller_comes_out_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, disk=FailingDisk(errno.EIO, "write_at", spare=1))
    sink = storage.create("key", 1000 * MEBIBYTE)
    with pytest.raises(StorageError, match="EIO"):
        _write_pieces(sink, 1000)
    with pytest.raises(StorageError, match="given up"):
        sink.write(b"x")
    with pytest.raises(StorageError, match="given up"):
        sink.close()
    sink.abort()


def test_a_file_that_shrinks_under_a_reader_is_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("key", bytes(1000))
    with storage.open("key") as source:
        os.truncate(tmp_path / "key", 500)
        with pytest.raises(StorageError, match="shorter"):
            source.read_into(0, memoryview(bytearray(1000)))
    with pytest.raises(StorageError, match="closed"):
        source.read_into(0, memoryview(bytearray(1)))


# What is held


def test_nothing_is_leaked(tmp_path: Path) -> None:
    _use_everything(LocalStorage(tmp_path / "warm"))
    gc.collect()
    files, threads = _open_files(), threading.active_count()
    for turn in range(5):
        _use_everything(LocalStorage(tmp_path / str(turn)))
    for method in ("write_at", "fsync_file", "fsync_folder", "link_unnamed", "create_file", "status_of", "read_at"):
        for spare in range(4):
            storage = LocalStorage(tmp_path / f"{method}-{spare}", disk=FailingDisk(errno.EIO, method, spare=spare))
            try:
                _use_everything(storage)
            except StorageError:
                pass
    gc.collect()
    assert _open_files() == files
    assert threading.active_count() == threads


def test_a_dropped_sink_frees_its_thread_and_leaves_its_file(tmp_path: Path) -> None:
    files, threads = _open_files(), threading.active_count()
    sink = LocalStorage(tmp_path).create("key", 100 * MEBIBYTE)
    _write_pieces(sink, 20)
    assert threading.active_count() == threads + 1
    del sink
    gc.collect()
    assert _open_files() == files
    assert threading.active_count() == threads
    assert os.listdir(tmp_path) == ["key"]


def test_an_abort_frees_the_room(tmp_path: Path) -> None:
    sink = LocalStorage(tmp_path).create("folder/key", 100 * MEBIBYTE)
    _write_pieces(sink, 20)
    sink.abort()
    assert os.listdir(tmp_path) == []


def test_importing_it_brings_neither_torch_nor_numpy() -> None:
    code = "import sys, holdfast.storage.local.local; sys.exit(bool({'torch', 'numpy', 'ctypes'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def _require_useful(error: StorageError, code: int, path: Path) -> None:
    assert error.errno == code
    assert error.file == str(path)
    assert error.advice
    assert os.listdir(path.parent) == []


def _use_everything(storage: LocalStorage) -> None:
    storage.put("folder/small", b"x")
    for size_bytes in (10, 2 * MEBIBYTE, 25 * MEBIBYTE):
        _stream(storage, f"folder/{size_bytes}", bytes(size_bytes))
    aborted = storage.create("folder/aborted", 100 * MEBIBYTE)
    _write_pieces(aborted, 20)
    aborted.abort()
    storage.sync("folder")
    storage.read("folder/small", 1)
    storage.open("folder/10")
    for key in ("folder", "missing"):
        with pytest.raises(StorageError):
            storage.open(key)
    with pytest.raises(StorageError):
        storage.put("folder/small", b"y")
    storage.features.links.point("latest", "folder")
    storage.entries("folder")
    storage.delete("folder/small")


def _stream(storage: LocalStorage, key: str, data: bytes) -> None:
    with storage.create(key, len(data)) as sink:
        sink.write(data)


def _write_pieces(sink: object, count: int) -> None:
    for _ in range(count):
        sink.write(bytes(MEBIBYTE))  # type: ignore[attr-defined]


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Filtered(LocalStorage):
    """A storage of a user that hides a folder."""

    def entries(self, folder: str) -> list[Entry]:
        return [entry for entry in super().entries(folder) if entry.name != "hidden"]


def test_folders_are_listed_by_the_entries_of_a_subclass_that_has_its_own(tmp_path: Path) -> None:
    for name in ("hidden", "shown"):
        LocalStorage(tmp_path).put(f"{name}/key", b"x")
    assert sorted(folder_names(LocalStorage(tmp_path), "")) == ["hidden", "shown"]
    assert list(folder_names(Filtered(tmp_path), "")) == ["shown"]


@pytest.mark.parametrize("size_bytes", [1, 2 * MEBIBYTE])
@pytest.mark.parametrize("call", ["open", "create"])
def test_an_interrupt_loses_no_handle_that_the_system_has_returned(
    call: str, size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_type))
    storage = LocalStorage(tmp_path / "run")
    storage.put("folder/key", b"x")

    def work() -> None:
        if call == "open":
            storage.open("folder/key").close()
        else:
            storage.delete("folder/new")
            storage.create("folder/new", size_bytes).abort()

    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, lost, moments = handles(), [], 0
    for place in interrupt_everywhere(work):
        lost += [place] * (handles() - before)
        before = handles()
        moments += 1
    assert moments > 20
    # Python ignores an interrupt that comes in a finalizer; no finalizer may fail.
    assert set(ignored) <= {KeyboardInterrupt}
    # Where os.open itself has just returned, or its owner is about to be made, nothing can hold the handle.
    owners = ("local/disk.py", "local/source.py", "local/streaming.py")
    assert [place for place in lost if not any(owner in place for owner in owners)] == []
