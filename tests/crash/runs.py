"""A run of two saves over simulated ranks, and what must hold on every disk that a crash can leave behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.loading.pipeline import load
from holdfast.loading.records import LoadRequest
from holdfast.loading.strategy import LoadStrategy
from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.ranks.store import StoreRanks
from holdfast.runs.catalog import Catalog
from holdfast.runs.selector import Selector
from holdfast.runs.verify import verify
from holdfast.saving.pipeline import Saver, save
from holdfast.saving.request import SaveRequest
from holdfast.state.wrappers import PerRank
from holdfast.storage.base import Storage
from holdfast.testing import PowerLossStorage, SimulatedCrash
from holdfast.testing.simulation import simulate_ranks

STEPS = (1, 2)


class Part:
    """A component whose state says which step and rank it is of, in a tensor and in a value."""

    def __init__(self, mark: int = -1) -> None:
        self.mark = mark
        self.tensor = torch.full((700,), float(mark))

    def become(self, other: Part) -> None:
        """Take the other's state over, in place as a training does."""
        self.mark = other.mark
        self.tensor.copy_(other.tensor)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "mark": self.mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tensor, self.mark = state["tensor"], state["mark"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self.mark == other.mark and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


def components(step: int, rank: int) -> dict[str, Any]:
    return {"all": Part(step), "mine": PerRank(Part(100 * step + rank))}


@dataclass
class Witness:
    """What the training was told before the crash."""

    committed: list[int] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)
    failed: dict[int, list[HoldfastError]] = field(default_factory=dict)

    @property
    def crashed(self) -> bool:
        return any(isinstance(end, SimulatedCrash) for end in self.ended)


def run(storage: Storage, n: int) -> Witness:
    """Save step 1 and step 2 on `n` ranks. A save counts as committed when it returned on any rank."""
    witness = Witness()

    def rank(ranks: Ranks) -> None:
        catalog, parent = Catalog(storage), None
        for step in STEPS:
            saved = save(SaveRequest(step, components(step, ranks.rank)), catalog, ranks, parent=parent)
            parent = saved.digest
            if step not in witness.committed:
                witness.committed.append(step)

    witness.ended = simulate_ranks(n, rank)
    return witness


_PATIENCE_SECONDS = 300.0


def run_behind(storages: Sequence[Storage], *, dead: Callable[[], bool] = lambda: False) -> Witness:
    """The same two saves asynchronously, one rank for each storage, each with a writer thread and a thread of its own
    for every save. A save counts as committed when any rank was told so.

    `dead`: the machine is gone, and with it every rank that waits for another. A rank that met a crash itself is gone
    for the others, too.
    """
    witness = Witness(ended=[None] * len(storages))
    store = MemoryStore(lambda: dead() or witness.crashed)

    def live(rank: int) -> None:
        ranks = _ranks_of(rank, len(storages), store)
        saver = Saver(Catalog(storages[rank]), ranks, mode="async", timeout_seconds=_PATIENCE_SECONDS / 3)
        try:
            _save_behind(saver, rank, witness)
        except (Exception, SimulatedCrash) as error:
            witness.ended[rank] = error
        with suppress(SimulatedCrash):
            saver.end()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(len(storages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_SECONDS)
        assert not thread.is_alive(), f"a rank hangs:\n{_where_threads_are()}"
    return witness


def _where_threads_are() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _save_behind(saver: Saver, rank: int, witness: Witness) -> None:
    """Save, change the live objects while the save is under way, save again, whether the first one failed or not."""
    live = components(STEPS[0], rank)
    for step in STEPS:
        for name, part in components(step, rank).items():
            _inner(live[name]).become(_inner(part))
        try:
            saver.save(step, lambda step=step: SaveRequest(step, live))
            for part in live.values():
                _inner(part).become(Part(-77))
            saver.wait()
        except HoldfastError as error:
            witness.failed.setdefault(step, []).append(error)
            continue
        if step not in witness.committed:
            witness.committed.append(step)


def _inner(part: Any) -> Part:
    return part.component if isinstance(part, PerRank) else part


def _ranks_of(rank: int, size: int, store: MemoryStore) -> Ranks:
    if size == 1:
        return Alone()
    return StoreRanks(store, rank, size, name="threads", timeout_seconds=_PATIENCE_SECONDS / 3)


class MemoryStore:
    """A key-value store for ranks that are threads of one process."""

    def __init__(self, dead: Callable[[], bool]) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._dead = dead

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def pause(self, seconds: float) -> None:
        if self._dead():
            raise SimulatedCrash("the machine is gone")
        time.sleep(seconds)

    def branch(self) -> MemoryStore:
        return self


def violations_after_power_loss(
    storage: PowerLossStorage, seeds: Iterable[int], n: int, witness: Witness, disks: Path
) -> Iterator[tuple[int, list[str]]]:
    """Yield each seed with what is wrong with the disk that it leaves. Of equal disks one is examined: of all that one
    crash can leave, most seeds leave the same. `disks` is where they are made; each crash needs its own."""
    disks.mkdir()
    known: dict[str, list[str]] = {}
    for seed in seeds:
        disk = disks / f"{seed}"
        found = storage.after_power_loss(seed, disk)
        content = _digest(disk)
        if content not in known:
            known[content] = violations(found, n, witness)
        yield seed, known[content]
    shutil.rmtree(disks, ignore_errors=True)


def _digest(folder: Path) -> str:
    """Return a digest of every name below a folder and of what is there."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path).encode() if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        state.update(f"{kind} {len(content)} {path.relative_to(folder)}\0".encode() + content)
    return state.hexdigest()


def violations(storage: Storage, n: int, witness: Witness) -> list[str]:
    """What is wrong with a disk after a crash, of G1, G2 and G6. Goes on with the run, as a restart would."""
    catalog = Catalog(storage)
    scan = catalog.scan()
    wrong = [f"G1: {skipped}" for skipped in scan.damaged]
    found = {checkpoint.step for checkpoint in scan.checkpoints}
    wrong += [f"G1: step {step} was committed and is gone" for step in witness.committed if step not in found]
    for checkpoint in scan.checkpoints:
        report = verify(checkpoint)
        wrong += [f"G1: step {checkpoint.step}: {problem}" for problem in report.problems]
    if wrong:
        return wrong
    parent = None
    if scan.checkpoints:
        latest = scan.checkpoints[0]
        wrong += [text for rank in range(n) for text in restored_wrongly(catalog, latest.folder, latest.step, rank, n)]
        parent = latest.digest
    try:
        saved = save(SaveRequest(3, components(3, 0)), Catalog(storage), Alone(), parent=parent)
    except Exception as error:
        return [*wrong, f"G6: the next save fails: {error}"]
    return wrong + restored_wrongly(Catalog(storage), saved.folder, 3, 0, 1)


def restored_wrongly(catalog: Catalog, folder: str, step: int, rank: int, n: int) -> list[str]:
    live = components(-1, rank)
    request = LoadRequest(Selector("folder", name=folder), live, LoadStrategy())
    try:
        load(request, catalog, Place(rank, n))
    except Exception as error:
        return [f"G1: step {step} cannot be restored: {error}"]
    expected = components(step, rank)
    if live["all"] != expected["all"] or live["mine"].component != expected["mine"].component:
        return [f"G2: step {step}, rank {rank} is not what was saved"]
    return []


class Place(Alone):
    """One rank of several, alone: what it decides needs nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # type: ignore[misc]
