"""Agree on one save with all ranks: whether there is anything to write, and who writes what. Knows torch, no files.

The first agreement is enough as long as the structure of every rank's state stays the same. Where it is new, the
coordinator plans from the inventories of all ranks, and the ranks compare their replicas before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.errors import UsageError
from holdfast.ranks.base import Ranks
from holdfast.runs.claims import has_claim
from holdfast.saving.capture import Capture
from holdfast.saving.compare import Sampler, digest_parts, digest_sets
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.files import FileLayout, lay_out
from holdfast.saving.messages import Inventory, ReplicaSet, SavePlan, StateSummary, WriteAssignment
from holdfast.saving.request import SaveRequest, argument_digests
from holdfast.state.budget import free_for_staging, machine_name, note_ranks_here, ranks_here
from holdfast.storage.base import Storage

__all__ = ["AgreedSave", "Agreement", "Prepared", "RankPlan"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank brings to a save."""

    request: SaveRequest
    captured: Capture


@dataclass(frozen=True, slots=True)
class AgreedSave:
    """One save on one rank, agreed on."""

    request: SaveRequest
    captured: Capture
    plan: SavePlan


@dataclass(frozen=True, slots=True)
class RankPlan:
    """This rank's part of a plan, which holds until the structure of some rank's state changes."""

    number: int
    assignment: WriteAssignment
    files: list[FileLayout]
    structure: str


class Agreement:
    """The plan step of a save, and what a rank keeps of the last plan."""

    def __init__(self, ranks: Ranks, coordinator: Coordinator, storage: Storage) -> None:
        self._ranks = ranks
        self._coordinator = coordinator
        self._storage = storage
        self._sampler = Sampler(ranks.rank)
        self._rank_plan: RankPlan | None = None
        self._shared_lease = 0

    def agree(self, step: int, prepared: Prepared | BaseException, *, held_bytes: int, unreported: bool) -> AgreedSave:
        """Return what all ranks do. A rank that could not prepare passes its error, which is raised on all of them.

        `held_bytes` is the staging memory of this rank; `unreported`: it has not raised the failure of the last save.
        """
        # The step is part of the label, so that ranks which save different steps get an error that names both.
        plan = self._ranks.decide(
            f"save of step {step!r:.40}",
            partial(self._summarize, step, prepared, held_bytes, unreported),
            partial(self._begin, prepared),
            sends=StateSummary,
            returns=SavePlan,
        )
        ready = _require(prepared)
        if not plan.committed and not plan.unreported:
            plan = self._complete(step, ready, plan)
        return AgreedSave(ready.request, ready.captured, plan)

    def rank_plan(self, agreed: AgreedSave) -> RankPlan:
        """Return this rank's part of the plan; the files are laid out when the plan is new."""
        plan, rank = agreed.plan, self._ranks.rank
        if plan.ranks_here:
            note_ranks_here(plan.ranks_here[rank])
        if self._rank_plan is None or plan.assignments:
            assignment = plan.assignments[rank]
            files = lay_out(agreed.captured.inventory(), assignment, rank=rank)
            self._rank_plan = RankPlan(plan.number, assignment, files, agreed.captured.structure)
        return self._rank_plan

    def require_shared_run(self, plan: SavePlan) -> None:
        """Make sure that all ranks see the leader's run, once for each lease, before anything is written. Otherwise the
        leader's writer would wait for parts that lie on another machine's disk."""
        if self._ranks.size == 1 or plan.lease == self._shared_lease:
            return
        look = partial(self._require_claim, plan)
        self._ranks.decide("first look at the run", look, _choose_nothing, sends=None, returns=None)
        self._shared_lease = plan.lease

    def _require_claim(self, plan: SavePlan) -> None:
        if not has_claim(self._storage, plan.lease, plan.lease_token):
            raise UsageError(
                f"rank {self._ranks.rank} does not see the lease of the run that rank 0 has just taken",
                run=self._storage.url,
                advice="give all ranks the same run, on storage that all of them share; nothing was written",
            )

    def _summarize(
        self, step: int, prepared: Prepared | BaseException, held_bytes: int, unreported: bool
    ) -> StateSummary:
        ready = _require(prepared)
        known, captured = self._rank_plan, ready.captured
        # An arena that held this very structure holds it again; any other may need more memory than there is.
        is_same = known is not None and known.structure == captured.structure and held_bytes
        return StateSummary(
            captured.structure,
            captured.digests,
            captured.frozen,
            known.number if known is not None else 0,
            None if is_same else free_for_staging(),
            unreported=unreported,
            comparison=self._sampler.comparison(captured.structure),
            samples=self._sampler.take(captured.memory, captured.structure, step),
            held_bytes=held_bytes,
            machine=machine_name(),
            ranks_here=ranks_here(),
            argument_digests=argument_digests(ready.request.metadata) if self._ranks.size > 1 else (),
            asset_names=ready.request.asset_names if self._ranks.size > 1 else (),
        )

    def _begin(self, prepared: Prepared | BaseException, summaries: list[StateSummary]) -> SavePlan:
        return self._coordinator.begin(_require(prepared).request, summaries)

    def _complete(self, step: int, ready: Prepared, plan: SavePlan) -> SavePlan:
        """Return the plan after the agreements that a new structure needs."""
        captured = ready.captured
        if plan.differing:
            self._raise_difference(step, captured, self._sampler.sets, plan.differing)
        if not plan.number:
            plan = self._ranks.decide(
                f"plan of step {step}",
                captured.inventory,
                partial(self._coordinator.plan, ready.request),
                sends=Inventory,
                returns=SavePlan,
            )
        if not plan.folder:
            plan = self._compare(step, ready, plan)
        if plan.comparison != self._sampler.comparison(captured.structure):
            self._sampler.begin(plan.replicas, plan.comparison, captured.structure)
        self._sampler.round = plan.round
        return plan

    def _compare(self, step: int, ready: Prepared, planned: SavePlan) -> SavePlan:
        """Compare all replicas of a new plan, before anything is written, and start the save."""
        sets = planned.replicas
        started = self._ranks.decide(
            f"replicas of step {step}",
            partial(digest_sets, sets, self._ranks.rank, ready.captured.memory),
            partial(self._coordinator.compare, ready.request),
            sends=tuple[bytes, ...],
            returns=SavePlan,
        )
        if started.differing:
            self._raise_difference(step, ready.captured, sets, started.differing)
        return msgspec.structs.replace(started, assignments=planned.assignments, replicas=sets)

    def _raise_difference(
        self, step: int, captured: Capture, sets: Sequence[ReplicaSet], differing: tuple[int, ...]
    ) -> None:
        """Raise, on all ranks, the error that names the replicas that differ."""
        self._ranks.decide(
            f"difference at step {step}",
            partial(digest_parts, sets, differing, self._ranks.rank, captured.memory),
            partial(self._coordinator.raise_difference, differing),
            sends=tuple[tuple[bytes, ...], ...],
            returns=None,
        )


def _require(prepared: Prepared | BaseException) -> Prepared:
    if isinstance(prepared, BaseException):
        raise prepared
    return prepared


def _choose_nothing(_: list[None]) -> None:
    """Choose nothing: that all ranks passed this agreement is the decision."""
