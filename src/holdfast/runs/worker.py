"""A worker thread. Functions enter; what they raise is logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from holdfast.errors import UsageError
from holdfast.storage.threads import HelperThread, Latch

logger = logging.getLogger("holdfast")

_LOOK_SECONDS = 1.0


class WorkerThread:
    """A thread that runs one function after another. One thread is kept for all saves: starting one takes longer than
    the rest of a save that a device copies."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: HelperThread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run. A RuntimeError where the system has no more threads."""
        if self._thread is None:
            thread = HelperThread(target=self._run, name="holdfast-save", daemon=True)
            # Only one that runs is kept: where the system has no more threads, the next work tries again.
            thread.start()
            self._thread = thread

    @property
    def is_current(self) -> bool:
        """Return whether the caller is in this thread."""
        return self._thread is threading.current_thread()

    def refuse_current(self) -> None:
        """Raise if the caller is in this thread, which cannot wait for itself."""
        if self.is_current:
            raise UsageError(
                "an on_event callback waits for the thread that it runs in; that would deadlock",
                advice="close the manager, or wait for it, in the training",
            )

    def submit(self, work: Callable[[], None]) -> None:
        """Run a function after those that were submitted before."""
        self.start()
        self._work.put(work)

    def wait(self) -> None:
        """Return when everything that was submitted so far is done."""
        self.refuse_current()
        thread = self._thread
        if thread is not None:
            done = Latch()
            self._work.put(done.set)
            while not done.wait(_LOOK_SECONDS) and thread.is_alive():
                pass

    def stop(self) -> None:
        """Have the thread end after everything that was submitted. Does not wait for it."""
        if self._thread is not None:
            self._work.put(None)
            self._thread = None

    def close(self) -> None:
        """End the thread after everything that was submitted. Return when it has ended."""
        thread = self._thread
        self.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.wait()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                # The next save waits for this thread, whatever a callback of this one has raised.
                logger.exception("work in the background ended by an unexpected error")
            # No reference to a finished save may stay in this frame: it would keep the arena alive.
            del work
