"""Show how far a long transfer is. Counts of bytes enter; one line on a terminal leaves, and nothing else.

Nothing is drawn in the first two seconds, nor where the stream is no terminal: logs and notebooks stay clean. For the
library and the command line alike, and without rich, which the library does not import.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

__all__ = ["Progress"]

_QUIET_SECONDS = 2.0
_SECONDS_BETWEEN_DRAWINGS = 0.1
_BAR_CHARACTERS = 16
_NOTEBOOKS = ("ipykernel", "google")


class Progress:
    """One bar for `total_bytes`. Several threads may count at once; an error of the terminal is never raised.

    with Progress("saving step 500", total_bytes) as progress:
        progress.add(count)
    """

    def __init__(
        self,
        label: str,
        total_bytes: int,
        *,
        shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._shown = shown and _is_terminal(self._stream)
        self._done_bytes = 0
        self._drawn_characters = 0
        self._lock = threading.Lock()
        self._start = clock()
        self._next_drawing = self._start + _QUIET_SECONDS

    def add(self, count_bytes: int) -> None:
        """Count more bytes as done."""
        with self._lock:
            self._done_bytes += count_bytes
            self._draw_when_due()

    def set(self, done_bytes: int) -> None:
        """Set how many bytes are done in all."""
        with self._lock:
            self._done_bytes = done_bytes
            self._draw_when_due()

    def close(self) -> None:
        """Leave the terminal's line as it was found: empty."""
        with self._lock:
            if self._drawn_characters:
                self._write("\r" + " " * self._drawn_characters + "\r")
                self._drawn_characters = 0
            self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw_when_due(self) -> None:
        if not self._shown:
            return
        now = self._clock()
        if now < self._next_drawing:
            return
        self._next_drawing = now + _SECONDS_BETWEEN_DRAWINGS
        # One short of the width: a full line would make some terminals begin another, which is not cleared.
        line = self._line(now - self._start)[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + line.ljust(self._drawn_characters))
        self._drawn_characters = max(self._drawn_characters, len(line))

    def _line(self, seconds: float) -> str:
        part = min(self._done_bytes / self._total_bytes, 1.0) if self._total_bytes else 1.0
        bar = "#" * int(part * _BAR_CHARACTERS)
        speed = self._done_bytes / seconds if seconds > 0 else 0.0
        left = max(self._total_bytes - self._done_bytes, 0) / speed if speed else 0.0
        return (
            f"{self._label} [{bar:-<{_BAR_CHARACTERS}}] {_gib(self._done_bytes)} of {_gib(self._total_bytes)} GiB, "
            f"{_gib(speed)} GiB/s, {_duration(left)} left"
        )

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # A terminal that is gone is no reason for a save or a load to fail.
            self._shown = False


def _is_terminal(stream: TextIO | None) -> bool:
    # The stream of a notebook may call itself a terminal, for the sake of colours; each drawing would be stored in it.
    if type(stream).__module__.partition(".")[0] in _NOTEBOOKS:
        return False
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
