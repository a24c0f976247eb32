"""The writer of one saver: start it when it is needed, replace it after it has exited, shut it down. Knows no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.client import Writer, start_writer
from holdfast.saving.writer.messages import Layout
from holdfast.storage.base import Storage, features_of

__all__ = ["WriterSupervisor"]

logger = logging.getLogger("holdfast")


class WriterSupervisor:
    """At most one writer, for one storage. `writer` is None as long as none runs; `start` starts one."""

    def __init__(self, storage: Storage, start: Callable[[Storage], Writer] = start_writer) -> None:
        self.writer: Writer | None = None
        self.start = start
        self._storage = storage

    def discard_dead_writer(self, last_step: int | None) -> bool:
        """Shut a writer down that has exited. Return whether it may still read the arena.

        `last_step` is the step of the last save if that succeeded: the exit was not reported as its failure then.
        """
        writer = self.writer
        if writer is None or not writer.is_gone():
            return False
        may_still_read = writer.may_still_read
        if not may_still_read and last_step is not None:
            logger.warning("%s after step %d; a new one is started", writer.describe_exit(), last_step)
        writer.shut_down()
        self.writer = None
        return may_still_read

    def start_early(self) -> None:
        """Start the writer before a save needs it, if it is a process: a thread starts in no time."""
        if features_of(self._storage).reopens_by_url:
            self._running_writer()

    def ready_writer(self, arena: Arena, layout: Layout) -> Writer:
        """Return a running writer that has the arena and the layout."""
        writer = self._running_writer()
        writer.use_arena(arena)
        writer.use_layout(layout)
        return writer

    def shut_down(self) -> None:
        """Let the writer finish and exit, if there is one."""
        if self.writer is not None:
            self.writer.shut_down()
        # Not before: after an interrupt it is shut down again.
        self.writer = None

    def _running_writer(self) -> Writer:
        if self.writer is None:
            self.writer = self.start(self._storage)
        return self.writer
