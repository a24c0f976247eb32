"""Start threads that work for one call, as far as the system allows it, and wait for them whatever interrupts the wait.

What such a thread works on, a file, a slot, a tensor, is used for something else when the call is over. So none may go
on after the call, however often the wait for it is interrupted. `Thread.join` does not ensure that: in CPython before
3.13, an interrupt of it marks the thread as ended, though it runs.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["HeldSignals", "HelperThread", "Latch", "join_all", "start_all"]

logger = logging.getLogger("holdfast")

_LOOK_SECONDS = 0.1


class HelperThread(threading.Thread):
    """A thread whose end can be waited for again after an interrupt of the wait, or of its start."""

    _is_started = False
    _has_begun = False
    _is_cancelled = False
    _has_ended = False

    def start(self) -> None:
        # Taken by the thread until its end. No threading.Event: an interrupt in one can leave its lock locked.
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._owner = os.getpid()
        super().start()
        self._is_started = True

    def run(self) -> None:
        self._has_begun = True
        try:
            if not self._is_cancelled:
                super().run()
        finally:
            self._has_ended = True
            self._running.release()

    def wait(self, on_look: Callable[[], object] = lambda: None) -> None:
        """Return when the thread has ended. One that was never started, because an interrupt came first or the system
        refused it, does nothing from now on. `on_look` is called about ten times a second, and may raise."""
        if self is threading.current_thread():
            raise RuntimeError("a thread cannot wait for itself")
        if not self._is_started:
            self._is_cancelled = True
            if not self._has_begun:
                return
        # A forked child does not have the thread, and at the end of the interpreter a daemon thread stands still.
        while not self._has_ended and self._owner == os.getpid() and not sys.is_finalizing():
            # With a time limit: an interrupt right after this has returned would lose what the thread has released.
            self._running.acquire(timeout=_LOOK_SECONDS)
            on_look()
        if self._has_ended and self._is_started:
            # It does nothing any more, but is still listed. An interrupt of this harms nothing.
            self.join()


class Latch:
    """An event that is set once. An interrupt of `wait` or `set` never leaves it locked, as it can a threading.Event,
    whose every later `wait` and `set` then stand still."""

    def __init__(self) -> None:
        self._is_set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        # By another thread, or by an earlier call.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return whether it was set within that time."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._is_set:
            # With a time limit: an interrupt may have taken the lock with it.
            left = _LOOK_SECONDS if end is None else min(end - time.monotonic(), _LOOK_SECONDS)
            if left <= 0:
                return self._is_set
            if self._lock.acquire(timeout=left):
                self.set()
        return True


class HeldSignals:
    """Holds back what signals do in the main thread, such as Ctrl-C, while threads work for a call.

    Inside of the block a signal is only noted. `deliver` calls the handlers of those that were noted, and only there
    can they raise: nothing else that comes in between keeps the call from waiting for its threads, however many signals
    there are. In another thread than the main one, where no handler runs, nothing is held back.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[int, FrameType | None]] = deque()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._is_holding = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in range(1, signal.NSIG):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
            # Last: until here, and after an interrupt of this, a signal does what it did before.
            self._is_holding = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.deliver()
        finally:
            self._is_holding = False
            for number, handler in self._handlers.items():
                # A handler may have put another one in its place.
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
        self.deliver()

    @property
    def count(self) -> int:
        """Return how many signals have come that were not delivered."""
        return len(self._noted)

    def deliver(self) -> None:
        """Call the handlers of the signals that have come."""
        while self._noted:
            number, frame = self._noted.popleft()
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._noted.append((number, frame))
        else:
            self._handlers[number](number, frame)


def start_all(threads: Iterable[HelperThread]) -> None:
    """Start the threads, or as many as the system allows: at a limit, or at the end of a process, the caller has to do
    the work alone."""
    with contextlib.suppress(RuntimeError):
        for thread in threads:
            thread.start()


def join_all(threads: Iterable[HelperThread], held: HeldSignals | None = None) -> None:
    """Return when those of the threads that were started have ended. An interrupt that comes meanwhile is raised after
    that: nothing may use what they work on before. `held`: what holds signals back meanwhile."""
    interrupts: list[BaseException] = []
    has_warned = False

    def warn_of(thread: HelperThread) -> None:
        nonlocal has_warned
        count = len(interrupts) - 1 if held is None else held.count
        if count > 0 and not has_warned:
            has_warned = True
            logger.warning(
                "interrupted, and waiting for the thread '%s' to end: what it reads or writes must not be used "
                "before; if the storage does not answer, only SIGKILL ends process %d",
                thread.name,
                os.getpid(),
            )

    for thread in threads:
        if thread is threading.current_thread():
            raise RuntimeError("a thread cannot wait for itself")
        while True:
            try:
                warn_of(thread)
                thread.wait(partial(warn_of, thread))
                break
            except BaseException as error:
                interrupts.append(error)
    if interrupts:
        raise interrupts[-1]
