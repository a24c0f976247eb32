"""Turn a call of `restore` into a restore, and set the line that the next saves continue. A selector enters on all
ranks; a `RestoreResult` leaves.

What depends on files, such as whether a selector is a path, is decided by the leader. The restore itself is
`loading.pipeline`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import msgspec

from holdfast.errors import CheckpointNotFoundError, HoldfastError
from holdfast.loading.pipeline import load
from holdfast.loading.records import Loaded, LoadRequest, NothingToLoad
from holdfast.loading.resolve import NEVER_COMMITTED, locate
from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.manager.arguments import RNG, agree_on, one_of, wanted_guards
from holdfast.manager.open_run import OpenRun
from holdfast.manager.results import RestoreResult
from holdfast.ondisk.paths import parse_folder
from holdfast.ranks.base import on_leader
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Skipped
from holdfast.runs.events import Event
from holdfast.runs.lineage import Lineage
from holdfast.runs.orphans import wait_for_orphans
from holdfast.runs.selector import Selector, parse_selector
from holdfast.saving.current import finish_saves
from holdfast.storage.registry import open_storage, same_place

logger = logging.getLogger("holdfast")

__all__ = ["Resume", "RestoreRNG", "Restores"]

Resume = Literal["auto", "required", "never"]
RestoreRNG = Literal["now", "later"]
Selecting = str | int | os.PathLike[str]


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """What a rank asks a restore for. selector: empty where it is a path, which may differ from rank to rank."""

    strategy: str
    selector: str
    rng: str


class _Located(msgspec.Struct, frozen=True, array_like=True):
    """What the leader found. url: of another run, empty for the manager's own."""

    url: str
    selector: str
    explicit: bool


class Restores:
    """Makes the restores of one manager.

    rng: whether the random state is restored; without it the one of a checkpoint is left out on purpose.
    """

    def __init__(self, run: OpenRun, *, resume: Resume, verify: Verify, rng: bool, timeout_seconds: float) -> None:
        self._run = run
        self._resume: Resume = resume
        self._verify: Verify = verify
        self._unwanted = frozenset() if rng else frozenset({RNG})
        self._timeout_seconds = timeout_seconds

    def restore(
        self,
        selector: Selecting,
        strategy: LoadStrategy | None,
        guards: Mapping[str, Any] | None,
        rng: RestoreRNG = "now",
    ) -> RestoreResult:
        """Restore on all ranks, or start fresh where there is nothing and nothing was asked for by name."""
        self._run.saver.calls.refuse_nested("restore()")
        self._run.saver.drain()
        started = time.monotonic()
        chosen_strategy = strategy if strategy is not None else LoadStrategy()
        catalog, chosen, explicit, wanted = self._agree(selector, chosen_strategy, guards, rng)
        if self._resume == "never" and not explicit:
            left = on_leader(self._run.ranks, "list what is left", self._left_by_a_fresh_start, returns=tuple[str, ...])
            self._run.deferred_rng.replace(None)
            self._start_line(Lineage())
            return RestoreResult(resumed=False, rejected=left)
        waited = time.monotonic() - started
        request = LoadRequest(
            chosen,
            self._run.components.live,
            chosen_strategy,
            wanted,
            self._run.components.pipeline_stage,
            self._verify,
            self._unwanted,
            defer_rng=rng == "later",
        )
        loaded = self._load(request, catalog)
        if isinstance(loaded, NothingToLoad):
            return self._start_fresh(loaded, catalog, explicit=explicit)
        self._run.deferred_rng.replace(loaded)
        self._run.components.note_restored(catalog, loaded, chosen_strategy)
        if catalog is self._run.catalog:
            self._set_aside(loaded.damaged)
        phases = MappingProxyType({"wait": waited, **loaded.phases})
        self._emit_events(loaded, time.monotonic() - started, phases)
        return self._resumed(loaded, chosen_strategy, own_run=catalog is self._run.catalog)

    def _load(self, request: LoadRequest, catalog: Catalog) -> Loaded | NothingToLoad:
        """Restore while no save is under way, and none of another thread begins."""

        def load_with(spare_memory: Callable[[], memoryview | None], limit_bytes: int | None) -> Loaded | NothingToLoad:
            ready = replace(request, spare_memory=spare_memory, limit_bytes=limit_bytes)
            return load(ready, catalog, self._run.ranks)

        return self._run.saver.restoring("restore()", load_with)

    def should_load(self) -> bool:
        """Return whether a restore would find a checkpoint or fail for the lack of one, as the leader finds it."""
        if self._resume != "auto":
            return self._resume == "required"
        self._run.saver.drain()

        def look() -> bool:
            self._wait_for_writers(self._run.catalog)
            return self._run.catalog.holds_something()

        return on_leader(self._run.ranks, "should_load", look, returns=bool)

    def peek(self, selector: str | int) -> Checkpoint | None:
        """Return a checkpoint without loading it; None when `latest` finds nothing. Waits for a pending save."""
        catalog, chosen, explicit = self._locate(selector)
        finish_saves(catalog.storage)
        if not explicit and not catalog.holds_something():
            return None
        return catalog.find(chosen)

    def _wait_for_writers(self, catalog: Catalog) -> None:
        """Wait for saves to a run that this process, or one that is gone, has begun."""
        self._run.saver.finish_other_saves(catalog.storage)
        # Half of the time that the other ranks wait for the leader.
        wait_for_orphans(catalog, self._timeout_seconds / 2, self._run.saver.events.emit)

    def _left_by_a_fresh_start(self) -> tuple[str, ...]:
        """Return all that the run holds and a start that never resumes leaves alone, each with the reason."""
        scan = self._run.catalog.survey()
        left = {found.folder: "left as it is: resume='never' starts fresh" for found in scan.checkpoints}
        left |= {skipped.folder: skipped.reason for skipped in scan.damaged}
        left |= {folder: str(error) for folder, error in scan.unreadable}
        left |= dict.fromkeys(scan.attempts, NEVER_COMMITTED)
        return tuple(f"{folder}: {left[folder]}" for folder in sorted(left))

    def _run_of(self, selector: Selecting) -> Catalog:
        """Return the run that a selector leads to; the manager's own where that is not there yet."""
        try:
            return self._locate(selector)[0]
        except HoldfastError:
            return self._run.catalog

    def _locate(self, selector: Selecting) -> tuple[Catalog, Selector, bool]:
        """Return the run and the selector in it, and whether anything but this run's latest was asked for."""
        if _is_path(selector):
            catalog, chosen = locate(selector)  # type: ignore[arg-type]
            same_run = same_place(catalog.storage, self._run.catalog.storage)
            return self._run.catalog if same_run else catalog, chosen, True
        _, chosen = locate(self._run.catalog.storage, selector)  # type: ignore[arg-type]
        return self._run.catalog, chosen, chosen.kind != "latest"

    def _agree(
        self, selector: Selecting, strategy: LoadStrategy, guards: Mapping[str, Any] | None, rng: RestoreRNG
    ) -> tuple[Catalog, Selector, bool, dict[str, Any]]:
        """Return the run, the selector in it, whether anything but this run's latest was asked for, and the guards.

        One agreement: every rank checks its arguments, the leader compares them, waits for saves that are still being
        written, and looks at a path, because what a path is depends on the files that a rank sees.
        """
        wanted: list[dict[str, Any]] = []

        def check() -> _Asked:
            wanted.append(wanted_guards(strategy, guards))
            one_of("rng", rng, get_args(RestoreRNG))
            return _Asked(repr(strategy), "" if _is_path(selector) else str(self._locate(selector)[1]), rng)

        def locate_on_leader(asked: list[_Asked]) -> _Located:
            agree_on("the strategy of restore", [one.strategy for one in asked])
            agree_on("the selector of restore", [one.selector or "a path" for one in asked])
            agree_on("rng of restore", [one.rng for one in asked])
            # The manifests are read once, here or when a checkpoint is chosen, however often the run is looked at.
            self._run.catalog.drop_cache()
            self._wait_for_writers(self._run_of(selector))
            # Only now: what a path leads to may have been committed meanwhile.
            catalog, chosen, explicit = self._locate(selector)
            return _Located("" if catalog is self._run.catalog else catalog.storage.url, str(chosen), explicit)

        located = self._run.ranks.decide("restore", check, locate_on_leader, sends=_Asked, returns=_Located)
        catalog = Catalog(open_storage(located.url)) if located.url else self._run.catalog
        return catalog, parse_selector(located.selector), located.explicit, wanted[0]

    def _start_fresh(self, nothing: NothingToLoad, catalog: Catalog, *, explicit: bool) -> RestoreResult:
        if self._resume == "required" or explicit:
            raise CheckpointNotFoundError(
                "there is no checkpoint to resume from",
                run=catalog.storage.url,
                advice="check the path" if explicit else "check the path, or use resume='auto' to start fresh",
            )
        self._run.deferred_rng.replace(None)
        self._start_line(None)
        return RestoreResult(resumed=False, rejected=tuple(map(str, nothing.passed_over)))

    def _set_aside(self, damaged: Mapping[Checkpoint, str]) -> None:
        """Have the run's writer write the damage down: a process that only reads leaves it as it is."""
        self._run.housekeeper.suspect(damaged)
        if damaged and self._run.saver.lease:
            self._run.housekeeper.clear_debris_in_background()

    def _emit_events(self, loaded: Loaded, seconds: float, phases: Mapping[str, float]) -> None:
        checkpoint, rank = loaded.checkpoint, self._run.ranks.rank
        damaged = [str(one) for one in loaded.passed_over if _is_newer(one, checkpoint)]
        common: dict[str, Any] = {"size_bytes": checkpoint.size_bytes, "phases": phases, "path": checkpoint.path}
        emit = self._run.saver.events.emit
        if damaged:
            emit(Event("fell_back", checkpoint.step, rank, seconds, **common, error="; ".join(damaged)))
        emit(Event("restored", checkpoint.step, rank, seconds, **common))

    def _resumed(self, loaded: Loaded, strategy: LoadStrategy, *, own_run: bool) -> RestoreResult:
        checkpoint = loaded.checkpoint
        parts: dict[str, Any] = {
            "checkpoint": checkpoint,
            "restored": loaded.restored,
            "missing": loaded.missing,
            "skipped": loaded.skipped,
            "rejected": tuple(map(str, loaded.passed_over)),
            "accepted": loaded.accepted,
            "renamed": loaded.renamed,
            "cast": loaded.cast,
            "deferred": loaded.deferred,
            "config": checkpoint.config,
        }
        if not strategy.progress:
            self._start_line(Lineage.of(checkpoint) if own_run else Lineage())
            return RestoreResult(resumed=False, **parts)
        if own_run:
            self._run.saver.lineage.continue_from(checkpoint, self._run.catalog)
            self._run.reports.drop_failed()
        else:
            self._start_line(Lineage())
        self._run.pace.note_start(checkpoint.epoch)
        if self._run.ranks.rank == 0:
            logger.info("resumed from step %d (%s)", checkpoint.step, checkpoint.path)
        return RestoreResult(
            resumed=True,
            step=checkpoint.step,
            next_step=checkpoint.step + 1,
            progress=dict(checkpoint.progress),
            metrics=dict(checkpoint.metrics),
            extra=dict(checkpoint.extra),
            **parts,
        )

    def _start_line(self, own: Lineage | None) -> None:
        """Begin at step 0, or with the state of another run: no checkpoint of this run belongs to this training yet, so
        no save may be skipped for one, whatever the manager did before. `own` are those that it may report on: what it
        restored, or None for any where it restored nothing."""
        self._run.saver.lineage.start(own)
        self._run.reports.drop_failed()
        self._run.pace.note_fresh_start()


def _is_newer(skipped: Skipped, checkpoint: Checkpoint) -> bool:
    """Return whether a restore fell back from this folder. An attempt that was never committed was no checkpoint."""
    skipped_name, name = parse_folder(skipped.folder), parse_folder(checkpoint.folder)
    return skipped.reason != NEVER_COMMITTED and skipped_name is not None and name is not None and skipped_name > name


def _is_path(selector: Selecting) -> bool:
    if not isinstance(selector, str):
        return isinstance(selector, os.PathLike)
    return ("@" in selector or "/" in selector) and not selector.startswith("best:")
