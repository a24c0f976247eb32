"""A local storage whose power is cut: every disk that POSIX allows afterwards can be looked at. Knows no checkpoints.

The calls are really made in a scratch folder, and recorded in a model of the disk: for each file the writes since its
last fsync, for each folder the changes of names since its last fsync. `after_power_loss` makes one of the possible
disks from it. What was synced is there; what was not may be there, in part, in any order, or not at all. That is more
cruel than ext4 is, on purpose: what survives this survives on any file system that keeps to POSIX.

    storage = PowerLossStorage(tmp_path / "scratch", crash_at=7)
    with pytest.raises(SimulatedCrash):
        save_something(storage)
    for seed in range(20):
        look_at(storage.after_power_loss(seed, tmp_path / f"disk-{seed}"))
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.storage.keys import TEMPORARY_PREFIX
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.testing.storages import SimulatedCrash

__all__ = ["PowerLossDisk", "PowerLossStorage"]

_SECTOR_BYTES = 512
_LIVE = "live"


class PowerLossStorage(LocalStorage):
    """A `LocalStorage` in `scratch/live` that dies at its `crash_at`-th call that changes the disk, counted from 1.

    `log` names those calls, `calls` counts them; run once without `crash_at` to learn how many there are. Once dead,
    every call raises `SimulatedCrash`. `ignore_fsync_of` takes a key, a folder (`""` is the root, `".."` the folder
    that holds the root) and answers whether a sync of it is to be forgotten: to show that a test would notice.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        crash_at: int | None = None,
        ignore_fsync_of: Callable[[str], bool] = lambda path: False,
    ) -> None:
        scratch = Path(os.path.abspath(scratch))
        scratch.mkdir(parents=True, exist_ok=True)
        self._power_disk = PowerLossDisk(str(scratch), crash_at=crash_at, ignore_fsync_of=ignore_fsync_of)
        super().__init__(scratch / _LIVE, disk=self._power_disk)

    @property
    def log(self) -> list[str]:
        return self._power_disk.log

    @property
    def calls(self) -> int:
        return len(self._power_disk.log)

    @property
    def crashed(self) -> bool:
        return self._power_disk.crashed

    def after_power_loss(self, seed: int, target: Path) -> LocalStorage:
        """The storage as it may be found after the power is cut now, or was at the crash; `target` must not exist.

        seed 0: all that was not synced is lost. 1: all of it is there. 2: the names are there, the bytes are not.
        3: of the names of each folder the later half is there and the earlier half is not, and files have their
        size but zeros for bytes. From 4 on: chosen at random for each write and each name.
        """
        self._power_disk.materialise(_choices(seed), target)
        return LocalStorage(target)


class PowerLossDisk(Disk):
    """The disk that `PowerLossStorage` uses: makes the calls, and keeps the model."""

    def __init__(self, scratch: str, *, crash_at: int | None, ignore_fsync_of: Callable[[str], bool]) -> None:
        self.log: list[str] = []
        self.crashed = False
        self._scratch = scratch
        self._crash_at = crash_at
        self._ignored = ignore_fsync_of
        self._outside = _Folder("..")
        self._handles: dict[int, _Inode] = {}
        # A sink writes from a thread of its own.
        self._lock = threading.RLock()

    def materialise(self, choices: _Choices, target: Path) -> None:
        with self._lock:
            root = self._outside.after(choices).get(_LIVE)
            if isinstance(root, _Folder):
                _write_folder(root, choices, target)

    # Folders

    def open_root(self, path: str) -> int:
        with self._lock:
            self._require_life()
            return self._hold(super().open_root(path), self._inode_of_path(path))

    def open_folder(self, folder: int, name: str) -> int:
        with self._lock:
            self._require_life()
            return self._hold(super().open_folder(folder, name), self._folder(folder).now[name])

    def make_folder(self, folder: int, name: str) -> None:
        with self._lock:
            parent = self._folder(folder)
            path = self._begin("make_folder", parent.path_of(name))
            super().make_folder(folder, name)
            parent.change({name: _Folder(path)})

    def remove_folder(self, folder: int, name: str) -> None:
        with self._lock:
            self._begin("remove_folder", self._folder(folder).path_of(name))
            super().remove_folder(folder, name)
            self._folder(folder).change({name: None})

    def list_names(self, folder: int) -> list[str]:
        self._require_life()
        return super().list_names(folder)

    def fsync_folder(self, folder: int) -> None:
        # Only in the model: the scratch folder itself needs no durability, and the tests need speed.
        with self._lock:
            inode = self._folder(folder)
            self._begin("fsync_folder", inode.path)
            if not self._ignored(inode.path):
                inode.sync()

    # Files

    def create_file(self, folder: int, name: str) -> int:
        with self._lock:
            parent = self._folder(folder)
            path = self._begin("create_file", parent.path_of(name))
            handle = super().create_file(folder, name)
            parent.change({name: _File(path)})
            return self._hold(handle, parent.now[name])

    def create_unnamed(self, folder: int) -> int:
        with self._lock:
            self._begin("create_unnamed", self._folder(folder).path_of("(unnamed)"))
            return self._hold(super().create_unnamed(folder), _File(None))

    def open_file(self, folder: int, name: str) -> int:
        self._require_life()
        return super().open_file(folder, name)

    def reopen_file(self, file: int) -> int:
        self._require_life()
        return super().reopen_file(file)

    def set_direct(self, file: int, direct: bool) -> None:
        self._require_life()
        super().set_direct(file, direct)

    def write_at(self, file: int, data: memoryview, offset: int) -> int:
        with self._lock:
            inode = self._file(file)
            self._begin("write", f"{inode.shown} ({len(data)} bytes at {offset})")
            count = super().write_at(file, data, offset)
            inode.unsynced.append(_Write(offset, bytes(data[:count])))
            return count

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        self._require_life()
        return super().read_at(file, target, offset)

    def read_cached_at(self, file: int, target: memoryview, offset: int) -> int:
        self._require_life()
        return super().read_cached_at(file, target, offset)

    def fsync_file(self, file: int) -> None:
        with self._lock:
            inode = self._file(file)
            self._begin("fsync_file", inode.shown)
            if inode.path is None or not self._ignored(inode.path):
                inode.sync()

    # Names

    def link_unnamed(self, file: int, folder: int, name: str) -> None:
        with self._lock:
            path = self._begin("link", self._folder(folder).path_of(name))
            super().link_unnamed(file, folder, name)
            self._name(self._file(file), folder, name, path)

    def link(self, folder: int, name: str, new_name: str) -> None:
        with self._lock:
            path = self._begin("link", self._folder(folder).path_of(new_name))
            super().link(folder, name, new_name)
            self._name(self._folder(folder).now[name], folder, new_name, path)

    def rename_exclusive(self, folder: int, name: str, new_name: str) -> None:
        with self._lock:
            path = self._begin("rename_exclusive", self._folder(folder).path_of(new_name))
            super().rename_exclusive(folder, name, new_name)
            self._rename(folder, name, new_name, path)

    def rename(self, folder: int, name: str, new_name: str) -> None:
        with self._lock:
            path = self._begin("rename", self._folder(folder).path_of(new_name))
            super().rename(folder, name, new_name)
            self._rename(folder, name, new_name, path)

    def symlink(self, target: str, folder: int, name: str) -> None:
        with self._lock:
            path = self._begin("symlink", self._folder(folder).path_of(name))
            super().symlink(target, folder, name)
            self._folder(folder).change({name: _Link(path, target)})

    def read_link(self, folder: int, name: str) -> str:
        self._require_life()
        return super().read_link(folder, name)

    def unlink(self, folder: int, name: str) -> None:
        with self._lock:
            self._begin("unlink", self._folder(folder).path_of(name))
            super().unlink(folder, name)
            self._folder(folder).change({name: None})

    # Looking, and letting go

    def status(self, folder: int, name: str) -> os.stat_result:
        self._require_life()
        return super().status(folder, name)

    def status_of(self, handle: int) -> os.stat_result:
        self._require_life()
        return super().status_of(handle)

    def free_bytes(self, path: str) -> int:
        self._require_life()
        return super().free_bytes(path)

    def close(self, handle: int) -> None:
        # Also when dead: the system closes the handles of a dead process.
        with self._lock:
            self._handles.pop(handle, None)
            super().close(handle)

    # The model

    def _begin(self, call: str, what: str) -> str:
        """Count a call that changes the disk, or die at it."""
        self._require_life()
        self.log.append(f"{call} {what or '/'}")
        if len(self.log) == self._crash_at:
            self.crashed = True
            self._require_life()
        return what

    def _require_life(self) -> None:
        if self.crashed:
            raise SimulatedCrash(f"the power was cut at call {self._crash_at}: {self.log[-1]}")

    def _hold(self, handle: int, inode: _Inode) -> int:
        self._handles[handle] = inode
        return handle

    def _inode_of_path(self, path: str) -> _Inode:
        if path == self._scratch:
            return self._outside
        # Anything else than the root is a folder above it, which this model does not have to know.
        return self._outside.now[_LIVE] if path == os.path.join(self._scratch, _LIVE) else _Folder("../..")

    def _folder(self, handle: int) -> _Folder:
        inode = self._handles[handle]
        if not isinstance(inode, _Folder):
            raise TypeError(f"{inode.path} is no folder")
        return inode

    def _file(self, handle: int) -> _File:
        inode = self._handles[handle]
        if not isinstance(inode, _File):
            raise TypeError(f"{inode.path} is no file")
        return inode

    def _name(self, inode: _Inode, folder: int, name: str, path: str) -> None:
        self._folder(folder).change({name: inode})
        self._settle(inode, path)

    def _rename(self, folder: int, name: str, new_name: str, path: str) -> None:
        inode = self._folder(folder).now[name]
        # One change, for a rename is never half there.
        self._folder(folder).change({name: None, new_name: inode})
        self._settle(inode, path)

    def _settle(self, inode: _Inode, path: str) -> None:
        """The inode has its real name now, and only now can it be known whether its syncs are to be forgotten."""
        inode.path = path
        if isinstance(inode, _File) and self._ignored(path):
            inode.forget_syncs()


@dataclass(eq=False)
class _Inode:
    # The first real name, relative to the root; None for a file that has none yet.
    path: str | None


@dataclass(eq=False)
class _Link(_Inode):
    target: str


@dataclass(frozen=True)
class _Write:
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(eq=False)
class _File(_Inode):
    synced: bytearray = field(default_factory=bytearray)
    unsynced: list[_Write] = field(default_factory=list)
    _before_syncs: list[_Write] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return self.path or "(unnamed)"

    def sync(self) -> None:
        if self.path is None or TEMPORARY_PREFIX in self.path:
            self._before_syncs += self.unsynced
        for write in self.unsynced:
            _apply(self.synced, write)
        self.unsynced = []

    def forget_syncs(self) -> None:
        """Take back the syncs from before the file had its name."""
        if self._before_syncs:
            self.synced = bytearray()
            self.unsynced = self._before_syncs + self.unsynced
            self._before_syncs = []

    def after(self, choices: _Choices) -> bytes:
        content = bytearray(self.synced)
        for write in self.unsynced:
            for kept in choices.of_write(write):
                _apply(content, kept)
            if len(content) < write.end and choices.keeps_size():
                content.extend(bytes(write.end - len(content)))
        return bytes(content)


@dataclass(eq=False)
class _Folder(_Inode):
    path: str
    now: dict[str, _Inode] = field(default_factory=dict)
    synced: dict[str, _Inode] = field(default_factory=dict)
    # Each change names what is under some names from then on, None for nothing.
    unsynced: list[dict[str, _Inode | None]] = field(default_factory=list)

    def path_of(self, name: str) -> str:
        if self.path == "..":
            return "" if name == _LIVE else f"../{name}"
        return f"{self.path}/{name}" if self.path else name

    def change(self, names: dict[str, _Inode | None]) -> None:
        self.unsynced.append(names)
        _apply_names(self.now, names)

    def sync(self) -> None:
        self.synced = dict(self.now)
        self.unsynced = []

    def after(self, choices: _Choices) -> dict[str, _Inode]:
        names = dict(self.synced)
        for change, kept in zip(self.unsynced, choices.of_names(len(self.unsynced)), strict=True):
            if kept:
                _apply_names(names, change)
        return names


class _Choices:
    """Seed 0, and what the others differ from: nothing that was not synced is there."""

    def of_names(self, count: int) -> list[bool]:
        """Which of a folder's changes, in the order of time, are there."""
        return [False] * count

    def of_write(self, write: _Write) -> list[_Write]:
        """What is there of a write."""
        return []

    def keeps_size(self) -> bool:
        """Whether a file has the size that a lost write gave it, with zeros in its place."""
        return False


class _KeepAll(_Choices):
    def of_names(self, count: int) -> list[bool]:
        return [True] * count

    def of_write(self, write: _Write) -> list[_Write]:
        return [write]


class _KeepNames(_Choices):
    def of_names(self, count: int) -> list[bool]:
        return [True] * count


class _KeepLaterNames(_Choices):
    def of_names(self, count: int) -> list[bool]:
        return [position >= count // 2 for position in range(count)]

    def keeps_size(self) -> bool:
        return True


class _Random(_Choices):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of_names(self, count: int) -> list[bool]:
        return [self._random.random() < 0.5 for _ in range(count)]

    def of_write(self, write: _Write) -> list[_Write]:
        fate = self._random.choice(("kept", "lost", "front kept", "back kept"))
        if fate == "kept":
            return [write]
        cut = self._cut(write)
        if fate == "lost" or cut is None:
            return []
        if fate == "front kept":
            return [_Write(write.offset, write.data[:cut])]
        return [_Write(write.offset + cut, write.data[cut:])]

    def keeps_size(self) -> bool:
        return self._random.random() < 0.5

    def _cut(self, write: _Write) -> int | None:
        """A place inside of the write where a sector ends; None where there is none."""
        first = -write.offset % _SECTOR_BYTES or _SECTOR_BYTES
        cuts = range(first, len(write.data), _SECTOR_BYTES)
        return self._random.choice(cuts) if cuts else None


def _choices(seed: int) -> _Choices:
    named: dict[int, type[_Choices]] = {0: _Choices, 1: _KeepAll, 2: _KeepNames, 3: _KeepLaterNames}
    return named[seed]() if seed in named else _Random(seed)


def _apply(content: bytearray, write: _Write) -> None:
    if len(content) < write.offset:
        content.extend(bytes(write.offset - len(content)))
    content[write.offset : write.end] = write.data


def _apply_names(names: dict[str, _Inode], change: dict[str, _Inode | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _write_folder(folder: _Folder, choices: _Choices, target: Path) -> None:
    target.mkdir(parents=True)
    for name, inode in folder.after(choices).items():
        path = target / name
        if isinstance(inode, _Folder):
            _write_folder(inode, choices, path)
        elif isinstance(inode, _Link):
            path.symlink_to(inode.target)
        elif isinstance(inode, _File):
            path.write_bytes(inode.after(choices))
