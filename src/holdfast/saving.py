"""The save chain in order: capture, plan, stage, write, commit. A request enters, a committed checkpoint leaves.

Three agreements carry it: what everybody has and who writes what; that everybody's bytes are durable; the commit. A
rank that fails in one of them fails it for all, and everything that was committed before stays as it was.
"""

from __future__ import annotations

import errno
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast._version import __version__
from holdfast.catalog import Catalog, Checkpoint
from holdfast.errors import HoldfastError, SaveFailedError, StorageError
from holdfast.memory import collector_paused
from holdfast.ranks import Ranks, on_leader
from holdfast.records import layout
from holdfast.records.codec import Json
from holdfast.records.files import PlainFile
from holdfast.records.manifest import MeshRecord, TensorRecord, TreeRecord
from holdfast.records.state import CapturedTree, Inventory, Receipt, SavePlan
from holdfast.stages.capture import capture, take_frozen, take_inventory
from holdfast.stages.commit import Facts, Listing, commit
from holdfast.stages.plan import GlobalPlan, frozen_guards, plan
from holdfast.stages.stage import asset_files, stage, values_file
from holdfast.stages.write import write

logger = logging.getLogger("holdfast")

_ROOM_FOR_RECORDS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save: the live objects, and the facts that go into the manifest, encoded."""

    step: int
    components: Mapping[str, Any]
    pipeline_stage: int | None = None
    parent: str | None = None
    metrics: Mapping[str, Json] = field(default_factory=dict)
    progress: Mapping[str, Json] = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)
    config: Json = None
    guards: Mapping[str, Json] = field(default_factory=dict)
    tags: Sequence[str] = ()
    assets: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """Where the checkpoint is. `skipped` when the step was committed already and nothing was written."""

    folder: str
    digest: str
    skipped: bool


def save(request: SaveRequest, catalog: Catalog, ranks: Ranks) -> Saved:
    """Save on all ranks and return when the checkpoint is committed."""
    try:
        with collector_paused():
            return _SaveChain(request, catalog, ranks).run()
    except HoldfastError as error:
        if type(error) is HoldfastError:  # what some rank's own code raised, passed on by its name
            raise SaveFailedError(**{**error.fields, "step": request.step}) from error
        raise error.at(step=request.step) from error
    except Exception as error:
        raise SaveFailedError(f"{type(error).__name__}: {error}", step=request.step) from error


class _SaveChain:
    """One save on one rank. What the leader learns in one agreement it needs in the next, so it is kept here."""

    def __init__(self, request: SaveRequest, catalog: Catalog, ranks: Ranks) -> None:
        self.request = request
        self.catalog = catalog
        self.ranks = ranks
        self.trees: list[CapturedTree] = []
        self.inventory = Inventory((), (), ())
        self.memory: list[torch.Tensor] = []
        self.global_plan = GlobalPlan((), (), (), 0)
        self.inventories: list[Inventory] = []
        self.receipts: list[Receipt] = []
        self.sequence = 0
        self.run_id = ""

    def run(self) -> Saved:
        started = time.monotonic()
        # The step is part of the label, so that ranks which save different steps are told so.
        label = f"save of step {self.request.step}"
        decided = self.ranks.decide(label, self._capture, self._plan, sends=Inventory, returns=SavePlan)
        if decided.committed:
            checkpoint = self.catalog.read(decided.folder)
            return Saved(decided.folder, checkpoint.digest, skipped=True)
        self._write_together(decided)
        digest = on_leader(self.ranks, "commit", lambda: self._commit(decided.folder, started).digest, returns=str)
        return Saved(decided.folder, digest, skipped=False)

    def _capture(self) -> Inventory:
        ranks = self.ranks
        self.trees = capture(
            self.request.components, rank=ranks.rank, size=ranks.size, pipeline_stage=self.request.pipeline_stage
        )
        self.inventory, self.memory = take_inventory(self.trees, take_frozen(self.request.components), size=ranks.size)
        return self.inventory

    def _plan(self, inventories: list[Inventory]) -> SavePlan:
        """The leader's part. Nothing is touched before the plan stands and there is room for it."""
        scan = self.catalog.scan()
        for checkpoint in self.catalog.lineage(self.request.parent, scan):
            if checkpoint.step == self.request.step:
                return SavePlan(checkpoint.folder, committed=True)
        self.inventories = inventories
        self.global_plan = plan(inventories)
        self._check_room()
        self.run_id = self.catalog.open_run()
        self.sequence = max((checkpoint.sequence for checkpoint in scan.checkpoints), default=0) + 1
        folder, claim = self.catalog.claim(self.request.step, self.ranks.size)
        return SavePlan(folder, self.global_plan.duties, claim=claim)

    def _check_room(self) -> None:
        free = self.catalog.storage.free_bytes()
        needed = self.global_plan.size_bytes + _ROOM_FOR_RECORDS_BYTES
        if free is not None and free < needed:
            raise StorageError(
                f"the checkpoint needs {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free",
                errno=errno.ENOSPC,
                run=self.catalog.storage.url,
                advice="make room or keep fewer checkpoints; nothing was written",
            )

    def _write_together(self, decided: SavePlan) -> None:
        """Every rank writes. If one cannot, nothing can refer to what the others wrote, and all of it goes."""
        names: list[str] = []
        try:
            self.ranks.decide(
                "write", lambda: self._write(decided, names), self._note_receipts, sends=Receipt, returns=None
            )
        except (Exception, KeyboardInterrupt):
            # Safe also when only this rank gave up: the commit waits for every rank to have passed this agreement.
            _discard([*names, layout.ATTEMPT] if self.ranks.rank == 0 else names, decided.folder, self.catalog)
            raise

    def _write(self, decided: SavePlan, names: list[str]) -> Receipt:
        if self.ranks.rank != 0:
            self.catalog.require_claim(decided.folder, decided.claim)
        duty = decided.duties[self.ranks.rank]
        tensors = stage(self.inventory, self.memory, duty, rank=self.ranks.rank)
        plain = self._plain_files(decided)
        names += [file.name for file in tensors] + [file.name for file in plain]
        return write(decided.folder, tensors, plain, self.catalog.storage)

    def _plain_files(self, decided: SavePlan) -> list[PlainFile]:
        rank = self.ranks.rank
        duty = decided.duties[rank]
        mine: dict[str, dict[str, Json]] = {}
        for index in duty.trees:
            tree, scope = self.trees[index], duty.scopes[index]
            file = layout.SHARED_VALUES if scope == "" and rank == 0 else layout.values_file(rank)
            mine.setdefault(file, {})[layout.tree_name(tree.component, scope)] = tree.values
        for merged in self.global_plan.trees if rank == 0 else ():
            if merged.merged is not None:
                mine.setdefault(merged.file, {})[merged.name] = merged.merged
        files = [values_file(name, trees) for name, trees in mine.items()]
        return files + asset_files(self.request.assets) if rank == 0 else files

    def _note_receipts(self, receipts: list[Receipt]) -> None:
        self.receipts = receipts

    def _commit(self, folder: str, started: float) -> Checkpoint:
        request = self.request
        meshes: set[MeshRecord] = {mesh for inventory in self.inventories for mesh in inventory.meshes}
        frozen = frozen_guards(entry for inventory in self.inventories for entry in inventory.frozen)
        facts = Facts(
            run_id=self.run_id,
            folder=folder,
            step=request.step,
            sequence=self.sequence,
            parent=request.parent,
            meshes=sorted(meshes),
            metrics=request.metrics,
            progress=request.progress,
            extra=request.extra,
            config=request.config,
            guards={**request.guards, **frozen},
            tags=request.tags,
            versions={"holdfast": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        )
        listing = Listing(
            leaves=[
                TensorRecord(name=leaf.name, dtype=leaf.dtype, shape=leaf.shape, chunks=(), sharded=leaf.sharded)
                for leaf in self.global_plan.leaves
            ],
            trees=[
                TreeRecord(component=tree.component, kind=tree.kind, file=tree.file, scope=tree.scope, type=tree.type)
                for tree in self.global_plan.trees
            ],
        )
        checkpoint = commit(facts, listing, self.receipts, self.catalog)
        seconds = time.monotonic() - started
        logger.info(
            "committed step %d: %.1f MiB in %.2f s to %s",
            request.step,
            checkpoint.size_bytes / 2**20,
            seconds,
            checkpoint.path,
        )
        self.catalog.point_latest(folder)
        return checkpoint


def _discard(names: Sequence[str], folder: str, catalog: Catalog) -> None:
    """Give back the room that an attempt took. Only called when no manifest can be there; what stays is debris."""
    for name in names:
        try:
            catalog.storage.delete(layout.key(folder, name))
        except StorageError as error:
            logger.debug("could not remove %s of an abandoned attempt: %s", name, error)
