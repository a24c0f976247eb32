"""Keep metrics that were reported before their checkpoint was committed until they are written. For the leader alone.

A step and its metrics enter; a note on the checkpoint leaves, written by the housekeeper's worker thread, or an error
that the manager raises at the next call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.errors import CheckpointNotFoundError, HoldfastError, SaveFailedError
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.lineage import Lineage
from holdfast.runs.selection import choose, choose_own
from holdfast.runs.selector import Selector
from holdfast.saving.outcome import as_save_error
from holdfast.saving.pending import PendingSave

logger = logging.getLogger("holdfast")

__all__ = ["Reports"]

_PAUSES_SECONDS = (0.05, 0.2, 0.8)


@dataclass(slots=True)
class _Waiting:
    """Metrics that are not written yet, the save that they were reported of, and why they are not written, where
    writing them failed."""

    pending: PendingSave
    metrics: dict[str, Any]
    error: HoldfastError | None = None

    @property
    def step(self) -> int:
        return self.pending.step

    @property
    def failed(self) -> bool:
        """Return whether the save failed, so that the metrics belong to no checkpoint so far."""
        return self.pending.done() and self.pending.error is not None

    @property
    def folder(self) -> str:
        """Return the checkpoint of the save; empty as long as it is not committed."""
        return self.pending.folder if self.pending.done() and self.pending.error is None else ""


class Reports:
    """The metrics that are still to be written, by the save that they were reported of: several saves can have one
    step. Metrics of a save that failed go to the next checkpoint of its step.

    own: returns the checkpoints that this training restored or saved, and those that they go back to; None when it did
        neither. Metrics of a step are added to no other checkpoint.
    """

    def __init__(self, catalog: Catalog, housekeeper: Housekeeper, *, own: Callable[[], Lineage | None]) -> None:
        self._own = own
        self._catalog = catalog
        self._housekeeper = housekeeper
        self._waiting: dict[PendingSave, _Waiting] = {}
        self._unseen: Exception | None = None
        self._lock = threading.Lock()
        self._pause = threading.Event()

    def add(self, pending: PendingSave, metrics: dict[str, Any]) -> None:
        """Write metrics when a pending save is committed, in the background."""
        with self._lock:
            waiting = self._waiting.setdefault(pending, _Waiting(pending, self._take_failed(pending.step)))
            waiting.metrics.update(metrics)
            # A cleanup that is submitted already runs first, and must not remove what these metrics may keep.
            self._housekeeper.awaiting_notes.add(pending.folder)
        self._housekeeper.run_in_background(partial(self._write_after, pending))

    def _take_failed(self, step: int) -> dict[str, Any]:
        """Remove and return what was reported of failed saves of a step. What is reported later replaces it."""
        failed = [one for one in self._waiting.values() if one.step == step and one.failed]
        for one in failed:
            self._drop(one)
        return {name: value for one in failed for name, value in one.metrics.items()}

    def note_commit(self) -> None:
        """Try again what waits for a step that was not committed before."""
        if self._waiting:
            self._housekeeper.run_in_background(self._write_committed)

    def settle(self) -> None:
        """Write what could not be written before. What still cannot is given up, and raised, once."""
        self._settle_unseen()
        for waiting in list(self._waiting.values()):
            if waiting.error is not None:
                self._write(waiting, pauses=())
                if waiting.error is not None:
                    self._forget(waiting)
                    raise _not_written(waiting, waiting.error)

    def _settle_unseen(self) -> None:
        """Look again for the checkpoints of metrics that wait, where that failed. Raise, once, when it still does."""
        if self._unseen is None:
            return
        self._write_committed()
        error, self._unseen = self._unseen, None
        if error is not None:
            steps = ", ".join(str(waiting.step) for waiting in self._waiting.values())
            raise SaveFailedError(
                f"the metrics reported of step {steps} are not written, because the run cannot be listed: {error}",
                advice="they are tried again after the next save; report them again if there is none",
            ) from error

    def end(self) -> HoldfastError | None:
        """Write for the last time what could not be written, and return the error when it still cannot. Log what was
        never written because its step was not committed."""
        failure: HoldfastError | None = None
        try:
            self.settle()
        except HoldfastError as error:
            failure = error
        for waiting in list(self._waiting.values()):
            _warn_of_loss(waiting, waiting.error or "the step was not committed")
        return failure

    def drop_failed(self) -> None:
        """Drop the metrics of saves that failed, with a warning: the training goes on from another state, whose
        checkpoints of these steps they do not describe."""
        for waiting in list(self._waiting.values()):
            if waiting.failed:
                self._forget(waiting)
                _warn_of_loss(waiting, "its save failed, and another state was restored since")

    def write_now(self, step: int, metrics: dict[str, Any], folder: str = "") -> bool:
        """Write metrics of a step that is committed, in `folder` where that is known. False, and a warning, when there
        is no such checkpoint on the line of this training."""
        found = self._find(self._catalog.scan(), step, folder)
        try:
            if found is not None:
                self._housekeeper.annotate(found, metrics=metrics)
                return True
        except CheckpointNotFoundError:
            pass  # removed between the scan and the note
        logger.warning(
            "there is no checkpoint of step %d any more on the line of this training to add metrics to", step
        )
        return False

    def _find(self, scan: Scan, step: int, folder: str) -> Checkpoint | None:
        own = self._own()
        if folder:
            return choose(scan, Selector("folder", name=folder))
        return choose(scan, Selector("step", step=step)) if own is None else choose_own(scan, step, own)

    def _write_after(self, pending: PendingSave) -> None:
        pending.wait()
        waiting = self._waiting.get(pending)
        if waiting is None:
            return
        if pending.error is None:
            self._write(waiting, pauses=_PAUSES_SECONDS)
            self._housekeeper.clean_up_in_background()
        else:
            logger.warning(
                "the save of step %d failed; its reported metrics are added when that step is committed", pending.step
            )

    def _write_committed(self) -> None:
        try:
            scan = self._catalog.scan()
        except Exception as error:
            self._unseen = error
            logger.warning("reported metrics wait, because the run cannot be listed: %s", error)
            return
        self._unseen = None
        for waiting in list(self._waiting.values()):
            if waiting.pending.done() and self._find(scan, waiting.step, waiting.folder) is not None:
                self._write(waiting, pauses=_PAUSES_SECONDS)
                self._housekeeper.clean_up_in_background()

    def _write(self, waiting: _Waiting, *, pauses: tuple[float, ...]) -> None:
        """Write metrics, trying again after each pause; note the error when all tries failed."""
        step = waiting.step
        for pause in (*pauses, None):
            try:
                reported = dict(waiting.metrics)
                self.write_now(step, reported, waiting.folder)
            except Exception as error:
                # Whatever it is, such as what a plug-in's storage raises: otherwise it would never reach the caller.
                waiting.error = as_save_error(error, step)
            else:
                waiting.error = None
                self._forget(waiting, reported)
                return
            if pause is not None:
                self._pause.wait(pause)
        logger.warning("the metrics of step %d could not be written and will be tried again: %s", step, waiting.error)

    def _forget(self, waiting: _Waiting, written: dict[str, Any] | None = None) -> None:
        """Drop metrics, unless more were reported of their save meanwhile."""
        with self._lock:
            if written is None or waiting.metrics == written:
                self._drop(waiting)

    def _drop(self, waiting: _Waiting) -> None:
        self._waiting.pop(waiting.pending, None)
        self._housekeeper.awaiting_notes.discard(waiting.pending.folder)


def _warn_of_loss(waiting: _Waiting, why: object) -> None:
    names = ", ".join(waiting.metrics)
    logger.warning("the metrics %s of step %d were never written: %s", names, waiting.step, why)


def _not_written(waiting: _Waiting, error: HoldfastError) -> SaveFailedError:
    values = ", ".join(f"{name}={value}" for name, value in waiting.metrics.items())
    return SaveFailedError(
        f"the metrics {values} that were reported while the save was pending could not be written: {error}",
        step=waiting.step,
        advice="report them again",
    )
