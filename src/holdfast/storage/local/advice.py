"""Turn errors of the system into ours, with what a person can do about them. Knows paths; makes no calls."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import KeyDamagedError, KeyExistsError, KeyMissingError, StorageError

__all__ = ["explained", "explaining"]

_ADVICE = {
    errno.EACCES: "the user of this process may not do that there: look at the owner and the mode of the folders",
    errno.EPERM: "the file system does not allow it: look at its mount options, and for an immutable flag",
    errno.EROFS: "the file system is mounted read-only: choose another place, or remount it",
    errno.ENOSPC: "the disk is full: free room, keep fewer checkpoints, or choose another disk",
    errno.EDQUOT: "the quota is used up: free room, keep fewer checkpoints, or have it raised",
    errno.ENOTDIR: "a part of this path is a file or a link where a folder is needed; links are not followed here",
    errno.ELOOP: "this is a link, and links are not followed here: name what it points to",
    errno.EISDIR: "this is a folder, not a key",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "too many files are open in this process: raise `ulimit -n`, or open fewer at once",
    errno.EIO: "the disk failed: what was being written is lost; look at the system's log before you trust this disk",
    errno.ESTALE: "the file server forgot this folder: mount it again",
}
# Something else lies under the name: a link, or a file in the place of a folder. No second read changes that.
_SOMETHING_ELSE = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}


def explained(error: OSError, doing: str, file: str) -> StorageError:
    """Return the same error as a `StorageError` that names the file."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, FileExistsError):
        return KeyExistsError("the key exists already, and a name is written once", errno=errno.EEXIST, file=file)
    if isinstance(error, FileNotFoundError):
        return KeyMissingError("the key does not exist", errno=errno.ENOENT, file=file)
    kind = KeyDamagedError if error.errno in _SOMETHING_ELSE else StorageError
    return kind.of(error, doing, file=file, advice=_ADVICE.get(error.errno or 0, ""))


@contextmanager
def explaining(doing: str, file: str) -> Iterator[None]:
    """Raise every error of the system inside of it as a `StorageError` that names the file."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise explained(error, doing, file) from error
