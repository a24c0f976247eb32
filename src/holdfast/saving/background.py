"""One save behind the training: follow the writer, agree with the other ranks, keep the outcome. Knows no torch.

Who may remove what: until the leader says that a save failed, every rank's part stays, because the leader's writer may
be about to commit, alone, when its trainer is gone. So a leader tells its own writer to give up before it tells the
other ranks, and a rank that hears nothing from the leader removes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast.errors import (
    HoldfastError,
    RankError,
    SaveFailedError,
    SaveUncertainError,
    UsageError,
    error_from_record,
    error_record,
)
from holdfast.ranks.base import Ranks
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.events import Event, EventKind
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.client import Writer
from holdfast.saving.writer.messages import Commit, Committed, Discard, Discarded, Failed, Reply, Written

__all__ = ["BackgroundSave", "PendingSave", "Saved", "as_save_error", "is_agreed_error", "outcome_from_storage"]

logger = logging.getLogger("holdfast")

_GIVE_UP_SECONDS = 60.0
_PULSE_SECONDS = 0.5


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """Where the checkpoint is. `skipped` when the step was committed already and nothing was written. `error` when the
    commit itself failed: it may have been done or not, so no rank may remove anything."""

    folder: str
    digest: str
    skipped: bool = False
    size_bytes: int = 0
    sequence: int = 0
    segment: str = ""
    error: dict[str, Any] | None = None


class PendingSave:
    """A save from its start to its end, whatever thread it is in."""

    def __init__(self, step: int, rank: int, watcher: Callable[[Event], None]) -> None:
        self.step = step
        self.folder = ""
        self.size_bytes = 0
        self.written_bytes: Callable[[], int] = lambda: 0
        self.error: HoldfastError | None = None
        self.reported = False
        self.starts_writer = False
        self.checkpoint: Checkpoint | None = None
        self.phases: dict[str, float] = {}
        self.started = time.monotonic()
        self.seconds = 0.0
        self._rank = rank
        self._owner = os.getpid()
        self._watcher = watcher
        self._saved: Saved | None = None
        self._worker: int | None = None
        self._staged = threading.Event()
        self._done = threading.Event()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - begin

    def tell(self, kind: EventKind, *, size_bytes: int = 0, path: str = "", error: str = "") -> None:
        seconds = time.monotonic() - self.started
        phases = MappingProxyType(dict(self.phases))
        self._watcher(Event(kind, self.step, self._rank, seconds, size_bytes, phases, path, error))

    @property
    def skipped(self) -> bool:
        return self._saved is not None and self._saved.skipped

    def staged(self) -> bool:
        return self._staged.is_set()

    def done(self) -> bool:
        return self._done.is_set()

    def mark_staged(self) -> None:
        self._staged.set()
        self.tell("staged", size_bytes=self.size_bytes)

    def mark_worker(self) -> None:
        """This thread carries it out, so it cannot wait for it."""
        self._worker = threading.get_ident()

    def mark_saved(self, saved: Saved) -> None:
        """The outcome is certain. What is told of it may ask for it, before anybody else hears."""
        self._saved = saved

    def succeed(self, saved: Saved) -> None:
        self._saved = saved
        self._end()

    def fail(self, error: HoldfastError) -> None:
        if self._done.is_set():
            return
        self.error = error
        self._end()
        self.tell("failed", error=str(error))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether it came to its end within that time."""
        if self._owner != os.getpid() and not self._done.is_set():
            raise UsageError("a forked child cannot wait for a save of its parent", step=self.step)
        if self._worker != threading.get_ident() or self._done.is_set():
            return self._done.wait(timeout_seconds)
        if self._saved is None:
            raise UsageError(
                "what is called with an event waits for the save that it is told of",
                step=self.step,
                advice="wait for it in the training, or when it is told to be committed",
            )
        return True

    def result(self) -> Saved:
        """The outcome, or the failure, which counts as heard then."""
        self.wait()
        if self.error is not None:
            self.reported = True
            raise self.error
        if self._saved is None:
            raise HoldfastError("the save has no outcome")
        return self._saved

    def _end(self) -> None:
        self.seconds = time.monotonic() - self.started
        # Nothing may keep the arena when the saver gives it back, not even somebody's handle of an old save.
        self.written_bytes = lambda: self.size_bytes
        self._staged.set()
        self._done.set()


def as_save_error(error: BaseException, step: int) -> HoldfastError:
    """Any failure of a save as the error that the caller gets."""
    if isinstance(error, HoldfastError):
        if type(error) is HoldfastError:  # what some rank's own code raised, passed on by its name
            return SaveFailedError(**{**error.fields, "step": step})
        return error.at(step=step)
    return SaveFailedError(f"{type(error).__name__}: {error}", step=step)


def is_agreed_error(error: BaseException) -> bool:
    """Whether an error is what the ranks agreed on, and not that the leader, or the way to it, was lost."""
    silent = isinstance(error, RankError) and tuple(getattr(error, "ranks", ())) == (0,)
    return isinstance(error, HoldfastError) and not silent


def outcome_from_storage(error: Exception, look: Callable[[], Saved | None], *, may_come_later: bool) -> Saved:
    """Return what the storage has of a save that was cut off before its outcome was known; raise if it has nothing.

    `look` returns the committed checkpoint, None where there is none, and raises where that cannot be seen.
    `may_come_later`: another process may still be about to commit it.
    """
    try:
        found = look()
    except BaseException as trouble:
        raise SaveUncertainError(
            f"{_one_line(error)}; whether the save is committed cannot be seen either: {_one_line(trouble)}",
            advice="look with `holdfast ls` once the storage works again; nothing of the checkpoint was removed",
        ) from error
    if found is not None:
        logger.warning("%s is committed, though its save was cut off: %s", found.folder, _one_line(error))
        return found
    if not may_come_later:
        raise error
    later = "the save is not committed so far, and may still be: look with `holdfast ls`"
    if isinstance(error, RankError):
        raise RankError(**{**error.fields, "advice": f"{error.advice}; {later}"}) from error
    raise SaveUncertainError(f"the save was cut off: {_one_line(error)}", advice=later) from error


def _one_line(error: BaseException) -> str:
    return str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class WriterHandoff:
    """What this rank's writer has of a save: nothing as long as there is no writer. `finish_staging` returns when the
    arena holds all of it. `names` are the files that it may write, the last one first."""

    number: int = 0
    names: tuple[str, ...] = ()
    writer: Writer | None = None
    arena: Arena | None = None
    finish_staging: Callable[[], None] = lambda: None


class BackgroundSave:
    """The background half of one save on one rank.

    `failure` is why this rank could not stage; the others hear it here. `on_end` gets the outcome, None for a failure.
    `look` returns what is committed already, None if nothing is, and raises where that cannot be seen. `clear` removes
    what a writer that is gone has written.
    """

    def __init__(
        self,
        pending: PendingSave,
        handed: WriterHandoff,
        ranks: Ranks,
        *,
        failure: BaseException | None,
        timeout_seconds: float,
        on_end: Callable[[Saved | None], None],
        look: Callable[[], Saved | None],
        clear: Callable[[], None],
    ) -> None:
        self._pending = pending
        self._handed = handed
        self._ranks = ranks
        self._failure = failure
        self._timeout_seconds = timeout_seconds
        self._on_end = on_end
        self._look = look
        self._clear = clear
        self._told = -1
        self._next_pulse = 0.0
        self._own_failure: BaseException | None = None
        self._saved: Saved | None = None

    def run(self) -> None:
        """Return when the save came to its end, which the pending save then says."""
        pending = self._pending
        pending.mark_worker()
        try:
            saved = self._agree()
            if saved.error is not None:
                raise error_from_record(saved.error)
        except BaseException as error:
            self._conclude(None)
            pending.fail(as_save_error(error, pending.step))
        else:
            pending.mark_saved(saved)
            self._conclude(saved)
            pending.succeed(saved)
        finally:
            # An error that somebody keeps refers to this frame, and must not keep the arena.
            self._handed = WriterHandoff()

    def _conclude(self, saved: Saved | None) -> None:
        """What follows on a save changes nothing about its outcome, and somebody waits for that."""
        try:
            self._on_end(saved)
        except BaseException:
            outcome = "failed" if saved is None else "is committed"
            logger.exception("step %d %s; what follows on that went wrong", self._pending.step, outcome)

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
                if_silent=self._commit_without_word,
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
        """Find out how the save ended when the way to the other ranks is gone. Nobody was told that it failed."""
        if self._own_failure is not None:
            raise self._own_failure
        if self._ranks.rank != 0:
            return outcome_from_storage(error, self._look, may_come_later=True)
        # The leader's writer sees by itself whether all parts are there.
        return self._saved if self._saved is not None else self._commit([])

    def _do_part(self) -> int:
        try:
            return self._write()
        except BaseException as error:
            self._own_failure = error
            raise

    def _write(self) -> int:
        """This rank's part: its size, once it is durable."""
        pending = self._pending
        if self._failure is not None:
            self._stop_writer()
            raise self._failure
        with pending.phase("copy"):
            try:
                self._handed.finish_staging()
            except BaseException:
                self._stop_writer()
                raise
        if not pending.staged():
            pending.mark_staged()
        with pending.phase("write"):
            answer = self._hear()
        if not isinstance(answer, Written):
            raise SaveFailedError(f"the writer answered {type(answer).__name__}")
        pending.tell("written", size_bytes=answer.size_bytes)
        return answer.size_bytes

    def _commit_without_word(self) -> Saved:
        """Some ranks are not heard of. A trainer that is gone leaves a writer behind, which may have done its part."""
        saved = self._commit([], waits=False)
        if saved.error is None:
            logger.warning(
                "step %d is committed, though some ranks were not heard of: all parts were there", self._pending.step
            )
        return saved

    def _commit(self, sizes: list[int], *, waits: bool = True) -> Saved:
        """The leader's part: its writer has all that a commit needs."""
        with self._pending.phase("commit"):
            try:
                self._writer().send(Commit(self._handed.number, waits))
                answer = self._listen()
                if not isinstance(answer, Committed | Failed):
                    raise SaveFailedError(f"the writer answered {type(answer).__name__} to the order to commit")
            except Exception as error:
                # Whatever it is: what is raised here has the other ranks remove their parts, and the order was given.
                return self._outcome_after_cut(error)
        if isinstance(answer, Failed) and answer.sealed:
            return Saved(self._pending.folder, "", error=answer.error)
        if isinstance(answer, Failed):
            raise error_from_record(answer.error)
        self._saved = Saved(
            self._pending.folder,
            answer.digest,
            size_bytes=answer.size_bytes,
            sequence=answer.sequence,
            segment=answer.segment,
        )
        return self._saved

    def _outcome_after_cut(self, error: Exception) -> Saved:
        """Return what the storage has of a commit whose writer is gone, or cannot be heard. The other ranks wait for an
        answer, so an error is one, too."""
        writer = self._handed.writer
        # A thread that was given up cannot be ended, and may still commit.
        unfinished = writer is not None and (writer.may_still_read or not writer.is_gone())
        try:
            return outcome_from_storage(error, self._look, may_come_later=unfinished)
        except Exception as failure:
            return Saved(self._pending.folder, "", error=error_record(failure))

    def _clear_after_writer_exit(self) -> None:
        """Remove what a writer that is gone has left. The other ranks wait for an answer, so errors are only logged."""
        try:
            self._clear()
        except BaseException:
            logger.warning("step %d: what its writer left was not removed", self._pending.step, exc_info=True)

    def _hear(self) -> Reply:
        answer = self._listen()
        if isinstance(answer, Failed):
            raise error_from_record(answer.error)
        return answer

    def _listen(self) -> Reply:
        return self._writer().receive(self._handed.number, self._progress, self._timeout_seconds)

    def _progress(self) -> int:
        """How far the writer is. The other ranks hear of it now and then, so that they do not take slow for dead."""
        arena = self._handed.arena
        done = arena.written + arena.staged if arena is not None else 0
        if done != self._told and time.monotonic() > self._next_pulse:
            self._told, self._next_pulse = done, time.monotonic() + _PULSE_SECONDS
            with contextlib.suppress(Exception):
                self._ranks.pulse()
        return done

    def _writer(self) -> Writer:
        if self._handed.writer is None:
            raise SaveFailedError("there is no writer")
        return self._handed.writer

    def _stop_writer(self) -> None:
        """The rest will never be staged: let the writer know, and hear it end."""
        if self._handed.writer is not None and self._handed.arena is not None:
            self._handed.arena.abandon()
            with contextlib.suppress(HoldfastError):
                self._hear()

    def _give_up(self) -> None:
        """Have this rank's part removed."""
        writer = self._handed.writer
        if writer is None:
            return
        try:
            writer.send(Discard(self._handed.number))
            while not isinstance(writer.receive(self._handed.number, lambda: 0, _GIVE_UP_SECONDS), Discarded):
                pass
        except HoldfastError:
            # A thread that was given up may still write.
            if writer.is_gone() and not writer.may_still_read:
                self._clear_after_writer_exit()
