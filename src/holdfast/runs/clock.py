"""The time: as text in records, and as something that passes for code that waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["Clock", "seconds_since", "timestamp"]


@dataclass(frozen=True, slots=True)
class Clock:
    """The monotonic time and a way to wait; a test passes its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def timestamp() -> str:
    """Return the present time in UTC, as records state it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def seconds_since(text: str) -> float:
    """Return how long ago a time was that `timestamp` gave; 0 for one that makes no sense or is yet to come."""
    try:
        return max((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0
