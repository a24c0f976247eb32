"""The background half of one save: follow the writer, agree with the other ranks, record the outcome. Knows no torch.

Who may remove what: until the leader has announced that a save failed, every rank's part stays, because the leader's
writer may be about to commit, alone, when its trainer is gone. So a leader has its own writer discard the save before
it announces the failure, and a rank that gets no answer from the leader removes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import HoldfastError, SaveFailedError, error_from_record, error_record
from holdfast.ranks.base import Ranks
from holdfast.runs.catalog import Catalog
from holdfast.saving.completion import Completion
from holdfast.saving.outcome import Saved, as_save_error, discard_files, is_agreed_error, outcome_from_storage
from holdfast.saving.pending import PendingSave
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.client import Writer
from holdfast.saving.writer.messages import Commit, Committed, Discard, Discarded, Failed, Reply, Written

__all__ = ["BackgroundSave", "WriterHandoff"]

logger = logging.getLogger("holdfast")

_GIVE_UP_SECONDS = 60.0
_PULSE_SECONDS = 0.5


@dataclass(slots=True)
class WriterHandoff:
    """What this rank's writer has of a save: nothing as long as `writer` is None. `finish_staging` returns when the
    arena holds all of it. `names` are the files that the writer may create, in the order in which to remove them."""

    number: int = 0
    names: tuple[str, ...] = ()
    writer: Writer | None = None
    arena: Arena | None = None
    finish_staging: Callable[[], None] = lambda: None


class BackgroundSave:
    """The background half of one save on one rank.

    failure: why this rank could not stage; the other ranks learn of it here.
    owner: kept alive until the save has ended. The hooks of optimizers and the end of the process need the saver.
    """

    def __init__(
        self,
        pending: PendingSave,
        handoff: WriterHandoff,
        ranks: Ranks,
        catalog: Catalog,
        completion: Completion,
        *,
        failure: BaseException | None,
        timeout_seconds: float,
        owner: object | None,
    ) -> None:
        self._pending = pending
        self._handoff = handoff
        self._ranks = ranks
        self._catalog = catalog
        self._completion = completion
        self._failure = failure
        self._timeout_seconds = timeout_seconds
        self._owner = owner
        self._reported_bytes = -1
        self._next_pulse = 0.0
        self._own_failure: BaseException | None = None
        self._saved: Saved | None = None

    def run(self) -> None:
        """Return when the save has ended and its outcome is recorded in the pending save. It is carried out once, also
        if it was submitted twice, because an interrupt had come when it was."""
        pending = self._pending
        if pending.done():
            return
        pending.mark_worker()
        try:
            saved = self._agree()
            if saved.error is not None:
                raise error_from_record(saved.error)
        except BaseException as error:
            self._completion.fail(pending, as_save_error(error, pending.step))
        else:
            self._completion.succeed(pending, saved)
        finally:
            # An error that is kept refers to this frame, and must not keep the arena.
            self._handoff, self._owner = WriterHandoff(), None

    def _agree(self) -> Saved:
        label = f"commit of step {self._pending.step}"
        try:
            return self._ranks.decide(
                label,
                self._do_part,
                self._commit,
                sends=int,
                returns=Saved,
                if_failed=self._give_up,
                if_silent=self._commit_without_agreement,
            )
        except Exception as error:
            if self._ranks.size == 1:
                raise
            if is_agreed_error(error):
                if self._ranks.rank != 0:
                    self._give_up()
                raise
            return self._outcome_without_agreement(error)

    def _outcome_without_agreement(self, error: Exception) -> Saved:
        """Find out how the save ended when the connection to the other ranks is lost. No failure was announced."""
        if self._own_failure is not None:
            raise self._own_failure
        if self._ranks.rank != 0:
            return outcome_from_storage(error, self._catalog, self._pending.folder, may_come_later=True)
        # The leader's writer sees by itself whether all parts are there.
        return self._saved if self._saved is not None else self._commit([])

    def _do_part(self) -> int:
        try:
            return self._write()
        except BaseException as error:
            self._own_failure = error
            raise

    def _write(self) -> int:
        """Return the size of this rank's part, once it is durable."""
        pending = self._pending
        if self._failure is not None:
            self._stop_writer()
            raise self._failure
        with pending.phase("copy"):
            try:
                self._handoff.finish_staging()
            except BaseException:
                self._stop_writer()
                raise
        if not pending.staged():
            pending.mark_staged()
        with pending.phase("write"):
            reply = self._receive_success()
        if not isinstance(reply, Written):
            raise SaveFailedError(f"the writer answered {type(reply).__name__}")
        pending.emit("written", size_bytes=reply.size_bytes)
        return reply.size_bytes

    def _commit_without_agreement(self) -> Saved:
        """Commit although some ranks do not respond: the writer of a trainer that is gone may have done its part."""
        saved = self._commit([], waits=False)
        if saved.error is None:
            logger.warning(
                "step %d is committed, though some ranks did not respond: all parts were there", self._pending.step
            )
        return saved

    def _commit(self, sizes: list[int], *, waits: bool = True) -> Saved:
        """Have the leader's writer commit, which has all that a commit needs."""
        with self._pending.phase("commit"):
            try:
                self._writer().send(Commit(self._handoff.number, waits))
                reply = self._receive()
                if not isinstance(reply, Committed | Failed):
                    raise SaveFailedError(f"the writer answered {type(reply).__name__} to the command to commit")
            except Exception as error:
                # Whatever it is: an exception here makes the other ranks remove their parts, and the command was sent.
                return self._outcome_after_lost_writer(error)
        if isinstance(reply, Failed) and reply.sealed:
            return Saved(self._pending.folder, "", error=reply.error)
        if isinstance(reply, Failed):
            raise error_from_record(reply.error)
        self._saved = Saved(
            self._pending.folder,
            reply.digest,
            size_bytes=reply.size_bytes,
            sequence=reply.sequence,
            segment=reply.segment,
        )
        return self._saved

    def _outcome_after_lost_writer(self, error: Exception) -> Saved:
        """Return what the storage has of a commit whose writer is gone or does not respond. The other ranks wait for a
        result, so an error is returned, too."""
        writer = self._handoff.writer
        # A thread that was given up cannot be ended, and may still commit.
        unfinished = writer is not None and (writer.may_still_read or not writer.is_gone())
        try:
            return outcome_from_storage(error, self._catalog, self._pending.folder, may_come_later=unfinished)
        except Exception as failure:
            return Saved(self._pending.folder, "", error=error_record(failure))

    def _clear_after_writer_exit(self) -> None:
        """Remove the files of a writer that is gone. The other ranks wait for this one, so errors are only logged."""
        try:
            discard_files(self._handoff.names, self._pending.folder, self._catalog)
        except BaseException:
            logger.warning("step %d: what its writer left was not removed", self._pending.step, exc_info=True)

    def _receive_success(self) -> Reply:
        reply = self._receive()
        if isinstance(reply, Failed):
            raise error_from_record(reply.error)
        return reply

    def _receive(self) -> Reply:
        return self._writer().receive(self._handoff.number, self._progress, self._timeout_seconds)

    def _progress(self) -> int:
        """Return how far the writer is, and send the other ranks a heartbeat, so that slow is not taken for dead."""
        arena = self._handoff.arena
        done = arena.written + arena.staged if arena is not None else 0
        if done != self._reported_bytes and time.monotonic() > self._next_pulse:
            self._reported_bytes, self._next_pulse = done, time.monotonic() + _PULSE_SECONDS
            with contextlib.suppress(Exception):
                self._ranks.heartbeat()
        return done

    def _writer(self) -> Writer:
        if self._handoff.writer is None:
            raise SaveFailedError("there is no writer")
        return self._handoff.writer

    def _stop_writer(self) -> None:
        """Abandon the arena, because the rest will never be staged, and wait for the writer to give up."""
        if self._handoff.writer is not None and self._handoff.arena is not None:
            self._handoff.arena.abandon()
            with contextlib.suppress(HoldfastError):
                self._receive_success()

    def _give_up(self) -> None:
        """Have the writer remove this rank's part."""
        writer = self._handoff.writer
        if writer is None:
            return
        try:
            writer.send(Discard(self._handoff.number))
            while not isinstance(writer.receive(self._handoff.number, lambda: 0, _GIVE_UP_SECONDS), Discarded):
                pass
        except HoldfastError:
            # A thread that was given up may still write.
            if writer.is_gone() and not writer.may_still_read:
                self._clear_after_writer_exit()
