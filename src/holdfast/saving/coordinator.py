"""What the leader decides about a save, and what it keeps from one to the next: the plan, and the lease on the run.

Every rank's summary enters; a plan, a folder's name and the facts of the manifest leave. Knows no tensors.
"""

from __future__ import annotations

import errno
import logging
import platform
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from holdfast._version import __version__
from holdfast.errors import (
    CorruptCheckpointError,
    KeyMissingError,
    RunInUseError,
    StorageError,
    UnsafeContentError,
    UnsupportedFormatError,
    UsageError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import BLOCK_BYTES, MeshRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.events import Event, Observer
from holdfast.runs.lease import Lease
from holdfast.runs.orphans import wait_for_orphans
from holdfast.runs.run_record import open_run
from holdfast.saving.committed_steps import CommittedSteps
from holdfast.saving.compare import ReplicaMonitor
from holdfast.saving.facts import Facts, Listing
from holdfast.saving.messages import Inventory, SavePlan, StateSummary, WriteAssignment
from holdfast.saving.outcome import Saved
from holdfast.saving.plan import GlobalPlan, Replicas, partly_held, plan
from holdfast.saving.request import COMPARED_ARGUMENTS, SaveRequest
from holdfast.state.frozen import frozen_guards
from holdfast.state.trees import FrozenEntry

logger = logging.getLogger("holdfast")

__all__ = ["Coordinator"]

_ROOM_FOR_RECORDS_BYTES = 1 << 20
_ROOM_FOR_HEADERS_BYTES = 16 << 20
_SHOWN_RANKS = 8


class GivenArguments(Protocol):
    """What a rank tells of the arguments of a save: digests in the order of `COMPARED_ARGUMENTS`, and the names of its
    assets."""

    @property
    def argument_digests(self) -> tuple[str, ...]: ...

    @property
    def asset_names(self) -> tuple[str, ...]: ...


class Coordinator:
    """The leader's decisions about saves, and the state that they need: the plan, the lease, the committed steps."""

    def __init__(
        self,
        catalog: Catalog,
        size: int,
        *,
        claims: bool,
        staging_limit_bytes: int | None,
        timeout_seconds: float,
        replicas: Replicas = "compare",
        before_claim: Callable[[], None] = lambda: None,
        emit: Observer = lambda event: None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._emit = emit
        self._before_claim = before_claim
        self._replicas: Replicas = replicas
        self._monitor = ReplicaMonitor()
        self._holding = threading.Lock()
        self._catalog = catalog
        self._size = size
        self._claims = claims
        self._staging_limit_bytes = staging_limit_bytes
        self._number = 0
        self._structures: list[str] = []
        self._pattern: list[int] = []
        self._summaries: Sequence[StateSummary] = ()
        self._frozen: list[FrozenEntry] = []
        self._plan = GlobalPlan((), (), (), (), BLOCK_BYTES)
        self._meshes: tuple[MeshRecord, ...] = ()
        self._committed = CommittedSteps(catalog)
        self._attempts: dict[int, int] | None = None
        self._lease: Lease | None = None
        self._warned_of_arguments = False
        self._reported_loss = False
        self.listing = Listing((), ())

    @property
    def trees(self) -> Sequence[Any]:
        return self._plan.trees

    def begin(self, request: SaveRequest, summaries: list[StateSummary]) -> SavePlan:
        """Decide whether there is anything to write, and whether the plan of the last save holds."""
        if all(summary.unreported for summary in summaries):
            return SavePlan(unreported=True)
        self.compare_arguments(summaries)
        is_held = self._lease is not None
        if is_held:
            # First of all: what is committed now may be another writer's.
            self.hold_run()
        differing = self._monitor.note_samples(summaries, request.step)
        if differing:
            return self._stop_for(differing)
        self._committed.follow(request.ancestry.parent)
        found = None if request.resave else self._read_committed(request)
        if found is not None:
            size_bytes, sequence = found.size_bytes, found.sequence
            return SavePlan(found.folder, committed=True, digest=found.digest, size_bytes=size_bytes, sequence=sequence)
        self._summaries, self._frozen = summaries, [entry for summary in summaries for entry in summary.frozen]
        if not self._holds(summaries):
            return SavePlan()
        return self._start(request, (), is_held=is_held)

    def compare_arguments(self, given: Sequence[GivenArguments]) -> None:
        """Warn, once, of arguments that another rank gave and that are not stored, because rank 0's are."""
        first = given[0]
        if all(
            of_rank.argument_digests == first.argument_digests and of_rank.asset_names == first.asset_names
            for of_rank in given
        ):
            return
        texts = []
        for rank, of_rank in enumerate(given):
            pairs = zip(COMPARED_ARGUMENTS, of_rank.argument_digests, first.argument_digests, strict=True)
            lost = {name: own for name, given, own in pairs if given and given != own}
            if of_rank.asset_names and of_rank.asset_names != first.asset_names:
                lost["assets"] = ", ".join(first.asset_names)
            if lost.get("tag") == "":
                raise UsageError(
                    f"rank {rank} gives a tag and rank 0 gives none", advice="give the tag on rank 0, or on all ranks"
                )
            if lost.get("assets") == "":
                raise UsageError(
                    f"rank {rank} gives assets and rank 0 gives none", advice="give them on rank 0, or on all ranks"
                )
            texts += [f"{', '.join(lost)} on rank {rank}"] if lost else []
        if texts and not self._warned_of_arguments:
            self._warned_of_arguments = True
            more = f" and {len(texts) - _SHOWN_RANKS} more ranks" if len(texts) > _SHOWN_RANKS else ""
            logger.warning(
                "arguments of the save differ between the ranks, and rank 0's are stored: %s%s",
                "; ".join(texts[:_SHOWN_RANKS]),
                more,
            )

    def plan(self, request: SaveRequest, inventories: list[Inventory]) -> SavePlan:
        """Make a new plan. Nothing is written before it is complete and there is room for it."""
        planned = plan(inventories, self._replicas)
        for name, ranks in partly_held(inventories).items():
            logger.warning(
                "the component '%s' is given on rank %s alone, and is stored and restored for it alone; wrap it in "
                "PerRank if that is meant",
                name,
                ", ".join(map(str, ranks)),
            )
        self._plan = planned
        self._meshes = tuple(sorted({mesh for inventory in inventories for mesh in inventory.meshes}))
        self._number += 1
        self._structures = [summary.structure for summary in self._summaries]
        self._pattern = _pattern(self._summaries)
        self.listing = Listing.of(planned)
        if self._monitor.knows(planned.replicas, self._summaries):
            return self._start(request, planned.assignments)
        self._monitor.begin(planned.replicas, planned.compared)
        if not planned.replicas:
            return self._start(request, planned.assignments)
        return SavePlan(
            number=self._number,
            assignments=planned.assignments,
            comparison=self._monitor.comparison,
            replicas=planned.replicas,
        )

    def compare(self, request: SaveRequest, digests: Sequence[Sequence[bytes]]) -> SavePlan:
        """Start the save that was planned if all replicas are the same on all ranks."""
        differing = self._monitor.compare(digests)
        return self._stop_for(differing) if differing else self._start(request, ())

    def raise_difference(self, numbers: Sequence[int], digests: Sequence[Sequence[Sequence[bytes]]]) -> None:
        """Raise the error that names the leaves and the ranks that differ."""
        raise self._monitor.difference(numbers, digests)

    def _stop_for(self, differing: tuple[int, ...]) -> SavePlan:
        """Have the ranks look for what differs. Until they are the same again, every save compares all of them."""
        self._structures = []
        self._monitor.forget()
        return SavePlan(differing=differing)

    def facts(self, request: SaveRequest, folder: str) -> Facts:
        """Return the facts of the manifest of a save."""
        metadata = request.metadata
        return Facts(
            step=request.step,
            folder=folder,
            metadata=replace(metadata, guards={**metadata.guards, **frozen_guards(self._frozen)}),
            ancestry=request.ancestry,
            meshes=self._meshes,
            versions={"holdfast": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
            lease=self.lease,
            lease_token=self._lease.token if self._lease is not None else "",
            links=request.links,
            block_bytes=self._plan.block_bytes,
        )

    def note_commit(self, step: int, saved: Saved) -> None:
        """Take note of a checkpoint that this training has committed."""
        self._committed.add(step, saved.folder, saved.digest)

    @property
    def lease(self) -> int:
        """Return the number under which this process writes; 0 as long as it does not."""
        return self._lease.number if self._lease is not None else 0

    def hold_run(self) -> None:
        """Become the run's only writer, or make sure that this process still is."""
        happened: list[Event] = []
        try:
            # One thread at a time: the second of two would take the run over from the first.
            with self._holding:
                self._hold(happened)
        finally:
            # Without the lock: an observer may use the manager.
            for event in happened:
                self._emit(event)

    def _hold(self, happened: list[Event]) -> None:
        lost = 0
        if self._lease is not None:
            if not self._is_lost(self._lease, happened):
                return
            self._lease.abandon()
            lost = self._lease.number
            happened.append(Event("lease_lost", None, 0, error="the claim was deleted or damaged, and is made again"))
            logger.warning(
                "the claim of this process on the run %s was deleted or damaged, and is made again",
                self._catalog.storage.url,
            )
        # What another manager of this process, or a writer without its training, is about to commit comes first.
        self._before_claim()
        wait_for_orphans(self._catalog, self._timeout_seconds / 2, happened.append)
        close = self._catalog.attempts.close_older
        self._lease = Lease.acquire(self._catalog.storage, lost=lost, close_attempts=close)
        if self._lease.taken_from is not None:
            happened.append(Event("lease_taken_over", None, 0, error=f"held before by {self._lease.taken_from.who}"))
        self.forget()

    def _is_lost(self, lease: Lease, happened: list[Event]) -> bool:
        try:
            return lease.is_lost()
        except RunInUseError as error:
            if not self._reported_loss:
                self._reported_loss = True
                happened.append(Event("lease_lost", None, 0, error=str(error)))
            raise

    def release_run(self) -> None:
        """Let another process write to the run."""
        if self._lease is not None:
            self._lease.release()

    def forget(self) -> None:
        """Look at the run anew before the next save, because something failed."""
        self._committed.forget()
        self._attempts = None

    def _holds(self, summaries: Sequence[StateSummary]) -> bool:
        # What the ranks hold in parts is merged from their values, which have to travel each time.
        merged = any(tree.merged is not None for tree in self._plan.trees)
        return (
            not merged
            and self._number > 0
            and all(summary.plan == self._number for summary in summaries)
            and [summary.structure for summary in summaries] == self._structures
            and _pattern(summaries) == self._pattern
        )

    def parent_of_part(self, request: SaveRequest) -> Checkpoint:
        """Return the checkpoint from which a save of some components takes over the rest: the one that this training
        saved or restored last, which must be of the same step."""
        if self._lease is not None:
            self.hold_run()
        self._committed.follow(request.ancestry.parent)
        found = self._read_committed(request)
        if found is None:
            raise UsageError(
                "components= stores a part of the state anew, and this training has neither saved nor restored a "
                f"checkpoint of step {request.step}",
                run=self._catalog.storage.url,
                advice="save the whole state of the step first: save(step)",
            )
        if found.digest != request.ancestry.parent:
            raise UsageError(
                f"components= stores a part of the state anew, and step {request.step} is not the last that this "
                "training saved or restored: `latest` would lead back to it",
                run=self._catalog.storage.url,
                advice="pass the step of the last checkpoint, or save the whole state with resave=True alone",
            )
        return self._catalog.annotated(found)

    def claim_folder(self, step: int, needed_bytes: int) -> tuple[str, str]:
        """Create the folder of a save that is written in the call; return its name and its claim."""
        self._check_room(needed_bytes)
        self.hold_run()
        first = self._next_attempt(step)
        return self._catalog.attempts.claim_free(step, self._size, lease=self.lease, first=first)

    def _start(
        self, request: SaveRequest, assignments: tuple[WriteAssignment, ...], *, is_held: bool = False
    ) -> SavePlan:
        """Name the folder of a save. `is_held`: that this process holds the run was seen in the same decision."""
        needed_bytes = sum(self._plan.sizes)
        streamed = not self._claims and self._must_stream()
        if self._claims or streamed:
            folder, claim = self.claim_folder(request.step, needed_bytes)
        else:
            self._check_room(needed_bytes)
            if not is_held:
                self.hold_run()
            # The leader's writer claims it later, and fails if another process was first.
            folder = paths.folder_name(request.step, self._next_attempt(request.step))
            claim = uuid.uuid4().hex
        self._monitor.round += 1
        return SavePlan(
            folder,
            self._number,
            assignments,
            claim=claim,
            streamed=streamed,
            lease=self.lease,
            lease_token=self._lease.token if self._lease is not None else "",
            comparison=self._monitor.comparison,
            round=self._monitor.round,
            ranks_here=neighbours(self._summaries) if assignments else (),
        )

    def _next_attempt(self, step: int) -> int:
        """Return the number of an attempt at a step that no folder of the run has. The run is listed once, and not for
        each save: only this process makes folders in it."""
        if self._attempts is None:
            open_run(self._catalog)
            self._attempts = self._catalog.attempts.highest_by_step()
        attempt = max(self._attempts.get(step, 0) + 1, self._first_attempt(step))
        # A person may have put a checkpoint, a file or a link there since the names were listed.
        while self._catalog.attempts.is_taken(paths.folder_name(step, attempt)):
            attempt += 1
        self._attempts[step] = attempt
        return attempt

    def _first_attempt(self, step: int) -> int:
        """Return the lowest number of an attempt whose name no writer before this one can still be deleting."""
        return self._lease.floor.first_attempt(step) if self._lease is not None else 1

    def _must_stream(self) -> bool:
        limit = self._staging_limit_bytes
        rooms = rooms_for_staging(self._summaries, self._plan.sizes)
        for rank, (needed, room) in enumerate(zip(self._plan.sizes, rooms, strict=True)):
            if limit is not None and needed > limit:
                logger.debug("rank %d has %d bytes, over staging_limit_bytes=%d: streamed", rank, needed, limit)
                return True
            if room is not None and needed + _ROOM_FOR_HEADERS_BYTES > room:
                logger.warning(
                    "rank %d has %.1f MiB to stage and %.1f MiB of memory are free: this save is written in pieces "
                    "before the training goes on",
                    rank,
                    needed / 2**20,
                    room / 2**20,
                )
                return True
        return False

    def _check_room(self, needed_bytes: int) -> None:
        free = self._catalog.storage.free_bytes()
        needed = needed_bytes + _ROOM_FOR_RECORDS_BYTES
        if free is not None and free < needed:
            raise StorageError(
                f"the checkpoint needs {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free",
                errno=errno.ENOSPC,
                run=self._catalog.storage.url,
                advice="make room, or remove checkpoints by `holdfast prune`; nothing was written",
            )

    def _read_committed(self, request: SaveRequest) -> Checkpoint | None:
        """Return the checkpoint of the step, if this lineage has it. One that is removed at this moment, whose manifest
        is damaged, or in whose folder one of another lineage lies by now, does not count: the step is saved again."""
        try:
            found = self._committed.read(request.step, request.ancestry)
        except (KeyMissingError, CorruptCheckpointError, UnsafeContentError, UnsupportedFormatError):
            found = None
            self.forget()
        if found is not None and found not in request.ancestry.lineage:
            self.forget()
            return None
        return found


def neighbours(summaries: Sequence[StateSummary]) -> tuple[int, ...]:
    """Return for each rank how many of these ranks are on its machine, itself included."""
    counts = Counter(summary.machine for summary in summaries)
    return tuple(counts[summary.machine] if summary.machine else 1 for summary in summaries)


def rooms_for_staging(summaries: Sequence[StateSummary], needed: Sequence[int]) -> list[int | None]:
    """Return the memory that each rank may stage in, where all ranks stage at the same time: what it holds already, and
    its share of what is free on its machine, or what the others there leave if they need less than theirs. Ranks that
    hold their memory already need none. None where what a rank holds is enough by itself."""
    rooms: list[int | None] = []
    missing = [
        max(size + _ROOM_FOR_HEADERS_BYTES - summary.held_bytes, 0) if summary.room_bytes is not None else 0
        for summary, size in zip(summaries, needed, strict=True)
    ]
    on_machine: Counter[str] = Counter()
    for summary, count in zip(summaries, missing, strict=True):
        on_machine[summary.machine] += count
    for summary, own, count in zip(summaries, missing, neighbours(summaries), strict=True):
        if summary.room_bytes is None:
            rooms.append(None)
            continue
        most = max(count, summary.ranks_here, 1)
        others = on_machine[summary.machine] - own if summary.machine else 0
        share = summary.room_bytes // most
        rooms.append(summary.held_bytes + max(share, share * count - others))
    return rooms


def _pattern(summaries: Sequence[StateSummary]) -> list[int]:
    """Return which ranks have the same values of which trees: all that a plan takes from their digests."""
    classes: dict[str, int] = {}
    return [classes.setdefault(digest, len(classes)) for summary in summaries for digest in summary.digests]
