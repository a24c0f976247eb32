"""Turn events of a manager into numbers for monitoring systems, in a thread of their own.

Events enter; `Scalars`, numbers by name with the step that they belong to, leave. TensorBoard, W&B and MLflow get the
same ones; Prometheus, which counts by itself, takes the events.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from holdfast import Event

logger = logging.getLogger("holdfast")

__all__ = ["Scalars", "ScalarsObserver", "scalars_of"]

_WAITING_EVENTS = 1024
_CLOSE_SECONDS = 10.0
# They are the parts of a save during which the training stands still.
_BLOCKING_PHASES = ("wait", "capture", "agree", "stage")


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers by name, the step that they belong to, and when they were measured, in seconds since the epoch."""

    values: dict[str, float]
    step: int
    time_seconds: float


def scalars_of(event: Event) -> dict[str, float]:
    """Return what a monitoring system can plot of an event; empty where there is no number.

    A committed checkpoint has `holdfast/save_seconds`, `holdfast/save_bytes`, and the seconds of each phase, as
    `holdfast/save_write_seconds`; `holdfast/save_blocked_seconds` is how long `save` kept the training waiting. A
    restore has the same under `holdfast/restore_...`.
    """
    if event.kind == "staged":
        return {"holdfast/save_blocked_seconds": sum(event.phases.get(name, 0.0) for name in _BLOCKING_PHASES)}
    work = {"committed": "save", "restored": "restore"}.get(event.kind)
    if work is None:
        return {}
    found = {f"holdfast/{work}_seconds": event.seconds, f"holdfast/{work}_bytes": float(event.size_bytes)}
    return found | {f"holdfast/{work}_{name}_seconds": seconds for name, seconds in event.phases.items()}


class ScalarsObserver(ABC):
    """Writes the numbers of events to a monitoring system, from a thread that no save waits for.

    Pass it as one of `observers=`. Only the events of rank 0 are written, so every rank may pass one. Each kind of
    event is also counted: `holdfast/failed_count` and the like. A monitoring system that is slow, unreachable or raises
    delays and harms nothing: the first error is logged, and when too many events wait, further ones are dropped with a
    warning. `close`, which also the end of the process calls, writes what is waiting, for ten seconds at most.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Scalars | threading.Event] = queue.Queue(maxsize=_WAITING_EVENTS)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._last_step = 0
        self._warned: set[str] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    @abstractmethod
    def write(self, scalars: Scalars) -> None:
        """Send the numbers to the monitoring system. Called in the observer's own thread."""

    def __call__(self, event: Event) -> None:
        if event.rank != 0:
            return
        with self._lock:
            if self._closed:
                return
            self._counts[event.kind] += 1
            if event.step is not None:
                self._last_step = event.step
            values = scalars_of(event) | {f"holdfast/{event.kind}_count": float(self._counts[event.kind])}
            step = self._last_step if event.step is None else event.step
            self._start()
            try:
                self._queue.put_nowait(Scalars(values, step, time.time()))
            except queue.Full:
                self._warn("%s is too slow: its events are dropped until it has caught up", type(self).__name__)

    def flush(self, timeout: float = _CLOSE_SECONDS) -> bool:
        """Wait until what was observed so far is written; return False if it is not after `timeout` seconds."""
        if self._thread is None:
            return True
        written, deadline = threading.Event(), time.monotonic() + timeout
        try:
            self._queue.put(written, timeout=timeout)
        except queue.Full:
            return False
        return written.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Write what is waiting and ignore later events. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        if not self.flush():
            logger.warning("%s did not write its last events in %d s", type(self).__name__, _CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a monitoring system that does not answer must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name=type(self).__name__, daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self.write(item)
            except Exception as error:
                self._warn("%s could not write an event: %r; no save is affected", type(self).__name__, error)

    def _warn(self, message: str, *arguments: object) -> None:
        """Log a warning the first time."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)
