"""Save and restore a training run: the one class most users build. Live objects enter; committed checkpoints and
restored runs leave. Each call checks that the manager is open, and hands over to the part that does the work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from holdfast.loading.resolve import Location
from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.manager.annotating import Annotator
from holdfast.manager.arguments import (
    Introduction,
    agree_on_run,
    check_epoch,
    check_limit,
    check_metrics,
    check_options,
    check_timeout,
    checked_observers,
)
from holdfast.manager.assets import AssetsArgument
from holdfast.manager.components import Components
from holdfast.manager.lifetime import Closable, Lifetime
from holdfast.manager.open_run import OpenRun
from holdfast.manager.restores import RestoreRNG, Restores, Resume
from holdfast.manager.results import RestoreResult, SaveHandle
from holdfast.manager.saves import SaveArguments, Saves, Stored
from holdfast.manager.schedule import Pace
from holdfast.manager.triggers import Trigger
from holdfast.ondisk.paths import check_step
from holdfast.ranks.base import DEFAULT_TIMEOUT_SECONDS, Ranks, on_leader
from holdfast.ranks.torch_store import torch_ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.events import Event, EventLog, Observer
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import Decision, KeepPolicy
from holdfast.saving.pipeline import Saver
from holdfast.saving.plan import Replicas
from holdfast.saving.stage import ChosenMode
from holdfast.state.budget import machine_name, note_ranks_here
from holdfast.storage.base import Storage
from holdfast.storage.registry import storage_for

__all__ = ["CheckpointManager"]


class CheckpointManager(Closable):
    """Saves and restores the state of a training run.

    run: the folder or URL that holds the run's checkpoints.
    state: the components by name: models, optimizers, schedulers, loaders, anything with `state_dict` and
        `load_state_dict`. `PerRank`, `Shared`, `Sharded` and `Trainable` declare how one is stored.
    save: when `step` saves: `Every`, `At`, `OnLastStep`, `OnSignal`, `TimeLimit`, combined with `|`. None never does.
    keep: what stays: `KeepLast`, `KeepBest`, `KeepEvery`, `KeepTagged`, `KeepAll`, combined with `|`. None keeps all.
    mode: when `save` returns. "sync": when the checkpoint is committed. "async": when the state is copied to memory of
        its own, from which a writer process saves it. "async_pinned": at once, while a GPU's copies are under way; the
        next step of the optimizers in `state` waits for them on the device. "async_device": the same from a clone on
        the GPU, where its memory allows. "auto" takes the best asynchronous one for the devices that hold the state.
    rng: keep the random state of every rank, as the component "rng".
    config: the run's configuration, stored with every checkpoint. assets: files and folders stored with it, or a
        mapping of names to paths or bytes. `save` takes further ones.
    resume: "auto" starts fresh when there is nothing to restore, "required" makes that an error, "never" always starts
        fresh.
    process_group: the ranks that save together, all by default. pipeline_stage: this rank's stage, when the stages'
        names collide.
    storage: the door to the bytes, when it is not the run's own path or URL.
    verify: "full" checks every byte that is restored, "quick" sizes and the manifest, "off" the manifest alone.
    timeout: seconds to wait for the other ranks, or for a disk that stands still, before a call fails on all ranks.
    staging_limit_bytes: the memory that copies of a rank's state may take. A save that needs more is written in pieces
        before `save` returns. A restore takes no more new host memory than this leaves.
    links: whether there are links `latest` and `best` in the run for people, and, given a template such as
        "{name}--{val_loss:.3f}-{step}", one more for each checkpoint.
    on_event: a function that gets an `Event` for what happens to a save, a restore or the run: a save was committed,
        a checkpoint was restored, and so on. It is called in the thread where that happens, and what it raises is
        logged. observers: more such functions.
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
        assets: AssetsArgument = (),
        resume: Resume = "auto",
        process_group: Any = None,
        pipeline_stage: int | None = None,
        storage: Storage | None = None,
        verify: Verify = "full",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        staging_limit_bytes: int | None = None,
        links: bool | str | LinkTemplate = True,
        on_event: Observer | None = None,
        observers: Sequence[Observer] = (),
        replicas: Replicas = "compare",
    ) -> None:
        check_timeout(timeout)
        self.keep = keep
        ranks = torch_ranks(process_group, timeout_seconds=timeout)

        def introduce() -> Introduction:
            check_options(mode=mode, resume=resume, verify=verify, replicas=replicas, save=save, keep=keep)
            check_limit(staging_limit_bytes)
            self._events = EventLog(checked_observers(on_event, observers))
            self._stored = Stored.checked(config, assets if ranks.rank == 0 else (), links, keep)
            self._catalog = Catalog(storage_for(run, storage), ranking=self._stored.ranking)
            self._components = Components.checked(state, rng, self._catalog, ranks, pipeline_stage, verify)
            # Last: from here on signals do not do what they did.
            self._pace = Pace(save, ranks)
            undo.callback(self._pace.close)
            return self._catalog.storage.url, mode, sorted(self._components.live), replicas, machine_name()

        # A manager that cannot be built leaves the handlers of signals as they were.
        with ExitStack() as undo:
            # The ranks agree once, so that what is wrong on one is known to all here and not at the first save.
            counts = ranks.decide("open", introduce, agree_on_run, sends=Introduction, returns=tuple[int, ...])
            note_ranks_here(counts[ranks.rank])
            self._saver = Saver(
                self._catalog,
                ranks,
                mode=mode,
                staging_limit_bytes=staging_limit_bytes,
                timeout_seconds=timeout,
                events=self._events,
                replicas=replicas,
            )
            self._connect(ranks, resume=resume, verify=verify, rng=rng, timeout_seconds=timeout)
            if save is not None:
                on_leader(ranks, "become the writer", self._run.become_writer, returns=None)
            undo.pop_all()
        self._saver.prepare(self._components.while_held())

    def _connect(self, ranks: Ranks, *, resume: Resume, verify: Verify, rng: bool, timeout_seconds: float) -> None:
        """Build the parts that the calls hand over to."""
        parts = self._saver, self._catalog, ranks, self._components, self._pace
        self._run = OpenRun.connect(*parts, keep=self.keep, links=self._stored.links)
        self._lifetime, self._annotator = Lifetime(self._run), Annotator(self._run)
        self._saves = Saves(self._run, self._stored, self._annotator, resume=resume)
        self._restores = Restores(self._run, resume=resume, verify=verify, rng=rng, timeout_seconds=timeout_seconds)

    def should_save(self, step: int, *, epoch: int | None = None, metrics: Mapping[str, Any] | None = None) -> bool:
        """Return whether `step` would save now. Changes nothing. Where a clock or a signal decides, all ranks must
        call it."""
        self._lifetime.require_open()
        check_metrics(metrics)
        return self._run.pace.wants_save(check_step(step), check_epoch(epoch))

    @property
    def should_stop(self) -> bool:
        """Return whether a signal or a time limit asks to stop, as of the last `step`, `should_save` or
        `should_stop_now`; the same on all ranks. For loops that do not use the result of `step`."""
        return self._run.pace.should_stop

    def should_stop_now(self) -> bool:
        """Return whether a signal (`OnSignal`) or a time limit (`TimeLimit`) of `save=` asks to stop by now; False
        without such a trigger. For where no step is done, such as an evaluation: all ranks call it, as often, and all
        get the same, also where the signal came to one of them. Saves nothing: the next `step` does, and returns True.
        """
        self._lifetime.require_open()
        return self._run.pace.ask_to_stop()

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
        """Save when a trigger of `save=` asks for it, and raise what failed before, once. Call it after every training
        step.

        Return True when a signal or a time limit asks to stop, on all ranks alike; the step at which it did is saved
        and committed then. A loop that goes on gets True from each later call, and another signal saves again. `epoch`
        is how many epochs are done by now.
        """
        self._lifetime.require_open()
        self._run.deferred_rng.require_set()
        step = check_step(step)
        wish = self._run.pace.ask(step, check_epoch(epoch))
        given = SaveArguments(metrics=metrics, progress=progress, extra=extra, guards=guards, epoch=epoch)
        if wish.stop and self._run.pace.must_save_to_stop:
            self._saves.save_and_stop(step, wish.reasons, given)
            return True
        if self._run.ranks.size == 1:
            # With several ranks the next save does: one rank would raise it some steps before another.
            self.poll()
        if wish.save:
            self._saves.save(step, given)
        return wish.stop

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
        assets: AssetsArgument | None = None,
        resave: bool = False,
        components: Sequence[str] | None = None,
        wait: bool = False,
    ) -> SaveHandle:
        """Save the state after `step` was done. A step that this line of the run has committed is not written again;
        its checkpoint gets the metrics and the tag. With `resave` it is, as a later checkpoint of the same step.

        One save is under way at a time: this waits for the one before it. If that failed, and no call has raised its
        error yet, the error is raised here and nothing is saved; the next save works. `wait` returns only when the
        checkpoint is committed, which in sync mode is always so. `epoch` is how many epochs are done by now; without
        it, the last that was named.

        `assets` are files of this one checkpoint, beside those of the manager: a list of paths of files and folders,
        or a mapping of names to paths or bytes. Rank 0's are stored, as they are in this call: it reads them all, into
        the memory of the staged state in the asynchronous modes, so what is written to a file later does not count.

        `components`, with `resave`, names those to store anew: the new checkpoint takes the rest over from the one of
        this step that was saved or restored last, whatever the live state of the others is by now. It is written
        before the call returns, and costs about as many bytes as these components have. What of metrics, progress,
        extra, guards and epoch is not given is that checkpoint's; its tags are not taken over.
        """
        self._lifetime.require_open()
        given = SaveArguments(
            metrics=metrics,
            progress=progress,
            extra=extra,
            guards=guards,
            tag=tag,
            epoch=epoch,
            assets=assets,
            resave=resave,
            components=components,
        )
        handle = self._saves.save(step, given)
        if wait:
            handle.wait()
        return handle

    def restore(
        self,
        selector: str | int | os.PathLike[str] = "latest",
        *,
        strategy: LoadStrategy | None = None,
        guards: Mapping[str, Any] | None = None,
        rng: RestoreRNG = "now",
    ) -> RestoreResult:
        """Restore the run, or start fresh where there is nothing and nothing was asked for by name.

        `selector` is a selector of this run, or the path of another run or checkpoint, as `RUN`, `RUN@SELECTOR`, a
        folder, a manifest or a link.

        With `rng="later"` the random state is read and checked with the rest, and set by `restore_rng`: for a loop that
        draws random numbers between the restore and its first step. Until then `step` and `save` are errors.
        """
        self._lifetime.require_open()
        return self._restores.restore(selector, strategy, guards, rng)

    def restore_rng(self) -> bool:
        """Set the random state that `restore(rng="later")` has read, once, on all ranks. Return whether there was one:
        False after a fresh start, after a restore without a random state, and when it is set already."""
        self._lifetime.require_open()
        return self._run.deferred_rng.set()

    def attach(self, name: str, component: Any) -> bool:
        """Add a component that did not exist yet. If the restored checkpoint has its state, it gets it now: True.
        The strategy of the restore applies to it, with what that excludes."""
        self._lifetime.require_open()
        saver = self._run.saver
        saver.calls.refuse_nested("attach()")
        return saver.restoring("attach()", partial(self._run.components.attach, name, component))

    def should_load(self) -> bool:
        """Return whether `restore()` would find a checkpoint, as the leader finds it, or, with `resume="required"`,
        raise that there is none."""
        self._lifetime.require_open()
        return self._restores.should_load()

    def checkpoints(self) -> list[Checkpoint]:
        """Return the run's committed checkpoints, the latest first."""
        return list(self._run.catalog.scan().checkpoints)

    def peek(self, selector: str | int = "latest") -> Checkpoint | None:
        """Return a checkpoint without loading it; None when `latest` finds nothing. Waits for a pending save."""
        return self._restores.peek(selector)

    def report(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Add metrics to the checkpoint of a step after it was saved: ranking and `best` follow. While the save of the
        step is pending they are kept and written when it is committed; if that fails again and again, the next call
        raises it.

        Only a checkpoint on this manager's own line (what it restored and saved since) is changed. False, and a
        warning, when there is none; it may have been removed. A manager that neither restored nor saved adds them to
        the newest checkpoint of that step.
        """
        self._lifetime.require_open()
        return self._annotator.report(step, metrics)

    def tag(self, selector: str | int, tag: str) -> None:
        """Give a checkpoint a tag. It is never removed as long as it has one.

        A step means this manager's own line (what it restored and saved since) where that has the step, otherwise the
        newest checkpoint of that step. The same holds for `untag`.
        """
        self._lifetime.require_open()
        self._annotator.annotate(selector, tag=tag)

    def untag(self, selector: str | int, tag: str) -> None:
        """Remove a tag. One that the checkpoint does not have is an error."""
        self._lifetime.require_open()
        self._annotator.annotate(selector, untag=tag)

    def retention(self) -> list[Decision]:
        """Return what `keep` would keep and remove now, each with its reasons, the latest first. Changes nothing."""
        return self._run.housekeeper.plan()

    def prune(self) -> list[Decision]:
        """Remove what `keep` does not keep, now, and not after the next save. Return what was decided."""
        self._lifetime.require_open()
        self._run.housekeeper.refuse_own_thread()
        self._run.saver.drain()

        def work() -> list[Decision]:
            self._run.housekeeper.wait()
            return self._run.housekeeper.clean_up()

        return on_leader(self._run.ranks, "prune", work, returns=list[Decision])

    @property
    def is_pending(self) -> bool:
        """Return whether a save is under way."""
        return self._run.saver.is_pending

    @property
    def events(self) -> tuple[Event, ...]:
        """Return what happened on this rank, the latest last: the most recent 256 events."""
        return tuple(self._run.saver.events.recent)

    def poll(self) -> None:
        """Raise what failed, once; never wait. With several ranks one may raise it some calls before another."""
        self._lifetime.require_open()
        self._run.saver.poll()
        self._annotator.settle_reports()

    def wait(self) -> None:
        """Return when every save is committed; raise what failed, once."""
        self._lifetime.require_open()
        self._run.saver.wait()
        self._annotator.settle_reports()

    def wait_for_staging(self) -> None:
        """Make the device wait for the copies of a save that still read the weights. Call it before changing them in
        any other way than by the `step` of an optimizer in the state, such as in place. Costs nothing when none do."""
        self._run.saver.wait_for_staging()

    def __repr__(self) -> str:
        names = ", ".join(self._run.components.live)
        return f"CheckpointManager({self._run.catalog.storage.url!r}, [{names}], {self._run.ranks!r})"
