"""Keep metrics that were reported before their checkpoint was committed until they are written. For the leader alone.

A step and its metrics enter; a note on the checkpoint leaves, written by the housekeeper's worker thread, or an error
that the manager raises at the next call.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.background import PendingSave
from holdfast.catalog import Catalog, choose
from holdfast.errors import CheckpointNotFoundError, HoldfastError, SaveFailedError
from holdfast.housekeeping import Housekeeper
from holdfast.records.selector import Selector

logger = logging.getLogger("holdfast")

__all__ = ["Reports"]

_PAUSES_SECONDS = (0.05, 0.2, 0.8)


@dataclass(slots=True)
class _Waiting:
    """Metrics of one step that are not written yet, and why not, where writing them failed."""

    metrics: dict[str, Any]
    error: HoldfastError | None = None


class Reports:
    """The metrics that are still to be written, by step."""

    def __init__(self, catalog: Catalog, housekeeper: Housekeeper) -> None:
        self._catalog = catalog
        self._housekeeper = housekeeper
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._pause = threading.Event()

    def add(self, pending: PendingSave, metrics: dict[str, Any]) -> None:
        """Write metrics when a pending save is committed, in the background."""
        with self._lock:
            waiting = self._waiting.setdefault(pending.step, _Waiting({}))
            waiting.metrics.update(metrics)
        self._housekeeper.do_behind(partial(self._write_after, pending))

    def note_commit(self) -> None:
        """Try again what waits for a step that was not committed before."""
        if self._waiting:
            self._housekeeper.do_behind(self._write_committed)

    def settle(self) -> None:
        """Write what could not be written before. What still cannot is given up, and raised, once."""
        for step, waiting in list(self._waiting.items()):
            if waiting.error is not None:
                self._write(step, pauses=())
                if waiting.error is not None:
                    self._forget(step, waiting)
                    raise _not_written(step, waiting, waiting.error)

    def end(self) -> HoldfastError | None:
        """Write for the last time what could not be written, and return the error when it still cannot. Log what was
        never written because its step was not committed."""
        failure: HoldfastError | None = None
        try:
            self.settle()
        except HoldfastError as error:
            failure = error
        for step, waiting in list(self._waiting.items()):
            why = waiting.error or "the step was not committed"
            logger.warning("the metrics %s of step %d were never written: %s", ", ".join(waiting.metrics), step, why)
        return failure

    def write_now(self, step: int, metrics: dict[str, Any]) -> bool:
        """Write metrics of a step that is committed. False, and a warning, when there is no such checkpoint."""
        found = choose(self._catalog.scan(), Selector("step", step=step))
        try:
            if found is not None:
                self._housekeeper.note(found, metrics=metrics)
                return True
        except CheckpointNotFoundError:
            pass  # removed between the scan and the note
        logger.warning("there is no checkpoint of step %d any more to add metrics to", step)
        return False

    def _write_after(self, pending: PendingSave) -> None:
        pending.wait()
        if pending.error is None:
            self._write(pending.step, pauses=_PAUSES_SECONDS)
            self._housekeeper.tidy_behind()
            return
        logger.warning(
            "the save of step %d failed; its reported metrics are added when that step is committed", pending.step
        )

    def _write_committed(self) -> None:
        committed = {found.step for found in self._catalog.scan().checkpoints}
        for step in committed & set(self._waiting):
            self._write(step, pauses=_PAUSES_SECONDS)
            self._housekeeper.tidy_behind()

    def _write(self, step: int, *, pauses: tuple[float, ...]) -> None:
        """Write the metrics of a step, trying again after each pause; note the error when all tries failed."""
        waiting = self._waiting.get(step)
        if waiting is None:
            return
        for pause in (*pauses, None):
            try:
                said = dict(waiting.metrics)
                self.write_now(step, said)
            except HoldfastError as error:
                waiting.error = error
            else:
                waiting.error = None
                self._forget(step, waiting, said)
                return
            if pause is not None:
                self._pause.wait(pause)
        logger.warning("the metrics of step %d could not be written and will be tried again: %s", step, waiting.error)

    def _forget(self, step: int, waiting: _Waiting, written: dict[str, Any] | None = None) -> None:
        """Drop a step, unless more was reported of it meanwhile."""
        with self._lock:
            if (written is None or waiting.metrics == written) and self._waiting.get(step) is waiting:
                del self._waiting[step]


def _not_written(step: int, waiting: _Waiting, error: HoldfastError) -> SaveFailedError:
    values = ", ".join(f"{name}={value}" for name, value in waiting.metrics.items())
    return SaveFailedError(
        f"the metrics {values} that were reported while the save was pending could not be written: {error}",
        step=step,
        advice="report them again",
    )
