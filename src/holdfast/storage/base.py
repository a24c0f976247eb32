"""Door 1: the only way to durable bytes. A key enters with its bytes, and is readable, whole, or not there.

The protocol is small enough for an object store: flat keys, no rename, no overwrite, no links, no folders to make.
A *key* is a relative path with `/` between its parts, such as `step-000000500/manifest.json`; a *folder* is the part
of a key before a `/`, and `""` is the root. The contract, which `holdfast.testing.StorageContract` checks:

- A name is written once. Writing to a key that exists raises `KeyExistsError`, whatever the size of either value, also
  in a race of many writers; of two writers of one key that overlap in any way exactly one ends well.
- A name means itself. Nothing is decoded, folded or stripped: two names that differ are two keys.
- What was written or deleted is seen so at once, by every process: no listing and no missing key is remembered.
- `put` makes the whole value visible at once or not at all: no reader ever sees half of it.
- `create` claims its key at the first byte and streams; the key may be visible before `close` returned, so no reader
  may rely on it before a key that was `put` later refers to it.
- When `put` or `Sink.close` returns, the bytes are durable. The *name* is durable only after `sync(folder)` of the
  folder that holds it returned, which also covers the folders above it. A power cut before that may lose the name.
- An error of the system while bytes are made durable is final: the caller must give the key up, never try again.
- A source of a key that was deleted meanwhile reads that key's bytes or raises, and never reads anything else.
- Every failure is a `StorageError` that names the key; a key that is not there is a `KeyMissingError`, and one that
  cannot be what was written there (no regular value, too short, too large) a `KeyDamagedError`. Any other error of a
  read means that the storage cannot be read now: it is retried, and never taken for damage.

What only some storages can do is declared: a storage may have a property `features`, which returns a
`StorageFeatures`. Nothing that is not declared is used, whatever methods an object has; a storage without the property
declares nothing. `StorageContract` checks that what is declared works.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import msgspec

from holdfast.errors import UsageError

__all__ = [
    "WRITE_PIECE_BYTES",
    "Bytes",
    "Entry",
    "Links",
    "Sink",
    "Source",
    "Storage",
    "StorageFeatures",
    "alignment_of",
    "features_of",
    "folder_names",
]

Bytes = bytes | bytearray | memoryview

# What is handed to a disk at a time; a writer may hand it more. Large enough to write past the page cache at nearly its
# full speed.
WRITE_PIECE_BYTES = 8 << 20


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One name directly inside a folder. `size_bytes` is None for a folder."""

    name: str
    size_bytes: int | None

    @property
    def is_folder(self) -> bool:
        return self.size_bytes is None


class Sink(Protocol):
    """A key that is being written, front to back."""

    def write(self, data: Bytes) -> None:
        """Take the bytes. They may be changed by the caller as soon as this returned."""

    def close(self) -> None:
        """Return when every byte is durable."""

    def abort(self) -> None:
        """Give up: free what is held. What is left under the key is debris that nothing refers to. Never raises."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close` after success, `abort` after an exception."""


class Source(Protocol):
    """A key that is being read. May be used by several threads at once.

    A source of a storage that declares `aligned_reads` has an `alignment_bytes`, see `alignment_of`.
    """

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on; a key that ends before is a `KeyDamagedError`."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def alignment_of(source: Source) -> int:
    """Return the number that offsets, sizes and memory should be multiples of for this source to read at its best.

    1, which also stands for a source without `alignment_bytes`, means that any will do. Others are read as well, only
    slower.
    """
    return getattr(source, "alignment_bytes", 1)


@runtime_checkable
class Storage(Protocol):
    """Durable bytes under flat keys. See the module's text for the contract."""

    @property
    def url(self) -> str:
        """Return where this is, for people and for messages: a path or a URL."""

    def put(self, key: str, data: bytes) -> None:
        """Create a small key, whole or not at all."""

    def create(self, key: str, size_bytes: int) -> Sink:
        """Create a large key of exactly `size_bytes` bytes by streaming."""

    def open(self, key: str) -> Source: ...

    def read(self, key: str, limit_bytes: int) -> bytes:
        """Return the whole value of a small key. One with more than `limit_bytes` is a `KeyDamagedError`, before memory
        is taken."""

    def entries(self, folder: str) -> list[Entry]:
        """Return the names directly inside a folder, sorted. A folder that does not exist is empty."""

    def sync(self, folder: str) -> None:
        """Make every name in this folder, and the folder's own name, durable."""

    def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error. The removal is durable after `sync`."""

    def free_bytes(self) -> int | None:
        """Return the room that is left, or None where there is no such number."""


class Links(Protocol):
    """Links in the root of a storage, for people and scripts: Holdfast makes them and follows none."""

    def point(self, name: str, target: str) -> None:
        """Make the link `name` lead to `target`, a key or a folder. A reader finds the old or the new target. Only a
        link is replaced, never a key or a folder."""

    def remove(self, name: str) -> None:
        """Remove a link. Anything else under that name stays, and is an error."""

    def targets(self) -> dict[str, str]:
        """Return the links by name, and where each leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFeatures:
    """What a storage can do beyond the protocol. The defaults are what a storage has that declares nothing."""

    reopens_by_url: bool = False
    """A new process on this machine that calls `open_storage(url)` gets the same storage. Asynchronous saves are then
    written by a process that survives the trainer; otherwise by a thread inside the trainer, which ends with it."""

    aligned_reads: bool = False
    """Its sources have `alignment_bytes`, see `alignment_of`."""

    links: Links | None = None
    """Its links, such as `latest`."""

    clone: Callable[[str, str], bool] | None = None
    """Make a new key with the value of another one, without writing its bytes again: `clone(key, new_key)`. The two are
    independent from then on: to delete one leaves the other as it is. The bytes of the new key are durable when those
    of the first are, its name after `sync`. Return False, with nothing changed, where the storage refuses it for this
    key, which is copied then. A `new_key` that exists is a `KeyExistsError`, a `key` that does not a
    `KeyMissingError`."""

    displace: Callable[[str], str] | None = None
    """Rename whatever has the name of a key, also what is no value; return the new key, in the same folder."""

    folder_names: Callable[[str], Iterable[str]] | None = None
    """Return the names of the folders directly inside a folder, in any order: those that `entries` gives, but faster,
    because nothing else is looked at. A run of thousands of checkpoints is listed in every save."""

    stamp: Callable[[str], tuple[int, str]] | None = None
    """Return the size of a key's value, and a text that another value under this key does not have; empty where there
    is no such text. It shows that something else than this storage, such as a person with a shell, has removed,
    replaced or cut short what was written. A storage without it answers for what it has acknowledged."""

    identity: Callable[[], Hashable | None] | None = None
    """Return a value that is equal for two storages at the same place under different URLs; None if it is not known."""


_MINIMAL_FEATURES = StorageFeatures()


def folder_names(storage: Storage, folder: str) -> Iterable[str]:
    """Return the names of the folders directly inside a folder, in any order."""
    listed = features_of(storage).folder_names
    if listed is not None:
        return listed(folder)
    return [entry.name for entry in storage.entries(folder) if entry.size_bytes is None]


def features_of(storage: Storage) -> StorageFeatures:
    """Return what a storage declares; the minimal features where it declares nothing."""
    declared = getattr(storage, "features", _MINIMAL_FEATURES)
    if not isinstance(declared, StorageFeatures):
        raise UsageError(
            f"the features of a {type(storage).__name__} are a {type(declared).__name__}",
            advice="return a holdfast.storage.base.StorageFeatures from its property 'features'",
        )
    return declared
