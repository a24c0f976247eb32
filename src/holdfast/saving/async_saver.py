"""Stage a save in the call and hand it to the writer; the rest runs in the background. Knows torch.

The writer starts while the state is still being staged. From the handoff on the other ranks rely on this one, so a
failure to stage takes the same way as any other: through the background save, to all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from holdfast.ondisk import paths
from holdfast.ranks.base import Ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.events import Event, Observer
from holdfast.runs.worker import WorkerThread
from holdfast.saving.agreement import AgreedSave, Agreement
from holdfast.saving.background import BackgroundSave, WriterHandoff
from holdfast.saving.completion import Completion
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.current import CurrentSave
from holdfast.saving.files import plain_files
from holdfast.saving.pending import PendingSave
from holdfast.saving.preparation import Preparation
from holdfast.saving.stage import ChosenMode, Mode, Stager
from holdfast.saving.staging.chunks import Sources
from holdfast.saving.staging.device_copy import best_mode
from holdfast.saving.staging.step_hooks import StepHooks, changes_in_step_alone
from holdfast.saving.writer.messages import Image, Job, Layout, PlainImage
from holdfast.saving.writer.supervisor import WriterSupervisor
from holdfast.state.devices import ACCELERATORS
from holdfast.state.names import unwrap

__all__ = ["AsyncSaver", "StagedSave"]

logger = logging.getLogger("holdfast")

_Loaded = TypeVar("_Loaded")

_CLOSING_SECONDS = 5.0
_HANDOVER_TRIES = 100
_FREED_AT_ONCE_BYTES = 256 << 20
_LONGEST_SECONDS = 1e9


class StagedSave:
    """A save that the writer has, or the failure to stage it."""

    def __init__(self) -> None:
        self.handoff = WriterHandoff()
        self.failure: BaseException | None = None


class AsyncSaver:
    """The steps of a save that is written in the background, and what they keep from save to save: the arena, the
    writer, the worker thread and the hooks of optimizers. `worker` must be stopped when its owner is dropped."""

    def __init__(
        self,
        catalog: Catalog,
        ranks: Ranks,
        coordinator: Coordinator,
        agreement: Agreement,
        completion: Completion,
        current: CurrentSave,
        *,
        mode: ChosenMode,
        timeout_seconds: float,
        staging_limit_bytes: int | None = None,
        emit: Observer = lambda event: None,
    ) -> None:
        self.worker = WorkerThread()
        self.stager = Stager()
        self.supervisor = WriterSupervisor(catalog.storage)
        self.preparation = Preparation(self.stager, self.supervisor, ranks=ranks.size, limit_bytes=staging_limit_bytes)
        self._hooks = StepHooks(self.stager)
        self._catalog = catalog
        self._ranks = ranks
        self._coordinator = coordinator
        self._agreement = agreement
        self._completion = completion
        self._current = current
        self._mode: ChosenMode = mode
        self._emit = emit
        self._timeout_seconds = timeout_seconds
        self._staging_limit_bytes = staging_limit_bytes
        self._background_ranks: Ranks | None = None
        self._jobs = 0
        self._is_lent = False
        # From when the writer gets a job until the worker thread has the save that the job is of.
        self._has_job_without_save = False

    def stage(self, agreed: AgreedSave, pending: PendingSave) -> StagedSave:
        """Copy this rank's part into the arena, or start the copies, and give the writer its job."""
        staged = StagedSave()
        try:
            with pending.phase("stage"):
                self._stage(agreed, pending, staged.handoff)
        except BaseException as error:
            staged.failure = error
            # The optimizers' next step must not wait for copies that will never be enqueued.
            self.stager.cancel()
        return staged

    def finish_in_background(self, staged: StagedSave, pending: PendingSave, *, owner: object) -> None:
        """Write and commit in the worker thread. A rank that is alone raises a failure to stage at once.

        `owner` is kept alive until the save has ended. The request and the capture are not: they hold the training's
        own tensors.
        """
        failure = staged.failure
        if self._background_ranks is None:
            self._background_ranks = self._ranks.branch("behind")
        background = BackgroundSave(
            pending,
            staged.handoff,
            self._background_ranks,
            self._catalog,
            self._completion,
            failure=failure,
            timeout_seconds=self._timeout_seconds,
            owner=owner,
        )
        self._hand_over(background, pending)
        del background
        if failure is not None and (self._ranks.size == 1 or not isinstance(failure, Exception)):
            pending.wait()
            raise failure

    def _hand_over(self, background: BackgroundSave, pending: PendingSave) -> None:
        """Give a save to the worker thread, and have the next save wait for it. An interrupt that comes meanwhile is
        raised after that: the writer has its job, and must not be left alone with it."""
        self.worker.start()
        if self.worker.is_current:
            pending.mark_queued()
        interrupt: BaseException | None = None
        for _ in range(_HANDOVER_TRIES):
            try:
                self._current.latest = pending
                self.worker.submit(background.run)
                self._has_job_without_save = False
                break
            except BaseException as error:
                interrupt = error
        else:
            # It was not given to the thread: the next save must not wait for it.
            self._current.latest = None
        if interrupt is not None:
            raise interrupt

    def lending(self, load: Callable[[Callable[[], memoryview | None], int | None], _Loaded]) -> _Loaded:
        """Return what `load` returns, and lend it the arena meanwhile. No save may begin before that.

        It gets a function that returns the arena's memory: None where there is none, or where a writer may still read
        it, after a save that failed. And how many bytes of new memory it may take besides; None where there is no
        limit. No `with` block: an interrupt before its first line would keep what it has taken.
        """
        try:
            self.preparation.pause()
            loaded = load(self._lend, self._staging_left_bytes())
        except BaseException:
            # A restore that fails is rare: it costs the next save some time that nothing which the restore left behind
            # can refer to the memory of that save.
            if self._is_lent:
                self.stager.close()
            self._take_back()
            raise
        self._take_back()
        return loaded

    def _take_back(self) -> None:
        self._is_lent = False
        self.preparation.resume()

    def _staging_left_bytes(self) -> int | None:
        """Return how much memory copies of the state may take beside the arena; None where there is no limit."""
        limit_bytes = self._staging_limit_bytes
        return None if limit_bytes is None else max(limit_bytes - self.stager.held_bytes, 0)

    def _lend(self) -> memoryview | None:
        if self._current.is_inherited:
            return None  # a forked child shares the memory with its parent
        last, writer = self._current.latest, self.supervisor.writer
        if self._has_job_without_save or (last is not None and (not last.done() or last.error is not None)):
            return None
        if writer is not None and writer.may_still_read:
            return None
        memory = self.stager.spare_memory()
        self._is_lent = memory is not None
        return memory

    def releases(self, *, at_exit: bool) -> list[Callable[[], None]]:
        """Return what has to be called, each whatever the others raise, to release everything but the connection. At
        the exit of the process the system releases the memory."""
        rest = [] if at_exit else [self._release_memory]
        return [self.preparation.stop, self._hooks.remove, self.supervisor.shut_down, *rest]

    def _release_memory(self) -> None:
        """Release the arena. To undo its page lock takes long, and the caller need not wait for it. The exit of the
        process must: a thread that ends in the middle of a call of a device's library ends the process with it."""
        if self.stager.held_bytes > _FREED_AT_ONCE_BYTES:
            # At the end of a process no thread can be started.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.stager.close_in_own_thread, name="holdfast-close", daemon=False).start()
                return
        self.stager.close()

    def disconnect(self) -> None:
        """Release the connection to the other ranks of the background agreements."""
        ranks, self._background_ranks = self._background_ranks, None
        if ranks is not None:
            with contextlib.suppress(Exception):
                ranks.close(_CLOSING_SECONDS)

    def _stage(self, agreed: AgreedSave, pending: PendingSave, handoff: WriterHandoff) -> None:
        own, captured = self._agreement.rank_plan(agreed), agreed.captured
        mode, rank = self._mode_for(captured.memory), self._ranks.rank
        plain = plain_files(captured, own.assignment, rank, self._coordinator.trees, agreed.request.assets)
        self._discard_dead_writer()
        pending.starts_writer = self.supervisor.writer is None
        arena, images = self.stager.arrange(own.files, plain)
        listing = self._coordinator.listing if rank == 0 else None
        writer = self.supervisor.ready_writer(arena, Layout(own.number, images, listing))
        arena.begin()
        pending.size_bytes = sum(image.size_bytes for image in images) + sum(file.size_bytes for file in plain)
        pending.written_bytes = lambda: arena.written
        eager = bool(ACCELERATORS.among(captured.devices))
        job = self._next_job(agreed, own.number, self.stager.stage_plain(plain), eager=eager)
        handoff.names = _file_names(job, images)
        self._has_job_without_save = True
        writer.send(job)
        # Not before: the cleanup after a failure waits for a reply of this writer.
        handoff.number, handoff.writer, handoff.arena = job.number, writer, arena
        copies_later = mode in ("async_pinned", "async_device")
        optimizers = _optimizers(agreed.request.components) if copies_later else []
        sources = Sources(captured.memory, captured.addresses, captured.devices)
        staging = self.stager.stage(sources, mode, optimizers)
        if copies_later:
            handoff.finish_staging = partial(self.stager.finish_in_own_thread, staging)
            self._hooks.install(optimizers)
        else:
            staging.finish()
            pending.mark_staged()

    def _discard_dead_writer(self) -> None:
        if self._current.is_inherited:
            return None  # a forked child shares the memory with its parent
        last, writer = self._current.latest, self.supervisor.writer
        if self._has_job_without_save and writer is not None:
            # After an interrupt: nothing will tell it to commit or to discard, and it may be reading the arena.
            writer.kill()
        self._has_job_without_save = False
        if self.supervisor.discard_dead_writer(last.step if last is not None and last.error is None else None):
            self.stager.close()
        if writer is not None and self.supervisor.writer is None:
            step = last.step if last is not None else None
            self._emit(Event("writer_restarted", step, self._ranks.rank, error=writer.describe_exit()))

    def _next_job(self, agreed: AgreedSave, layout_number: int, plain: tuple[PlainImage, ...], *, eager: bool) -> Job:
        self._jobs += 1
        ranks, plan = self._ranks, agreed.plan
        return Job(
            number=self._jobs,
            token=plan.claim,
            layout=layout_number,
            run=self._catalog.storage.url,
            folder=plan.folder,
            step=agreed.request.step,
            rank=ranks.rank,
            size=ranks.size,
            plain=plain,
            facts=self._coordinator.facts(agreed.request, plan.folder) if ranks.rank == 0 else None,
            timeout_seconds=min(self._timeout_seconds, _LONGEST_SECONDS),
            eager=eager,
        )

    def _mode_for(self, memory: Sequence[torch.Tensor]) -> Mode:
        """Return the mode; the first time that "auto" chooses one, log which and why."""
        if self._mode != "auto":
            return self._mode
        self._mode, why = best_mode(memory)
        if self._ranks.rank == 0:
            logger.info("saving in mode '%s': %s", self._mode, why)
        return self._mode


def _optimizers(components: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    inner = map(unwrap, components.values())
    return [one for one in inner if isinstance(one, torch.optim.Optimizer) and changes_in_step_alone(one)]


def _file_names(job: Job, images: Sequence[Image]) -> tuple[str, ...]:
    """Return the files of a rank's part in the order in which to remove them: first the receipt, which refers to the
    others, last the claim of the attempt."""
    last = paths.ATTEMPT if job.rank == 0 else ""
    first = paths.receipt_file(job.rank) if job.rank != 0 else ""
    files = [*(image.name for image in images), *(file.name for file in job.plain)]
    return tuple(filter(None, (first, *files, last)))
