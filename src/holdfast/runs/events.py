"""Report what happened to a run's saves, restores and cleanup, as values for observers. Machines read events, people
read log lines."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

logger = logging.getLogger("holdfast")

__all__ = ["Event", "EventKind", "EventLog", "Observer"]

EventKind = Literal[
    "started",
    "staged",
    "written",
    "committed",
    "failed",
    "restored",
    "fell_back",
    "pruned",
    "retention_failed",
    "writer_restarted",
    "orphan_committed",
    "lease_lost",
    "lease_taken_over",
]

_REMEMBERED_EVENTS = 256


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, on one rank.

    kind: of a save "started", "staged" (the training may change its tensors again; not when all is written before
        `save` returns, as in sync mode or past the staging limit), "written" (this rank's part is durable),
        "committed" (the checkpoint exists), "failed"; of a restore "fell_back" (newer checkpoints are damaged; `error`
        names them) and "restored". The others report what else happened, and have no phases: "pruned" (removed, as
        `keep` says), "retention_failed" (cleanup raised `error`, and is retried after the next save),
        "writer_restarted" (the writer process had ended), "orphan_committed" (a writer whose training had ended
        committed a checkpoint), "lease_lost" (this process is not the run's writer any more, or its claim was
        deleted), "lease_taken_over" (the run's last writer had not released it). All of these but "writer_restarted"
        are the leader's alone.
    step: None where the event is not about one step. seconds: since the save or restore began. phases: how long each
        part of it took so far, by name. A save has "wait" (for the one before it), "capture", "agree", "stage", "copy"
        (from a device), "write" and "commit"; a restore has "wait", "resolve", "fit", "read" (which checks, too) and
        "restore" (what the components themselves take).
    size_bytes: what this rank staged or wrote; of "committed", "restored" and "pruned", the whole checkpoint.
    """

    kind: EventKind
    step: int | None
    rank: int
    seconds: float = 0.0
    size_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    path: str = ""
    error: str = ""


Observer = Callable[[Event], None]


class EventLog:
    """Passes each event on to the observers, and keeps the most recent ones.

    Called from the thread in which something happens. An observer that raises is logged, and harms neither the save nor
    the other observers.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.recent: deque[Event] = deque(maxlen=_REMEMBERED_EVENTS)
        self._observers = tuple(observers)

    def emit(self, event: Event) -> None:
        """Keep an event and call every observer with it."""
        self.recent.append(event)
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("an observer failed for %r; the work goes on", event.kind)
