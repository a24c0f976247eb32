"""The load in order: resolve, match, read, restore. A selector enters, restored objects leave.

No live object changes before every rank knows that its part fits and is sound. What must be decided from files is
decided by the leader; a checkpoint that is damaged for one rank is damaged for all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import torch

from holdfast.errors import CorruptCheckpointError, HoldfastError, KeyDamagedError, KeyMissingError
from holdfast.loading.candidates import Candidate, Candidates
from holdfast.loading.components import Matched, match_components
from holdfast.loading.filling import Filling
from holdfast.loading.guards import check_guards
from holdfast.loading.match import Place
from holdfast.loading.records import Loaded, LoadRequest, NothingToLoad
from holdfast.loading.restore import restore_random_state, restore_tensors, restore_values
from holdfast.loading.strategy import Verify
from holdfast.loading.verdict import MatchReport, Texts, Verdict, judge, log_differences, union
from holdfast.ranks.base import Ranks, together
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Skipped
from holdfast.state.memory import collector_paused

logger = logging.getLogger("holdfast")

__all__ = ["LoadRequest", "Loaded", "NothingToLoad", "Verify", "load"]


def load(request: LoadRequest, catalog: Catalog, ranks: Ranks) -> Loaded | NothingToLoad:
    """Restore on all ranks. `NothingToLoad` when `latest` was asked of a run that has no checkpoint."""
    try:
        # New memory must be ordinary memory, whatever mode the caller is in: the training goes on with it.
        with collector_paused(), torch.inference_mode(False), torch.no_grad():
            return _load(request, catalog, ranks)
    except HoldfastError:
        raise
    except Exception as error:
        raise HoldfastError(f"the restore failed: {type(error).__name__}: {error}") from error


def _load(request: LoadRequest, catalog: Catalog, ranks: Ranks) -> Loaded | NothingToLoad:
    """Try the candidates in order, each step on all ranks. One that is damaged is rejected, and the next one tried; one
    that was removed meanwhile is not damaged, and leaves no trace."""
    clock = _Clock()
    with Candidates(request.selector, catalog, ranks) as candidates:
        clock.end_of("resolve")
        rejected = _Rejected(candidates)
        for candidate in candidates:
            attempt = _Attempt(candidate, request, catalog, ranks, clock)
            verdict = attempt.match()
            damage = verdict.damage or attempt.read()
            if not damage:
                attempt.restore()
                if ranks.rank == 0:
                    log_differences(verdict, request.strategy, attempt.checkpoint.step)
                return attempt.loaded(verdict, rejected)
            if not candidates.give_up(candidate):
                continue
            rejected.add(candidate, attempt.opened, damage)
            if request.selector.may_fall_back and ranks.rank == 0:
                logger.warning("%s is damaged and rejected: %s", candidate.folder, damage[0])
    return rejected.nothing_left(request, catalog)


class _Attempt:
    """The attempt to restore from one candidate, on one rank. Each step ends with an agreement of all ranks."""

    def __init__(
        self, candidate: Candidate, request: LoadRequest, catalog: Catalog, ranks: Ranks, clock: _Clock
    ) -> None:
        self.opened: Checkpoint | None = None
        self._candidate = candidate
        self._request = request
        self._catalog = catalog
        self._ranks = ranks
        self._clock = clock
        self._place = Place(ranks.rank, ranks.size, request.pipeline_stage)

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, once this rank has opened it."""
        if self.opened is None:
            raise CorruptCheckpointError("the manifest could not be read", file=self._candidate.folder)
        return self.opened

    def match(self) -> Verdict:
        """Match every component. What does not fit is an error on all ranks; damage is in the verdict."""
        verdict = self._ranks.decide("fit", self._match_here, self._judge, sends=MatchReport, returns=Verdict)
        self._clock.end_of("fit")
        return verdict

    def read(self) -> Texts:
        """Check what every rank needs, and fill memory that nothing uses yet. Return the damage on any rank."""
        damage = self._ranks.decide("check", self._filling.check, union, sends=Texts, returns=Texts)
        self._clock.end_of("read")
        return damage

    def restore(self) -> None:
        """Hand the state over to the live objects."""
        # Components' own code first, on all ranks: if one of them refuses, no tensor has changed on any.
        together(self._ranks, "restore values", self._restore_values, sends=None)
        together(self._ranks, "restore tensors", self._restore_tensors, sends=None)
        self._clock.end_of("restore")

    def loaded(self, verdict: Verdict, rejected: _Rejected) -> Loaded:
        """Return what was restored, and what was not."""
        left_out = [f"{leaf}: left out by exclude" for one in self._matched.fitted for leaf in sorted(one.left_out)]
        return Loaded(
            self.checkpoint,
            restored=tuple(one.component for one in self._matched.fitted if one.component not in verdict.deferred),
            missing=(*self._matched.absent, *verdict.missing),
            skipped=(*self._matched.skipped, *verdict.unexpected, *left_out),
            passed_over=rejected.folders,
            damaged=rejected.damaged,
            phases=self._clock.phases,
            unclaimed=verdict.unclaimed,
            accepted=verdict.accepted,
            renamed=verdict.renamed,
            cast=verdict.cast,
            deferred=verdict.deferred,
            # Only these: the others hold on to memory of the restore.
            set_rng=partial(
                restore_random_state,
                [one for one in self._matched.fitted if one.component in verdict.deferred],
                self._request.components,
            ),
        )

    def _match_here(self) -> MatchReport:
        request = self._request
        try:
            checkpoint = self.opened = self._candidate.open(self._catalog)
            _require_decodable(checkpoint)
            check_guards(checkpoint, request.guards, request.strategy, logs=self._place.rank == 0)
            self._matched: Matched = match_components(request, checkpoint, self._place)
        except (CorruptCheckpointError, KeyMissingError, KeyDamagedError) as error:
            # Any other StorageError means that the storage cannot be read now: an error on all ranks, and no damage.
            return MatchReport(damage=(str(error),))
        wanted = [wish for one in self._matched.fitted for wish in one.requests]
        copied = [wish for one in self._matched.fitted for wish in one.copied]
        self._filling = Filling(
            checkpoint, wanted, request.verify, self._place, copied, request.spare_memory, request.limit_bytes
        )
        return self._matched.report(request)

    def _judge(self, reports: list[MatchReport]) -> Verdict:
        damage = union([report.damage for report in reports])
        return Verdict(damage=damage) if damage else judge(reports, self._request, self.checkpoint)

    def _restore_values(self) -> None:
        restore_values(self._matched.fitted, self._request.components)

    def _restore_tensors(self) -> None:
        self._clock.end_of("restore")
        self._filling.fill_live()
        self._clock.end_of("read")
        restore_tensors(self._matched.fitted, self._request.components)
        if not self._request.defer_rng:
            restore_random_state(self._matched.fitted, self._request.components)


class _Rejected:
    """The folders that are no sound checkpoint, and why."""

    def __init__(self, candidates: Candidates) -> None:
        self.damaged: dict[Checkpoint, str] = {}
        self._candidates = candidates
        self._tried: list[Skipped] = []
        self._problems: list[str] = []

    @property
    def folders(self) -> tuple[Skipped, ...]:
        """Return those that the last listing of the run rejected, and those that were tried."""
        return (*self._candidates.rejected, *self._tried)

    def add(self, candidate: Candidate, checkpoint: Checkpoint | None, damage: Sequence[str]) -> None:
        """Note a candidate that is damaged."""
        if checkpoint is not None:
            self.damaged[checkpoint] = damage[0]
        self._tried.append(Skipped(candidate.folder, damage[0]))
        self._problems += [f"{candidate.folder}: {text}" for text in damage]

    def nothing_left(self, request: LoadRequest, catalog: Catalog) -> NothingToLoad:
        """Return that there is no checkpoint; an error if there are some, and all are damaged."""
        if self._problems:
            raise CorruptCheckpointError(
                "no sound checkpoint is left"
                if request.selector.may_fall_back
                else f"{self.folders[-1].folder} is damaged",
                run=catalog.storage.url,
                problems=self._problems,
                advice="no live object was changed",
            )
        return NothingToLoad(self.folders)


class _Clock:
    """Seconds by phase. All that passes belongs to one: each `end_of` takes what passed since the one before it."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.monotonic()

    def end_of(self, phase: str) -> None:
        """Add what passed since the last call to a phase."""
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now


def _require_decodable(checkpoint: Checkpoint) -> None:
    """Raise now what would be raised when the result is made, after live objects have changed."""
    _ = checkpoint.config, checkpoint.extra, checkpoint.progress, checkpoint.metrics
