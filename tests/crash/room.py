"""A machine room in memory: one shelf of bytes, and processes that share it, die, fall silent and come back.

Nothing here knows what a checkpoint is. The shelf has the manners of a POSIX folder: a name is durable only after the
sync of its folder, and a power cut keeps any part of what was not synced. A process has a door of its own to the shelf,
at which it fails, dies or is held up at a chosen operation. The door also says who is who: under the names of this one
real process many are played, so what they write about themselves is exchanged on the way, and each sees the others as
alive, dead, or on a machine that it cannot look into.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from blake3 import blake3

from holdfast.errors import KeyExistsError, KeyMissingError, StorageError
from holdfast.ondisk import paths
from holdfast.runs.process_identity import Identity, birth_of, this_process
from holdfast.storage.base import Bytes, Entry, StorageFeatures
from holdfast.testing import SimulatedCrash

__all__ = ["Door", "Fault", "Process", "Room", "Shelf"]

_Result = TypeVar("_Result")
_SILENT_SECONDS, _BEATING_SECONDS = b"0.0", b"0.01"


class Shelf:
    """Bytes under names, as all processes see them, and as a power cut leaves them."""

    url = "memory://room"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self._durable: dict[str, bytes] = {}
        # For each folder the changes of its names since its last sync: what is under a key from then on.
        self._unsynced: dict[str, list[tuple[str, bytes | None]]] = {}
        self._unfinished: set[str] = set()

    def set(self, key: str, data: bytes | None) -> None:
        folder, _, name = key.rpartition("/")
        if data is None:
            if self.values.pop(key, None) is None:
                return
            names = self._folders[folder]
            del names[name]
            if not names:
                del self._folders[folder]
        else:
            self.values[key] = data
            self._folders.setdefault(folder, {})[name] = None
        self._unsynced.setdefault(folder, []).append((key, data))

    def grow(self, key: str, data: bytes) -> None:
        """More bytes of a key that is being written. Its name stays as durable as it is."""
        if key in self.values:  # else somebody removed its name, and the bytes go nowhere
            self.values[key] += data
            self._unfinished.add(key)

    def finish(self, key: str) -> None:
        """Its bytes are durable, its name as far as it was."""
        self._unfinished.discard(key)
        if key not in self.values:
            return
        changes = self._unsynced.get(key.rpartition("/")[0], [])
        changes[:] = [
            (other, self.values[key] if other == key and data is not None else data) for other, data in changes
        ]
        if key in self._durable:
            self._durable[key] = self.values[key]

    def entries(self, folder: str) -> list[Entry]:
        prefix = f"{folder}/" if folder else ""
        found = {name: Entry(name, len(self.values[prefix + name])) for name in list(self._folders.get(folder, ()))}
        for other in list(self._folders):
            if other != folder and other.startswith(prefix):
                name = other.removeprefix(prefix).partition("/")[0]
                found[name] = Entry(name, None)
        return [found[name] for name in sorted(found)]

    def sync(self, folder: str) -> None:
        """Make the names in a folder, and in those above it, durable."""
        while True:
            for key, data in self._unsynced.pop(folder, ()):
                _put(self._durable, key, data)
            self._forget_removed(folder)
            if not folder:
                return
            folder = folder.rpartition("/")[0]

    def cut_power(self, chance: random.Random, keep: float) -> None:
        """Every name that was not synced is there or not, and every byte."""
        values = self._durable
        for changes in self._unsynced.values():
            for key, data in changes:
                if chance.random() < keep:
                    _put(values, key, data)
        for key in self._unfinished & values.keys():
            values[key] = values[key][: chance.randrange(len(values[key]) + 1)]
        self.values, self._folders, self._unfinished = {}, {}, set()
        for key, data in values.items():
            self.set(key, data)
        self._durable, self._unsynced = dict(values), {}
        self.links = {name: target for name, target in self.links.items() if chance.random() < 0.8}

    def is_durable(self, key: str) -> bool:
        return self._durable.get(key) == self.values.get(key) is not None

    def damage(self, key: str) -> None:
        """One bit of it is another from now on."""
        data = self.values[key]
        self.values[key] = data[:-1] + bytes([data[-1] ^ 1])
        self.finish(key)

    def _forget_removed(self, folder: str) -> None:
        """A folder that is removed, durably, takes along what was in it."""
        prefix = f"{folder}/" if folder else ""
        for other in [name for name in self._unsynced if name.startswith(prefix) and name not in self._folders]:
            del self._unsynced[other]
            for key in [key for key in self._durable if key.startswith(f"{other}/")]:
                del self._durable[key]


def _put(values: dict[str, bytes], key: str, data: bytes | None) -> None:
    if data is None:
        values.pop(key, None)
    else:
        values[key] = data


class Fault(NamedTuple):
    """What happens to a process at its `at`-th operation from now on, counted from 1.

    kind: "fail": the operation fails, once; "blind": one of those that only look does. "full": from there on nothing
        can be written until somebody makes room. "die": the process is killed. "power": so is everything else, and the
        shelf loses its power. "meet": somebody else acts right before it. "glance": the same, but looking counts too.
    after: the operation was done all the same.
    behind: not in what the process does, but in the housework that it leaves behind.
    """

    kind: str
    at: int
    after: bool = False
    behind: bool = False


@dataclass(eq=False)
class Process:
    """A process that is played: on which machine, whether it lives, and whether the others hear of it."""

    number: int
    host: str
    alive: bool = True
    silent: bool = False

    @property
    def identity(self) -> Identity:
        return Identity(f"played-{self.number}", self.host, self.number, self.number)


@dataclass(eq=False)
class Room:
    """The shelf, and who uses it."""

    shelf: Shelf = field(default_factory=Shelf)
    processes: dict[int, Process] = field(default_factory=dict)

    def process(self, host: str) -> Process:
        number = len(self.processes) + 1
        found = self.processes[number] = Process(number, host)
        return found

    def view(self, viewer: Process, data: bytes) -> bytes:
        """What is written in a record about processes, as one of them sees it."""
        return _PLAYED.sub(lambda match: self._seen(viewer, self.processes[int(match[1])]), data)

    def who(self, data: bytes) -> Process | None:
        """The process that a record is of."""
        match = _PLAYED.search(data)
        return self.processes[int(match[1])] if match else None

    def _seen(self, viewer: Process, other: Process) -> bytes:
        if other is viewer:
            return _ME
        if other.host != viewer.host:
            return _spelled(other.identity)
        return _spelled(_LIVING if other.alive else _GONE)

    def writer_on(self) -> tuple[int, Process | None, bool]:
        """The highest number that was claimed, by whom, and whether it was released."""
        names = [entry.name for entry in self.shelf.entries(paths.LEASE)]
        numbers = [int(name.removesuffix(".json")) for name in names if name.endswith(".json")]
        if not numbers:
            return 0, None, True
        number = max(numbers)
        holder = self.who(self.shelf.values[f"{paths.LEASE}/{number:09d}.json"])
        return number, holder, f"{number:09d}.released" in names

    def beat(self, viewer: Process) -> None:
        """Whoever lives elsewhere gives a sign whenever somebody looks."""
        number, holder, _ = self.writer_on()
        if holder is None or holder is viewer or holder.host == viewer.host or not holder.alive or holder.silent:
            return
        front = f"{paths.LEASE}/{number:09d}.beat-"
        beats = [key for key in self.shelf.values if key.startswith(front)]
        last = max((int(key.removeprefix(front)) for key in beats), default=0)
        for key in beats:
            self.shelf.set(key, None)
        self.shelf.set(f"{front}{last + 1:09d}", b"now\n")


class _Links:
    """The links of the shelf, through the door of one process."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._shelf = door.room.shelf

    def point(self, name: str, target: str) -> None:
        self._door._act(lambda: self._shelf.links.__setitem__(name, target), needs_room=True)

    def targets(self) -> dict[str, str]:
        return self._door._look(lambda: dict(self._shelf.links))

    def remove(self, name: str) -> None:
        self._door._act(lambda: self._shelf.links.pop(name))


class Door:
    """One process's way to the shelf: a `Storage`, with links."""

    def __init__(self, room: Room, process: Process) -> None:
        self.room = room
        self.process = process
        self.url = room.shelf.url
        self.fault: Fault | None = None
        self.fired = False
        self.on_meeting: Callable[[], None] = lambda: None
        self.on_change: Callable[[str, str, bytes | None], None] = lambda what, key, data: None
        self._left = 0
        self.is_full = False

    def arm(self, fault: Fault | None) -> None:
        self.fault, self.fired, self.is_full = fault, False, False
        self._left = fault.at if fault else 0

    def put(self, key: str, data: bytes) -> None:
        def put() -> None:
            self._require_free(key)
            self.on_change("put", key, data)
            self.room.shelf.set(key, data.replace(_ME, _spelled(self.process.identity)))

        self._act(put, needs_room=True)

    def create(self, key: str, size_bytes: int) -> _Sink:
        def create() -> _Sink:
            self._require_free(key)
            self.room.shelf.set(key, b"")
            return _Sink(self, key, size_bytes)

        return self._act(create, needs_room=True)

    def open(self, key: str) -> _Source:
        return self._look(lambda: _Source(self._value(key), key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        return self._look(lambda: self._value(key))

    def entries(self, folder: str) -> list[Entry]:
        def look() -> list[Entry]:
            if folder == paths.LEASE:
                self.room.beat(self.process)
            return self.room.shelf.entries(folder)

        return self._look(look)

    def sync(self, folder: str) -> None:
        self._act(lambda: self.room.shelf.sync(folder))

    def delete(self, key: str) -> None:
        def delete() -> None:
            if key in self.room.shelf.values:
                self.on_change("delete", key, None)
            self.room.shelf.set(key, None)

        self._act(delete)

    def free_bytes(self) -> None:
        return None

    @property
    def features(self) -> StorageFeatures:
        return StorageFeatures(links=_Links(self))

    def _value(self, key: str) -> bytes:
        value = self.room.shelf.values.get(key)
        if value is None:
            raise KeyMissingError("the key does not exist", errno=errno.ENOENT, file=key)
        if not key.endswith((".json", ".released")):
            return value
        if self.room.who(value) is None:
            return value
        seen = self.room.view(self.process, value)
        return signed_again(self._hurried(seen) if key.startswith(f"{paths.LEASE}/") else seen)

    def _hurried(self, claim: bytes) -> bytes:
        """A time-out that the test has the time for. Who is silent has been for as long as it takes."""
        _, holder, _ = self.room.writer_on()
        beating = holder is not None and holder.alive and not holder.silent
        seconds = _BEATING_SECONDS if beating else _SILENT_SECONDS
        return re.sub(rb'"timeout_seconds":[0-9.]+', b'"timeout_seconds":' + seconds, claim)

    def _require_free(self, key: str) -> None:
        if key in self.room.shelf.values:
            raise KeyExistsError("it exists already", errno=errno.EEXIST, file=key)

    def _look(self, action: Callable[[], _Result]) -> _Result:
        self._require_life()
        if self.fault is not None and self.fault.kind in ("glance", "blind") and self._count():
            self._fail_if("blind")
        return action()

    def _act(self, action: Callable[[], _Result], *, needs_room: bool = False) -> _Result:
        self._require_life()
        fault = self.fault
        if fault is None or fault.kind == "blind":
            return action()
        here = self._count()
        if (here and fault.kind == "full") or self.is_full:
            self.is_full = True
            if needs_room:
                raise StorageError("no space left [ENOSPC]", errno=errno.ENOSPC, file="shelf")
        if not here or fault.kind in ("full", "meet", "glance"):
            return action()
        if fault.after:
            action()
        self._fail_if("fail")
        self.process.alive = False
        raise SimulatedCrash(f"{fault}")

    def _fail_if(self, kind: str) -> None:
        if self.fault is not None and self.fault.kind == kind:
            raise StorageError("the disk has a bad day [EIO]", errno=errno.EIO, file="shelf")

    def _count(self) -> bool:
        """Whether this operation is the one; a meeting is held right before it."""
        if self._left == 0:
            return False
        self._left -= 1
        if self._left:
            return False
        self.fired = True
        if self.fault is not None and self.fault.kind in ("meet", "glance"):
            self.on_meeting()
        return True

    def _require_life(self) -> None:
        if not self.process.alive:
            raise SimulatedCrash("this process is dead")

    def __repr__(self) -> str:
        return f"Door({self.process.number})"


class _Sink:
    def __init__(self, door: Door, key: str, size_bytes: int) -> None:
        self._door, self._key, self._size_bytes = door, key, size_bytes

    def write(self, data: Bytes) -> None:
        view = bytes(data)
        shelf = self._door.room.shelf
        try:
            self._door._act(lambda: shelf.grow(self._key, view), needs_room=True)
        except SimulatedCrash:
            if self._key in shelf.values and len(shelf.values[self._key]) < self._size_bytes:
                shelf.grow(self._key, view[: len(view) // 2])
            raise

    def close(self) -> None:
        self._door._act(lambda: self._door.room.shelf.finish(self._key))

    def abort(self) -> None:
        if self._door.process.alive:
            self._door.room.shelf.set(self._key, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


class _Source:
    def __init__(self, value: bytes, key: str) -> None:
        self._value, self._key = value, key

    @property
    def size_bytes(self) -> int:
        return len(self._value)

    def read_into(self, offset: int, target: memoryview) -> None:
        end = offset + target.nbytes
        if end > len(self._value):
            raise StorageError(f"the key ends before byte {end}", file=self._key, byte_range=(offset, end))
        if target.nbytes:
            target.cast("B")[:] = self._value[offset:end]

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def signed_again(record: bytes) -> bytes:
    """A record that was changed on purpose, with the digest that it has now."""
    content, digest, _ = record.rpartition(b',"digest":"')
    if not digest:
        return record
    return b'%s,"digest":"%s"}\n' % (content, blake3(content + b"}").hexdigest().encode())


def _spelled(identity: Identity) -> bytes:
    """As it stands in a claim, between the braces."""
    return msgspec.json.encode(identity)[1:-1]


_PLAYED = re.compile(rb'"host":"played-([0-9]+)","machine":"[a-z]*","process":[0-9]+,"birth":[0-9]+')
_ME = _spelled(this_process())
# The first process of the machine lives as long as any other; one of its number with another birth does not.
_LIVING = Identity(this_process().host, this_process().machine, 1, birth_of(1))
_GONE = Identity(this_process().host, this_process().machine, 1, (birth_of(1) or 0) + 1)
