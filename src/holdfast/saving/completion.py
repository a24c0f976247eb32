"""What follows the end of a save: the lineage grows, the log line and the event, the callback of the leader.

Called from the thread in which the save ends. Knows no torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from holdfast.errors import HoldfastError
from holdfast.runs.catalog import Catalog
from holdfast.runs.interrupts import finish
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.outcome import InterruptedSaveError, Saved, settle_interrupted
from holdfast.saving.pending import PendingSave
from holdfast.saving.training_lineage import TrainingLineage

__all__ = ["Completion"]

logger = logging.getLogger("holdfast")


class Completion:
    """`on_commit` can be set: it is called on the leader after each commit."""

    def __init__(self, catalog: Catalog, rank: int, lineage: TrainingLineage, coordinator: Coordinator) -> None:
        self.on_commit: Callable[[], None] = lambda: None
        self._catalog = catalog
        self._rank = rank
        self._lineage = lineage
        self._coordinator = coordinator

    def succeed(self, pending: PendingSave, saved: Saved) -> None:
        """Record a committed save, and let those who wait for it go on. What fails here changes nothing about the
        outcome, so it is only logged."""
        pending.mark_saved(saved)
        try:
            self._record_commit(pending, saved)
        except Exception:
            logger.exception("step %d is committed; an action after the commit failed", pending.step)
        finally:
            pending.succeed(saved)

    def fail(self, pending: PendingSave, error: HoldfastError) -> None:
        """Record a failure, and let those who wait for the save go on. A save that was interrupted after its commit did
        not fail: it is recorded as committed."""
        self._coordinator.forget()
        try:
            if isinstance(error, InterruptedSaveError):
                finish(partial(self._settle, pending))
        finally:
            pending.fail(error)

    def _settle(self, pending: PendingSave) -> None:
        """Let the lineage of this training agree with the storage after an interrupt: a checkpoint that is committed
        and not in it would count as one of another training, which retention never removes."""
        if self._rank != 0:
            return
        for folder in self._attempts_of(pending):
            saved = settle_interrupted(self._catalog, folder)
            if saved is not None and self._lineage.head != saved.digest:
                self.succeed(pending, saved)
            elif saved is not None:
                pending.succeed(saved)

    def _attempts_of(self, pending: PendingSave) -> list[str]:
        """Return the folder in which this process wrote a save. One that was interrupted before its ranks knew the
        folder may have made it all the same."""
        if pending.attempt:
            return [pending.attempt]
        try:
            return self._catalog.attempts.open_here(pending.step, self._coordinator.lease)
        except HoldfastError as error:
            logger.warning("step %d was interrupted, and its folder cannot be looked for: %s", pending.step, error)
            return []

    def _record_commit(self, pending: PendingSave, saved: Saved) -> None:
        self._lineage.append(saved.sequence, saved.segment, saved.digest)
        self._coordinator.note_commit(pending.step, saved)
        # Read it now, while it is the newest, which is never removed.
        with contextlib.suppress(HoldfastError):
            pending.checkpoint = self._catalog.read(saved.folder)
        path = self._catalog.path_of(saved.folder)
        if self._rank == 0:
            logger.info(
                "committed step %d: %.1f MiB in %.2f s to %s",
                pending.step,
                saved.size_bytes / 2**20,
                time.monotonic() - pending.started,
                path,
            )
        pending.emit("committed", size_bytes=saved.size_bytes, path=path)
        if self._rank == 0:
            self.on_commit()
