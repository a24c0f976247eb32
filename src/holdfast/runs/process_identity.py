"""The identity of this process, and whether another process lives. Only processes of the same machine can be seen, and
of those only the ones that the system shows to this user: one that cannot be seen is unknown, not dead."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

__all__ = ["Identity", "birth_of", "is_alive", "orphaned_writers", "parent_of", "seconds_since_birth", "this_process"]

# What the command line of every writer process has in it.
WRITER_MARK = b"holdfast.saving.writer"
_STATE, _PARENT, _BIRTH = 0, 1, 19
_FIRST_LOOK = time.monotonic()
# The number that Linux gives to the time namespace that every process is in unless it was put into another.
_MACHINE_CLOCK = "time:[4026531834]"


class Identity(msgspec.Struct, frozen=True):
    """A process. `machine` is the same for those that can see each other's numbers; `birth`, the start time in clock
    ticks, distinguishes a process from a later one with the same number."""

    host: str
    machine: str
    process: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    birth: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def this_process() -> Identity:
    """Return the identity of this process."""
    # Not cached: a forked child is another process, and may be in another namespace of process numbers.
    return Identity(socket.gethostname(), _machine(os.getpid()), os.getpid(), birth_of(os.getpid()))


def is_alive(other: Identity) -> bool | None:
    """Return whether that process lives; None when that cannot be seen from here.

    The boot of the machine, the namespace of process numbers and the start time must all be known to be the same
    before a process counts as seen. `/proc` may hide processes of other users (`hidepid`).
    """
    if not other.machine or other.machine != _machine(os.getpid()) or other.process <= 0:
        return None
    fields = _stat(other.process)
    if not fields:
        return _exists(other.process)
    if fields[_STATE] in "ZX":
        return False
    return None if other.birth is None else int(fields[_BIRTH]) == other.birth


def birth_of(process: int) -> int | None:
    """Return the start time of a process in clock ticks; None for one that is gone or cannot be seen."""
    fields = _living(process)
    return int(fields[_BIRTH]) if fields else None


def seconds_since_birth() -> float:
    """Return how long this process has been running; since the import of this module where that is unknown."""
    birth = _birth_seconds(os.getpid())
    if birth is None:
        return time.monotonic() - _FIRST_LOOK
    return time.clock_gettime(time.CLOCK_BOOTTIME) - birth


@cache
def _birth_seconds(process: int) -> float | None:
    """Return the start time of this process in seconds. Cached by its number, which changes with a fork: it is needed
    at every step of a training."""
    birth = birth_of(process)
    return None if birth is None else birth / os.sysconf("SC_CLK_TCK")


def parent_of(process: int) -> int | None:
    """Return the number of the parent; None for a process that is gone or cannot be seen."""
    fields = _living(process)
    return int(fields[_PARENT]) if fields else None


def orphaned_writers(trainer: int) -> Iterator[int]:
    """Yield the writer processes that a process with this number has started and left behind, for any of its runs: by
    their command line, which ends with that number, and by their parent, which is another one since."""
    if not _proc_is_ours(os.getpid()):
        return
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_writer = len(words) > 2 and any(WRITER_MARK in word for word in words)
        if is_writer and words[-2] == str(trainer).encode() and parent_of(int(entry)) not in (None, trainer):
            yield int(entry)


@cache
def _machine(process: int) -> str:
    """Return this boot of this machine and the namespace of process numbers of this process, whose number is given;
    empty where that is unknown."""
    if not _proc_is_ours(process):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}{_clock()}"
    except OSError:
        return ""


def _clock() -> str:
    """Return the namespace of the clock that start times are counted by, where it is not the machine's own."""
    try:
        clock = os.readlink("/proc/self/ns/time")
    except OSError:  # an older kernel, which has but one
        return ""
    return "" if clock == _MACHINE_CLOCK else f"/{clock}"


@cache
def _proc_is_ours(process: int) -> bool:
    """Return whether /proc has the numbers that this process has. That of another namespace, as a container may get it
    from its host, shows other processes under our numbers: no process could be identified by it."""
    try:
        return os.readlink("/proc/self") == str(process)
    except OSError:
        return False


def _exists(process: int) -> bool | None:
    """Return False when the system knows no such process, None when there is one that is not shown."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return None
    return None


def _living(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none for a process that is gone or a zombie."""
    fields = _stat(process) if _proc_is_ours(os.getpid()) else []
    return [] if not fields or fields[_STATE] in "ZX" else fields


def _stat(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
