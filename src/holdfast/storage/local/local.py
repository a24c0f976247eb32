"""Durable bytes in a folder of a POSIX file system. Keys and bytes enter, files come to be; torch is not known here.

Every call to the system goes through `Disk`, relative to a folder handle, and no link below the root is followed: a
run that came from elsewhere cannot make this read or write outside the root. Links and special files are no keys:
they are not listed, and to open one is an error.

How a name comes to be, and why in this order:

- `put` writes a file that has no name, syncs it, and links it to its key, which fails when the key is taken. A reader
  sees all of it or nothing. Then it is synced once more, see `_put_unnamed`. Where files without a name or links are
  refused, a temporary name in the same folder stands in.
- `create` claims its key with an exclusive open and streams into it.
- Neither syncs the folder: `sync` does, once for all of its names.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

from holdfast.errors import KeyDamagedError, KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry
from holdfast.storage.keys import TEMPORARY_PREFIX, folder_parts, is_part, key_parts
from holdfast.storage.local.advice import explained
from holdfast.storage.local.bypass import ALIGNMENT_BYTES, Bypass
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.streaming import FileSink, Pen

__all__ = ["LocalSource", "LocalStorage"]

_Result = TypeVar("_Result")

_DISK = Disk()
# No name of a run begins so.
_SET_ASIDE_PREFIX = "set-aside-"
# How often a writer takes its way again when a deleter removed the folder, still empty, under its feet.
_TRIES = 8
# No file without a name here: an old kernel, or a file system that has no such thing.
_UNNAMED_REFUSED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS, errno.EPERM}
# No second name here, or no /proc to name the unnamed by.
_LINK_REFUSED = _UNNAMED_REFUSED | {errno.EACCES, errno.EXDEV, errno.EMLINK}
# The folder is in use, or not ours to remove: an empty folder that stays is no key.
_FOLDER_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY, errno.EACCES, errno.EPERM, errno.ENOTDIR}


class LocalStorage:
    """A `Storage` in the folder `root`, which is made, with the folders above it, when something is first written.

    Only strings and a `Disk` are kept, no handles: it can be pickled, shared by threads, and used after a fork.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk = _DISK) -> None:
        path = os.fspath(root)
        if not isinstance(path, str) or path == "" or "\0" in path:
            raise UsageError(f"{path!r} is no path of a folder")
        # The folder above a link is that of its target: only the system can say what `..` means there.
        self._root = os.path.realpath(path) if os.pardir in path.split(os.sep) else os.path.abspath(path)
        self._disk = disk
        self._root_name_synced = False

    @property
    def url(self) -> str:
        return self._root

    @property
    def opens_by_url(self) -> bool:
        """Whether another process that opens `url` has the same storage: not a class or a disk that is only in this."""
        return type(self) is LocalStorage and self._disk is _DISK

    def folder_identity(self) -> tuple[int, int] | None:
        """Return what is the same for every path to the root: the numbers of its device and its inode; None as long as
        it is not there."""
        with self._explaining("looking at it", ""):
            try:
                with self._folder([]) as root:
                    status = self._disk.status_of(root)
            except FileNotFoundError:
                return None
        return status.st_dev, status.st_ino

    def put(self, key: str, data: bytes) -> None:
        *folders, name = key_parts(key)
        with self._explaining(f"writing a file of {len(data)} bytes", key):
            self._in_made_folder(folders, lambda folder: _put(self._disk, folder, name, memoryview(data)))

    def create(self, key: str, size_bytes: int) -> FileSink:
        *folders, name = key_parts(key)
        if size_bytes < 0:
            raise UsageError(f"a file cannot have {size_bytes} bytes", file=self._path(key))
        with self._explaining("creating it", key):
            file = self._in_made_folder(folders, lambda folder: self._disk.create_file(folder, name))
            return FileSink(self._disk, file, self._path(key), size_bytes, discard=lambda: self.delete(key))

    def open(self, key: str) -> LocalSource:
        *folders, name = key_parts(key)
        with self._explaining("opening it", key):
            with self._folder(folders) as folder:
                file = self._disk.open_file(folder, name)
            return LocalSource(self._disk, file, self._path(key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        with self.open(key) as source:
            if source.size_bytes > limit_bytes:
                raise KeyDamagedError(
                    f"it has {source.size_bytes} bytes, and at most {limit_bytes} are expected here",
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
                with self._folder(parts) as handle:
                    names = sorted(name for name in self._disk.list_names(handle) if is_part(name))
                    found = [self._entry(handle, name) for name in names]
            except FileNotFoundError:
                return []
        return [entry for entry in found if entry is not None]

    def sync(self, folder: str) -> None:
        parts = folder_parts(folder)
        with self._explaining("syncing the folder", folder):
            # From the inside out: a name above is no use before the names below it are safe.
            with self._folders_there(parts) as handles:
                for handle in reversed(handles):
                    _sync_folder(self._disk, handle)
            if handles and not self._root_name_synced:
                self._sync_root_name()
                self._root_name_synced = True

    def delete(self, key: str) -> None:
        """Remove a key, and the folders that have become empty by it: without keys there are no folders."""
        *folders, name = key_parts(key)
        with self._explaining("deleting it", key):
            try:
                with self._folder(folders) as folder:
                    self._disk.unlink(folder, name)
            except FileNotFoundError:
                pass
            self._remove_empty(folders)

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

    def point(self, name: str, target: str) -> None:
        """Make the link `name` in the root lead to `target`, a key or a folder. A reader finds the old or the new one.

        For people and scripts: nothing here ever follows it. Only a link is replaced, never a file or a folder.
        """
        key_parts(target)
        if len(key_parts(name)) != 1:
            raise UsageError(f"{name!r} is no name of a link in the root")
        with self._explaining(f"making it a link to {target}", name):
            self._in_made_folder([], lambda root: self._point(root, name, target))

    def links(self) -> dict[str, str]:
        """The links in the root, and where each leads. Whatever is no link is passed over."""
        with self._explaining("listing its links", ""):
            try:
                with self._folder([]) as root:
                    names = sorted(name for name in self._disk.list_names(root) if is_part(name))
                    found = {name: self._target(root, name) for name in names}
            except FileNotFoundError:
                return {}
        return {name: target for name, target in found.items() if target is not None}

    def unpoint(self, name: str) -> None:
        """Remove a link from the root. Anything else under that name stays, and is an error."""
        with self._explaining("removing the link", name), self._folder([]) as root:
            self._require_replaceable(root, name)
            self._disk.unlink(root, name)
            _sync_folder(self._disk, root)

    def set_aside(self, key: str) -> str:
        """Rename whatever lies in the place of a key, also a folder with all that is in it, a link or a special file.
        Return the new key, in the same folder: nothing reads it, and nothing in it is lost."""
        *folders, name = key_parts(key)
        new_name = f"{_SET_ASIDE_PREFIX}{os.urandom(4).hex()}.{name}"
        with self._explaining(f"renaming it to {new_name}", key), self._folder(folders) as folder:
            self._disk.rename(folder, name, new_name)
            _sync_folder(self._disk, folder)
        return "/".join((*folders, new_name))

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    # Ways to a folder

    @contextmanager
    def _folder(self, parts: list[str] | tuple[str, ...]) -> Iterator[int]:
        """A handle of a folder that is there."""
        with self._walk(self._open_root(), parts, self._disk.open_folder) as handle:
            yield handle

    def _in_made_folder(self, parts: list[str], action: Callable[[int], _Result]) -> _Result:
        """What `action` gives for the handle of a folder, which is made where it is not there."""
        for _ in range(_TRIES - 1):
            try:
                return self._once_in_made_folder(parts, action)
            except FileNotFoundError:
                continue
        return self._once_in_made_folder(parts, action)

    def _once_in_made_folder(self, parts: list[str], action: Callable[[int], _Result]) -> _Result:
        with self._walk(self._open_or_make_root(), parts, self._open_or_make) as handle:
            return action(handle)

    @contextmanager
    def _walk(self, handle: int, parts: list[str] | tuple[str, ...], step: Callable[[int, str], int]) -> Iterator[int]:
        try:
            for name in parts:
                deeper = step(handle, name)
                self._disk.close(handle)
                handle = deeper
            yield handle
        finally:
            self._disk.close(handle)

    @contextmanager
    def _folders_there(self, parts: tuple[str, ...]) -> Iterator[list[int]]:
        """Handles of the root and of each folder on the way, as far as they are there."""
        handles: list[int] = []
        with ExitStack() as stack:
            try:
                handles.append(self._open_root())
                stack.callback(self._disk.close, handles[-1])
                for name in parts:
                    handles.append(self._disk.open_folder(handles[-1], name))
                    stack.callback(self._disk.close, handles[-1])
            except FileNotFoundError:
                pass
            yield handles

    def _open_or_make(self, folder: int, name: str) -> int:
        try:
            return self._disk.open_folder(folder, name)
        except FileNotFoundError:
            self._make(folder, name)
            return self._disk.open_folder(folder, name)

    def _make(self, folder: int, name: str) -> None:
        try:
            self._disk.make_folder(folder, name)
        except FileExistsError:
            # Somebody else made it in between, which is as good.
            pass

    # The root

    def _open_root(self) -> int:
        try:
            return self._disk.open_root(self._root)
        except NotADirectoryError as error:
            raise StorageError(
                "it is, or lies below, something that is no folder",
                errno=errno.ENOTDIR,
                file=self._root,
                advice="give the path of a folder; one that does not exist is made",
            ) from error

    def _open_or_make_root(self) -> int:
        try:
            return self._open_root()
        except FileNotFoundError:
            self._make_with_parents(self._root)
        try:
            return self._open_root()
        except FileNotFoundError as error:
            raise StorageError(
                "it is a link to a folder that does not exist", errno=errno.ENOENT, file=self._root
            ) from error

    def _make_with_parents(self, path: str) -> None:
        parent, name = os.path.split(path)
        handle = self._open_or_make_parent(parent)
        try:
            self._make(handle, name)
            # At once, and also when another process made it: the next folder's name must not be durable before this.
            _sync_folder(self._disk, handle)
        finally:
            self._disk.close(handle)

    def _open_or_make_parent(self, path: str) -> int:
        try:
            return self._disk.open_root(path)
        except FileNotFoundError:
            if path == os.path.dirname(path):
                raise
            self._make_with_parents(path)
            return self._disk.open_root(path)

    def _sync_root_name(self) -> None:
        """Once for each storage: another process may have made the root and not have synced its name yet."""
        try:
            handle = self._disk.open_root(os.path.dirname(self._root))
        except PermissionError:
            # A parent that we may not even list is not one that this user's processes made the root in.
            return
        try:
            _sync_folder(self._disk, handle)
        finally:
            self._disk.close(handle)

    # Single names

    def _entry(self, folder: int, name: str) -> Entry | None:
        try:
            status = self._disk.status(folder, name)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            return Entry(name, None)
        return Entry(name, status.st_size) if stat.S_ISREG(status.st_mode) else None

    def _remove_empty(self, folders: list[str]) -> None:
        for depth in range(len(folders), 0, -1):
            try:
                with self._folder(folders[: depth - 1]) as parent:
                    self._disk.remove_folder(parent, folders[depth - 1])
            except OSError as error:
                if error.errno not in _FOLDER_STAYS:
                    raise
                return

    def _point(self, root: int, name: str, target: str) -> None:
        self._require_replaceable(root, name)
        temporary = _temporary_name()
        self._disk.symlink(target, root, temporary)
        try:
            self._disk.rename(root, temporary, name)
        except OSError:
            _try_unlink(self._disk, root, temporary)
            raise
        _sync_folder(self._disk, root)

    def _target(self, root: int, name: str) -> str | None:
        try:
            is_link = stat.S_ISLNK(self._disk.status(root, name).st_mode)
            return self._disk.read_link(root, name) if is_link else None
        except FileNotFoundError:
            return None

    def _require_replaceable(self, root: int, name: str) -> None:
        try:
            status = self._disk.status(root, name)
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(status.st_mode):
            raise StorageError("it is no link, and only a link is replaced", errno=errno.EEXIST, file=self._path(name))

    # Words

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key) if key else self._root

    @contextmanager
    def _explaining(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise explained(error, doing, self._path(key)) from error


class LocalSource:
    """A `Source` of one regular file. It owns the handle `file` from now on, also when this raises."""

    def __init__(self, disk: Disk, file: int, path: str) -> None:
        self._disk = disk
        self._file: int | None = file
        self._bypass: Bypass | None = None
        self._bypass_decided = False
        self._path = path
        try:
            self._size_bytes = self._regular_size_bytes(file)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def alignment_bytes(self) -> int:
        """More than 1 where reads past the page cache pay. Whoever asks is taken to read the file once, much of it."""
        if not self._bypass_decided and self._file is not None:
            self._bypass_decided = True
            self._bypass = Bypass.where_it_pays(self._disk, self._file, self._size_bytes)
        return 1 if self._bypass is None else ALIGNMENT_BYTES

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset < 0:
            raise UsageError(f"a file has no byte at {offset}", file=self._path)
        if target.nbytes == 0:
            return
        view = target.cast("B")
        if self._bypass is not None:
            count = self._read_past_cache(self._bypass, view, offset)
            offset += count
            view = view[count:]
        while len(view) > 0:
            count = self._read_some(view, offset)
            offset += count
            view = view[count:]

    def close(self) -> None:
        bypass, self._bypass = self._bypass, None
        if bypass is not None:
            bypass.close()
        file, self._file = self._file, None
        if file is not None:
            self._disk.close(file)

    def _read_past_cache(self, bypass: Bypass, view: memoryview, offset: int) -> int:
        try:
            return bypass.read(view, offset)
        except OSError as error:
            raise explained(error, "reading it", self._path) from error

    def _read_some(self, view: memoryview, offset: int) -> int:
        if self._file is None:
            raise StorageError("it was closed before this read", errno=errno.EBADF, file=self._path)
        try:
            count = self._disk.read_at(self._file, view, offset)
        except OSError as error:
            raise explained(error, "reading it", self._path) from error
        if count == 0:
            raise KeyDamagedError(
                f"it ends before byte {offset + len(view)}: the file is shorter than it should be",
                file=self._path,
                byte_range=(offset, offset + len(view)),
            )
        return count

    def _regular_size_bytes(self, file: int) -> int:
        status = self._disk.status_of(file)
        if stat.S_ISDIR(status.st_mode):
            raise KeyMissingError("it is a folder, and holds no bytes", errno=errno.EISDIR, file=self._path)
        if not stat.S_ISREG(status.st_mode):
            raise KeyDamagedError("it is no regular file", errno=errno.ENXIO, file=self._path)
        return status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()


def _put(disk: Disk, folder: int, name: str, data: memoryview) -> None:
    """Make a file with these bytes appear under a free name, whole."""
    try:
        file = disk.create_unnamed(folder)
    except OSError as error:
        if error.errno not in _UNNAMED_REFUSED:
            raise
        return _put_by_temporary_name(disk, folder, name, data)
    try:
        linked = _put_unnamed(disk, file, folder, name, data)
    finally:
        disk.close(file)
    if not linked:
        _put_by_temporary_name(disk, folder, name, data)


def _put_unnamed(disk: Disk, file: int, folder: int, name: str, data: memoryview) -> bool:
    """Whether it could be done this way."""
    Pen(disk, file).write(data)
    disk.fsync_file(file)
    try:
        disk.link_unnamed(file, folder, name)
    except OSError as error:
        if error.errno not in _LINK_REFUSED:
            raise
        return False
    try:
        # Once more, with a name: Btrfs does not log a file that has none, so after the first sync alone a power cut
        # could leave the name with an empty file. The first stays: elsewhere the name may be durable at any moment.
        disk.fsync_file(file)
    except OSError:
        _try_unlink(disk, folder, name)
        raise
    return True


def _put_by_temporary_name(disk: Disk, folder: int, name: str, data: memoryview) -> None:
    temporary = _temporary_name()
    file = disk.create_file(folder, temporary)
    try:
        Pen(disk, file).write(data)
        disk.fsync_file(file)
        _move_to_free_name(disk, file, folder, temporary, name)
    finally:
        disk.close(file)
        _try_unlink(disk, folder, temporary)


def _move_to_free_name(disk: Disk, file: int, folder: int, temporary: str, name: str) -> None:
    try:
        disk.link(folder, temporary, name)
    except FileExistsError:
        # A file server whose first answer was lost says this of its own work: two names, and one of them is ours alone.
        if disk.status_of(file).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _LINK_REFUSED:
            raise
        disk.rename_exclusive(folder, temporary, name)


def _sync_folder(disk: Disk, folder: int) -> None:
    try:
        disk.fsync_folder(folder)
    except OSError as error:
        # Not a failure but a refusal: such a file system has no sync of folders, its names are durable as they are.
        if error.errno != errno.EINVAL:
            raise


def _try_unlink(disk: Disk, folder: int, name: str) -> None:
    try:
        disk.unlink(folder, name)
    except OSError:
        pass


def _temporary_name() -> str:
    return TEMPORARY_PREFIX + os.urandom(8).hex()
