"""One save as its caller sees it: under way, staged, ended; its phases, its events and its outcome. Knows no torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType

from holdfast.errors import HoldfastError, UsageError
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.events import Event, EventKind
from holdfast.saving.outcome import Saved
from holdfast.storage.threads import Latch

__all__ = ["PendingSave"]


class PendingSave:
    """A save from its start to its end, in whatever thread. `on_event` is called with each of its events."""

    def __init__(self, step: int, rank: int, on_event: Callable[[Event], None]) -> None:
        self.step = step
        self.folder = ""
        # The folder in which this process writes before the call returns; empty where the writer process does.
        self.attempt = ""
        self.size_bytes = 0
        self.written_bytes: Callable[[], int] = lambda: 0
        self.error: HoldfastError | None = None
        self.reported = False
        # Whether an interrupt of the call has ended it: a failure for that reason is known to the caller.
        self.interrupted = False
        self.starts_writer = False
        self.checkpoint: Checkpoint | None = None
        self.phases: dict[str, float] = {}
        self.started = time.monotonic()
        self.seconds = 0.0
        self._rank = rank
        self._owner = os.getpid()
        self._on_event = on_event
        self._saved: Saved | None = None
        self._worker: int | None = None
        self._is_queued = False
        self._staged = Latch()
        self._done = Latch()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a phase of the save."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - begin

    def emit(self, kind: EventKind, *, size_bytes: int = 0, path: str = "", error: str = "") -> None:
        seconds = time.monotonic() - self.started
        phases = MappingProxyType(dict(self.phases))
        self._on_event(Event(kind, self.step, self._rank, seconds, size_bytes, phases, path, error))

    @property
    def skipped(self) -> bool:
        return self._saved is not None and self._saved.skipped

    def staged(self) -> bool:
        return self._staged.is_set()

    def done(self) -> bool:
        return self._done.is_set()

    def mark_staged(self) -> None:
        self._staged.set()
        self.emit("staged", size_bytes=self.size_bytes)

    def mark_worker(self) -> None:
        """Note that this thread carries the save out, so that it cannot wait for it."""
        self._worker, self._is_queued = threading.get_ident(), False

    def mark_queued(self) -> None:
        """Note that this thread, in a callback of another save, will carry the save out once the callback returns."""
        self._worker, self._is_queued = threading.get_ident(), True

    def mark_saved(self, saved: Saved) -> None:
        """Set the outcome, which is certain now. A callback of an event may ask for it before `succeed`."""
        self._saved = saved

    def succeed(self, saved: Saved) -> None:
        self._saved = saved
        self._end()

    def fail(self, error: HoldfastError) -> None:
        if self._done.is_set():
            return
        self.error = error
        self._end()
        self.emit("failed", error=str(error))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return whether the save has ended within that time."""
        if self._owner != os.getpid() and not self._done.is_set():
            raise UsageError("a forked child cannot wait for a save of its parent", step=self.step)
        if self._worker != threading.get_ident() or self._done.is_set():
            return self._done.wait(timeout_seconds)
        if self._saved is None and self._is_queued:
            raise UsageError(
                "an on_event callback waits for a save that begins when the callback has returned; that would deadlock",
                step=self.step,
                advice="make one save in a callback, and wait for it in the training",
            )
        if self._saved is None:
            raise UsageError(
                "an on_event callback called wait() on the save that reports this event; that would deadlock",
                step=self.step,
                advice="wait in the training, or in the callback of its 'committed' event",
            )
        return True

    def result(self) -> Saved:
        """Return the outcome, or raise the failure, which counts as reported then."""
        self.wait()
        if self.error is not None:
            self.reported = True
            raise self.error
        if self._saved is None:
            raise HoldfastError("the save has no outcome")
        return self._saved

    def _end(self) -> None:
        self.seconds = time.monotonic() - self.started
        # Nothing may keep the arena when the saver releases it, not even a handle of an old save.
        self.written_bytes = lambda: self.size_bytes
        self._staged.set()
        self._done.set()
