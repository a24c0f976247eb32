"""Repeat reads that fail for a moment. A storage enters; the same one, whose reads are tried again, leaves.

A file server that restarts, or a cable that is loose, fails a read that works a second later. What is decided from such
an error is wrong: an older checkpoint is taken for the newest, or a sound one for damaged. So a read is tried a few
times, and only then an error, which still does not mean damage. Writes are never repeated: an error while bytes are
made durable is final.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from holdfast.errors import KeyDamagedError, KeyExistsError, KeyMissingError, StorageError
from holdfast.storage.base import Entry, Links, Sink, Source, Storage, StorageFeatures, alignment_of, features_of

logger = logging.getLogger("holdfast")

__all__ = ["PAUSES_SECONDS", "RetryingStorage", "with_retries"]

_Result = TypeVar("_Result")

PAUSES_SECONDS = (0.05, 0.2, 0.8, 2.0)
"""How long to wait before the second and each further attempt."""

_MOMENTARY = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.ENOLINK,
    errno.EPROTO,
    errno.EREMOTEIO,
    # A storage of a plug-in that gives no reason.
    None,
}
_UNREADABLE = (
    "the storage cannot be read now, which does not mean that anything is damaged: check the mount, the file server or "
    "the disk, and try again"
)


def with_retries(storage: Storage) -> Storage:
    """Return the storage with reads that are repeated after momentary errors."""
    return storage if isinstance(storage, RetryingStorage) else RetryingStorage(storage)


class RetryingStorage:
    """Any storage, whose `open`, `read`, `entries`, `folder_names`, `stamp`, `read_into` and `targets` of links are
    repeated. All else is the storage's own."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def features(self) -> StorageFeatures:
        found = features_of(self.inner)
        if found.links is not None:
            found = replace(found, links=_RetryingLinks(found.links))
        if (stamp := found.stamp) is not None:
            found = replace(found, stamp=lambda key: _retried(lambda: stamp(key), key))
        if (listed := found.folder_names) is not None:
            found = replace(found, folder_names=lambda folder: _retried(lambda: listed(folder), folder))
        return found

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def create(self, key: str, size_bytes: int) -> Sink:
        return self.inner.create(key, size_bytes)

    def open(self, key: str) -> Source:
        return _RetryingSource(self.inner, key, _retried(lambda: self.inner.open(key), key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        return _retried(lambda: self.inner.read(key, limit_bytes), key)

    def entries(self, folder: str) -> list[Entry]:
        return _retried(lambda: self.inner.entries(folder), folder)

    def sync(self, folder: str) -> None:
        self.inner.sync(folder)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def __repr__(self) -> str:
        return repr(self.inner)


class _RetryingLinks:
    """Links whose listing is repeated, like that of `entries`."""

    def __init__(self, inner: Links) -> None:
        self._inner = inner

    def point(self, name: str, target: str) -> None:
        self._inner.point(name, target)

    def remove(self, name: str) -> None:
        self._inner.remove(name)

    def targets(self) -> dict[str, str]:
        return _retried(self._inner.targets, "")


class _RetryingSource:
    """A source that is opened anew when a read of it fails: a handle that a file server forgot never works again."""

    def __init__(self, storage: Storage, key: str, first: Source) -> None:
        self._storage = storage
        self._key = key
        self._size_bytes = first.size_bytes
        self._sources = [first]
        self._closed = False
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def alignment_bytes(self) -> int:
        return alignment_of(self._sources[-1]) if features_of(self._storage).aligned_reads else 1

    def read_into(self, offset: int, target: memoryview) -> None:
        source = self._sources[-1]
        try:
            source.read_into(offset, target)
        except StorageError as error:
            if self._closed or not _is_momentary(error):
                raise
            self._read_anew(source, offset, target, error)

    def _read_anew(self, failed: Source, offset: int, target: memoryview, error: StorageError) -> None:
        def read() -> None:
            nonlocal failed
            failed = self._another(failed)
            failed.read_into(offset, target)

        _retried(read, self._key, failed=error)

    def _another(self, failed: Source) -> Source:
        """Return a source that was opened after the failed one. That stays open: other threads may be reading it."""
        with self._lock:
            if self._sources[-1] is failed:
                self._sources.append(self._storage.open(self._key))
            newest = self._sources[-1]
        if newest.size_bytes != self._size_bytes:
            raise KeyDamagedError(
                f"the key had {self._size_bytes} bytes and has {newest.size_bytes} now: it was replaced meanwhile",
                file=self._key,
            )
        return newest

    def close(self) -> None:
        self._closed = True
        for source in self._sources:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _retried(read: Callable[[], _Result], key: str, *, failed: StorageError | None = None) -> _Result:
    """Return what a read gives, after as many attempts as there are pauses and one more. `failed`: the first failed."""
    pauses = iter(PAUSES_SECONDS)
    error = failed
    while True:
        if error is not None:
            pause = next(pauses, None)
            if pause is None:
                raise _unreadable(error) from error
            logger.info("%s could not be read, and is tried again in %g s: %s", key or "the run", pause, error.problem)
            time.sleep(pause)
        try:
            return read()
        except StorageError as found:
            if not _is_momentary(found):
                raise
            error = found


def _is_momentary(error: StorageError) -> bool:
    return error.errno in _MOMENTARY and not isinstance(error, KeyExistsError | KeyMissingError | KeyDamagedError)


def _unreadable(error: StorageError) -> StorageError:
    return error.changed(problem=f"{error.problem} (attempts: {len(PAUSES_SECONDS) + 1})", advice=_UNREADABLE)
