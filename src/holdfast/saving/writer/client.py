"""The trainer's end: start a writer, tell it what to write, hear how it went. Knows processes; knows no torch.

A storage that declares that another process can open it by its URL is written by a process; any other, such as one of
the testing kit, by a thread of this process, with the same code behind the same line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

from holdfast.errors import SaveFailedError
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.channel import Line
from holdfast.saving.writer.launch import start_process
from holdfast.saving.writer.messages import Answer, Layout, Leave, NewArena, Order
from holdfast.storage.base import Storage, features_of

logger = logging.getLogger("holdfast")

__all__ = ["Writer", "start_writer"]

_LEAVE_SECONDS = 5.0
_END_SECONDS = 1.0
# Orders are small, and a writer between two saves does nothing but wait for them.
_SEND_SECONDS = 60.0
# The URLs of storages whose writer is a thread, as it was logged.
_warned: set[str] = set()


def start_writer(storage: Storage) -> Writer:
    """A writer for that storage; it takes orders at once, though it may still be starting."""
    ours, theirs = socket.socketpair()
    ours.settimeout(_SEND_SECONDS)
    reopens = features_of(storage).reopens_by_url
    if reopens and sys.executable:
        process = start_process(theirs.fileno())
        theirs.close()
        return Writer(ours, process, None)
    if not reopens:
        _warn_of_thread(storage)
    thread = _WriterThread(Line(theirs, Order), storage)
    thread.start()
    return Writer(ours, None, thread)


def _warn_of_thread(storage: Storage) -> None:
    """Log, once for each storage, what a writer that is no process cannot do."""
    if storage.url in _warned:
        return
    _warned.add(storage.url)
    logger.warning(
        "%r cannot be opened by another process (its features do not declare reopens_by_url): asynchronous saves are "
        "written by a thread of this process, and a save that is not committed is lost if this process ends",
        storage,
    )


class _WriterThread(threading.Thread):
    """A writer in this process. `error` is what ended it, when it did not end by order."""

    def __init__(self, line: Line, storage: Storage) -> None:
        super().__init__(name="holdfast-writer", daemon=True)
        self._line = line
        self._storage = storage
        self.error: BaseException | None = None

    def run(self) -> None:
        from holdfast.saving.writer.server import serve

        try:
            serve(self._line, lambda url: self._storage, lambda: False)
        except BaseException as error:
            # Raised here it would reach nobody; the line's end alone says that something happened, and not what.
            self.error = error
            logger.warning("the writer thread ended by an error: %r", error, exc_info=True)


class Writer:
    """One writer, as long as it lives."""

    def __init__(
        self, ours: socket.socket, process: subprocess.Popen[bytes] | None, thread: _WriterThread | None
    ) -> None:
        self._line = Line(ours, Answer)
        self._process = process
        self._thread = thread
        self._owner = os.getpid()
        self._given_up = False
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        _writers.add(self)

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def may_still_read(self) -> bool:
        """Whether it was given up and could not be ended, so that the arena is not free."""
        return self._given_up and self._thread is not None

    def tell(self, order: Order, handle: int | None = None) -> None:
        try:
            self._line.send(order, handle)
        except TimeoutError as error:
            self.kill()
            raise SaveFailedError("the writer took no orders any more and was ended") from error
        except OSError as error:
            raise self._gone() from error

    def use_arena(self, arena: Arena) -> None:
        """Hand the arena over, once."""
        if self._arena is not arena:
            self.tell(NewArena(arena.size_bytes), arena.handle)
            self._arena = arena

    def use_layout(self, layout: Layout) -> None:
        """Tell the layout, once."""
        if self._layout is None or self._layout.number != layout.number:
            self.tell(layout)
            self._layout = layout

    def hear(self, number: int, progress: Callable[[], int], stall_seconds: float) -> Answer:
        """The next answer about a save. A writer that is gone, or whose `progress` stands still for too long, is an
        error."""
        watch = _Watch(progress, stall_seconds)
        while True:
            answer: Answer | None = self._line.receive(lambda: self.is_gone() or watch.stalled())
            if answer is None:
                break
            if answer.number == number:
                return answer
        if watch.stalled() and not self.is_gone():
            self.kill()
            raise SaveFailedError(
                f"the writer made no progress for {stall_seconds:g} s and was ended",
                advice="look at the disk or the file server; raise timeout= if it is only slow",
            )
        raise self._gone()

    def leave(self) -> None:
        """Let it finish and go; a process that does not is killed."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._line.send(Leave())
        self._line.close()
        self._arena = None
        if self._process is not None:
            try:
                self._process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._thread is not None and not self._given_up:
            self._thread.join(_LEAVE_SECONDS)

    def kill(self) -> None:
        """End it. A thread cannot be ended; it is left alone, with an arena that is not used any more."""
        self._given_up = True
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def is_gone(self) -> bool:
        if self._given_up:
            return True
        if self._process is not None:
            return self._process.poll() is not None
        return self._thread is not None and not self._thread.is_alive()

    def how_it_ended(self) -> str:
        """Return what is known of the end of a writer that is gone, as a sentence without its end."""
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
            error = self._thread.error
            return "the writer thread ended" if error is None else f"the writer thread failed ({error!r})"
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_END_SECONDS)
        if code is not None and code < 0:
            return f"the writer process was killed by {_signal_name(-code)}"
        return "the writer process ended" if code is None else f"the writer process ended with status {code}"

    def _gone(self) -> SaveFailedError:
        return SaveFailedError(
            f"{self.how_it_ended()} before the save was committed",
            advice="every older checkpoint is untouched, and the next save starts a new writer",
        )

    def let_go_in_child(self) -> None:
        """A forked child has no part in this: it must not hold the line open when the trainer is gone."""
        self._line.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals between the first and the last, which have no names
        return f"signal {number}"


class _Watch:
    """Notices that a number has not moved for some time."""

    def __init__(self, progress: Callable[[], int], stall_seconds: float) -> None:
        self._progress = progress
        self._stall_seconds = stall_seconds
        self._last = progress()
        self._since = time.monotonic()

    def stalled(self) -> bool:
        now = self._progress()
        if now != self._last:
            self._last, self._since = now, time.monotonic()
        return time.monotonic() - self._since > self._stall_seconds


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for writer in list(_writers):
        writer.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
