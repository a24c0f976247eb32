"""The time: as text in records, and as something that passes for code that waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["Clock", "timestamp"]


@dataclass(frozen=True, slots=True)
class Clock:
    """The monotonic time and a way to wait; a test passes its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def timestamp() -> str:
    """Return the present time in UTC, as records state it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
