"""The save chain in order: capture, plan, stage, write, commit. A request enters, a committed checkpoint leaves.

The front half is the same in every mode: the ranks say what they have, and, where that is new, agree on who writes
what. In sync mode each rank then writes from its tensors' own memory and the leader commits. In the asynchronous modes
each rank copies its part into its arena, hands it to its writer and returns; `background` does the rest.

A rank that fails in an agreement fails it for all, and everything that was committed before stays as it was.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch

from holdfast.errors import HoldfastError, KeyMissingError, StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.files import PlainFile
from holdfast.ranks.base import Ranks, on_leader
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.claims import has_claim
from holdfast.runs.events import Event
from holdfast.runs.lineage import Lineage, ancestry, draw_segment
from holdfast.runs.links import point_latest
from holdfast.runs.progress import Progress
from holdfast.runs.worker import WorkerThread
from holdfast.saving.background import (
    BackgroundSave,
    PendingSave,
    Saved,
    WriterHandoff,
    as_save_error,
    is_agreed_error,
    outcome_from_storage,
)
from holdfast.saving.capture import Capture, Capturer
from holdfast.saving.commit import commit
from holdfast.saving.compare import Sampler, digest_parts, digest_sets
from holdfast.saving.coordinator import Coordinator, SaveRequest, digests_of
from holdfast.saving.facts import Listing
from holdfast.saving.files import FileLayout, asset_files, lay_out, stage, values_file
from holdfast.saving.messages import Inventory, Receipt, ReplicaSet, SavePlan, StateSummary, WriteAssignment
from holdfast.saving.plan import Replicas
from holdfast.saving.stage import (
    ChosenMode,
    Mode,
    Stager,
    changes_in_step_alone,
    is_on_device,
    room_for_clone,
)
from holdfast.saving.staging.arena import Arena
from holdfast.saving.staging.budget import free_for_staging, machine_name, note_ranks_here, ranks_here
from holdfast.saving.write import write
from holdfast.saving.writer.client import Writer, start_writer
from holdfast.saving.writer.messages import Image, Job, Layout, PlainImage
from holdfast.state.memory import collector_paused
from holdfast.state.names import unwrap
from holdfast.storage.base import Storage
from holdfast.storage.registry import same_place

logger = logging.getLogger("holdfast")

_PARTING_SECONDS = 5.0
_LONGEST_SECONDS = 1e9
_LOOK_SECONDS = 0.1
_REMEMBERED_EVENTS = 256
_NOTABLE_SECONDS = 0.1
_NOTABLE_SHARE = 0.1
_WAITS_IN_A_ROW = 3


def save(request: SaveRequest, catalog: Catalog, ranks: Ranks) -> Saved:
    """Save once, on all ranks, and return when the checkpoint is committed."""
    return Saver(catalog, ranks, mode="sync").save(request.step, lambda: request).result()


_Ready = Callable[[], tuple[SaveRequest, Capture]]


class Saver:
    """Saves again and again, one save at a time.

    mode: "auto" takes the best asynchronous mode that the devices and their memory allow.
    staging_limit_bytes: the memory that staging may take on a rank; a save that needs more is written in pieces, from
        the tensors' own memory, before the call returns.
    on_event: is called with every `Event`, from whatever thread it happens in; what it raises is logged.
    replicas: "compare" makes it an error when ranks hold different content under one name, "trust" compares nothing.

    `on_commit` can be set: it is called on the leader after each commit, from whatever thread that happens in.
    """

    def __init__(
        self,
        catalog: Catalog,
        ranks: Ranks,
        *,
        mode: ChosenMode = "auto",
        staging_limit_bytes: int | None = None,
        timeout_seconds: float = 600.0,
        on_event: Callable[[Event], None] | None = None,
        replicas: Replicas = "compare",
    ) -> None:
        self.events: deque[Event] = deque(maxlen=_REMEMBERED_EVENTS)
        self.head: str | None = None
        self._lineage = Lineage()
        self._segment = draw_segment()
        self._own: Lineage | None = None
        self.on_commit: Callable[[], None] = lambda: None
        self._catalog = catalog
        self._ranks = ranks
        self._mode: ChosenMode = mode
        self._timeout_seconds = timeout_seconds
        self._on_event = on_event
        self._capturer = Capturer()
        self._coordinator = Coordinator(
            catalog,
            ranks.size,
            claims=mode == "sync",
            staging_limit_bytes=staging_limit_bytes,
            timeout_seconds=timeout_seconds,
            replicas=replicas,
            before_claim=partial(_finish_other_saves, weakref.ref(self), catalog.storage),
        )
        self._sampler = Sampler(ranks.rank)
        self._plan: _RankPlan | None = None
        self._stager = Stager()
        self._writer: Writer | None = None
        self._behind: Ranks | None = None
        self._shared_lease = 0
        self._worker = WorkerThread()
        self._pending: PendingSave | None = None
        self._jobs = 0
        self._waits = Waits()
        self._hooks: dict[int, Any] = {}
        self._owner = os.getpid()
        # One that is dropped without being closed: its writer sees the end of the line, and this thread hears it here.
        weakref.finalize(self, self._worker.stop)
        _savers.add(self)

    # What is asked of it

    def save(self, step: int, request: Callable[[], SaveRequest]) -> PendingSave:
        """Save on all ranks. Returns when the training may change its tensors again, or, in the pinned modes, when the
        optimizers of the request know what to wait for. Raises what failed before, if nobody has heard of it yet.

        `request` is called here, and what it raises is raised on all ranks.
        """
        pending = PendingSave(step, self._ranks.rank, self.tell)
        pending.phases["wait"] = self._wait_for_previous(step)
        with collector_paused(), self._failing(pending):
            ready = self._prepare(request, pending)
            with pending.phase("agree"):
                decided = self._agree(step, ready)
        self._raise_earlier_failure(decided)
        if not decided.committed:
            pending.tell("started")
        with collector_paused(), self._failing(pending):
            self._follow(_Work(*ready(), decided), pending)
        self._pending = pending
        return pending

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child, which has no part in what its parent saves."""
        return self._owner != os.getpid()

    def require_own_process(self) -> None:
        if self.is_inherited:
            raise UsageError(
                f"it was built in process {self._owner}, from which this one was forked",
                run=self._catalog.storage.url,
                advice="save in that process",
            )

    @property
    def is_pending(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def poll(self) -> None:
        """Raise what failed, once; never waits."""
        if not self.is_pending:
            self._hear()

    def wait(self) -> None:
        """Return when nothing is pending; raise what failed, once."""
        self.drain()
        self._hear()

    def drain(self) -> None:
        """Return when nothing is pending, whatever its end."""
        pending = self._pending
        if pending is None or pending.done():
            return
        label, total = f"saving step {pending.step}", pending.size_bytes
        with Progress(label, total, shown=self._ranks.rank == 0) as progress:
            while not pending.wait(_LOOK_SECONDS):
                progress.set(min(pending.written_bytes(), total))

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """What is saved from now on goes back to this one."""
        known = [checkpoint]
        if checkpoint.parent is not None and not checkpoint.head.line:
            known = ancestry(checkpoint.digest, self._catalog.scan().checkpoints) or known
        self.head, self._lineage, self._segment = checkpoint.digest, Lineage.through(known), draw_segment()
        self._own = self._lineage

    def start_line(self, own: Lineage | None) -> None:
        """Start a new line: the next save has no parent, and no step counts as committed. `own` is what `own` is then,
        until the next save."""
        self.head, self._lineage, self._segment, self._own = None, Lineage(), draw_segment(), own

    @property
    def own(self) -> Lineage | None:
        """The checkpoints that this training restored or saved, and those that they go back to; None as long as it did
        neither."""
        return self._own

    @property
    def storage(self) -> Storage:
        return self._catalog.storage

    @property
    def pending(self) -> PendingSave | None:
        """The save that is under way, or the last one."""
        return self._pending

    @property
    def lease(self) -> int:
        """The number under which this process writes to the run; 0 as long as it has not."""
        return self._coordinator.lease

    def finish_other_saves(self) -> None:
        """Wait for the saves of other managers of this process to the same run."""
        _finish_other_saves(weakref.ref(self), self._catalog.storage)

    def hold_run(self) -> None:
        """Become the run's only writer, or make sure that this process still is. For the leader alone."""
        self._coordinator.hold_run()

    def before_update(self) -> None:
        """Make the devices wait for copies that still read, before the training changes what they read."""
        self._stager.before_update()

    def close(self) -> None:
        """Finish what is pending and give everything back; then raise what failed, once."""
        if self.is_inherited:
            return
        self.drain()
        self._let_go()
        self._hear()

    def close_after(self, error: BaseException | None) -> None:
        """The same at the end of a `with` block."""
        try:
            self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            # The exception that ends the block is the one to see; the save's must not take its place.
            logger.error("%s", failure)

    def end(self) -> None:
        """The same at the end of the process, where nobody can hear an exception any more."""
        if self.is_inherited:
            return
        self.drain()
        error = self._unreported()
        if error is not None:
            logger.error("a save failed and nobody asked for its outcome: %s", error)
        self._let_go()

    # What failed before

    def _unreported(self) -> HoldfastError | None:
        pending = self._pending
        return pending.error if pending is not None and pending.done() and not pending.reported else None

    def _hear(self) -> None:
        if self._unreported() is not None and self._pending is not None:
            self._pending.result()

    def _wait_for_previous(self, step: int) -> float:
        """One save at a time. Gives the seconds that were spent on it."""
        previous = self._pending
        if previous is None or previous.done():
            self._waits.in_a_row = 0
            return 0.0
        begin = time.monotonic()
        self.drain()
        waited = time.monotonic() - begin
        between = begin - previous.started
        if self._waits.is_to_be_warned_of(waited, between, at_start=previous.starts_writer) and self._ranks.rank == 0:
            logger.warning(
                "saves take longer than the time between them: the save of step %d waited %.2f s for the save of step "
                "%d, which took %.2f s and had begun %.2f s before, and so did the saves before it; save less often, "
                "or to faster storage",
                step,
                waited,
                previous.step,
                previous.seconds,
                between,
            )
        return waited

    def _raise_earlier_failure(self, decided: SavePlan) -> None:
        if decided.unreported:
            self._hear()
        elif self._unreported() is not None and self._pending is not None:
            # Another rank has raised it already, in `poll`: to raise it here would part the ranks.
            logger.error("%s", self._pending.error)
            self._pending.reported = True

    @contextmanager
    def _failing(self, pending: PendingSave) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt as error:
            self._coordinator.forget()
            pending.fail(as_save_error(error, pending.step))
            raise
        except Exception as error:
            self._coordinator.forget()
            failure = as_save_error(error, pending.step)
            pending.fail(failure)
            raise failure from error

    # The front half

    def _prepare(self, request: Callable[[], SaveRequest], pending: PendingSave) -> _Ready:
        """The request and the capture, taken now. What that raises is raised where the ranks agree, and all hear it."""
        ranks = self._ranks
        with pending.phase("capture"):
            try:
                wanted = request()
                if wanted.parent is None:
                    wanted = replace(wanted, parent=self.head, lineage=self._lineage, segment=self._segment)
                captured = self._capturer.capture(
                    wanted.components,
                    rank=ranks.rank,
                    size=ranks.size,
                    pipeline_stage=wanted.pipeline_stage,
                    carried=wanted.carried,
                )
            except (Exception, KeyboardInterrupt) as error:
                return partial(_raise, error)
        return lambda: (wanted, captured)

    def _agree(self, step: int, ready: _Ready) -> SavePlan:
        # The step is part of the label, so that ranks which save different steps are told so.
        decided = self._ranks.decide(
            f"save of step {step!r:.40}",
            lambda: self._summary(*ready(), step),
            lambda summaries: self._coordinator.begin(ready()[0], summaries),
            sends=StateSummary,
            returns=SavePlan,
        )
        if decided.committed or decided.unreported:
            return decided
        captured = ready()[1]
        if decided.differing:
            self._find_difference(step, captured, self._sampler.sets, decided.differing)
        if not decided.number:
            decided = self._ranks.decide(
                f"plan of step {step}",
                captured.inventory,
                lambda inventories: self._coordinator.plan(ready()[0], inventories),
                sends=Inventory,
                returns=SavePlan,
            )
        if not decided.folder:
            decided = self._compare(step, ready, decided)
        if decided.comparison != self._sampler.comparison(captured.structure):
            self._sampler.begin(decided.replicas, decided.comparison, captured.structure)
        self._sampler.round = decided.round
        return decided

    def _compare(self, step: int, ready: _Ready, planned: SavePlan) -> SavePlan:
        """Compare all replicas of a new plan, before anything is written, and start the save."""
        request, captured = ready()
        sets = planned.replicas
        started = self._ranks.decide(
            f"replicas of step {step}",
            lambda: digest_sets(sets, self._ranks.rank, captured.memory),
            lambda digests: self._coordinator.compare(request, digests),
            sends=tuple[bytes, ...],
            returns=SavePlan,
        )
        if started.differing:
            self._find_difference(step, captured, sets, started.differing)
        return msgspec.structs.replace(started, assignments=planned.assignments, replicas=sets)

    def _find_difference(
        self, step: int, captured: Capture, sets: Sequence[ReplicaSet], differing: tuple[int, ...]
    ) -> None:
        """Raise, on all ranks, the error that names what differs."""
        self._ranks.decide(
            f"difference at step {step}",
            lambda: digest_parts(sets, differing, self._ranks.rank, captured.memory),
            lambda digests: self._coordinator.raise_difference(differing, digests),
            sends=tuple[tuple[bytes, ...], ...],
            returns=None,
        )

    def _summary(self, request: SaveRequest, captured: Capture, step: int) -> StateSummary:
        known = self._plan.number if self._plan is not None else 0
        # An arena that held this very structure holds it again; any other may need more memory than there is.
        same = self._plan is not None and self._plan.structure == captured.structure and self._stager.capacity_bytes
        room = None if same else free_for_staging()
        return StateSummary(
            captured.structure,
            captured.digests,
            captured.frozen,
            known,
            room,
            unreported=self._unreported() is not None,
            comparison=self._sampler.comparison(captured.structure),
            samples=self._sampler.take(captured.memory, captured.structure, step),
            held_bytes=self._stager.capacity_bytes,
            machine=machine_name(),
            ranks_here=ranks_here(),
            argument_digests=digests_of(request) if self._ranks.size > 1 else (),
        )

    def _follow(self, work: _Work, pending: PendingSave) -> None:
        """Do what was decided."""
        decided = work.decided
        pending.folder = decided.folder
        if decided.committed:
            if self._ranks.rank == 0:
                logger.info("step %d is committed already, in %s: nothing is written", pending.step, decided.folder)
            # By the leader's word: retention may be removing it, and then not every rank could read it.
            pending.succeed(Saved(decided.folder, decided.digest, True, decided.size_bytes, decided.sequence))
        elif self._mode == "sync" or decided.streamed:
            self._write_now(work, pending)
        else:
            self._require_shared_run(decided)
            self._write_behind(work, pending)

    def _require_shared_run(self, decided: SavePlan) -> None:
        """Make sure that all ranks see the leader's run, once for each lease, before anything is written. Otherwise the
        leader's writer would wait for parts that lie on another machine's disk."""
        if self._ranks.size == 1 or decided.lease == self._shared_lease:
            return
        self._ranks.decide("first look at the run", partial(self._see_run, decided), _nothing, sends=None, returns=None)
        self._shared_lease = decided.lease

    def _see_run(self, decided: SavePlan) -> None:
        if not has_claim(self._catalog.storage, decided.lease, decided.lease_token):
            raise UsageError(
                f"rank {self._ranks.rank} does not see the lease of the run that rank 0 has just taken",
                run=self._catalog.storage.url,
                advice="give all ranks the same run, on storage that all of them share; nothing was written",
            )

    def _plan_of(self, work: _Work) -> _RankPlan:
        """This rank's part of the plan; worked out when the plan is new."""
        decided = work.decided
        if decided.ranks_here:
            note_ranks_here(decided.ranks_here[self._ranks.rank])
        if self._plan is None or decided.assignments:
            assignment = decided.assignments[self._ranks.rank]
            files = lay_out(work.captured.inventory(), assignment, rank=self._ranks.rank)
            self._plan = _RankPlan(decided.number, assignment, files, work.captured.structure)
        return self._plan

    # Written before the call returns

    def _write_now(self, work: _Work, pending: PendingSave) -> None:
        receipts: list[Receipt] = []
        with pending.phase("write"):
            self._write_together(work, pending, receipts)
        pending.tell("written", size_bytes=pending.size_bytes)
        with pending.phase("commit"):
            saved = self._commit_together(work, receipts)
        pending.mark_saved(saved)
        try:
            self._note_commit(pending, saved)
        except Exception:
            logger.exception("step %d is committed; what follows on that went wrong", pending.step)
        pending.succeed(saved)

    def _commit_together(self, work: _Work, receipts: list[Receipt]) -> Saved:
        ranks = self._ranks
        try:
            return on_leader(ranks, "commit", lambda: self._commit(work, receipts), returns=Saved)
        except Exception as error:
            if ranks.size == 1 or is_agreed_error(error):
                raise
            # The leader, or the way to it, was lost in the very moment of the commit.
            look = partial(self._find_committed, work.decided.folder)
            return outcome_from_storage(error, look, may_come_later=ranks.rank != 0)

    def _write_together(self, work: _Work, pending: PendingSave, receipts: list[Receipt]) -> None:
        """Every rank writes. If one cannot, nothing can refer to what the others wrote, and all of it goes."""
        created: list[str] = []
        folder = work.decided.folder
        try:
            self._ranks.decide(
                "write", lambda: self._write(work, pending, created), receipts.extend, sends=Receipt, returns=None
            )
        except (Exception, KeyboardInterrupt):
            # Safe also when only this rank gave up: the commit waits for every rank to have passed this agreement.
            _discard([*created, paths.ATTEMPT] if self._ranks.rank == 0 else created, folder, self._catalog)
            raise

    def _write(self, work: _Work, pending: PendingSave, created: list[str]) -> Receipt:
        decided = work.decided
        if self._ranks.rank != 0:
            self._catalog.attempts.require_claim(decided.folder, decided.claim)
        mine = self._plan_of(work)
        tensors = stage(mine.files, work.captured.memory)
        plain = self._plain_files(work, mine.assignment)
        pending.size_bytes = sum(file.frame.size_bytes for file in tensors) + sum(file.size_bytes for file in plain)
        with Progress(f"saving step {work.request.step}", pending.size_bytes, shown=self._ranks.rank == 0) as progress:
            return write(
                decided.folder,
                tensors,
                plain,
                self._catalog.storage,
                on_bytes=progress.add,
                on_created=created.append,
            )

    def _commit(self, work: _Work, receipts: list[Receipt]) -> Saved:
        facts = self._coordinator.facts(work.request, work.decided.folder)
        checkpoint = commit(facts, self._coordinator.listing, receipts, self._catalog)
        if facts.links:
            point_latest(self._catalog.storage, checkpoint.folder)
        return _saved(checkpoint)

    # Written behind the training

    def _write_behind(self, work: _Work, pending: PendingSave) -> None:
        """Stage, and leave the rest to a thread. From here on the other ranks count on this one's word, so a failure
        goes the same way; only a rank that is alone raises it at once."""
        handed = WriterHandoff()
        failure: BaseException | None = None
        try:
            with pending.phase("stage"):
                self._stage(work, pending, handed)
        except BaseException as error:
            failure = error
            # The optimizers' next step must not wait for copies that nobody will send.
            self._stager.cancel()
        if self._behind is None:
            self._behind = self._ranks.branch("behind")
        behind = BackgroundSave(
            pending,
            handed,
            self._behind,
            failure=failure,
            timeout_seconds=self._timeout_seconds,
            # The request and the capture are not kept: they hold the training's own tensors.
            on_end=partial(self._note_end, pending),
            look=partial(self._find_committed, pending.folder),
            clear=partial(self._clear_attempt, pending.folder, handed),
        )
        self._worker.submit(behind.run)
        del behind
        if failure is not None and (self._ranks.size == 1 or not isinstance(failure, Exception)):
            pending.wait()
            raise failure

    def _stage(self, work: _Work, pending: PendingSave, handed: WriterHandoff) -> None:
        mine, memory = self._plan_of(work), work.captured.memory
        mode = self._mode_for(memory)
        plain = self._plain_files(work, mine.assignment)
        self._discard_dead_writer()
        pending.starts_writer = self._writer is None
        arena, images = self._stager.arrange(mine.files, plain)
        writer = self._writer_for(arena, Layout(mine.number, images, self._listing()))
        arena.begin()
        pending.size_bytes = sum(image.size_bytes for image in images) + sum(file.size_bytes for file in plain)
        pending.written_bytes = lambda: arena.written
        self._jobs += 1
        job = self._job(work, mine.number, self._stager.stage_plain(plain), eager=is_on_device(memory))
        handed.names = _names_of(job, images)
        writer.send(job)
        # Not before: whoever clears up after a failure waits for an answer of this writer.
        handed.number, handed.writer, handed.arena = job.number, writer, arena
        behind = mode in ("async_pinned", "async_device")
        optimizers = _optimizers(work.request.components) if behind else []
        staging = self._stager.stage(memory, mode, optimizers)
        handed.finish_staging = staging.finish
        if behind:
            self._install_step_hooks(optimizers)
        else:
            staging.finish()
            pending.mark_staged()

    def _job(self, work: _Work, layout_number: int, plain: tuple[PlainImage, ...], *, eager: bool) -> Job:
        ranks = self._ranks
        facts = self._coordinator.facts(work.request, work.decided.folder) if ranks.rank == 0 else None
        return Job(
            number=self._jobs,
            token=work.decided.claim,
            layout=layout_number,
            run=self._catalog.storage.url,
            folder=work.decided.folder,
            step=work.request.step,
            rank=ranks.rank,
            size=ranks.size,
            plain=plain,
            facts=facts,
            timeout_seconds=min(self._timeout_seconds, _LONGEST_SECONDS),
            eager=eager,
        )

    def _listing(self) -> Listing | None:
        return self._coordinator.listing if self._ranks.rank == 0 else None

    def _discard_dead_writer(self) -> None:
        if self._writer is not None and self._writer.is_gone():
            if self._writer.may_still_read:
                self._stager.close()
            elif self._pending is not None and self._pending.error is None:
                # Nobody was told of it: the last save was through when it ended.
                logger.warning(
                    "%s after step %d; a new one is started", self._writer.describe_exit(), self._pending.step
                )
            self._writer.shut_down()
            self._writer = None

    def _writer_for(self, arena: Arena, told: Layout) -> Writer:
        """A writer that lives and knows the arena and the layout."""
        if self._writer is None:
            self._writer = start_writer(self._catalog.storage)
        self._writer.use_arena(arena)
        self._writer.use_layout(told)
        return self._writer

    def _mode_for(self, memory: Sequence[torch.Tensor]) -> Mode:
        """The mode that is meant, and, the first time, a line that says which one was chosen and why."""
        if self._mode != "auto":
            return self._mode
        self._mode, why = _best_mode(memory)
        if self._ranks.rank == 0:
            logger.info("saving in mode '%s': %s", self._mode, why)
        return self._mode

    def _install_step_hooks(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The next step of each optimizer waits, on the device, for the copy of what it changes."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(
                    partial(_before_step, weakref.ref(self._stager))
                )

    # What both have in common

    def _plain_files(self, work: _Work, assignment: WriteAssignment) -> list[PlainFile]:
        rank, captured = self._ranks.rank, work.captured
        mine: dict[str, dict[str, Any]] = {}
        for index in assignment.trees:
            tree, scope = captured.trees[index], assignment.scopes[index]
            file = paths.SHARED_VALUES if scope == "" and rank == 0 else paths.values_file(rank)
            mine.setdefault(file, {})[paths.tree_name(tree.component, scope)] = msgspec.Raw(captured.texts[index])
        for merged in self._coordinator.trees if rank == 0 else ():
            if merged.merged is not None:
                mine.setdefault(merged.file, {})[merged.name] = merged.merged
        files = [values_file(name, trees) for name, trees in mine.items()]
        return files + asset_files(work.request.assets) if rank == 0 else files

    def _note_end(self, pending: PendingSave, saved: Saved | None) -> None:
        if saved is not None:
            self._note_commit(pending, saved)
        else:
            self._coordinator.forget()

    def _clear_attempt(self, folder: str, handed: WriterHandoff) -> None:
        _discard(handed.names, folder, self._catalog)

    def _find_committed(self, folder: str) -> Saved | None:
        """Return what a process that is gone has committed before it went; None when nothing is committed."""
        try:
            checkpoint = self._catalog.read(folder)
        except KeyMissingError:
            return None
        self._catalog.storage.sync(folder)
        return _saved(checkpoint)

    def _note_commit(self, pending: PendingSave, saved: Saved) -> None:
        if not saved.skipped:
            self._lineage = self._lineage.followed_by(saved.sequence, saved.segment)
            self._own = (self._own or Lineage()).followed_by(saved.sequence, saved.segment)
        self.head = saved.digest
        self._coordinator.note_commit(pending.step, saved)
        # Now, while it is the newest, which nobody removes.
        with contextlib.suppress(HoldfastError):
            pending.checkpoint = self._catalog.read(saved.folder)
        path = f"{self._catalog.storage.url}/{saved.folder}"
        if self._ranks.rank == 0:
            logger.info(
                "committed step %d: %.1f MiB in %.2f s to %s",
                pending.step,
                saved.size_bytes / 2**20,
                time.monotonic() - pending.started,
                path,
            )
        pending.tell("committed", size_bytes=saved.size_bytes, path=path)
        if self._ranks.rank == 0:
            self.on_commit()

    def tell(self, event: Event) -> None:
        self.events.append(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %r; the save goes on", event.kind)

    def _let_go(self) -> None:
        """Give everything back. What one part of it raises must not keep the others: a lease that is not released, or a
        thread that stays, would be found out by somebody else."""
        hooks, self._hooks = self._hooks, {}
        writer, self._writer = self._writer, None
        behind, self._behind = self._behind, None
        releases: list[Callable[[], None]] = [hook.remove for hook in hooks.values()]
        releases += [writer.shut_down] if writer is not None else []
        releases += [self._stager.close, self._coordinator.release_run, self._worker.stop]
        for release in releases:
            try:
                release()
            except Exception as error:
                logger.warning("closing the run %s: %s: %s", self._catalog.storage.url, type(error).__name__, error)
        if behind is not None:
            with contextlib.suppress(Exception):
                behind.part(_PARTING_SECONDS)


@dataclass(slots=True)
class Waits:
    """How often saves have waited for the one before, in a row. One warning is enough for a run."""

    in_a_row: int = 0
    warned: bool = False

    def is_to_be_warned_of(self, waited_seconds: float, between_seconds: float, *, at_start: bool) -> bool:
        """Return whether this wait is one that recurs and takes a notable part of the training's time. A wait for the
        save that started the writer process (`at_start`) does not count: the start is most of it."""
        notable = waited_seconds >= max(_NOTABLE_SECONDS, _NOTABLE_SHARE * (waited_seconds + between_seconds))
        self.in_a_row = self.in_a_row + 1 if notable and not at_start else 0
        if self.warned or self.in_a_row < _WAITS_IN_A_ROW:
            return False
        self.warned = True
        return True


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """This rank's part of a plan, which holds until the structure of some rank's state changes."""

    number: int
    assignment: WriteAssignment
    files: list[FileLayout]
    structure: str


@dataclass(frozen=True, slots=True)
class _Work:
    """One save on one rank, agreed on."""

    request: SaveRequest
    captured: Capture
    decided: SavePlan


def _best_mode(memory: Sequence[torch.Tensor]) -> tuple[Mode, str]:
    devices: dict[torch.device, int] = {}
    for tensor in memory:
        if tensor.is_cuda:
            devices[tensor.device] = devices.get(tensor.device, 0) + tensor.nbytes
    if not devices:
        return "async", "the state is in host memory"
    # Twice the room: what the training takes at its peak is only known as far as it has come.
    if all(room_for_clone(device) > 2 * count for device, count in devices.items()):
        return "async_device", "the devices have room for a clone of the state"
    return "async_pinned", "the devices have no room for a clone of the state"


def _optimizers(components: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    inner = map(unwrap, components.values())
    return [one for one in inner if isinstance(one, torch.optim.Optimizer) and changes_in_step_alone(one)]


def _before_step(stager: weakref.ref[Stager], *_: Any) -> None:
    """A hook outlives a saver that was never closed, and must not keep its arena."""
    found = stager()
    if found is not None:
        found.before_update()


def _nothing(_: list[None]) -> None:
    """Choose nothing: that all ranks came so far is the decision."""


def _raise(error: BaseException) -> tuple[SaveRequest, Capture]:
    raise error


def _names_of(job: Job, images: Sequence[Image]) -> tuple[str, ...]:
    """The files of a rank's part: first what says that the others are there, last what says that they will be."""
    last = paths.ATTEMPT if job.rank == 0 else ""
    first = paths.receipt_file(job.rank) if job.rank != 0 else ""
    files = [*(image.name for image in images), *(file.name for file in job.plain)]
    return tuple(filter(None, (first, *files, last)))


def _saved(checkpoint: Checkpoint) -> Saved:
    return Saved(
        checkpoint.folder,
        checkpoint.digest,
        size_bytes=checkpoint.size_bytes,
        sequence=checkpoint.sequence,
        segment=checkpoint.head.segment,
    )


def _discard(names: Sequence[str], folder: str, catalog: Catalog) -> None:
    """Give back the room that an attempt took. Only called when no manifest can be there; what stays is debris."""
    for name in names:
        try:
            catalog.storage.delete(paths.key(folder, name))
        except StorageError as error:
            logger.debug("could not remove %s of an abandoned attempt: %s", name, error)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _finish_other_saves(own: weakref.ref[Saver], storage: Storage) -> None:
    """Wait for the pending saves of other managers of this process to a run. Whoever takes the run over would give them
    up, and whoever restores would not find them, though their state is staged."""
    for other in list(_savers):
        is_other = other is not own() and not other.is_inherited
        if is_other and other.is_pending and same_place(other.storage, storage):
            other.drain()


@atexit.register
def _end_all() -> None:
    """A program that ends without closing its manager keeps its last save, and is told if that failed."""
    for saver in list(_savers):
        saver.end()
