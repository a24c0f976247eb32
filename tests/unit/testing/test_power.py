"""The model of a power cut: what was synced is there, and of the rest anything may be."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import KeyMissingError
from holdfast.storage.base import Storage
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import PowerLossStorage, SimulatedCrash, StorageContract

RAM = Path("/dev/shm")
SEEDS = range(40)
DATA = bytes(range(1, 251)) * 20


@pytest.fixture
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=RAM if RAM.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


class TestTheLivingStorage(StorageContract):
    def make(self, tmp_path: Path) -> Storage:
        return PowerLossStorage(tmp_path)


def commit(storage: Storage) -> None:
    """The order of a commit: the bytes and their names first, then the manifest, then its name."""
    with storage.create("step/data", len(DATA)) as sink:
        sink.write(DATA)
    storage.sync("step")
    storage.put("step/manifest.json", b"manifest")
    storage.sync("step")


def found(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read(key, 1 << 20)
    except KeyMissingError:
        return None


def outcomes(storage: PowerLossStorage, scratch: Path, key: str) -> list[bytes | None]:
    """What is under a key for each seed."""
    values = []
    for seed in SEEDS:
        target = scratch / f"disk-{seed}"
        values.append(found(storage.after_power_loss(seed, target), key))
        shutil.rmtree(target, ignore_errors=True)
    return values


def is_sound(storage: Storage) -> bool:
    """Whether a manifest, where there is one, is whole and speaks of data that is whole."""
    manifest = found(storage, "step/manifest.json")
    return manifest is None or (manifest == b"manifest" and found(storage, "step/data") == DATA)


# Bytes


def test_synced_bytes_under_a_synced_name_are_always_there(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    commit(storage)
    assert set(outcomes(storage, scratch, "step/data")) == {DATA}
    assert set(outcomes(storage, scratch, "step/manifest.json")) == {b"manifest"}


def test_bytes_that_were_not_synced_may_be_lost_torn_or_zero(scratch: Path) -> None:
    storage = PowerLossStorage(scratch, ignore_fsync_of=lambda path: path == "step/data")
    commit(storage)
    values = outcomes(storage, scratch, "step/data")
    assert values[0] == b""
    assert values[1] == DATA
    assert values[2] == b""
    assert values[3] == bytes(len(DATA))
    assert len(set(values)) > 6
    for value in values:
        assert value is not None
        for start in range(0, len(value), 512):
            sector = value[start : start + 512]
            assert sector in (DATA[start : start + 512], bytes(len(sector)))


def test_only_the_writes_since_the_last_sync_are_in_doubt(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    disk, root = storage._power_disk, str(scratch / "live")
    storage.put("key", b"x")
    handle = disk.open_root(root)
    file = disk.create_file(handle, "file")
    disk.write_at(file, memoryview(b"A" * 1024), 0)
    disk.fsync_file(file)
    disk.fsync_folder(handle)
    disk.write_at(file, memoryview(b"B" * 1024), 512)
    disk.close(file)
    disk.close(handle)
    values = outcomes(storage, scratch, "file")
    assert values[0] == b"A" * 1024
    assert values[1] == b"A" * 512 + b"B" * 1024
    assert values[3] == b"A" * 1024 + bytes(512)
    assert {value[:512] for value in values if value} == {b"A" * 512}


# Names


def test_a_name_that_was_not_synced_may_be_lost(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    storage.put("key", b"value")
    values = outcomes(storage, scratch, "key")
    assert values[:4] == [None, b"value", b"value", b"value"]
    assert set(values) == {None, b"value"}


def test_names_may_be_lost_in_any_combination(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    storage.sync("")
    for key in ("a", "b", "c", "d"):
        storage.put(key, b"x")
    seen = set()
    for seed in range(200):
        disk = storage.after_power_loss(seed, scratch / str(seed))
        seen.add("".join(entry.name for entry in disk.entries("")))
    assert len(seen) == 16
    names = [[entry.name for entry in LocalStorage(scratch / str(seed)).entries("")] for seed in range(4)]
    assert names == [[], ["a", "b", "c", "d"], ["a", "b", "c", "d"], ["c", "d"]]


def test_a_synced_name_in_a_folder_whose_name_is_lost_is_lost(scratch: Path) -> None:
    storage = PowerLossStorage(scratch, ignore_fsync_of=lambda path: path == "")
    commit(storage)
    values = outcomes(storage, scratch, "step/manifest.json")
    assert values[0] is None
    assert set(values) == {None, b"manifest"}


def test_a_root_whose_name_is_lost_is_lost(scratch: Path) -> None:
    storage = PowerLossStorage(scratch, ignore_fsync_of=lambda path: path == "..")
    commit(storage)
    assert set(outcomes(storage, scratch, "step/manifest.json")) == {None, b"manifest"}


def test_a_deletion_that_was_not_synced_may_be_undone(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    commit(storage)
    storage.delete("step/data")
    assert set(outcomes(storage, scratch, "step/data")) == {None, DATA}
    storage.sync("step")
    assert set(outcomes(storage, scratch, "step/data")) == {None}


def test_a_folder_removed_and_synced_stays_removed(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    storage.put("step/key", b"x")
    storage.sync("step")
    storage.delete("step/key")
    storage.sync("step")
    for seed in SEEDS:
        assert storage.after_power_loss(seed, scratch / str(seed)).entries("") == []


def test_a_link_is_the_old_one_or_the_new_one(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    storage.features.links.point("latest", "step-1")
    log_before = storage.calls
    storage.features.links.point("latest", "step-2")
    total = storage.calls
    seen = set()
    for crash_at in range(log_before + 1, total + 2):
        again = PowerLossStorage(scratch / f"again-{crash_at}", crash_at=crash_at)
        again.features.links.point("latest", "step-1")
        try:
            again.features.links.point("latest", "step-2")
        except SimulatedCrash:
            pass
        for seed in SEEDS:
            again.after_power_loss(seed, scratch / f"disk-{crash_at}-{seed}")
            seen.add(os.readlink(scratch / f"disk-{crash_at}-{seed}" / "latest"))
    assert seen == {"step-1", "step-2"}


# The cut


def test_the_log_is_readable(scratch: Path) -> None:
    storage = PowerLossStorage(scratch)
    commit(storage)
    assert storage.log == [
        "make_folder /",
        "fsync_folder ..",
        "make_folder step",
        "create_file step/data",
        "write step/data (5000 bytes at 0)",
        "fsync_file step/data",
        "fsync_folder step",
        "fsync_folder /",
        "fsync_folder ..",
        "create_unnamed step/(unnamed)",
        "write (unnamed) (8 bytes at 0)",
        "fsync_file (unnamed)",
        "link step/manifest.json",
        "fsync_file step/manifest.json",
        "fsync_folder step",
        "fsync_folder /",
    ]
    assert storage.calls == len(storage.log)


def test_after_the_cut_nothing_works_and_nothing_is_leaked(scratch: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for crash_at in range(1, 17):
        storage = PowerLossStorage(scratch / str(crash_at), crash_at=crash_at)
        with pytest.raises(SimulatedCrash):
            commit(storage)
        assert storage.crashed
        assert storage.calls == crash_at
        for call in (lambda: storage.put("key", b"x"), lambda: storage.entries(""), storage.free_bytes):  # noqa: B023
            with pytest.raises(SimulatedCrash):
                call()
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_large_file_is_cut_too(scratch: Path) -> None:
    data = os.urandom(20 << 20)
    for crash_at in (6, 7):
        storage = PowerLossStorage(scratch / str(crash_at), crash_at=crash_at)
        with pytest.raises(SimulatedCrash), storage.create("step/data", len(data)) as sink:
            sink.write(data)


def unsound(scratch: Path, ignore_fsync_of: Callable[[str], bool]) -> list[tuple[int, int]]:
    """The cuts and seeds after which a manifest speaks of what is not there."""
    storage = PowerLossStorage(scratch / "whole", ignore_fsync_of=ignore_fsync_of)
    commit(storage)
    bad = []
    for crash_at in range(1, storage.calls + 2):
        cut = PowerLossStorage(scratch / f"cut-{crash_at}", crash_at=crash_at, ignore_fsync_of=ignore_fsync_of)
        try:
            commit(cut)
        except SimulatedCrash:
            pass
        for seed in range(12):
            if not is_sound(cut.after_power_loss(seed, scratch / f"disk-{crash_at}-{seed}")):
                bad.append((crash_at, seed))
    return bad


def test_a_commit_in_the_right_order_survives_every_cut(scratch: Path) -> None:
    assert unsound(scratch, lambda path: False) == []


@pytest.mark.parametrize("path", ["step/data", "step/manifest.json", "step"])
def test_each_sync_of_a_commit_is_missed_when_it_is_left_out(scratch: Path, path: str) -> None:
    assert unsound(scratch, lambda synced: synced == path) != []


@pytest.mark.parametrize("path", ["step", "", ".."])
def test_a_commit_that_returned_is_lost_when_a_folder_was_not_synced(scratch: Path, path: str) -> None:
    storage = PowerLossStorage(scratch, ignore_fsync_of=lambda synced: synced == path)
    commit(storage)
    assert found(storage.after_power_loss(0, scratch / "disk"), "step/manifest.json") is None


def test_a_clone_keeps_its_synced_bytes_and_has_no_name_before_the_sync(tmp_path: Path) -> None:
    storage = PowerLossStorage(tmp_path / "scratch")
    storage.put("first/key", b"value")
    storage.sync("first")
    clone = storage.features.clone
    assert clone is not None
    assert clone("first/key", "second/key")
    lost = storage.after_power_loss(0, tmp_path / "lost")
    assert lost.read("first/key", 10) == b"value"
    assert lost.entries("second") == []
    storage.sync("second")
    storage.delete("first/key")
    storage.sync("first")
    for seed in range(8):
        kept = storage.after_power_loss(seed, tmp_path / f"kept-{seed}")
        assert kept.read("second/key", 10) == b"value"
