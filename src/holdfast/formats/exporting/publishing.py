"""Make a new file or folder appear under its name, complete or not at all. A target enters; a path to write to leaves.

What is written lies beside the target, as `.NAME.<random>.partial`, until all of it is durable. An error and Ctrl-C
remove it; a killed process leaves it, and nothing else.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import KeyExistsError, StorageError, UsageError
from holdfast.storage.local.advice import explaining
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.folders import sync_folder
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.local.streaming import FileSink

__all__ = ["check_target", "create_file", "published", "put_file", "require_room"]

logger = logging.getLogger("holdfast")

_DISK = Disk()
# A file system without an exclusive rename.
_RENAME_REFUSED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_MAX_NAME_BYTES = 200


def check_target(target: str | os.PathLike[str]) -> Path:
    """Return the path of a target that does not exist, in a folder that does."""
    if not isinstance(target, str | os.PathLike) or not isinstance(os.fspath(target), str):
        raise UsageError(f"a target is a path, not a {type(target).__name__}")
    text = os.fspath(target)
    if "://" in text:
        raise UsageError(
            f"the target {text!r} is no local path", advice="export to a local path and copy it from there"
        )
    path = Path(os.path.expanduser(text))
    _require_path(text)
    if not path.name or path.name == "..":
        raise UsageError(f"the target {text!r} has no name of its own", advice="name the new file or folder")
    with explaining("looking at it", str(path)):
        is_there, has_folder = _is_there(path), path.parent.is_dir()
    if is_there:
        raise _exists(path)
    if not has_folder:
        raise UsageError(
            "the folder of the target does not exist", file=str(path.parent), advice="create it, or check the path"
        )
    return path


def _require_path(text: str) -> None:
    try:
        is_path = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise UsageError(f"the target {text!r:.200} is no path: no file can have this name")


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def require_room(target: Path, size_bytes: int) -> None:
    """Raise unless the disk of a target has room for so many bytes."""
    free = LocalStorage(target.parent).free_bytes()
    if free < size_bytes:
        raise StorageError(
            f"{size_bytes:,} bytes are to be written and the disk has room for {free:,}",
            errno=errno.ENOSPC,
            file=str(target),
            advice="free room, or choose another disk",
        )


def create_file(path: Path, size_bytes: int) -> FileSink:
    """Create a file of exactly so many bytes, to be written front to back, past the page cache where that is possible.
    It is durable when it is closed, and removed after an error."""
    return LocalStorage(path.parent).create(path.name, size_bytes)


def put_file(path: Path, data: bytes) -> None:
    """Create a small file."""
    LocalStorage(path.parent).put(path.name, data)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Give a path beside the target. What the block has written there is made durable and moved to the target, or, when
    the block raises, removed."""
    name = target.name.encode("utf-8", "replace")[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    partial = target.parent / f".{name}.{os.urandom(4).hex()}.partial"
    try:
        with _explaining_target(target):
            yield partial
            _sync(partial)
            _move(partial, target)
    except BaseException:
        _remove(partial)
        raise


@contextmanager
def _explaining_target(target: Path) -> Iterator[None]:
    """Raise errors of the system as a `StorageError` that names the target, which is written under another name."""
    with explaining("writing it", str(target)):
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise StorageError(
                "what was being written, or its folder, was removed by another process",
                errno=errno.ENOENT,
                file=str(target),
                advice="export again to a folder that stays",
            ) from error


def _sync(path: Path) -> None:
    """Make a file, or a folder and everything in it, durable."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync_file(os.path.join(folder, name))
        _sync_folder(folder)
    if not path.is_dir():
        _sync_file(str(path))


def _sync_file(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _DISK.fsync_file(handle)
    finally:
        _DISK.close(handle)


def _sync_folder(path: str) -> None:
    handle = _DISK.open_root(path)
    try:
        sync_folder(_DISK, handle)
    finally:
        _DISK.close(handle)


def _move(partial: Path, target: Path) -> None:
    """Give what was written its name, which must still be free, and make that durable."""
    folder = _DISK.open_root(str(target.parent))
    try:
        _rename(folder, partial, target)
        sync_folder(_DISK, folder)
    finally:
        _DISK.close(folder)


def _rename(folder: int, partial: Path, target: Path) -> None:
    try:
        _DISK.rename_exclusive(folder, partial.name, target.name)
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        if error.errno not in _RENAME_REFUSED:
            raise
        if os.path.lexists(target):
            raise _exists(target) from None
        if partial.is_dir():
            # Of what another process makes in between, only an empty folder would be replaced.
            _DISK.rename(folder, partial.name, target.name)
        else:
            _DISK.link(folder, partial.name, folder, target.name)
            _DISK.unlink(folder, partial.name)


def _exists(target: Path) -> KeyExistsError:
    return KeyExistsError(
        "the target exists, and nothing is overwritten",
        errno=errno.EEXIST,
        file=str(target),
        advice="choose another target, or remove it",
    )


def _remove(partial: Path) -> None:
    if not os.path.lexists(partial):
        return
    try:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed and may be deleted: %s", partial, error)
