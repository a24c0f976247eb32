"""Save some components anew, as a later checkpoint of the same step that takes the rest over from the one before it.

A request that names components enters on every rank; a committed checkpoint leaves. It is whole in itself: the files
that it shares with its parent are in its folder, as clones where the storage has them (`take_over`). So the parent can
be removed, and whatever reads a checkpoint reads this one.

It is written before the call returns, in every mode: it waits for the commit of its parent, and is small. The plan that
full saves keep from one to the next is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from holdfast.errors import CorruptCheckpointError, SaveFailedError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.files import PlainFile
from holdfast.ranks.base import Ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.progress import Progress
from holdfast.saving.capture import Capture, Capturer
from holdfast.saving.commit import commit
from holdfast.saving.compare import ReplicaMonitor, digest_parts, digest_sets
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.facts import Facts, Listing
from holdfast.saving.files import asset_files, lay_out, plain_files, with_sources
from holdfast.saving.inheritance import Inheritance, inherit, inherited_metadata, inherited_versions
from holdfast.saving.messages import Inventory, Receipt, ReplicaSet, WriteAssignment
from holdfast.saving.outcome import Saved
from holdfast.saving.pending import PendingSave
from holdfast.saving.plan import GlobalPlan, Replicas, plan
from holdfast.saving.request import SaveRequest, argument_digests
from holdfast.saving.ring import Ring
from holdfast.saving.sync_saver import announce, commit_together, write_together
from holdfast.saving.take_over import clone_files, copies_of, require_equal
from holdfast.saving.training_lineage import TrainingLineage
from holdfast.saving.write import write
from holdfast.state.frozen import frozen_guards
from holdfast.storage.base import features_of

__all__ = ["AgreedPart", "PartSaver"]

_SHOWN_CHARACTERS = 200


class Contribution(msgspec.Struct, frozen=True, array_like=True):
    """What a rank sends first: all that it has of the components, the components that it knows, whether it has not
    raised the failure of the save before, and digests of its arguments as in `StateSummary`."""

    inventory: Inventory
    known: tuple[str, ...]
    unreported: bool
    argument_digests: tuple[str, ...] = ()
    asset_names: tuple[str, ...] = ()


class PartPlan(msgspec.Struct, frozen=True, array_like=True):
    """The leader's decision. Without a `folder` the replicas are compared first.

    parent, parent_digest: the folder and the digest of the checkpoint that the rest is taken over from.
    first_part: the number from which on files get names that no file of the parent has.
    assets: the names of the assets that this save writes itself.
    unreported: raise the failure of the save before; no save starts.
    differing: the numbers of sets whose replicas differ: the ranks look for the leaves, and no save starts.
    """

    folder: str = ""
    claim: str = ""
    parent: str = ""
    parent_digest: str = ""
    first_part: int = 0
    assignments: tuple[WriteAssignment, ...] = ()
    replicas: tuple[ReplicaSet, ...] = ()
    assets: tuple[str, ...] = ()
    unreported: bool = False
    differing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AgreedPart:
    """One save of some components on one rank, agreed on."""

    request: SaveRequest
    captured: Capture
    plan: PartPlan


@dataclass(frozen=True, slots=True)
class _Decided:
    """What the leader keeps of a save until it is committed."""

    parent: Checkpoint
    inheritance: Inheritance
    planned: GlobalPlan
    listing: Listing
    inventories: Sequence[Inventory]
    plan: PartPlan
    needed_bytes: int


class PartSaver:
    """The steps of a save of some components."""

    def __init__(
        self,
        catalog: Catalog,
        ranks: Ranks,
        coordinator: Coordinator,
        lineage: TrainingLineage,
        ring: Ring,
        *,
        replicas: Replicas,
    ) -> None:
        self._catalog = catalog
        self._ranks = ranks
        self._coordinator = coordinator
        self._lineage = lineage
        self._ring = ring
        self._replicas: Replicas = replicas
        self._capturer = Capturer()
        self._monitor = ReplicaMonitor()
        self._decided: _Decided | None = None

    def agree(
        self, label: str, request: Callable[[], SaveRequest], pending: PendingSave, *, unreported: bool
    ) -> AgreedPart:
        """Capture the components and return what all ranks do. What `request` raises is raised on all ranks. The
        `label` names the components, so that ranks which name different ones get an error with both."""
        taken: list[tuple[SaveRequest, Capture]] = []

        def contribute() -> Contribution:
            with pending.phase("capture"):
                taken.append(self._capture(request))
            wanted, captured = taken[0]
            digests = argument_digests(wanted.metadata) if self._ranks.size > 1 else ()
            known = tuple(wanted.components)
            return Contribution(captured.inventory(), known, unreported, digests, wanted.asset_names)

        with pending.phase("agree"):
            decided = self._ranks.decide(
                label,
                contribute,
                lambda contributions: self._begin(taken[0][0], contributions),
                sends=Contribution,
                returns=PartPlan,
            )
            agreed = AgreedPart(*taken[0], decided)
            if not decided.folder and not decided.unreported:
                agreed = self._compare(agreed)
        pending.folder = agreed.plan.folder
        return agreed

    def save(self, agreed: AgreedPart, pending: PendingSave) -> Saved:
        """Write on all ranks and commit on the leader; return the outcome on every rank."""
        folder = agreed.plan.folder
        part = partial(self._write_part, agreed, pending)
        receipts = write_together(part, folder, pending, self._catalog, self._ranks)
        work = partial(self._commit, agreed, receipts)
        return commit_together(work, folder, pending, self._catalog, self._ranks)

    def _capture(self, request: Callable[[], SaveRequest]) -> tuple[SaveRequest, Capture]:
        wanted = replace(request(), ancestry=self._lineage.next_ancestry())
        captured = self._capturer.capture(
            wanted.components,
            rank=self._ranks.rank,
            size=self._ranks.size,
            pipeline_stage=wanted.pipeline_stage,
            only=wanted.only,
        )
        return wanted, captured

    # The leader

    def _begin(self, request: SaveRequest, contributions: list[Contribution]) -> PartPlan:
        """Find the parent and plan. Nothing is written before the plan is complete and there is room for it."""
        if all(contribution.unreported for contribution in contributions):
            return PartPlan(unreported=True)
        self._coordinator.compare_arguments(contributions)
        _require_known(request.only, contributions)
        parent = self._coordinator.parent_of_part(request)
        self._require_usable(parent)
        inventories = [contribution.inventory for contribution in contributions]
        decided = self._decided = self._decide(request, parent, inventories)
        if not decided.planned.replicas:
            return self._start(request)
        self._monitor.begin(decided.planned.replicas, decided.planned.compared)
        return msgspec.structs.replace(decided.plan, replicas=decided.planned.replicas)

    def _require_usable(self, parent: Checkpoint) -> None:
        if parent.damage:
            raise CorruptCheckpointError(
                f"the checkpoint that this save continues is damaged: {parent.damage}",
                run=self._catalog.storage.url,
                file=parent.folder,
                advice="save the whole state: save(step, resave=True) without components=",
            )
        if parent.world_size != self._ranks.size:
            raise UsageError(
                f"components= stores a part of the state anew, and the checkpoint of step {parent.step} was saved by "
                f"{parent.world_size} ranks; there are {self._ranks.size} now",
                run=self._catalog.storage.url,
                advice="save the whole state once: save(step, resave=True) without components=",
            )

    def _decide(self, request: SaveRequest, parent: Checkpoint, inventories: list[Inventory]) -> _Decided:
        planned = plan(inventories, self._replicas, parent.manifest.block_bytes)
        assets = asset_files(request.assets)
        names = tuple(request.assets)
        inheritance = inherit(parent.manifest, request.only, names)
        first_part = paths.next_part(file.name for file in parent.manifest.files)
        listing = Listing.of(planned, first_part=first_part)
        copied = inheritance.mixed_bytes
        if features_of(self._catalog.storage).clone is None:
            copied += inheritance.size_bytes
        return _Decided(
            parent,
            inheritance,
            planned,
            Listing((*inheritance.tensors, *listing.leaves), (*inheritance.trees, *listing.trees)),
            inventories,
            PartPlan(
                parent=parent.folder,
                parent_digest=parent.digest,
                first_part=first_part,
                assignments=planned.assignments,
                assets=names,
            ),
            copied + sum(planned.sizes) + sum(file.size_bytes for file in assets),
        )

    def _start(self, request: SaveRequest) -> PartPlan:
        decided = self._require_decided()
        folder, claim = self._coordinator.claim_folder(request.step, decided.needed_bytes)
        return msgspec.structs.replace(decided.plan, folder=folder, claim=claim)

    def _commit(self, agreed: AgreedPart, receipts: list[Receipt]) -> Saved:
        decided, self._decided = self._require_decided(), None
        facts = self._facts(agreed, decided)
        checkpoint = commit(facts, decided.listing, receipts, self._catalog)
        return announce(checkpoint, self._catalog, links=facts.links)

    def _facts(self, agreed: AgreedPart, decided: _Decided) -> Facts:
        facts = self._coordinator.facts(agreed.request, agreed.plan.folder)
        new_meshes = {mesh for inventory in decided.inventories for mesh in inventory.meshes}
        guards = frozen_guards(entry for inventory in decided.inventories for entry in inventory.frozen)
        return msgspec.structs.replace(
            facts,
            metadata=inherited_metadata(agreed.request.metadata, decided.parent, guards),
            meshes=tuple(sorted({*decided.parent.manifest.meshes, *new_meshes})),
            versions=inherited_versions(facts.versions, decided.parent),
            block_bytes=decided.planned.block_bytes,
        )

    def _require_decided(self) -> _Decided:
        if self._decided is None:
            raise SaveFailedError("nothing was decided about this save")
        return self._decided

    # All ranks

    def _compare(self, agreed: AgreedPart) -> AgreedPart:
        """Compare all replicas before anything is written, and start the save."""
        sets, step, memory = agreed.plan.replicas, agreed.request.step, agreed.captured.memory
        rank = self._ranks.rank

        def choose(digests: list[tuple[bytes, ...]]) -> PartPlan:
            differing = self._monitor.compare(digests)
            return PartPlan(differing=differing) if differing else self._start(agreed.request)

        started = self._ranks.decide(
            f"replicas of step {step}",
            partial(digest_sets, sets, rank, memory),
            choose,
            sends=tuple[bytes, ...],
            returns=PartPlan,
        )
        if started.differing:
            numbers = started.differing
            self._ranks.decide(
                f"difference at step {step}",
                partial(digest_parts, sets, numbers, rank, memory),
                lambda digests: self._raise_difference(numbers, digests),
                sends=tuple[tuple[bytes, ...], ...],
                returns=None,
            )
        return replace(agreed, plan=started)

    def _raise_difference(self, numbers: Sequence[int], digests: Sequence[Sequence[Sequence[bytes]]]) -> None:
        raise self._monitor.difference(numbers, digests)

    def _write_part(self, agreed: AgreedPart, pending: PendingSave, created: list[str]) -> Receipt:
        """Take over this rank's share of the parent's files and write this rank's part of the components."""
        decided, rank, size = agreed.plan, self._ranks.rank, self._ranks.size
        if rank != 0:
            self._catalog.attempts.require_claim(decided.folder, decided.claim)
        parent = self._read_parent(decided)
        share = inherit(parent.manifest, agreed.request.only, decided.assets).share(rank, size)
        assignment = decided.assignments[rank]
        files = lay_out(agreed.captured.inventory(), assignment, rank=rank, first_part=decided.first_part)
        cloned = clone_files(parent, share.files, decided.folder, created.append)
        copies = copies_of(parent, share, cloned, rank=rank, first_part=decided.first_part + len(files))
        tensors = [*with_sources(files, agreed.captured.memory, self._ring), *copies.tensor_files]
        plain = [*self._plain_files(agreed, assignment), *copies.plain_files]
        pending.size_bytes = sum(file.frame.size_bytes for file in tensors) + sum(file.size_bytes for file in plain)
        with Progress(f"saving step {pending.step}", pending.size_bytes, shown=rank == 0) as progress:
            receipt = write(
                decided.folder,
                tensors,
                plain,
                self._catalog.storage,
                on_bytes=progress.add,
                on_created=created.append,
            )
        require_equal(copies, receipt, parent)
        self._sync_clones(decided.folder, [file.name for file in cloned], [file.name for file in receipt.files])
        chunks = [(tensor.name, chunk) for tensor, chunk in share.chunks_in(cloned)]
        return Receipt((*cloned, *receipt.files), (*chunks, *receipt.chunks))

    def _plain_files(self, agreed: AgreedPart, assignment: WriteAssignment) -> list[PlainFile]:
        rank = self._ranks.rank
        trees = self._require_decided().planned.trees if rank == 0 else ()
        assets, first_part = agreed.request.assets, agreed.plan.first_part
        return plain_files(agreed.captured, assignment, rank, trees, assets, first_part=first_part)

    def _read_parent(self, decided: PartPlan) -> Checkpoint:
        parent = self._catalog.read(decided.parent)
        if parent.digest != decided.parent_digest:
            raise SaveFailedError(f"{decided.parent} is not the checkpoint that rank 0 has read there")
        return parent

    def _sync_clones(self, folder: str, cloned: Sequence[str], synced: Sequence[str]) -> None:
        """Make the names of clones durable, where `write` has not synced their folder after they were made: a manifest
        may only ever name what a power cut cannot take away."""
        done = {paths.key(folder, name).rpartition("/")[0] for name in synced}
        places = {paths.key(folder, name).rpartition("/")[0] for name in cloned}
        for place in sorted(places - done, reverse=True):
            self._catalog.storage.sync(place)


def _require_known(names: Sequence[str], contributions: Sequence[Contribution]) -> None:
    known = {name for contribution in contributions for name in contribution.known}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"components= names '{', '.join(unknown):.{_SHOWN_CHARACTERS}}', and there is no such component",
            advice=f"the manager has {', '.join(sorted(known)):.{_SHOWN_CHARACTERS}}",
        )
