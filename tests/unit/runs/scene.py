"""A run with its writer and its housekeeper, and processes, clocks and storages for the tests of this folder."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from holdfast.errors import StorageError
from holdfast.manager.arguments import encoded_metrics
from holdfast.ondisk.manifest import UserMetadata
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.clock import Clock
from holdfast.runs.events import Event
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import Identity, birth_of, this_process
from holdfast.runs.retention import KeepPolicy
from holdfast.saving.pipeline import Saver
from holdfast.saving.request import SaveRequest
from holdfast.testing.storages import _Wrapper

HERE = this_process()
HOST, MACHINE = HERE.host, HERE.machine
# The first process of this machine lives as long as any; one of its number with another birth is long gone.
NEIGHBOUR = Identity(HOST, MACHINE, 1, birth_of(1))
GONE = Identity(HOST, MACHINE, 1, (birth_of(1) or 0) + 1)
FAR = Identity("far", "elsewhere", 1, 1)


def far(number: int = 1) -> Identity:
    return Identity(f"far-{number}", f"elsewhere-{number}", number, 1)


class Time:
    """A clock that goes on when somebody sleeps, and what happens meanwhile."""

    def __init__(self, on_sleep: Callable[[float], None] = lambda now: None) -> None:
        self.now = 0.0
        self._on_sleep = on_sleep

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._on_sleep(self.now)

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


def names(storage: Any, folder: str = "lease") -> list[str]:
    return [entry.name for entry in storage.entries(folder)]


def acquire(storage: Any, identity: Identity | None = None, time: Time | None = None, **more: Any) -> Lease:
    return Lease.acquire(storage, identity=identity, clock=(time or Time()).clock, **more)


class Part:
    """A component that is one tensor."""

    def __init__(self, mark: int = 0) -> None:
        self.tensor = torch.arange(mark, mark + 5)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


class Run:
    """A run, its writer, and a housekeeper of it."""

    def __init__(self, storage: Any, keep: KeepPolicy | None = None, links: Any = True) -> None:
        self.storage = storage
        self.catalog = Catalog(storage)
        self.saver = Saver(self.catalog, Alone(), mode="sync")
        self.events: list[Event] = []
        self.keeper = self.keep(keep, links)

    def keep(self, keep: KeepPolicy | None, links: Any = True) -> Housekeeper:
        self.keeper = Housekeeper(
            self.catalog,
            keep=keep,
            links=links,
            may_write=self.saver.hold_run,
            in_use=lambda: {self.saver.lineage.head},
            emit=self.events.append,
        )
        return self.keeper

    def save(self, step: int, *, tags: tuple[str, ...] = (), resave: bool = False, **metrics: Any) -> Checkpoint:
        metadata = UserMetadata(metrics=encoded_metrics(metrics), tags=tuple(tags))
        request = SaveRequest(step, {"part": Part()}, metadata, resave=resave)
        return self.catalog.read(self.saver.save(step, lambda: request).result().folder)

    def die(self) -> None:
        """As a process does: without a word."""
        lease = self.saver._coordinator._lease
        if lease is not None:
            lease._heartbeat.stop()

    @property
    def steps(self) -> list[int]:
        return [found.step for found in Catalog(self.storage).scan().checkpoints]

    @property
    def links(self) -> dict[str, str]:
        return self.storage.features.links.targets()

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.storage.entries("") if entry.name.startswith("step-")]


def folder(step: int) -> str:
    return f"step-{step:09d}"


def rot(*checkpoints: Checkpoint) -> None:
    """One byte of each is not what it was."""
    for checkpoint in checkpoints:
        storage, key = checkpoint.storage, checkpoint.key("rank-00000.safetensors")
        data = storage.read(key, 1 << 20)
        storage.delete(key)
        storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))


class Meeting(_Wrapper):
    """Right before one operation, given by its text or its number, something happens, once."""

    def __init__(self, inner: Any, before: str | int = "", do: Callable[[], object] = lambda: None) -> None:
        super().__init__(inner)
        self.operations: list[str] = []
        self.before, self.do = before, do

    def _act(self, operation: str, action: Callable[[], Any], *, size_bytes: int = 0) -> Any:
        self.operations.append(operation)
        self._meet(operation, len(self.operations))
        return action()

    def entries(self, folder: str) -> Any:
        self._meet(f"list {folder}")
        return super().entries(folder)

    def _meet(self, operation: str, number: int = 0) -> None:
        if self.before in (operation, number):
            self.before = ""
            self.do()


class Unreadable(_Wrapper):
    """Keys that end in a text cannot be read, for as long as it is set."""

    unread = ""

    def read(self, key: str, limit_bytes: int) -> bytes:
        if self.unread and key.endswith(self.unread):
            # No error that is tried again: the test would wait for the attempts.
            raise StorageError("no such access now", errno=errno.EACCES, file=key)
        return super().read(key, limit_bytes)


def attempt(run: Run, step: int, who: Identity | None, *, lease: int = 0, **more: Any) -> str:
    """An attempt with some bytes in it, by somebody."""
    name = folder(step)
    if who is not None:
        record = {"claim": "x", **msgspec.to_builtins(who), "lease": lease, **more}
        run.storage.put(f"{name}/attempt.json", json.dumps(record).encode())
    run.storage.put(f"{name}/rank-00000.safetensors", b"bytes")
    run.storage.put(f"{name}/assets/deep/config.yaml", b"more")
    return name


def save(saver: Saver, step: int) -> str:
    return saver.save(step, lambda: SaveRequest(step, {"part": Part(step)})).result().folder


def steps(storage: Any) -> list[int]:
    return [found.step for found in Catalog(storage).scan().checkpoints]
