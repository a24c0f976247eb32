"""Durable bytes in a folder of a POSIX file system. Keys and bytes enter, files come to be; torch is not known here.

Every call to the system goes through `Disk`, relative to a folder handle, and no link below the root is followed: a
run that came from elsewhere cannot make this read or write outside the root. Links and special files are no keys:
they are not listed, and to open one is an error.

How a name comes to be, and why in this order:

- `put` writes a file that has no name, syncs it, and links it to its key, which fails when the key is taken. A reader
  sees all of it or nothing (`publish`).
- `create` claims its key with an exclusive open and streams into it.
- `clone`, a declared feature, gives a file a second name in another folder, by a hard link.
- None of them syncs the folder: `sync` does, once for all of its names.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager

from holdfast.errors import KeyDamagedError, UsageError
from holdfast.storage.base import Entry, StorageFeatures
from holdfast.storage.keys import folder_parts, key_parts, parts_among
from holdfast.storage.local.advice import explaining
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.folders import Folders, sync_folder
from holdfast.storage.local.links import LocalLinks
from holdfast.storage.local.publish import put_whole
from holdfast.storage.local.source import LocalSource
from holdfast.storage.local.streaming import FileSink

__all__ = ["LocalStorage"]

_DISK = Disk()
# No second name here: a file system without links, too many of them, another disk, or a file of another user.
_CLONE_REFUSED = {
    errno.EACCES,
    errno.EINVAL,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EXDEV,
}
# No name of a run begins so.
_DISPLACED_PREFIX = "set-aside-"


class LocalStorage:
    """A `Storage` in the folder `root`, which is made, with the folders above it, when something is first written.

    Only strings and a `Disk` are kept, no handles: it can be pickled, shared by threads, and used after a fork.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk = _DISK) -> None:
        path = os.fspath(root)
        if not isinstance(path, str) or path == "" or "\0" in path:
            raise UsageError(f"{path!r} is no path of a folder")
        # The folder above a link is that of its target: only the system knows what `..` means there.
        self._root = os.path.realpath(path) if os.pardir in path.split(os.sep) else os.path.abspath(path)
        self._disk = disk
        self._folders = Folders(self._root, disk)

    @property
    def url(self) -> str:
        return self._root

    @property
    def features(self) -> StorageFeatures:
        return StorageFeatures(
            # Another process opens neither a subclass nor a disk that exists only in this one.
            reopens_by_url=type(self) is LocalStorage and self._disk is _DISK,
            aligned_reads=True,
            links=LocalLinks(self._root, self._disk, self._folders),
            clone=self._clone,
            displace=self._displace,
            # A subclass that lists otherwise is asked itself.
            folder_names=self._folder_names if type(self).entries is LocalStorage.entries else None,
            stamp=self._stamp,
            identity=self._identity,
        )

    def put(self, key: str, data: bytes) -> None:
        *folders, name = key_parts(key)
        with self._explaining(f"writing a file of {len(data)} bytes", key):
            self._folders.in_made(folders, lambda folder: put_whole(self._disk, folder, name, memoryview(data)))

    def create(self, key: str, size_bytes: int) -> FileSink:
        *folders, name = key_parts(key)
        if size_bytes < 0:
            raise UsageError(f"a file cannot have {size_bytes} bytes", file=self._path(key))
        with self._explaining("creating it", key):
            path = self._path(key)

            # The sink owns the handle before the folder is closed, where an interrupt would lose it.
            def create_in(folder: int) -> FileSink:
                file = self._disk.create_file(folder, name)
                return FileSink(self._disk, file, path, size_bytes, discard=lambda: self.delete(key))

            return self._folders.in_made(folders, create_in)

    def open(self, key: str) -> LocalSource:
        *folders, name = key_parts(key)
        with self._explaining("opening it", key):
            path = self._path(key)
            with self._folders.opened(folders) as folder:
                file = self._disk.open_file(folder, name)
                # In here: it owns the handle before the folder is closed, where an interrupt would lose it.
                return LocalSource(self._disk, file, path)

    def read(self, key: str, limit_bytes: int) -> bytes:
        with self.open(key) as source:
            if source.size_bytes > limit_bytes:
                raise KeyDamagedError(
                    f"the key has {source.size_bytes} bytes, and at most {limit_bytes} are expected here",
                    errno=errno.EFBIG,
                    file=self._path(key),
                )
            data = bytearray(source.size_bytes)
            source.read_into(0, memoryview(data))
            return bytes(data)

    def entries(self, folder: str) -> list[Entry]:
        parts = folder_parts(folder)
        with self._explaining("listing it", folder):
            try:
                with self._folders.opened(parts) as handle:
                    kinds = self._disk.list_kinds(handle)
                    found = [
                        Entry(name, None) if kinds[name] == stat.S_IFDIR else self._entry(handle, name)
                        for name in sorted(parts_among(kinds))
                    ]
            except FileNotFoundError:
                return []
        return [entry for entry in found if entry is not None]

    def sync(self, folder: str) -> None:
        parts = folder_parts(folder)
        with self._explaining("syncing the folder", folder):
            self._folders.sync(parts)

    def delete(self, key: str) -> None:
        """Remove a key, and the folders that have become empty by it: without keys there are no folders."""
        *folders, name = key_parts(key)
        with self._explaining("deleting it", key):
            try:
                with self._folders.opened(folders) as folder:
                    self._disk.unlink(folder, name)
            except FileNotFoundError:
                pass
            self._folders.remove_empty(folders)

    def free_bytes(self) -> int:
        path = self._root
        with self._explaining("asking for the free room", ""):
            while True:
                try:
                    return self._disk.free_bytes(path)
                except FileNotFoundError:
                    if path == os.path.dirname(path):
                        raise
                    path = os.path.dirname(path)

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    # Features

    def _identity(self) -> tuple[int, int] | None:
        """Return what is the same for every path to the root: the numbers of its device and its inode; None as long as
        it is not there."""
        with self._explaining("looking at it", ""):
            try:
                with self._folders.opened([]) as root:
                    status = self._disk.status_of(root)
            except FileNotFoundError:
                return None
        return status.st_dev, status.st_ino

    def _stamp(self, key: str) -> tuple[int, str]:
        """Return the size of the file of a key, and its place on its disk. A file system without a disk of its own,
        such as one on a network, may number its files anew at any time."""
        *folders, name = key_parts(key)
        with self._explaining("looking at it", key), self._folders.opened(folders) as folder:
            status = self._disk.status(folder, name)
        is_numbered = stat.S_ISREG(status.st_mode) and os.major(status.st_dev) != 0
        return status.st_size, f"{status.st_dev}:{status.st_ino}" if is_numbered else ""

    def _folder_names(self, folder: str) -> list[str]:
        parts = folder_parts(folder)
        with self._explaining("listing it", folder):
            try:
                with self._folders.opened(parts) as handle:
                    return parts_among(self._disk.list_folders(handle))
            except FileNotFoundError:
                return []

    def _clone(self, key: str, new_key: str) -> bool:
        """Give the file of a key a second name by a hard link. Return False where the file system refuses links, or
        this one. A file is never written again once it is closed, so the two names cannot affect each other."""
        *folders, name = key_parts(key)
        *new_folders, new_name = key_parts(new_key)
        with self._explaining("opening it", key), self._folders.opened(folders) as folder:
            if not stat.S_ISREG(self._disk.status(folder, name).st_mode):
                raise KeyDamagedError("the key is no regular file", file=self._path(key))
            with self._explaining(f"making it a second name of {key}", new_key):
                try:
                    self._folders.in_made(new_folders, lambda new: self._disk.link(folder, name, new, new_name))
                except OSError as error:
                    if error.errno not in _CLONE_REFUSED:
                        raise
                    self._folders.remove_empty(new_folders)
                    return False
        return True

    def _displace(self, key: str) -> str:
        """Rename whatever has the name of a key, also a folder with all that is in it, a link or a special file.
        Return the new key, in the same folder: nothing reads it, and nothing in it is lost."""
        *folders, name = key_parts(key)
        new_name = f"{_DISPLACED_PREFIX}{os.urandom(4).hex()}.{name}"
        with self._explaining(f"renaming it to {new_name}", key), self._folders.opened(folders) as folder:
            self._disk.rename(folder, name, new_name)
            sync_folder(self._disk, folder)
        return "/".join((*folders, new_name))

    # Single names

    def _entry(self, folder: int, name: str) -> Entry | None:
        try:
            status = self._disk.status(folder, name)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            return Entry(name, None)
        return Entry(name, status.st_size) if stat.S_ISREG(status.st_mode) else None

    # Errors

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key) if key else self._root

    def _explaining(self, doing: str, key: str) -> AbstractContextManager[None]:
        return explaining(doing, self._path(key))
