"""Keep symbolic links in the root of a local storage, for people and scripts. Nothing here follows one."""

from __future__ import annotations

import errno
import os
import stat

from holdfast.errors import StorageError, UsageError
from holdfast.storage.keys import key_parts, parts_among
from holdfast.storage.local.advice import explaining
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.folders import Folders, link_target, sync_folder
from holdfast.storage.local.publish import temporary_name, try_unlink

__all__ = ["LocalLinks"]


class LocalLinks:
    """The `Links` of one local storage."""

    def __init__(self, root: str, disk: Disk, folders: Folders) -> None:
        self._root = root
        self._disk = disk
        self._folders = folders

    def point(self, name: str, target: str) -> None:
        key_parts(target)
        if len(key_parts(name)) != 1:
            raise UsageError(f"{name!r} is no name of a link in the root")
        with explaining(f"making it a link to {target}", self._path(name)):
            self._folders.in_made([], lambda root: self._replace(root, name, target))

    def remove(self, name: str) -> None:
        with explaining("removing the link", self._path(name)), self._folders.opened([]) as root:
            self._require_replaceable(root, name)
            self._disk.unlink(root, name)
            sync_folder(self._disk, root)

    def targets(self) -> dict[str, str]:
        with explaining("listing its links", self._root):
            try:
                with self._folders.opened([]) as root:
                    kinds = self._disk.list_kinds(root)
                    names = sorted(parts_among(name for name, kind in kinds.items() if kind == stat.S_IFLNK))
                    found = {name: link_target(self._disk, root, name) for name in names}
            except FileNotFoundError:
                return {}
        return {name: target for name, target in found.items() if target is not None}

    def _replace(self, root: int, name: str, target: str) -> None:
        self._require_replaceable(root, name)
        temporary = temporary_name()
        self._disk.symlink(target, root, temporary)
        try:
            self._disk.rename(root, temporary, name)
        except OSError:
            try_unlink(self._disk, root, temporary)
            raise
        sync_folder(self._disk, root)

    def _require_replaceable(self, root: int, name: str) -> None:
        try:
            status = self._disk.status(root, name)
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(status.st_mode):
            raise StorageError(
                "the name is no link, and only a link is replaced", errno=errno.EEXIST, file=self._path(name)
            )

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)
