"""Make a small file appear under its name, whole or not at all. A folder's handle and bytes enter. Knows no keys.

The file is written without a name, synced, and linked to its name, which fails when the name is taken. Where files
without a name or links are refused, a temporary name in the same folder is used instead.
"""

from __future__ import annotations

import errno
import os

from holdfast.storage.keys import TEMPORARY_PREFIX
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.streaming import Pen

__all__ = ["put_whole", "temporary_name", "try_unlink"]

# No file without a name here: an old kernel, or a file system that has no such thing.
_UNNAMED_REFUSED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS, errno.EPERM}
# No second name here, or no /proc to name the unnamed by.
_LINK_REFUSED = _UNNAMED_REFUSED | {errno.EACCES, errno.EXDEV, errno.EMLINK}


def put_whole(disk: Disk, folder: int, name: str, data: memoryview) -> None:
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
    """Return whether the file could be linked to its name; it is there only then."""
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
        try_unlink(disk, folder, name)
        raise
    return True


def _put_by_temporary_name(disk: Disk, folder: int, name: str, data: memoryview) -> None:
    temporary = temporary_name()
    file = disk.create_file(folder, temporary)
    try:
        Pen(disk, file).write(data)
        disk.fsync_file(file)
        _move_to_free_name(disk, file, folder, temporary, name)
    finally:
        disk.close(file)
        try_unlink(disk, folder, temporary)


def _move_to_free_name(disk: Disk, file: int, folder: int, temporary: str, name: str) -> None:
    try:
        disk.link(folder, temporary, folder, name)
    except FileExistsError:
        # A file server whose first answer was lost reports this for the link that it made: two names, one ours alone.
        if disk.status_of(file).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _LINK_REFUSED:
            raise
        disk.rename_exclusive(folder, temporary, name)


def try_unlink(disk: Disk, folder: int, name: str) -> None:
    """Remove a name; a failure leaves it there, where it does no harm."""
    try:
        disk.unlink(folder, name)
    except OSError:
        pass


def temporary_name() -> str:
    """Return a name that is no key and is never listed, for a file that gets its own name later."""
    return TEMPORARY_PREFIX + os.urandom(8).hex()
