"""The save in order: capture, plan, stage, write, commit. A request enters, a committed checkpoint leaves.

The first two steps are the same in every mode: each rank captures its state, and all ranks agree on who writes what. In
sync mode each rank then writes its tensors, through a ring of slots, and the leader commits. In the asynchronous modes
each rank stages its part in its arena, hands it to its writer and returns; the rest runs in the background.

A rank that fails in an agreement fails it for all, and everything that was committed before stays as it was.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from holdfast.errors import HoldfastError, UsageError
from holdfast.ranks.base import DEFAULT_TIMEOUT_SECONDS, Ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.events import EventLog
from holdfast.saving.agreement import AgreedSave, Agreement, Prepared
from holdfast.saving.async_saver import AsyncSaver
from holdfast.saving.call_guard import CallGuard
from holdfast.saving.capture import Capturer
from holdfast.saving.completion import Completion
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.current import CurrentSave
from holdfast.saving.outcome import InterruptedSaveError, Saved, as_save_error
from holdfast.saving.part_saver import PartSaver
from holdfast.saving.pending import PendingSave
from holdfast.saving.plan import Replicas
from holdfast.saving.request import SaveRequest
from holdfast.saving.ring import Ring
from holdfast.saving.stage import ChosenMode
from holdfast.saving.sync_saver import SyncSaver
from holdfast.saving.training_lineage import TrainingLineage
from holdfast.state.memory import collector_paused

__all__ = ["Saver", "save"]

logger = logging.getLogger("holdfast")

_Loaded = TypeVar("_Loaded")


def save(request: SaveRequest, catalog: Catalog, ranks: Ranks, *, parent: str | None = None) -> Saved:
    """Save once, on all ranks, and return when the checkpoint is committed. `parent` is the digest of the checkpoint
    that it goes back to."""
    saver = Saver(catalog, ranks, mode="sync")
    saver.lineage.head = parent
    return saver.save(request.step, lambda: request).result()


class Saver:
    """Saves again and again, one save at a time.

    mode: "auto" takes the best asynchronous mode that the devices and their memory allow.
    staging_limit_bytes: the memory that staging may take on a rank; a save that needs more is written before the call
        returns, as in sync mode.
    events: gets every `Event`, from whatever thread it happens in.
    replicas: "compare" makes it an error when ranks hold different content under one name, "trust" compares nothing.

    `lineage` is where this training stands in the run. `on_commit` can be set: it is called on the leader after each
    commit, from whatever thread that happens in. `calls` keeps the calls of the manager apart.
    """

    def __init__(
        self,
        catalog: Catalog,
        ranks: Ranks,
        *,
        mode: ChosenMode = "auto",
        staging_limit_bytes: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        events: EventLog | None = None,
        replicas: Replicas = "compare",
    ) -> None:
        self.lineage = TrainingLineage()
        self._is_sync = mode == "sync"
        self._url = catalog.storage.url
        self.calls = CallGuard(self._url, timeout_seconds)
        self._ranks = ranks
        self.events = events if events is not None else EventLog()
        self._current = CurrentSave(catalog.storage, ranks.rank, self.calls)
        self.drain = self._current.drain
        self.finish_other_saves = self._current.finish_others
        self._capturer = Capturer()
        self._coordinator = Coordinator(
            catalog,
            ranks.size,
            claims=self._is_sync,
            staging_limit_bytes=staging_limit_bytes,
            timeout_seconds=timeout_seconds,
            replicas=replicas,
            before_claim=partial(self._current.finish_others, catalog.storage),
            emit=self.events.emit,
        )
        self._agreement = Agreement(ranks, self._coordinator, catalog.storage)
        self._completion = Completion(catalog, ranks.rank, self.lineage, self._coordinator)
        self._ring = Ring()
        self._sync = SyncSaver(catalog, ranks, self._coordinator, self._agreement, self._ring)
        self._part = PartSaver(catalog, ranks, self._coordinator, self.lineage, self._ring, replicas=replicas)
        self._async = AsyncSaver(
            catalog,
            ranks,
            self._coordinator,
            self._agreement,
            self._completion,
            self._current,
            mode=mode,
            timeout_seconds=timeout_seconds,
            staging_limit_bytes=staging_limit_bytes,
            emit=self.events.emit,
        )
        # A saver that is dropped without being closed: its writer sees the end of the channel, its threads end here.
        weakref.finalize(self, self._async.worker.stop)
        weakref.finalize(self, self._async.preparation.cancel)
        _savers.add(self)

    def prepare(self, components: Callable[[], Mapping[str, Any] | None]) -> None:
        """Get ready for the first save beside the training. `components` returns what will be saved, or None when its
        owner is gone; it must hold a weak reference alone."""
        if not self._is_sync:
            self._async.preparation.start(components)

    def save(self, step: int, request: Callable[[], SaveRequest]) -> PendingSave:
        """Save on all ranks. Returns when the training may change its tensors again, or, in the pinned modes, when the
        optimizers of the request know what to wait for. Raises the failure of the save before, if it was not raised.

        `request` is called here, and what it raises is raised on all ranks.
        """
        self.calls.refuse_nested("save()", step)
        try:
            pending = PendingSave(step, self._ranks.rank, self.events.emit)
            pending.phases["wait"] = self._current.take_turn_to_save(step, sys._getframe())
            self._async.preparation.stop()
            # Until all that the call has made is freed again: the collector counts what is left of it, and would
            # otherwise go through every tensor of the state, in the call or at the next step of the training.
            with collector_paused():
                try:
                    self._save(request, pending)
                except (KeyboardInterrupt, SystemExit) as error:
                    # Also between the steps, which fail by themselves.
                    _fail(pending, self._current, self._completion, as_save_error(error, pending.step))
                    raise
            self._current.latest = pending
            return pending
        finally:
            self.calls.leave()

    def _save(self, request: Callable[[], SaveRequest], pending: PendingSave) -> None:
        """Take the steps of a save that are done in the call."""
        with self._failing(pending):
            prepared = self._capture(request, pending)
            agreed = self._plan(prepared, pending)
        if agreed.plan.unreported:
            self._current.raise_failure()
        else:
            self._current.log_failure()
        if not agreed.plan.committed:
            pending.emit("started")
        with self._failing(pending):
            if agreed.plan.committed:
                self._skip(agreed, pending)
            elif self._is_sync or agreed.plan.streamed:
                self._async.stager.drop_reserved()
                receipts = self._sync.write(agreed, pending)
                saved = self._sync.commit(agreed, receipts, pending)
                self._completion.succeed(pending, saved)
            else:
                self._agreement.require_shared_run(agreed.plan)
                staged = self._async.stage(agreed, pending)
                self._async.finish_in_background(staged, pending, owner=self)

    def save_part(self, step: int, names: str, request: Callable[[], SaveRequest]) -> PendingSave:
        """Save some components anew, on all ranks, and take the rest over from the checkpoint of the same step that was
        saved or restored last. Returns when it is committed. `names` are the components, as a text."""
        self.calls.refuse_nested("save()", step)
        try:
            pending = PendingSave(step, self._ranks.rank, self.events.emit)
            pending.phases["wait"] = self._current.take_turn_to_save(step, sys._getframe())
            with collector_paused(), self._failing(pending):
                label = f"save of step {step!r:.40}, of {names:.200}"
                unreported = self._current.unreported_error is not None
                agreed = self._part.agree(label, request, pending, unreported=unreported)
            if agreed.plan.unreported:
                self._current.raise_failure()
            self._current.log_failure()
            pending.emit("started")
            with collector_paused(), self._failing(pending):
                self._completion.succeed(pending, self._part.save(agreed, pending))
            self._current.latest = pending
            return pending
        finally:
            self.calls.leave()

    def _capture(self, request: Callable[[], SaveRequest], pending: PendingSave) -> Prepared | BaseException:
        """Return the request and the state as they are now, or the error, which the agreement raises on all ranks."""
        ranks = self._ranks
        with pending.phase("capture"):
            try:
                wanted = replace(request(), ancestry=self.lineage.next_ancestry())
                captured = self._capturer.capture(
                    wanted.components,
                    rank=ranks.rank,
                    size=ranks.size,
                    pipeline_stage=wanted.pipeline_stage,
                    carried=wanted.carried,
                )
            except (Exception, KeyboardInterrupt) as error:
                return error
        return Prepared(wanted, captured)

    def _plan(self, prepared: Prepared | BaseException, pending: PendingSave) -> AgreedSave:
        """Agree with all ranks on whether there is anything to write and who writes what."""
        with pending.phase("agree"):
            agreed = self._agreement.agree(
                pending.step,
                prepared,
                held_bytes=self._async.stager.held_bytes,
                unreported=self._current.unreported_error is not None,
            )
        pending.folder = agreed.plan.folder
        return agreed

    def _skip(self, agreed: AgreedSave, pending: PendingSave) -> None:
        """End a save whose step is committed already."""
        plan = agreed.plan
        if self._ranks.rank == 0:
            logger.info("step %d is committed already, in %s: nothing is written", pending.step, plan.folder)
        # As the leader has read it: retention may be removing it, and then not every rank could read it.
        pending.succeed(Saved(plan.folder, plan.digest, True, plan.size_bytes, plan.sequence))

    @contextmanager
    def _failing(self, pending: PendingSave) -> Iterator[None]:
        """Record a failure in the pending save and raise it as an error of ours."""
        try:
            yield
        except KeyboardInterrupt as error:
            _fail(pending, self._current, self._completion, as_save_error(error, pending.step))
            raise
        except Exception as error:
            failure = as_save_error(error, pending.step)
            _fail(pending, self._current, self._completion, failure)
            raise failure from error

    # The save under way

    @property
    def pending(self) -> PendingSave | None:
        """Return the save that is under way, or the last one."""
        return self._current.latest

    @property
    def is_pending(self) -> bool:
        return self._current.is_pending

    def poll(self) -> None:
        """Raise the failure of the last save, once; never wait."""
        if not self._current.is_pending:
            self._current.raise_failure()

    def wait(self) -> None:
        """Return when no save is under way; raise its failure, once."""
        self._current.drain()
        self._current.raise_failure()

    def restoring(self, name: str, load: Callable[[Callable[[], memoryview | None], int | None], _Loaded]) -> _Loaded:
        """Return what `load` returns, while no save is under way and none begins. It gets a function that returns the
        memory of asynchronous saves, or None, and how many bytes of new memory it may take besides; None where there is
        no limit. `name`: of the call, for messages."""
        try:
            self._current.take_turn(name, sys._getframe())
            return self._async.lending(load)
        finally:
            self.calls.leave()

    def wait_for_staging(self) -> None:
        """Make the devices wait for copies that still read, before the training changes what they read."""
        self._async.stager.wait_for_staging()

    # The run

    @property
    def on_commit(self) -> Callable[[], None]:
        return self._completion.on_commit

    @on_commit.setter
    def on_commit(self, callback: Callable[[], None]) -> None:
        self._completion.on_commit = callback

    @property
    def lease(self) -> int:
        """Return the number under which this process writes to the run; 0 as long as it has not."""
        return self._coordinator.lease

    def hold_run(self) -> None:
        """Become the run's only writer, or make sure that this process still is. For the leader alone."""
        self._coordinator.hold_run()

    @property
    def is_inherited(self) -> bool:
        """Return whether this process is a forked child, which has no part in what its parent saves."""
        return self._current.is_inherited

    def require_own_process(self) -> None:
        """Raise in a forked child."""
        if self.is_inherited:
            raise UsageError(
                f"the manager was built in process {self._current.owner}, from which this one was forked",
                run=self._url,
                advice="save in that process",
            )

    # The end

    def close(self) -> None:
        """Finish the save under way and release everything; then raise its failure, once."""
        if self.is_inherited:
            return
        try:
            if not self.calls.is_closed:
                self._current.take_turn("close()", sys._getframe())
            self._release(at_exit=False)
            # After that: a call that waits for its turn finds nothing to work with.
            self.calls.close()
        finally:
            self.calls.leave()
        self._current.raise_failure()

    def close_after(self, error: BaseException | None) -> None:
        """Close at the end of a `with` block that ends with `error`."""
        try:
            self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            # The exception that ends the block is the one to see; the save's must not take its place.
            logger.error("%s", failure)

    def end(self) -> None:
        """Close at the end of the process, where an exception would be lost: log the failure instead."""
        if self.is_inherited:
            return
        self._current.drain()
        error = self._current.unreported_error
        if error is not None:
            logger.error("a save failed and its outcome was never read: %s", error)
        self._release(at_exit=True)

    def _release(self, *, at_exit: bool) -> None:
        """Release everything. What one part of it raises must not keep the others: a lease that is not released, or a
        thread that stays, would be found out much later."""
        memory = self._async.releases(at_exit=at_exit)
        interrupt: BaseException | None = None
        for release in [
            *memory,
            self._ring.close,
            self._coordinator.release_run,
            self._async.worker.close,
            self._async.disconnect,
        ]:
            try:
                release()
            except Exception as error:
                logger.warning("closing the run %s: %s: %s", self._url, type(error).__name__, error)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _fail(pending: PendingSave, current: CurrentSave, completion: Completion, failure: HoldfastError) -> None:
    """Record a failure that is raised now. A save that the worker thread has goes on, whatever ends the call."""
    if pending.done():
        pending.reported = True
    elif current.latest is not pending:
        completion.fail(pending, failure)
    else:
        pending.interrupted = isinstance(failure, InterruptedSaveError)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Keep the last save of a program that ends without closing its manager, and log its failure."""
    for saver in list(_savers):
        saver.end()
