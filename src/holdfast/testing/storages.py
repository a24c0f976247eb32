"""Storages for tests: one in memory, and wrappers that crash, fail for a moment, fill up or slow down any other. They
know no files.

Put one in the place of the real door, and enumerate: run once with `crash_at=None`, count `operations`, then run once
for every number up to that and look at what is left in the inner storage.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self, TypeVar

from holdfast.errors import KeyDamagedError, KeyExistsError, KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Bytes, Entry, Sink, Source, Storage, StorageFeatures, alignment_of, features_of
from holdfast.storage.keys import folder_parts, key_parts
from holdfast.storage.local.advice import explained

__all__ = ["CrashingStorage", "FlakyStorage", "FullStorage", "MemoryStorage", "SimulatedCrash", "SlowStorage"]

_Result = TypeVar("_Result")


class SimulatedCrash(BaseException):
    """The process died here. No `Exception`, so that no code under test can catch it and go on living."""


class MemoryStorage:
    """A storage in memory with the manners of an object store.

    Keys are flat and folders are only what keys have in common. A key that is streamed is visible when it is closed,
    whole, and a key that another writer made meanwhile is found then. `sync` has nothing to do. With
    `capacity_bytes`, which may be changed at any time, there is room for that many bytes in all.
    """

    def __init__(self, url: str = "memory://", *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._url = url
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes) -> None:
        key_parts(key)
        value = bytes(data)
        with self._lock:
            self._require_free(key)
            self._require_room(key, len(value))
            self._values[key] = value

    def create(self, key: str, size_bytes: int) -> _MemorySink:
        key_parts(key)
        if size_bytes < 0:
            raise UsageError(f"a key cannot have {size_bytes} bytes", file=self._place(key))
        with self._lock:
            self._require_free(key)
            self._require_room(key, size_bytes)
        return _MemorySink(self, key, self._place(key), size_bytes)

    def open(self, key: str) -> _MemorySource:
        key_parts(key)
        with self._lock:
            value = self._values.get(key)
        if value is None:
            raise KeyMissingError("the key does not exist", errno=errno.ENOENT, file=self._place(key))
        return _MemorySource(value, self._place(key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        value = self.open(key).value
        if len(value) > limit_bytes:
            raise KeyDamagedError(
                f"the key has {len(value)} bytes, and at most {limit_bytes} are expected here", file=self._place(key)
            )
        return value

    def entries(self, folder: str) -> list[Entry]:
        prefix = "".join(f"{part}/" for part in folder_parts(folder))
        found: dict[str, Entry] = {}
        with self._lock:
            for key, value in self._values.items():
                if key.startswith(prefix):
                    name, deeper, _ = key.removeprefix(prefix).partition("/")
                    found[name] = Entry(name, None if deeper else len(value))
        return [found[name] for name in sorted(found)]

    def sync(self, folder: str) -> None:
        folder_parts(folder)

    def delete(self, key: str) -> None:
        key_parts(key)
        with self._lock:
            self._values.pop(key, None)

    def free_bytes(self) -> int | None:
        with self._lock:
            return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self._used_bytes())

    def __repr__(self) -> str:
        return f"MemoryStorage({self._url!r})"

    def _place(self, key: str) -> str:
        return self._url + key if self._url.endswith("/") else f"{self._url}/{key}"

    def _used_bytes(self) -> int:
        return sum(len(value) for value in self._values.values())

    def _require_free(self, key: str) -> None:
        if key in self._values:
            raise KeyExistsError(
                "the key exists already, and a name is written once", errno=errno.EEXIST, file=self._place(key)
            )

    def _require_room(self, key: str, size_bytes: int) -> None:
        if self.capacity_bytes is not None and self._used_bytes() + size_bytes > self.capacity_bytes:
            raise _no_room(self._place(key), size_bytes)


class _MemorySink:
    def __init__(self, storage: MemoryStorage, key: str, place: str, size_bytes: int) -> None:
        self._storage = storage
        self._key = key
        self._place = place
        self._size_bytes = size_bytes
        self._data = bytearray()
        self._state = "open"

    def write(self, data: Bytes) -> None:
        self._require_open()
        self._data += data

    def close(self) -> None:
        if self._state == "closed":
            return
        self._require_open()
        self._state = "given up"
        if len(self._data) != self._size_bytes:
            raise StorageError(
                f"{len(self._data)} bytes were written, but {self._size_bytes} were announced", file=self._place
            )
        self._storage.put(self._key, bytes(self._data))
        self._state = "closed"

    def abort(self) -> None:
        if self._state == "open":
            self._state = "given up"
            self._data = bytearray()

    def _require_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"the sink takes no more bytes: it was {self._state} before", file=self._place)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


class _MemorySource:
    def __init__(self, value: bytes, place: str) -> None:
        self.value = value
        self._place = place

    @property
    def size_bytes(self) -> int:
        return len(self.value)

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset < 0:
            raise UsageError(f"a key has no byte at {offset}", file=self._place)
        end = offset + target.nbytes
        if end > len(self.value):
            raise KeyDamagedError(
                f"the key ends before byte {end}: it has {len(self.value)} bytes",
                file=self._place,
                byte_range=(offset, end),
            )
        if target.nbytes > 0:
            target.cast("B")[:] = self.value[offset:end]

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Wrapper:
    """Every method goes through `_act` (it changes something) or `_look` (it does not), and then to the inner one."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def features(self) -> StorageFeatures:
        """Return what does not bypass the wrapper: reads of the inner storage's sources, its clones and its stamps."""
        inner = features_of(self.inner)
        return StorageFeatures(
            aligned_reads=inner.aligned_reads,
            clone=self._clone if inner.clone is not None else None,
            stamp=inner.stamp,
        )

    def put(self, key: str, data: bytes) -> None:
        self._act(f"put {key}", lambda: self.inner.put(key, data), size_bytes=len(data))

    def create(self, key: str, size_bytes: int) -> Sink:
        return _WrappedSink(self, key, self._act(f"create {key}", lambda: self.inner.create(key, size_bytes)))

    def open(self, key: str) -> Source:
        return self._look(lambda: self.inner.open(key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        return self._look(lambda: self.inner.read(key, limit_bytes))

    def entries(self, folder: str) -> list[Entry]:
        return self._look(lambda: self.inner.entries(folder))

    def sync(self, folder: str) -> None:
        self._act(f"sync {folder or '/'}", lambda: self.inner.sync(folder))

    def delete(self, key: str) -> None:
        self._act(f"delete {key}", lambda: self.inner.delete(key))

    def free_bytes(self) -> int | None:
        return self._look(self.inner.free_bytes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def _clone(self, key: str, new_key: str) -> bool:
        clone = features_of(self.inner).clone
        return clone is not None and self._act(f"clone {key} to {new_key}", lambda: clone(key, new_key))

    def _act(self, operation: str, action: Callable[[], _Result], *, size_bytes: int = 0) -> _Result:
        return action()

    def _look(self, action: Callable[[], _Result]) -> _Result:
        return action()

    def _write(self, key: str, sink: Sink, data: memoryview) -> None:
        self._act(f"write {key} ({len(data)} bytes)", lambda: sink.write(data), size_bytes=len(data))

    def _abort(self, sink: Sink) -> None:
        sink.abort()


class _WrappedSink:
    def __init__(self, storage: _Wrapper, key: str, inner: Sink) -> None:
        self._storage = storage
        self._key = key
        self._inner: Sink | None = inner

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        self._storage._write(self._key, self._living(), view.cast("B") if view.nbytes else memoryview(b""))

    def close(self) -> None:
        self._storage._act(f"close {self._key}", self._living().close)

    def abort(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            self._storage._abort(inner)

    def _living(self) -> Sink:
        if self._inner is None:
            raise StorageError("the sink takes no more bytes: it was given up before", file=self._key)
        return self._inner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


class CrashingStorage(_Wrapper):
    """The process that uses this dies at its `crash_at`-th operation, counted from 1.

    An operation is a `put`, `create`, `sync`, `delete`, and a sink's `write` and `close`; reads do not count.
    `operations` names those that were begun, such as `put step-000000500/manifest.json`. The crash comes before the
    operation is done, except that half of the bytes of a `write` go through; with `after=True` it comes right after.
    Once dead, every call raises `SimulatedCrash`, reads too, and an `abort` does nothing, as a dead process would.
    Look at what is left through the inner storage.
    """

    def __init__(self, inner: Storage, crash_at: int | None = None, *, after: bool = False) -> None:
        super().__init__(inner)
        self.crash_at = crash_at
        self.operations: list[str] = []
        self.crashed = False
        self._after = after
        self._lock = threading.Lock()

    def _act(self, operation: str, action: Callable[[], _Result], *, size_bytes: int = 0) -> _Result:
        is_last = self._begin(operation)
        if is_last and not self._after:
            raise self._death()
        result = action()
        if is_last:
            raise self._death()
        return result

    def _look(self, action: Callable[[], _Result]) -> _Result:
        if self.crashed:
            raise self._death()
        return action()

    def _write(self, key: str, sink: Sink, data: memoryview) -> None:
        operation = f"write {key} ({len(data)} bytes)"
        is_last = self._begin(operation)
        sink.write(data[: len(data) // 2] if is_last and not self._after else data)
        if is_last:
            raise self._death()

    def _abort(self, sink: Sink) -> None:
        if not self.crashed:
            sink.abort()

    def _begin(self, operation: str) -> bool:
        """Count it; whether it is the one to die at."""
        with self._lock:
            if self.crashed:
                raise self._death()
            self.operations.append(operation)
            self.crashed = len(self.operations) == self.crash_at
            return self.crashed

    def _death(self) -> SimulatedCrash:
        when = "after" if self._after else "before"
        return SimulatedCrash(f"died {when} operation {self.crash_at}: {self.operations[-1]}")


class FlakyStorage(_Wrapper):
    """Fails chosen reads, as a file server does that does not answer for a moment; writes are not touched.

    A read is an `open`, a `read`, an `entries`, or a source's `read_into`. `reads` names those that were begun, each
    with its key: `open step-000000500/manifest.json`, `read run.json`, `entries notes`, `entries /`, and
    `read_into step-000000500/rank-00000.safetensors 4096-8192`. Each read whose name matches `fail_on`, a pattern as
    of a shell, fails the first `times` times with the system's error `errno`, and works from then on; with
    `times=None` it fails for ever. `fail_on` may be set at any time. Run once without it, then once for every name in
    `reads`.
    """

    def __init__(
        self, inner: Storage, fail_on: str | None = None, *, times: int | None = 1, errno: int = errno.EIO
    ) -> None:
        super().__init__(inner)
        self.fail_on = fail_on
        self.times = times
        self.errno = errno
        self.reads: list[str] = []
        self._failed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self, key: str) -> Source:
        self._begin(f"open {key}", key)
        return _FlakySource(self, key, self.inner.open(key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        self._begin(f"read {key}", key)
        return self.inner.read(key, limit_bytes)

    def entries(self, folder: str) -> list[Entry]:
        self._begin(f"entries {folder or '/'}", folder)
        return self.inner.entries(folder)

    def _begin(self, read: str, key: str) -> None:
        with self._lock:
            self.reads.append(read)
            if self.fail_on is None or not fnmatchcase(read, self.fail_on):
                return
            if self.times is not None and self._failed[read] >= self.times:
                return
            self._failed[read] += 1
        error = OSError(self.errno, os.strerror(self.errno))
        raise explained(error, "reading it", f"{self.url}/{key}" if key else self.url)


class _FlakySource:
    def __init__(self, storage: FlakyStorage, key: str, inner: Source) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    @property
    def alignment_bytes(self) -> int:
        return alignment_of(self._inner)

    def read_into(self, offset: int, target: memoryview) -> None:
        self._storage._begin(f"read_into {self._key} {offset}-{offset + target.nbytes}", self._key)
        self._inner.read_into(offset, target)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FullStorage(_Wrapper):
    """The disk is full after `room_bytes` more bytes. Set `room_bytes` anew to make room."""

    def __init__(self, inner: Storage, room_bytes: int) -> None:
        super().__init__(inner)
        self.room_bytes = room_bytes
        self._lock = threading.Lock()

    def free_bytes(self) -> int:
        return self.room_bytes

    def _act(self, operation: str, action: Callable[[], _Result], *, size_bytes: int = 0) -> _Result:
        with self._lock:
            if size_bytes > self.room_bytes:
                raise _no_room(operation.split()[1], size_bytes)
            self.room_bytes -= size_bytes
        return action()


class SlowStorage(_Wrapper):
    """Every operation that changes something takes `delay_seconds` longer, and every read `read_delay_seconds`."""

    def __init__(self, inner: Storage, delay_seconds: float, *, read_delay_seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.delay_seconds = delay_seconds
        self.read_delay_seconds = read_delay_seconds

    def _act(self, operation: str, action: Callable[[], _Result], *, size_bytes: int = 0) -> _Result:
        time.sleep(self.delay_seconds)
        return action()

    def _look(self, action: Callable[[], _Result]) -> _Result:
        time.sleep(self.read_delay_seconds)
        return action()


def _no_room(place: str, size_bytes: int) -> StorageError:
    return StorageError(
        f"writing {size_bytes} bytes failed: No space left on device [ENOSPC]",
        errno=errno.ENOSPC,
        file=place,
        advice="the storage is full: free room, or keep fewer checkpoints",
    )
