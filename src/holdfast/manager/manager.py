"""The checkpoint manager: the one class most users build. Live objects enter; committed checkpoints and restored runs
leave. All it does itself is to check arguments and keep the line of checkpoints; the chains do the rest."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from holdfast.errors import CheckpointNotFoundError, ClosedError, HoldfastError, RunInUseError, UsageError
from holdfast.loading.carrying import bound_to_ranks, carried_guards, carry
from holdfast.loading.pipeline import load
from holdfast.loading.records import Loaded, LoadRequest, NothingToLoad
from holdfast.loading.resolve import Location, locate
from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.manager.arguments import (
    Introduction,
    agree_on,
    agree_on_run,
    check_callable,
    check_epoch,
    check_limit,
    check_metrics,
    check_timeout,
    encoded,
    encoded_config,
    encoded_metrics,
    one_of,
    plain_step,
)
from holdfast.manager.reports import Reports
from holdfast.manager.results import SaveHandle
from holdfast.manager.schedule import Pace
from holdfast.manager.triggers import Trigger
from holdfast.ondisk.manifest import UserMetadata
from holdfast.ondisk.paths import check_component_name, check_step
from holdfast.ranks.base import on_leader
from holdfast.ranks.store import torch_ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.events import Event
from holdfast.runs.lineage import Lineage
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.orphans import wait_for_orphans
from holdfast.runs.readers import reading
from holdfast.runs.retention import Decision, KeepPolicy
from holdfast.runs.selection import choose_own
from holdfast.runs.selector import Selector, check_tag, parse_selector
from holdfast.saving.pending import PendingSave
from holdfast.saving.pipeline import Saver
from holdfast.saving.plan import Replicas
from holdfast.saving.request import SaveRequest
from holdfast.saving.stage import ChosenMode
from holdfast.state.names import cuts_of, follow_models, kind_of, refuse_flat_parameters, unwrap
from holdfast.state.rng import RNGState
from holdfast.state.state_dicts import check_components
from holdfast.state.trees import CarriedTree
from holdfast.state.wrappers import Sharded, check_covers
from holdfast.storage.base import Storage
from holdfast.storage.registry import open_storage, same_place, storage_for

logger = logging.getLogger("holdfast")

_DEFAULT_TIMEOUT_SECONDS = 600.0
_RNG = "rng"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore did. `resumed` is False for a fresh run, whose `next_step` is 0.

    `restored` are the components that took state, `missing` what the checkpoint did not have, `skipped` what was left
    as it is, each with the reason, and `rejected` the folders that were no sound checkpoint, each with the reason. A
    fresh start has it, too: with `resume="never"` it lists all that is there. `accepted` are differences that the
    strategy let pass and a stricter one would refuse, such as another number of parameter groups.
    """

    resumed: bool
    step: int | None = None
    next_step: int = 0
    progress: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    config: Any = None
    checkpoint: Checkpoint | None = None
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


class CheckpointManager:
    """Saves and restores the state of a training run.

    run: the folder or URL that holds the run's checkpoints.
    state: the components by name: models, optimizers, schedulers, loaders, anything with `state_dict` and
        `load_state_dict`. `PerRank`, `Shared`, `Sharded` and `Trainable` say more about one.
    save: when `step` saves: `Every`, `At`, `OnLastStep`, `OnSignal`, `TimeLimit`, combined with `|`. None never does.
    keep: what stays: `KeepLast`, `KeepBest`, `KeepEvery`, `KeepTagged`, `KeepAll`, combined with `|`. None keeps all.
    mode: when `save` returns. "sync": when the checkpoint is committed. "async": when the state is copied to memory of
        its own, from which a writer process saves it. "async_pinned": at once, while a GPU's copies are under way; the
        next step of the optimizers in `state` waits for them on the device. "async_device": the same from a clone on
        the GPU, where its memory allows. "auto" takes the best asynchronous one for the devices that hold the state.
    rng: keep the random state of every rank, as the component "rng".
    config: the run's configuration, stored with every checkpoint. assets: files and folders stored with it.
    resume: "auto" starts fresh when there is nothing to restore, "required" makes that an error, "never" always starts
        fresh.
    process_group: the ranks that save together, all by default. pipeline_stage: this rank's stage, when the stages'
        names collide.
    storage: the door to the bytes, when it is not the run's own path or URL.
    verify: "full" checks every byte that is restored, "quick" sizes and the manifest, "off" the manifest alone.
    timeout: seconds to wait for the other ranks, or for a disk that stands still, before a call fails on all ranks.
    staging_limit_bytes: the memory that copies of a rank's state may take. A save that needs more is written in pieces
        before `save` returns.
    links: whether there are links `latest` and `best` in the run for people, and, given a template such as
        "{name}--{val_loss:.3f}-{step}", one more for each checkpoint.
    on_event: a function that gets an `Event` when a save or a restore started, was staged, written, committed, failed,
        was restored, or pruned. It is called in the thread where that happens, and what it raises is logged.
    replicas: "compare" makes it an error when ranks hold different content of a leaf of which one rank's is stored.
        "trust" stores one rank's without a comparison.

    Every method that saves or restores is called on all ranks, in the same order. All of them return the same or raise
    the same.
    """

    def __init__(
        self,
        run: Location,
        state: Mapping[str, Any],
        *,
        save: Trigger | None = None,
        keep: KeepPolicy | None = None,
        mode: ChosenMode = "auto",
        rng: bool = True,
        config: Any = None,
        assets: Sequence[str | os.PathLike[str]] = (),
        resume: Literal["auto", "required", "never"] = "auto",
        process_group: Any = None,
        pipeline_stage: int | None = None,
        storage: Storage | None = None,
        verify: Verify = "full",
        timeout: float = _DEFAULT_TIMEOUT_SECONDS,
        staging_limit_bytes: int | None = None,
        links: bool | str | LinkTemplate = True,
        on_event: Callable[[Event], None] | None = None,
        replicas: Replicas = "compare",
    ) -> None:
        check_timeout(timeout)
        self._ranks = torch_ranks(process_group, timeout_seconds=timeout)
        self._timeout_seconds = timeout
        self._resume = resume
        self._pipeline_stage = pipeline_stage
        self._verify: Verify = verify
        self._source: tuple[Catalog, Checkpoint] | None = None
        self._strategy = LoadStrategy()
        # With rng=False the random state of a checkpoint is left out on purpose.
        self._unwanted = frozenset() if rng else frozenset({_RNG})
        self._closed = False

        def introduce() -> Introduction:
            one_of("mode", mode, get_args(ChosenMode))
            one_of("resume", resume, ("auto", "required", "never"))
            one_of("verify", verify, ("full", "quick", "off"))
            one_of("replicas", replicas, get_args(Replicas))
            _check_stage(pipeline_stage)
            check_limit(staging_limit_bytes)
            check_callable("on_event", on_event)
            _check_policies(save, keep)
            self._links = _checked_links(links)
            self._components = follow_models(_checked_components(state, rng), pipeline_stage=pipeline_stage)
            self._config = encoded_config(config)
            self._assets = _checked_assets(assets) if self._ranks.rank == 0 else ()
            self._ranking = keep.metrics if keep is not None else ()
            self._catalog = Catalog(storage_for(run, storage), ranking=self._ranking)
            # Last: from here on signals do not do what they did.
            self._pace = Pace(save, self._ranks)
            return self._catalog.storage.url, mode, sorted(self._components), replicas

        # Construction agrees once, so that what is wrong on one rank is known to all here and not at the first save.
        with self._giving_signals_back():
            self._ranks.decide("open", introduce, agree_on_run, sends=Introduction, returns=None)
        self._saver = Saver(
            self._catalog,
            self._ranks,
            mode=mode,
            staging_limit_bytes=staging_limit_bytes,
            timeout_seconds=timeout,
            on_event=on_event,
            replicas=replicas,
        )
        self._needed: set[str | None] = set()
        self._awaited: tuple[str, ...] = ()
        self._not_carried: frozenset[str] = frozenset()
        self._carried: tuple[CarriedTree, ...] | None = ()
        self._reading = ExitStack()
        weakref.finalize(self, self._reading.close)
        # Weak, so that a manager that is dropped without being closed is gone at once, with its writer.
        saver, needed = weakref.proxy(self._saver), self._needed
        self._housekeeper = Housekeeper(
            self._catalog,
            keep=keep,
            links=self._links,
            may_write=lambda: saver.hold_run(),
            in_use=lambda: {saver.lineage.head, *needed},
            own_line=True,
            emit=lambda event: saver.tell(event),
        )
        self._reports = Reports(self._catalog, self._housekeeper, own=lambda: saver.lineage.own)
        self._saver.on_commit = partial(_after_commit, self._reports, self._housekeeper)
        if save is not None:
            self._hold_run()

    def _hold_run(self) -> None:
        """Whoever means to save finds out here, and not hours later, that somebody else does."""
        with self._giving_signals_back():
            on_leader(self._ranks, "become the writer", self._become_writer, returns=None)

    def _become_writer(self) -> None:
        self._saver.hold_run()
        # What a crash left behind goes now. No checkpoint does before the first new one is committed: until then nobody
        # knows whether the newest is sound.
        self._housekeeper.clear_debris_in_background()

    @contextmanager
    def _giving_signals_back(self) -> Iterator[None]:
        """A manager that could not be made leaves the handlers of signals as they were."""
        try:
            yield
        except BaseException:
            pace: Pace | None = getattr(self, "_pace", None)
            if pace is not None:
                pace.close()
            raise

    def should_save(self, step: int, *, epoch: int | None = None, metrics: Mapping[str, Any] | None = None) -> bool:
        """Whether `step` would save now. Changes nothing. Where a clock or a signal decides, all ranks must ask."""
        self._check_open()
        check_metrics(metrics)
        return self._pace.wants_save(check_step(step), check_epoch(epoch))

    @property
    def should_stop(self) -> bool:
        """Whether a signal or a time limit asks to stop, as the last `step` or `should_save` found it; the same on all
        ranks. For loops that do not go by what `step` returns."""
        return self._pace.should_stop

    def step(
        self,
        step: int,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        guards: Mapping[str, Any] | None = None,
    ) -> bool:
        """Call it after every training step: it saves when `save=` says so, and raises what failed, once.

        True: a signal or a time limit asks to stop, and the step at which it did is saved and committed. On all ranks
        alike. A loop that goes on is told True again, and another signal saves again. `epoch` is how many epochs are
        done by now.
        """
        self._check_open()
        step = check_step(step)
        wish = self._pace.ask(step, check_epoch(epoch))
        said: dict[str, Any] = {"metrics": metrics, "progress": progress, "extra": extra, "guards": guards}
        if wish.stop and self._pace.must_save_to_stop:
            self._save_and_stop(step, wish.reasons, epoch=epoch, **said)
            return True
        if self._ranks.size == 1:
            # With several ranks the next save does: one rank would hear of it some steps before another.
            self.poll()
        if wish.save:
            self._save(step, epoch=epoch, **said)
        return wish.stop

    def _save_and_stop(self, step: int, reasons: Sequence[str], **said: Any) -> None:
        if self._ranks.rank == 0:
            logger.warning("saving step %d and stopping: %s", step, ", ".join(reasons))
        try:
            self._save(step, **said).wait()
        except (RunInUseError, UsageError):
            raise
        except HoldfastError as error:
            # It may be what failed before, and nobody had heard of. There will be no other time to save this.
            logger.error("%s; trying once more", error)
            self._pace.note_failure()
            try:
                self._save(step, **said).wait()
            except HoldfastError:
                self._pace.note_failure()
                raise

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        guards: Mapping[str, Any] | None = None,
        tag: str | None = None,
        epoch: int | None = None,
        resave: bool = False,
        wait: bool = False,
    ) -> SaveHandle:
        """Save the state after `step` was done. A step that this line of the run has committed is not written again;
        its checkpoint gets the metrics and the tag. With `resave` it is, as a later checkpoint of the same step.

        One save is under way at a time: this waits for the one before it. If that failed, and nobody has heard of it,
        its error is raised here and nothing is saved; the next save works. `wait` returns only when the checkpoint is
        committed, which in sync mode is always so. `epoch` is how many epochs are done by now; without it, the last
        that was named.
        """
        said = {"metrics": metrics, "progress": progress, "extra": extra, "guards": guards}
        handle = self._save(step, **said, tag=tag, epoch=epoch, resave=resave)
        if wait:
            handle.wait()
        return handle

    def _save(
        self,
        step: int,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        guards: Mapping[str, Any] | None = None,
        tag: str | None = None,
        resave: bool = False,
    ) -> SaveHandle:
        self._check_open()
        step = plain_step(step)

        def request() -> SaveRequest:
            self._reports.settle()
            return SaveRequest(
                step=check_step(step),
                components=self._components,
                pipeline_stage=self._pipeline_stage,
                metadata=UserMetadata(
                    metrics=encoded_metrics(metrics),
                    progress=encoded("progress", progress),
                    extra=encoded("extra", extra),
                    config=self._config,
                    guards={**encoded("guards", guards), **self._carried_guards()},
                    tags=() if tag is None else (check_tag(tag),),
                    epoch=check_epoch(epoch) if epoch is not None else self._pace.epoch,
                    ranking=self._ranking,
                ),
                assets=self._assets,
                links=self._links is not False,
                resave=resave,
                carried=self._carry(),
            )

        pending = self._saver.save(step, request)
        self._pace.note_save()
        said = encoded_metrics(metrics) if pending.skipped else {}
        if pending.skipped and not self._add_to_committed(pending, metrics=said, tag=tag or ""):
            # Its checkpoint was removed since the leader found it, as by retention.
            pending = self._saver.save(step, lambda: replace(request(), resave=True))
        if pending.skipped and (progress or extra or guards) and self._ranks.rank == 0:
            logger.warning("step %d was committed before; its progress, extra and guards stay as they are", step)
        return SaveHandle(pending, self._catalog)

    def _add_to_committed(self, pending: PendingSave, *, metrics: dict[str, Any], tag: str) -> bool:
        """What can be said of a checkpoint later is said now. All ranks come here, whatever each of them says. Return
        False, on all of them, if the checkpoint is not there any more."""

        def work() -> bool:
            try:
                found = self._catalog.find(Selector("folder", name=pending.folder))
                if metrics or tag:
                    self._note_and_tidy(found, metrics=metrics, tag=tag)
            except CheckpointNotFoundError:
                return False
            return True

        return on_leader(self._ranks, "annotate", work, returns=bool)

    def restore(
        self,
        selector: str | int | os.PathLike[str] = "latest",
        *,
        strategy: LoadStrategy | None = None,
        guards: Mapping[str, Any] | None = None,
    ) -> RestoreResult:
        """Restore the run, or start fresh where there is nothing and nothing was asked for by name.

        `selector` is a selector of this run, or the path of another run or checkpoint, as `RUN`, `RUN@SELECTOR`, a
        folder, a manifest or a link.
        """
        self._check_open()
        self._saver.drain()
        started = time.monotonic()
        strategy = strategy if strategy is not None else LoadStrategy()
        wanted = self._on_all("restore", lambda: _wanted(strategy, guards), same=repr(strategy))
        on_leader(self._ranks, "look for writers", self._wait_for_survivors, returns=None)
        catalog, chosen, explicit = self._locate_together(selector)
        if self._resume == "never" and not explicit:
            left = on_leader(self._ranks, "list what is left", self._left_by_a_fresh_start, returns=tuple[str, ...])
            self._start_line(Lineage())
            return RestoreResult(resumed=False, rejected=left)
        own_run = catalog is self._catalog
        waited = time.monotonic() - started
        request = LoadRequest(
            chosen, self._components, strategy, wanted, self._pipeline_stage, self._verify, self._unwanted
        )
        loaded = load(request, catalog, self._ranks)
        if isinstance(loaded, NothingToLoad):
            if self._resume == "required" or explicit:
                raise CheckpointNotFoundError(
                    "there is no checkpoint to resume from",
                    run=catalog.storage.url,
                    advice="check the path" if explicit else "check the path, or use resume='auto' to start fresh",
                )
            self._start_line(None)
            return RestoreResult(resumed=False, rejected=tuple(map(str, loaded.passed_over)))
        self._source, self._strategy = (catalog, loaded.checkpoint), strategy
        self._await_components(loaded.checkpoint, loaded.unclaimed)
        if own_run:
            self._set_aside(loaded.damaged)
        phases = MappingProxyType({"wait": waited, **loaded.phases})
        self._tell_restored(loaded.checkpoint, time.monotonic() - started, phases)
        return self._resumed(loaded, strategy, own_run=own_run)

    def _left_by_a_fresh_start(self) -> tuple[str, ...]:
        """Return all that the run holds and a start that never resumes passes over, each with the reason."""
        scan = self._catalog.survey()
        left = {found.folder: "left as it is: resume='never' starts fresh" for found in scan.checkpoints}
        left |= {skipped.folder: skipped.reason for skipped in scan.damaged}
        left |= {folder: str(error) for folder, error in scan.unreadable}
        left |= dict.fromkeys(scan.attempts, "was never committed")
        return tuple(f"{folder}: {left[folder]}" for folder in sorted(left))

    def _await_components(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        """Keep the state of components that are not attached yet: in the source, and in every save until they are."""
        lost = bound_to_ranks(checkpoint, names, self._ranks.size)
        if lost and self._ranks.rank == 0:
            logger.warning(
                "saves before attach() will not have the state of %s: the checkpoint of step %d has it for each of %d "
                "ranks, and there are %d now",
                ", ".join(lost),
                checkpoint.step,
                checkpoint.world_size,
                self._ranks.size,
            )
        self._awaited = tuple(names)
        self._carried = None if set(names) - set(lost) else ()
        self._not_carried = frozenset(lost)
        self._protect_source()

    def _protect_source(self) -> None:
        """Keep the checkpoint, in this run or in another one, as long as `attach` may want it."""
        self._needed.clear()
        self._reading.close()
        if self._source is None or not self._awaited:
            return
        catalog, checkpoint = self._source
        if catalog is self._catalog:
            self._needed.add(checkpoint.digest)
        elif self._ranks.rank == 0:
            self._reading.enter_context(reading(catalog.storage, checkpoint.folder))

    def _carry(self) -> tuple[CarriedTree, ...]:
        """Return this rank's share of the state that is carried on. Read at the first save that needs it, and kept:
        most components are attached before any save."""
        if self._carried is None and self._source is not None:
            checkpoint = self._source[1]
            names = self._carried_names()
            ranks = self._ranks
            checked = self._verify == "full"
            self._carried = carry(checkpoint, names, rank=ranks.rank, size=ranks.size, checked=checked)
            if ranks.rank == 0:
                logger.info(
                    "saves carry on the state of %s as step %d had it, until they are attached",
                    ", ".join(names),
                    checkpoint.step,
                )
        return self._carried or ()

    def _carried_names(self) -> list[str]:
        return [name for name in self._awaited if name not in self._not_carried]

    def _carried_guards(self) -> dict[str, Any]:
        return {} if self._source is None else carried_guards(self._source[1], self._carried_names())

    def _note_attached(self, name: str) -> None:
        self._awaited = tuple(other for other in self._awaited if other != name)
        if self._carried is not None:
            self._carried = tuple(one for one in self._carried if one.tree.component != name)
        if not self._awaited:
            self._protect_source()

    def _set_aside(self, damaged: Mapping[Checkpoint, str]) -> None:
        """Have it written down, by whoever writes to the run: a mere reader leaves it as it is."""
        self._housekeeper.suspect(damaged)
        if damaged and self._saver.lease:
            self._housekeeper.clear_debris_in_background()

    def attach(self, name: str, component: Any) -> bool:
        """Add a component that did not exist yet. If the restored checkpoint has its state, it gets it now: True.
        The strategy of the restore applies to it, with what that excludes."""
        self._check_open()
        kind = self._on_all("attach", lambda: self._check_new(name, component), same=repr(name))
        components = follow_models({**self._components, name: component}, pipeline_stage=self._pipeline_stage)
        loaded: Loaded | NothingToLoad = NothingToLoad()
        if self._source is not None and self._strategy.takes(name, kind):
            catalog, checkpoint = self._source
            if any(tree.component == name for tree in checkpoint.manifest.trees):
                strategy = replace(self._strategy, only=(name,), skip=())
                selector = Selector("folder", name=checkpoint.folder)
                request = LoadRequest(
                    selector,
                    components,
                    strategy,
                    pipeline_stage=self._pipeline_stage,
                    verify=self._verify,
                    globs_must_match=False,
                )
                loaded = load(request, catalog, self._ranks)
        self._components = components
        self._note_attached(name)
        return isinstance(loaded, Loaded) and name in loaded.restored

    def should_load(self) -> bool:
        """Whether `restore()` would find a checkpoint, by the leader's word, or, with `resume="required"`, say that
        there is none."""
        self._check_open()
        if self._resume != "auto":
            return self._resume == "required"
        self._saver.drain()
        return on_leader(self._ranks, "should_load", self._look, returns=bool)

    def _look(self) -> bool:
        self._wait_for_survivors()
        return self._catalog.holds_something()

    def _wait_for_survivors(self) -> None:
        self._saver.finish_other_saves()
        # Half of the time that the others wait for the leader's word.
        wait_for_orphans(self._catalog, self._timeout_seconds / 2)

    def checkpoints(self) -> list[Checkpoint]:
        """The run's committed checkpoints, the latest first."""
        return list(self._catalog.scan().checkpoints)

    def peek(self, selector: str | int = "latest") -> Checkpoint | None:
        """A checkpoint without loading it; None when `latest` finds nothing."""
        catalog, chosen, explicit = self._locate(selector)
        if not explicit and not catalog.holds_something():
            return None
        return catalog.find(chosen)

    def report(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Add metrics to the checkpoint of a step after it was saved: ranking and `best` follow. While the save of the
        step is pending they are kept and written when it is committed; if that fails again and again, the next call
        raises it.

        Only a checkpoint on this manager's own line (what it restored and saved since) is changed. False, and a
        warning, when there is none; it may have been removed. A manager that neither restored nor saved adds them to
        the newest checkpoint of that step.
        """
        self._check_open()
        step = plain_step(step)
        said = self._on_all("report", lambda: (check_step(step), _reported(metrics))[1], same=repr(step))
        return on_leader(self._ranks, f"report of step {step}", lambda: self._report(step, said), returns=bool)

    def _report(self, step: int, metrics: dict[str, Any]) -> bool:
        self._reports.settle()
        pending = self._saver.pending
        if pending is not None and pending.step == step and not pending.done():
            self._reports.add(pending, metrics)
            return True
        written = self._reports.write_now(step, metrics)
        if written:
            self._tidy_as_writer()
        return written

    def _note_and_tidy(self, checkpoint: Checkpoint, **said: Any) -> None:
        self._housekeeper.annotate(checkpoint, **said)
        self._tidy_as_writer()

    def _tidy_as_writer(self) -> None:
        # Who only says something of a checkpoint does not become the run's writer by it.
        if self._saver.lease:
            self._housekeeper.clean_up_in_background()

    def tag(self, selector: str | int, tag: str) -> None:
        """Give a checkpoint a name. It is never removed as long as it has one.

        A step means this manager's own line (what it restored and saved since) where that has the step, otherwise the
        newest checkpoint of that step. The same holds for `untag`.
        """
        self._annotate(selector, tag=tag)

    def untag(self, selector: str | int, tag: str) -> None:
        """Take a name back. One that the checkpoint does not have is an error."""
        self._annotate(selector, untag=tag)

    def _annotate(self, selector: str | int, *, tag: str = "", untag: str = "") -> None:
        self._check_open()
        self._saver.drain()
        self._on_all("annotate", lambda: check_tag(tag or untag), same=repr((selector, tag, untag)))

        def work() -> None:
            found = self._find_to_annotate(parse_selector(selector))
            if untag and untag not in found.tags:
                raise CheckpointNotFoundError(f"'{selector}' has no tag '{untag}'", run=self._catalog.storage.url)
            self._note_and_tidy(found, tag=tag, untag=untag)

        on_leader(self._ranks, "annotate", work, returns=None)

    def _find_to_annotate(self, selector: Selector) -> Checkpoint:
        """Return the checkpoint that a selector names: of several of one step, the one on this manager's line."""
        found, own = self._catalog.find(selector), self._saver.lineage.own
        if selector.kind != "step" or own is None:
            return found
        return choose_own(self._catalog.survey(), selector.step, own) or found

    def retention(self) -> list[Decision]:
        """What `keep` would keep and remove now, each with its reasons, the latest first. Does nothing."""
        return self._housekeeper.plan()

    def prune(self) -> list[Decision]:
        """Remove what `keep` does not keep, now, and not after the next save. Gives what was decided."""
        self._check_open()
        self._saver.drain()

        def work() -> list[Decision]:
            self._housekeeper.wait()
            return self._housekeeper.clean_up()

        return on_leader(self._ranks, "prune", work, returns=list[Decision])

    @property
    def is_pending(self) -> bool:
        """Whether a save is under way."""
        return self._saver.is_pending

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened on this rank, the latest last: the most recent 256 events."""
        return tuple(self._saver.events)

    def poll(self) -> None:
        """Raise what failed, once; never waits. With several ranks one may hear of it some calls before another."""
        self._check_open()
        self._saver.poll()
        self._settle_reports()

    def wait(self) -> None:
        """Return when every save is committed; raise what failed, once."""
        self._check_open()
        self._saver.wait()
        self._settle_reports()

    def _settle_reports(self) -> None:
        """Raise that reported metrics could not be written. With several ranks the next save or report does, on all."""
        if self._ranks.size == 1:
            self._reports.settle()

    def wait_for_staging(self) -> None:
        """Call it before changing weights in any other way than by the `step` of an optimizer in the state, such as in
        place: the device then waits for the copies of a save that still read them. Costs nothing when none do."""
        self._saver.wait_for_staging()

    def close(self) -> None:
        """Finish what is pending, end the writer process and give its memory back; raise what failed, once.
        Idempotent."""
        if not self._closed and not self._saver.is_inherited:
            self._closed = True
            failure = self._finish_housework()
            self._saver.close()
            if failure is not None:
                raise failure

    def _finish_housework(self) -> HoldfastError | None:
        """Finish all that goes on beside the saves. Returns why reported metrics could not be written."""
        self._saver.drain()
        self._reading.close()
        self._housekeeper.wait()
        failure = self._reports.end()
        self._housekeeper.close()
        self._pace.close()
        return failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed and not self._saver.is_inherited:
            self._closed = True
            failure = self._finish_housework()
            self._saver.close_after(error)
            if failure is not None and error is None:
                raise failure
            if failure is not None:
                logger.error("%s", failure)

    def __repr__(self) -> str:
        names = ", ".join(self._components)
        return f"CheckpointManager({self._catalog.storage.url!r}, [{names}], {self._ranks!r})"

    def _locate(self, selector: str | int | os.PathLike[str]) -> tuple[Catalog, Selector, bool]:
        """Which checkpoint of which run; `explicit` when anything but this run's latest was asked for."""
        if _is_path(selector):
            catalog, chosen = locate(selector)  # type: ignore[arg-type]
            same_run = same_place(catalog.storage, self._catalog.storage)
            return self._catalog if same_run else catalog, chosen, True
        _, chosen = locate(self._catalog.storage, selector)  # type: ignore[arg-type]
        return self._catalog, chosen, chosen.kind != "latest"

    def _locate_together(self, selector: str | int | os.PathLike[str]) -> tuple[Catalog, Selector, bool]:
        """The same by the leader's word: what a path is depends on the files that a rank sees."""
        if not _is_path(selector):
            return self._on_all("selector of restore", lambda: self._locate(selector))

        def locate_on_leader() -> tuple[str, str]:
            catalog, chosen, _ = self._locate(selector)
            return "" if catalog is self._catalog else catalog.storage.url, str(chosen)

        url, chosen = on_leader(self._ranks, "path of restore", locate_on_leader, returns=tuple[str, str])
        return Catalog(open_storage(url)) if url else self._catalog, parse_selector(chosen), True

    def _on_all(self, label: str, work: Callable[[], Value], *, same: str = "") -> Value:
        """Each rank does its own, and an error on one is the error of all; so is a `same` that is not the same."""
        done: list[Value] = []

        def mine() -> str:
            done.append(work())
            return same

        self._ranks.decide(label, mine, partial(agree_on, label), sends=str, returns=None)
        return done[0]

    def _check_new(self, name: str, component: Any) -> str:
        check_component_name(name)
        if name in self._components:
            raise UsageError(f"there is a component '{name}' already")
        components = {**self._components, name: component}
        check_covers(components)
        refuse_flat_parameters(name, component)
        if isinstance(component, Sharded):
            cuts_of(name, components)
        check_components([name], follow_models(components, pipeline_stage=self._pipeline_stage))
        kind_of(name, component)
        return kind_of(name, unwrap(component))

    def _tell_restored(self, checkpoint: Checkpoint, seconds: float, phases: Mapping[str, float]) -> None:
        self._saver.tell(
            Event(
                "restored",
                checkpoint.step,
                self._ranks.rank,
                seconds,
                size_bytes=checkpoint.size_bytes,
                phases=phases,
                path=checkpoint.path,
            )
        )

    def _resumed(self, loaded: Loaded, strategy: LoadStrategy, *, own_run: bool) -> RestoreResult:
        checkpoint = loaded.checkpoint
        rejected = tuple(str(skipped) for skipped in loaded.passed_over)
        parts: dict[str, Any] = {
            "checkpoint": checkpoint,
            "restored": loaded.restored,
            "missing": loaded.missing,
            "skipped": loaded.skipped,
            "rejected": rejected,
            "accepted": loaded.accepted,
            "config": checkpoint.config,
        }
        if not strategy.progress:
            self._start_line(Lineage.of(checkpoint) if own_run else Lineage())
            return RestoreResult(resumed=False, **parts)
        if own_run:
            self._saver.lineage.continue_from(checkpoint, self._catalog)
            self._reports.drop_failed()
        else:
            self._start_line(Lineage())
        self._pace.note_start(checkpoint.epoch)
        if self._ranks.rank == 0:
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
        no save may be skipped for one, whatever the manager did before. `own` are those that it may
        report on: what it restored, or None for any where it restored nothing."""
        self._saver.lineage.start(own)
        self._reports.drop_failed()
        self._pace.note_fresh_start()

    def _check_open(self) -> None:
        self._saver.require_own_process()
        if self._closed:
            raise ClosedError("the manager was closed", run=self._catalog.storage.url, advice="build a new one")


def _after_commit(reports: Reports, housekeeper: Housekeeper) -> None:
    reports.note_commit()
    housekeeper.clean_up_in_background()


def _reported(metrics: Mapping[str, Any]) -> dict[str, Any]:
    encoded = encoded_metrics(metrics)
    if not encoded:
        raise UsageError(f"metrics={metrics!r:.100} says nothing", advice="give numbers by name")
    return encoded


def _check_policies(save: object, keep: object) -> None:
    if save is not None and not isinstance(save, Trigger):
        raise UsageError(f"save={save!r:.100}", advice="give a trigger such as Every(steps=500), or several with |")
    if keep is not None and not isinstance(keep, KeepPolicy):
        raise UsageError(f"keep={keep!r:.100}", advice="give a policy such as KeepLast(3), or several with |")


def _checked_links(links: object) -> bool | LinkTemplate:
    if isinstance(links, bool | LinkTemplate):
        return links
    if isinstance(links, str):
        return LinkTemplate(links)
    raise UsageError(f"links={links!r:.100}", advice="give True, False, or a template such as '{name}-{step}'")


def _wanted(strategy: object, guards: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(strategy, LoadStrategy):
        raise UsageError(f"strategy={strategy!r:.100}", advice="give a holdfast.LoadStrategy")
    return encoded("guards", guards)


def _check_stage(stage: object) -> None:
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        raise UsageError(f"pipeline_stage={stage!r}", advice="give the stage's number, from 0 on")


def _checked_components(state: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise UsageError(f"state is a mapping of components by name, not a {type(state).__name__}")
    if not state:
        raise UsageError("state is empty", advice="pass at least the model: {'model': model}")
    components = {check_component_name(name): component for name, component in state.items()}
    if rng and not any(isinstance(component, RNGState) for component in components.values()):
        if _RNG in components:
            raise UsageError(f"'{_RNG}' is taken by the random state", advice="rename the component, or pass rng=False")
        components[_RNG] = RNGState()
    for name, component in components.items():
        kind_of(name, component)
        refuse_flat_parameters(name, component)
        if isinstance(component, Sharded):
            cuts_of(name, components)
    check_covers(components)
    check_components(components, components)
    return components


def _checked_assets(assets: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    if isinstance(assets, str | os.PathLike):
        raise UsageError("assets takes a list of paths")
    paths = tuple(Path(asset).resolve() for asset in assets)
    for path in paths:
        if not path.exists():
            raise UsageError(f"the asset {path} is not there")
    if len({path.name for path in paths}) != len(paths):
        raise UsageError("two assets have the same name")
    return paths


def _is_path(selector: str | int | os.PathLike[str]) -> bool:
    if not isinstance(selector, str):
        return isinstance(selector, os.PathLike)
    return ("@" in selector or "/" in selector) and not selector.startswith("best:")
