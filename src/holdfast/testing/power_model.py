"""A model of a disk that may lose its power: what was synced, and what was not, of each file and each folder.

Calls that change the disk enter; one of the disks that POSIX allows after the cut leaves. Makes no such calls itself.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.storage.keys import TEMPORARY_PREFIX
from holdfast.testing.storages import SimulatedCrash

__all__ = ["LIVE", "Choices", "DiskModel", "File", "Folder", "Inode", "Link", "Write", "choices_of"]

LIVE = "live"
_SECTOR_BYTES = 512


class DiskModel:
    """The model of one disk, by the handles that are open. `log` names the calls that change the disk."""

    def __init__(self, scratch: str, *, crash_at: int | None, ignore_fsync_of: Callable[[str], bool]) -> None:
        self.log: list[str] = []
        self.crashed = False
        self.ignores = ignore_fsync_of
        # A sink writes from a thread of its own.
        self.lock = threading.RLock()
        self._scratch = scratch
        self._crash_at = crash_at
        self._outside = Folder("..")
        self._handles: dict[int, Inode] = {}

    def materialise(self, choices: Choices, target: Path) -> None:
        """Make the disk that these choices leave, as a folder."""
        with self.lock:
            root = self._outside.after(choices).get(LIVE)
            if isinstance(root, Folder):
                _write_folder(root, choices, target)

    def begin(self, call: str, what: str) -> str:
        """Count a call that changes the disk, or die at it."""
        self.require_life()
        self.log.append(f"{call} {what or '/'}")
        if len(self.log) == self._crash_at:
            self.crashed = True
            self.require_life()
        return what

    def require_life(self) -> None:
        if self.crashed:
            raise SimulatedCrash(f"the power was cut at call {self._crash_at}: {self.log[-1]}")

    def hold(self, handle: int, inode: Inode) -> int:
        self._handles[handle] = inode
        return handle

    def release(self, handle: int) -> None:
        self._handles.pop(handle, None)

    def inode_of_path(self, path: str) -> Inode:
        if path == self._scratch:
            return self._outside
        # Anything else than the root is a folder above it, which this model does not have to know.
        return self._outside.now[LIVE] if path == os.path.join(self._scratch, LIVE) else Folder("../..")

    def folder(self, handle: int) -> Folder:
        inode = self._handles[handle]
        if not isinstance(inode, Folder):
            raise TypeError(f"{inode.path} is no folder")
        return inode

    def file(self, handle: int) -> File:
        inode = self._handles[handle]
        if not isinstance(inode, File):
            raise TypeError(f"{inode.path} is no file")
        return inode

    def name(self, inode: Inode, folder: int, name: str, path: str) -> None:
        self.folder(folder).change({name: inode})
        # A file that had a real name before keeps it, with what was synced of its bytes.
        if inode.path is None or TEMPORARY_PREFIX in inode.path:
            self._settle(inode, path)

    def rename(self, folder: int, name: str, new_name: str, path: str) -> None:
        inode = self.folder(folder).now[name]
        # One change, for a rename is never half there.
        self.folder(folder).change({name: None, new_name: inode})
        self._settle(inode, path)

    def _settle(self, inode: Inode, path: str) -> None:
        """Decide whether to forget the syncs of an inode, now that it has its real name."""
        inode.path = path
        if isinstance(inode, File) and self.ignores(path):
            inode.forget_syncs()


@dataclass(eq=False)
class Inode:
    # The first real name, relative to the root; None for a file that has none yet.
    path: str | None


@dataclass(eq=False)
class Link(Inode):
    target: str


@dataclass(frozen=True)
class Write:
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(eq=False)
class File(Inode):
    synced: bytearray = field(default_factory=bytearray)
    unsynced: list[Write] = field(default_factory=list)
    _before_syncs: list[Write] = field(default_factory=list)

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

    def after(self, choices: Choices) -> bytes:
        content = bytearray(self.synced)
        for write in self.unsynced:
            for kept in choices.of_write(write):
                _apply(content, kept)
            if len(content) < write.end and choices.keeps_size():
                content.extend(bytes(write.end - len(content)))
        return bytes(content)


@dataclass(eq=False)
class Folder(Inode):
    path: str
    now: dict[str, Inode] = field(default_factory=dict)
    synced: dict[str, Inode] = field(default_factory=dict)
    # Each change names what is under some names from then on, None for nothing.
    unsynced: list[dict[str, Inode | None]] = field(default_factory=list)

    def path_of(self, name: str) -> str:
        if self.path == "..":
            return "" if name == LIVE else f"../{name}"
        return f"{self.path}/{name}" if self.path else name

    def change(self, names: dict[str, Inode | None]) -> None:
        self.unsynced.append(names)
        _apply_names(self.now, names)

    def sync(self) -> None:
        self.synced = dict(self.now)
        self.unsynced = []

    def after(self, choices: Choices) -> dict[str, Inode]:
        names = dict(self.synced)
        for change, kept in zip(self.unsynced, choices.of_names(len(self.unsynced)), strict=True):
            if kept:
                _apply_names(names, change)
        return names


class Choices:
    """Seed 0, and what the others differ from: nothing that was not synced is there."""

    def of_names(self, count: int) -> list[bool]:
        """Return which of a folder's changes, in the order of time, survive."""
        return [False] * count

    def of_write(self, write: Write) -> list[Write]:
        """Return what survives of a write."""
        return []

    def keeps_size(self) -> bool:
        """Return whether a file has the size that a lost write gave it, with zeros in its place."""
        return False


class _KeepAll(Choices):
    def of_names(self, count: int) -> list[bool]:
        return [True] * count

    def of_write(self, write: Write) -> list[Write]:
        return [write]


class _KeepNames(Choices):
    def of_names(self, count: int) -> list[bool]:
        return [True] * count


class _KeepLaterNames(Choices):
    def of_names(self, count: int) -> list[bool]:
        return [position >= count // 2 for position in range(count)]

    def keeps_size(self) -> bool:
        return True


class _Random(Choices):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of_names(self, count: int) -> list[bool]:
        return [self._random.random() < 0.5 for _ in range(count)]

    def of_write(self, write: Write) -> list[Write]:
        fate = self._random.choice(("kept", "lost", "front kept", "back kept"))
        if fate == "kept":
            return [write]
        cut = self._cut(write)
        if fate == "lost" or cut is None:
            return []
        if fate == "front kept":
            return [Write(write.offset, write.data[:cut])]
        return [Write(write.offset + cut, write.data[cut:])]

    def keeps_size(self) -> bool:
        return self._random.random() < 0.5

    def _cut(self, write: Write) -> int | None:
        """Return an offset inside the write at which a sector ends; None if there is none."""
        first = -write.offset % _SECTOR_BYTES or _SECTOR_BYTES
        cuts = range(first, len(write.data), _SECTOR_BYTES)
        return self._random.choice(cuts) if cuts else None


def choices_of(seed: int) -> Choices:
    named: dict[int, type[Choices]] = {0: Choices, 1: _KeepAll, 2: _KeepNames, 3: _KeepLaterNames}
    return named[seed]() if seed in named else _Random(seed)


def _apply(content: bytearray, write: Write) -> None:
    if len(content) < write.offset:
        content.extend(bytes(write.offset - len(content)))
    content[write.offset : write.end] = write.data


def _apply_names(names: dict[str, Inode], change: dict[str, Inode | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _write_folder(folder: Folder, choices: Choices, target: Path) -> None:
    target.mkdir(parents=True)
    for name, inode in folder.after(choices).items():
        path = target / name
        if isinstance(inode, Folder):
            _write_folder(inode, choices, path)
        elif isinstance(inode, Link):
            path.symlink_to(inode.target)
        elif isinstance(inode, File):
            path.write_bytes(inode.after(choices))
