"""Find, make, sync and remove the folders below a root. Parts of keys enter, handles leave. Knows no files.

No link below the root is followed: every step is relative to the handle of the folder above.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from holdfast.errors import StorageError
from holdfast.storage.local.disk import Disk

__all__ = ["Folders", "link_target", "sync_folder"]

_Result = TypeVar("_Result")

# How often a writer starts again after another process removed the folder, which was still empty. Each time that
# process has deleted a key there, so this ends; on a busy machine a few times in a row are not rare.
_TRIES = 1000
# The folder is in use, or not ours to remove: an empty folder that stays is no key.
_FOLDER_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY, errno.EACCES, errno.EPERM, errno.ENOTDIR}


class Folders:
    """The folders of one storage. Keeps no handles."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._root_name_synced = False

    @contextmanager
    def opened(self, parts: list[str] | tuple[str, ...]) -> Iterator[int]:
        """Give a handle of a folder that is there."""
        with self._walk(self._open_root, parts, self._disk.open_folder) as handle:
            yield handle

    def in_made(self, parts: list[str], action: Callable[[int], _Result]) -> _Result:
        """Return what `action` returns for the handle of a folder, which is made where it is not there."""
        for _ in range(_TRIES - 1):
            try:
                return self._once_in_made(parts, action)
            except FileNotFoundError:
                continue
        return self._once_in_made(parts, action)

    def sync(self, parts: tuple[str, ...]) -> None:
        """Make the names in a folder durable, and those of the folders on the way to it."""
        # From the inside out: a name above is no use before the names below it are safe.
        with self._there(parts) as handles:
            for handle in reversed(handles):
                sync_folder(self._disk, handle)
        if handles and not self._root_name_synced:
            self._sync_root_name()
            self._root_name_synced = True

    def remove_empty(self, folders: list[str]) -> None:
        """Remove a folder and those above it, as far as they are empty."""
        for depth in range(len(folders), 0, -1):
            try:
                with self.opened(folders[: depth - 1]) as parent:
                    self._disk.remove_folder(parent, folders[depth - 1])
            except OSError as error:
                if error.errno not in _FOLDER_STAYS:
                    raise
                return

    def _once_in_made(self, parts: list[str], action: Callable[[int], _Result]) -> _Result:
        with self._walk(self._open_or_make_root, parts, self._open_or_make) as handle:
            return action(handle)

    @contextmanager
    def _walk(
        self, open_root: Callable[[], int], parts: list[str] | tuple[str, ...], step: Callable[[int, str], int]
    ) -> Iterator[int]:
        # Opened here: an interrupt on the way from an open handle to the `try` would lose it.
        handle = open_root()
        try:
            for name in parts:
                # In this order: an interrupt in between must not close a handle twice, which may be another's by then.
                above, handle = handle, step(handle, name)
                self._disk.close(above)
            yield handle
        finally:
            self._disk.close(handle)

    @contextmanager
    def _there(self, parts: tuple[str, ...]) -> Iterator[list[int]]:
        """Give handles of the root and of each folder on the way, as far as they are there."""
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
            # Another process made it in between, which is as good.
            pass

    # The root

    def _open_root(self) -> int:
        try:
            return self._disk.open_root(self._root)
        except FileNotFoundError:
            self._refuse_link_to_nowhere(self._root)
            raise
        except NotADirectoryError as error:
            raise StorageError(
                "the path is, or is below, something that is no folder",
                errno=errno.ENOTDIR,
                file=self._root,
                advice="give the path of a folder; one that does not exist is made",
            ) from error

    def _open_or_make_root(self) -> int:
        try:
            return self._open_root()
        except FileNotFoundError:
            self._make_with_parents(self._root)
        return self._open_root()

    def _refuse_link_to_nowhere(self, path: str) -> None:
        """Raise if a path is, or lies below, a link that leads nowhere. Such a root is not empty: the volume that it
        leads to is not mounted, and what was saved there is still there."""
        parent, name = os.path.split(path)
        if parent == path:
            return
        try:
            handle = self._disk.open_root(parent)
        except FileNotFoundError:
            return self._refuse_link_to_nowhere(parent)
        except OSError:
            return  # what may not be listed cannot be looked at
        try:
            target = link_target(self._disk, handle, name)
        finally:
            self._disk.close(handle)
        if target is not None:
            raise StorageError(
                f"{path} is a link to a folder that does not exist: {target}",
                errno=errno.ENOENT,
                file=self._root,
                advice="mount the volume that it leads to, or give another path",
            )

    def _make_with_parents(self, path: str) -> None:
        parent, name = os.path.split(path)
        handle = self._open_or_make_parent(parent)
        try:
            self._make(handle, name)
            # At once, and also when another process made it: the next folder's name must not be durable before this.
            sync_folder(self._disk, handle)
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
        """Sync the name of the root: another process may have made the root, and not have synced its name yet."""
        try:
            handle = self._disk.open_root(os.path.dirname(self._root))
        except PermissionError:
            # A parent that we may not even list is not one that this user's processes made the root in.
            return
        try:
            sync_folder(self._disk, handle)
        finally:
            self._disk.close(handle)


def link_target(disk: Disk, folder: int, name: str) -> str | None:
    """Return where a link in a folder leads; None for anything else, and for a name that is not there."""
    try:
        is_link = stat.S_ISLNK(disk.status(folder, name).st_mode)
        return disk.read_link(folder, name) if is_link else None
    except FileNotFoundError:
        return None


def sync_folder(disk: Disk, folder: int) -> None:
    """Make the names in a folder durable."""
    try:
        disk.fsync_folder(folder)
    except OSError as error:
        # Not a failure but a refusal: such a file system has no sync of folders, its names are durable as they are.
        if error.errno != errno.EINVAL:
            raise
