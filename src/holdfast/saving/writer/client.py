"""The trainer's side of the writer: start it, send commands, receive replies. Knows processes; knows no torch.

A storage that declares that another process can open it by its URL is written by a process; any other, such as one of
the testing kit, by a thread of this process, with the same code over the same channel.
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
from holdfast.saving.writer.channel import Channel
from holdfast.saving.writer.launch import start_process
from holdfast.saving.writer.messages import Command, Layout, NewArena, Reply, Shutdown
from holdfast.storage.base import Storage, features_of

logger = logging.getLogger("holdfast")

__all__ = ["Writer", "start_writer"]

_SHUTDOWN_SECONDS = 5.0
_EXIT_SECONDS = 1.0
# Commands are small, and a writer between two saves does nothing but wait for them.
_SEND_SECONDS = 60.0
# The URLs of storages whose writer is a thread, as it was logged.
_warned: set[str] = set()


def start_writer(storage: Storage) -> Writer:
    """Return a writer for that storage. Commands can be sent at once, although it may still be starting."""
    ours, theirs = socket.socketpair()
    ours.settimeout(_SEND_SECONDS)
    reopens = features_of(storage).reopens_by_url
    if reopens and sys.executable:
        process = start_process(theirs.fileno())
        theirs.close()
        return Writer(ours, process, None)
    if not reopens:
        _warn_of_thread(storage)
    thread = _WriterThread(Channel(theirs, Command), storage)
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
    """A writer in this process. `error` is the exception that ended it, None after a shutdown."""

    def __init__(self, channel: Channel, storage: Storage) -> None:
        super().__init__(name="holdfast-writer", daemon=True)
        self._channel = channel
        self._storage = storage
        self.error: BaseException | None = None

    def run(self) -> None:
        from holdfast.saving.writer.server import serve

        try:
            serve(self._channel, lambda url: self._storage, lambda: False)
        except BaseException as error:
            # Raised here it would be lost: the trainer only sees that the channel was closed, and not why.
            self.error = error
            logger.warning("the writer thread ended by an error: %r", error, exc_info=True)


class Writer:
    """One writer, as long as it lives."""

    def __init__(
        self, ours: socket.socket, process: subprocess.Popen[bytes] | None, thread: _WriterThread | None
    ) -> None:
        self._channel = Channel(ours, Reply)
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
        """Return whether the writer is a thread that was given up and may still read the arena."""
        return self._given_up and self._thread is not None

    def send(self, command: Command, handle: int | None = None) -> None:
        try:
            self._channel.send(command, handle)
        except TimeoutError as error:
            self.kill()
            raise SaveFailedError("the writer accepted no more commands and was ended") from error
        except OSError as error:
            raise self._gone() from error
        except BaseException:
            # Such as an interrupt: half of the message may have been sent, and what follows would not be understood.
            self.kill()
            raise

    def use_arena(self, arena: Arena) -> None:
        """Send the arena, unless the writer has it already."""
        if self._arena is not arena:
            self.send(NewArena(arena.size_bytes), arena.handle)
            self._arena = arena

    def use_layout(self, layout: Layout) -> None:
        """Send the layout, unless the writer has it already."""
        if self._layout is None or self._layout.number != layout.number:
            self.send(layout)
            self._layout = layout

    def receive(self, number: int, progress: Callable[[], int], stall_seconds: float) -> Reply:
        """Return the next reply about a save. Raises when the writer is gone, or when `progress` does not change for
        `stall_seconds`."""
        watch = _StallTimer(progress, stall_seconds)
        while True:
            reply: Reply | None = self._channel.receive(lambda: self.is_gone() or watch.stalled())
            if reply is None:
                break
            if reply.number == number:
                return reply
        if watch.stalled() and not self.is_gone():
            self.kill()
            raise SaveFailedError(
                f"the writer made no progress for {stall_seconds:g} s and was ended",
                advice="look at the disk or the file server; raise timeout= if it is only slow",
            )
        raise self._gone()

    def shut_down(self) -> None:
        """Let the writer finish and exit; kill a process that does not."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._channel.send(Shutdown())
        self._channel.close()
        self._arena = None
        if self._process is not None:
            try:
                self._process.wait(_SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._thread is not None and not self._given_up:
            self._thread.join(_SHUTDOWN_SECONDS)

    def kill(self) -> None:
        """End the writer. A thread cannot be ended: it keeps an arena that is not used any more."""
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

    def describe_exit(self) -> str:
        """Return how a writer that is gone has ended, as the beginning of a sentence."""
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)
            error = self._thread.error
            return "the writer thread ended" if error is None else f"the writer thread failed ({error!r})"
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_EXIT_SECONDS)
        if code is not None and code < 0:
            return f"the writer process was killed by {_signal_name(-code)}"
        return "the writer process ended" if code is None else f"the writer process ended with status {code}"

    def _gone(self) -> SaveFailedError:
        return SaveFailedError(
            f"{self.describe_exit()} before the save was committed",
            advice="every older checkpoint is untouched, and the next save starts a new writer",
        )

    def close_in_child(self) -> None:
        """Close this end in a forked child: a copy there would keep the channel open after the trainer is gone."""
        self._channel.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals between the first and the last, which have no names
        return f"signal {number}"


class _StallTimer:
    """Detects that a number has not changed for some time."""

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
        writer.close_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
