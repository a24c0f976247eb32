"""Free the place of a key of whatever is no value there. A storage and a key enter; a free place leaves.

Only a file system has such things: a folder, a link or a special file under the name of a key, or a file under that of
a folder. What may hold data of a user is renamed, not deleted.
"""

from __future__ import annotations

import errno

from holdfast.errors import KeyDamagedError, StorageError
from holdfast.storage.base import Storage, features_of

__all__ = ["obstruction_of", "remove_or_set_aside", "set_aside"]

# What a file system answers that is asked to delete a folder like a file.
_IS_FOLDER = {errno.EISDIR, errno.EPERM, errno.ENOTEMPTY}


def obstruction_of(storage: Storage, folder: str) -> KeyDamagedError | None:
    """Return why a folder cannot be listed when a file, a link or a special file has its name; None when it can be. Any
    other error of the storage is raised."""
    try:
        storage.entries(folder)
    except KeyDamagedError as error:
        return error
    return None


def remove_or_set_aside(storage: Storage, key: str) -> None:
    """Delete a key; where a folder has its name, rename that."""
    try:
        storage.delete(key)
    except StorageError as error:
        if error.errno not in _IS_FOLDER:
            raise
        set_aside(storage, key)


def set_aside(storage: Storage, key: str) -> None:
    """Rename whatever has the name of a key; an error where the storage cannot."""
    displace = features_of(storage).displace
    if displace is None:
        raise StorageError(
            "something that is no value has this name, and the storage cannot rename it",
            file=key,
            advice="move it away by hand",
        )
    displace(key)
