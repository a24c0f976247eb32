"""Keep the last events of a saver, and call `on_event` with each. Knows no torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from holdfast.runs.events import Event

__all__ = ["EventLog"]

logger = logging.getLogger("holdfast")

_KEPT_EVENTS = 256


class EventLog:
    """The last events, in `recent`. `on_event` is called in the thread of the event; what it raises is logged."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self.recent: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """Keep an event and pass it on."""
        self.recent.append(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %r; the save goes on", event.kind)
