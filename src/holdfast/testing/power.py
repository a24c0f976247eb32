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
from collections.abc import Callable
from pathlib import Path

from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.local.page_cache import PageCache
from holdfast.testing.power_model import LIVE, DiskModel, File, Folder, Link, Write, choices_of

__all__ = ["PowerLossDisk", "PowerLossStorage"]


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
        super().__init__(scratch / LIVE, disk=self._power_disk)

    @property
    def log(self) -> list[str]:
        return self._power_disk.model.log

    @property
    def calls(self) -> int:
        return len(self._power_disk.model.log)

    @property
    def crashed(self) -> bool:
        return self._power_disk.model.crashed

    def after_power_loss(self, seed: int, target: Path) -> LocalStorage:
        """Return the storage as it may be after the power is cut now, or was at the crash; `target` must not exist.

        seed 0: all that was not synced is lost. 1: all of it is there. 2: the names are there, the bytes are not.
        3: of the names of each folder the later half is there and the earlier half is not, and files have their
        size but zeros for bytes. From 4 on: chosen at random for each write and each name.
        """
        self._power_disk.model.materialise(choices_of(seed), target)
        return LocalStorage(target)


class PowerLossDisk(Disk):
    """The disk that `PowerLossStorage` uses: makes each call, and notes it in the model."""

    def __init__(self, scratch: str, *, crash_at: int | None, ignore_fsync_of: Callable[[str], bool]) -> None:
        self.model = DiskModel(scratch, crash_at=crash_at, ignore_fsync_of=ignore_fsync_of)
        self.cache = _PowerLossCache(self.model)

    # Folders

    def open_root(self, path: str) -> int:
        with self.model.lock:
            self.model.require_life()
            return self.model.hold(super().open_root(path), self.model.inode_of_path(path))

    def open_folder(self, folder: int, name: str) -> int:
        with self.model.lock:
            self.model.require_life()
            return self.model.hold(super().open_folder(folder, name), self.model.folder(folder).now[name])

    def make_folder(self, folder: int, name: str) -> None:
        with self.model.lock:
            parent = self.model.folder(folder)
            path = self.model.begin("make_folder", parent.path_of(name))
            super().make_folder(folder, name)
            parent.change({name: Folder(path)})

    def remove_folder(self, folder: int, name: str) -> None:
        with self.model.lock:
            self.model.begin("remove_folder", self.model.folder(folder).path_of(name))
            super().remove_folder(folder, name)
            self.model.folder(folder).change({name: None})

    def list_kinds(self, folder: int) -> dict[str, int]:
        self.model.require_life()
        return super().list_kinds(folder)

    def fsync_folder(self, folder: int) -> None:
        # Only in the model: the scratch folder itself needs no durability, and the tests need speed.
        with self.model.lock:
            inode = self.model.folder(folder)
            self.model.begin("fsync_folder", inode.path)
            if not self.model.ignores(inode.path):
                inode.sync()

    # Files

    def create_file(self, folder: int, name: str) -> int:
        with self.model.lock:
            parent = self.model.folder(folder)
            path = self.model.begin("create_file", parent.path_of(name))
            handle = super().create_file(folder, name)
            parent.change({name: File(path)})
            return self.model.hold(handle, parent.now[name])

    def create_unnamed(self, folder: int) -> int:
        with self.model.lock:
            self.model.begin("create_unnamed", self.model.folder(folder).path_of("(unnamed)"))
            return self.model.hold(super().create_unnamed(folder), File(None))

    def open_file(self, folder: int, name: str) -> int:
        self.model.require_life()
        return super().open_file(folder, name)

    def reopen_file(self, file: int) -> int:
        self.model.require_life()
        return super().reopen_file(file)

    def write_at(self, file: int, data: memoryview, offset: int) -> int:
        with self.model.lock:
            inode = self.model.file(file)
            self.model.begin("write", f"{inode.shown} ({len(data)} bytes at {offset})")
            count = super().write_at(file, data, offset)
            inode.unsynced.append(Write(offset, bytes(data[:count])))
            return count

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        self.model.require_life()
        return super().read_at(file, target, offset)

    def fsync_file(self, file: int) -> None:
        with self.model.lock:
            inode = self.model.file(file)
            self.model.begin("fsync_file", inode.shown)
            if inode.path is None or not self.model.ignores(inode.path):
                inode.sync()

    # Names

    def link_unnamed(self, file: int, folder: int, name: str) -> None:
        with self.model.lock:
            path = self.model.begin("link", self.model.folder(folder).path_of(name))
            super().link_unnamed(file, folder, name)
            self.model.name(self.model.file(file), folder, name, path)

    def link(self, folder: int, name: str, new_folder: int, new_name: str) -> None:
        with self.model.lock:
            path = self.model.begin("link", self.model.folder(new_folder).path_of(new_name))
            super().link(folder, name, new_folder, new_name)
            self.model.name(self.model.folder(folder).now[name], new_folder, new_name, path)

    def rename_exclusive(self, folder: int, name: str, new_name: str) -> None:
        with self.model.lock:
            path = self.model.begin("rename_exclusive", self.model.folder(folder).path_of(new_name))
            super().rename_exclusive(folder, name, new_name)
            self.model.rename(folder, name, new_name, path)

    def rename(self, folder: int, name: str, new_name: str) -> None:
        with self.model.lock:
            path = self.model.begin("rename", self.model.folder(folder).path_of(new_name))
            super().rename(folder, name, new_name)
            self.model.rename(folder, name, new_name, path)

    def symlink(self, target: str, folder: int, name: str) -> None:
        with self.model.lock:
            path = self.model.begin("symlink", self.model.folder(folder).path_of(name))
            super().symlink(target, folder, name)
            self.model.folder(folder).change({name: Link(path, target)})

    def read_link(self, folder: int, name: str) -> str:
        self.model.require_life()
        return super().read_link(folder, name)

    def unlink(self, folder: int, name: str) -> None:
        with self.model.lock:
            self.model.begin("unlink", self.model.folder(folder).path_of(name))
            super().unlink(folder, name)
            self.model.folder(folder).change({name: None})

    # Looking, and letting go

    def status(self, folder: int, name: str) -> os.stat_result:
        self.model.require_life()
        return super().status(folder, name)

    def status_of(self, handle: int) -> os.stat_result:
        self.model.require_life()
        return super().status_of(handle)

    def free_bytes(self, path: str) -> int:
        self.model.require_life()
        return super().free_bytes(path)

    def close(self, handle: int) -> None:
        # Also when dead: the system closes the handles of a dead process.
        with self.model.lock:
            self.model.release(handle)
            super().close(handle)


class _PowerLossCache(PageCache):
    """The page cache of that disk: gone with it."""

    def __init__(self, model: DiskModel) -> None:
        self._model = model

    def set_direct(self, file: int, direct: bool) -> None:
        self._model.require_life()
        super().set_direct(file, direct)

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        self._model.require_life()
        return super().read_at(file, target, offset)
