"""The writer as a process: it has one end of a line and its trainer's number, and imports no torch.

It runs in a session of its own at a low priority. Signals that end a training do not end it: it leaves when its trainer
says so, or, when the trainer is gone, as soon as what was staged is safe.
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
from holdfast.saving.writer.channel import Line
from holdfast.saving.writer.messages import Order
from holdfast.saving.writer.server import serve
from holdfast.storage.registry import open_storage

_NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = (2 << 13) | 7


def main() -> None:
    """Called with the handle of the line and the number of the trainer's process."""
    handle, trainer = int(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(name)s writer: %(message)s")
    _stand_back()
    # There is no heap worth collecting, and a pause would be one of the disk.
    gc.disable()
    line = Line(socket.socket(fileno=handle), Order)
    identity = {"trainer": trainer, "trainer_birth": birth_of(trainer)}
    serve(line, open_storage, _watch(trainer), identity)


def _stand_back() -> None:
    """Let the training have the processor and the disk first."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LOWEST)


def _watch(trainer: int) -> Callable[[], bool]:
    """Whether the trainer is gone. Its end of the line may stay open in a data loader's worker that outlives it."""
    try:
        handle = os.pidfd_open(trainer)
    except OSError:
        return lambda: os.getppid() != trainer
    if os.getppid() != trainer:  # it ended before we looked, and the number may be somebody else's by now
        return lambda: True
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return lambda: bool(poll.poll(0))
