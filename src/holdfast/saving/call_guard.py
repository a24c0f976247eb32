"""Keep the calls of one manager apart: one inside of another is refused, and one of another thread waits.

Knows no torch, and nothing of what the calls do.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

from holdfast.errors import ClosedError, UsageError

__all__ = ["CallGuard"]

_FIRST_LOOK_SECONDS = 0.001
_LAST_LOOK_SECONDS = 0.05
_LOOKS = 5


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call that has its turn or waits for it. `thread`: the number of its thread. `frame`: of the function that was
    called."""

    name: str
    thread: int
    frame: FrameType

    @property
    def is_under_way(self) -> bool:
        """Return whether the function has not returned. An interrupt may have kept it from leaving its turn."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class CallGuard:
    """Which call of a manager is under way, of those that read or change its components, and which ones wait.

    It is no lock: an interrupt can leave one locked, and the save that an `except KeyboardInterrupt` makes would wait
    for ever. A caller takes its turn inside of a `try` whose `finally` leaves it.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self._url = url
        self._timeout_seconds = timeout_seconds
        # The first one has its turn. Each thread only appends its own call, and removes that or one that has ended:
        # neither can be interrupted half-way, and no thread can remove the turn of another by mistake.
        self._calls: list[_Call] = []
        self.is_closed = False

    def refuse_nested(self, name: str, step: int | None = None) -> None:
        """Raise in the middle of another call of this thread, such as in the state_dict() of a component: it would find
        components of which some have changed and others have not."""
        for call in self._calls.copy():
            if call.thread == threading.get_ident() and call.is_under_way:
                raise UsageError(
                    f"{name} was called in the middle of {call.name} of the same manager",
                    run=self._url,
                    step=step,
                    advice=f"call it after {call.name} has returned, and not in state_dict() or load_state_dict(), in "
                    "a callback of an earlier event, or in a signal handler",
                )

    def take(self, name: str, frame: FrameType) -> None:
        """Return when no other thread is in a call; a ClosedError when the manager was closed meanwhile. `frame`: of
        the function that takes its turn."""
        mine = _Call(name, threading.get_ident(), frame)
        self._calls.append(mine)
        end, pause_seconds = time.monotonic() + self._timeout_seconds, _FIRST_LOOK_SECONDS
        while (call := self._calls[0]) is not mine:
            # More than once: the frames of a thread that runs meanwhile can be seen in part only.
            if not any(call.is_under_way for _ in range(_LOOKS)):
                self._remove(call)
                continue
            if time.monotonic() > end:
                self._remove(mine)
                raise UsageError(
                    f"{name} waited {self._timeout_seconds:.0f} s for {call.name} in another thread to end",
                    run=self._url,
                    advice="use a manager in one thread at a time",
                )
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LAST_LOOK_SECONDS)
        if self.is_closed:
            self._remove(mine)
            raise ClosedError(f"{name} was called, and the manager was closed before its turn", run=self._url)

    def leave(self) -> None:
        """End the turn of this thread, if it has it or waits for it."""
        for call in self._calls.copy():
            if call.thread == threading.get_ident():
                self._remove(call)

    def close(self) -> None:
        """Refuse every turn from now on."""
        self.is_closed = True

    def _remove(self, call: _Call) -> None:
        # Another thread may have found that this call has ended, too.
        with contextlib.suppress(ValueError):
            self._calls.remove(call)
