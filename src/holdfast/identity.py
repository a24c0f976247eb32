"""Which process this is, and whether another one lives. Only processes of the same machine can be seen."""

from __future__ import annotations

import os
import socket
import time
from functools import cache
from pathlib import Path

import msgspec

__all__ = ["Identity", "birth_of", "is_alive", "parent_of", "seconds_since_birth", "this_process"]

_PARENT, _BIRTH = 1, 19
_FIRST_LOOK = time.monotonic()


class Identity(msgspec.Struct, frozen=True):
    """A process. `machine` is the same for those that can see each other's numbers; `birth`, in the system's own count,
    tells a process from a later one that got its number."""

    host: str
    machine: str
    process: int
    birth: int | None

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def this_process() -> Identity:
    # Asked anew each time: a forked child is another process.
    return Identity(socket.gethostname(), _machine(), os.getpid(), birth_of(os.getpid()))


def is_alive(other: Identity) -> bool | None:
    """Whether that process lives; None when that cannot be seen from here."""
    if other.machine != _machine() or not other.machine:
        return None
    return birth_of(other.process) == other.birth and other.birth is not None


def birth_of(process: int) -> int | None:
    """When a process began, in the system's own count; None for one that is gone."""
    fields = _stat(process)
    return int(fields[_BIRTH]) if fields else None


def seconds_since_birth() -> float:
    """How long this process has been running; since this was first asked, where the system does not say."""
    birth = _birth_seconds(os.getpid())
    if birth is None:
        return time.monotonic() - _FIRST_LOOK
    return time.clock_gettime(time.CLOCK_BOOTTIME) - birth


@cache
def _birth_seconds(process: int) -> float | None:
    """The same, of this process, whose number changes with a fork; asked at every step of a training."""
    birth = birth_of(process)
    return None if birth is None else birth / os.sysconf("SC_CLK_TCK")


def parent_of(process: int) -> int | None:
    fields = _stat(process)
    return int(fields[_PARENT]) if fields else None


@cache
def _machine() -> str:
    """This boot of this machine, and the space of process numbers in it; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(process: int) -> list[str]:
    """What the system says of a process, from its state on; nothing of one that is gone or only waits to be counted."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields
