"""Run the writer as a process. Gets one end of a channel and the process id of its trainer; imports no torch.

The process has its own session and a low priority. Signals that end a training do not end it: it exits when its trainer
sends `Shutdown`, or, when the trainer is gone, as soon as what was staged is durable.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import select
import signal
import socket
import sys
from collections.abc import Callable

from holdfast.runs.process_identity import birth_of
from holdfast.saving.writer.channel import Channel
from holdfast.saving.writer.messages import Command
from holdfast.saving.writer.server import serve
from holdfast.storage.registry import open_storage

_NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = (2 << 13) | 7


def main() -> None:
    """Serve a trainer; `sys.argv` has the handle of the channel and the trainer's process id."""
    handle, trainer = int(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(name)s writer: %(message)s")
    _lower_priority()
    # There is no heap worth collecting, and a pause would be one of the disk.
    gc.disable()
    channel = Channel(socket.socket(fileno=handle), Command)
    identity = {"trainer": trainer, "trainer_birth": birth_of(trainer)}
    serve(channel, open_storage, _exit_check(trainer), identity)


def _lower_priority() -> None:
    """Leave the processors and the disk to the training first."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LOWEST)


def _exit_check(trainer: int) -> Callable[[], bool]:
    """Return a function that tells whether the trainer is gone. Its end of the channel may stay open in a data loader's
    worker that outlives it."""
    try:
        handle = os.pidfd_open(trainer)
    except OSError:
        return lambda: os.getppid() != trainer
    if os.getppid() != trainer:  # it ended before, and another process may have its id by now
        return lambda: True
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return lambda: bool(poll.poll(0))
