"""What a process and everything it started use: memory and processor time, read from /proc. Knows nothing of torch."""

from __future__ import annotations

import ctypes
import gc
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

# A writer may leave its trainer's tree in order to survive it; what it inherits in its environment still tells.
_MARK = "HOLDFAST_BENCHMARK"
_TICKS = os.sysconf("SC_CLK_TCK")


def marked_environment() -> tuple[str, dict[str, str]]:
    """A mark, and the environment that lets a process and all it starts be found by it."""
    mark = uuid.uuid4().hex
    return mark, {**os.environ, _MARK: mark}


def family(pid: int, mark: str = "") -> list[int]:
    """The process and all that it started, also what has left its tree but carries the mark."""
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    if mark:
        needle = f"{_MARK}={mark}".encode()
        found |= {one for one in parents if needle in _environment(one)}
    return sorted(found)


def memory_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of all together: memory that they share is counted once."""
    return sum(_from_rollup(pid, b"Pss:") for pid in pids)


def shared_memory_bytes() -> int:
    """Return the shared memory of the whole machine, such as the buffers that a trainer shares with its writer. The sum
    over processes would count a page more than once that one of them maps between two looks."""
    lines = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == b"Shmem:")


def cpu_seconds(pids: Iterable[int]) -> float:
    return sum(_cpu_ticks(pid) for pid in pids) / _TICKS


def give_back_memory() -> None:
    """Return what is free to the system, so that the next contender's memory shows as growth and is not warm."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _parent(entry: Path) -> int:
    fields = _read(entry / "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else -1


def _cpu_ticks(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def _from_rollup(pid: int, field: bytes) -> int:
    for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _environment(pid: int) -> bytes:
    return _read(Path(f"/proc/{pid}/environ"))


def _read(path: Path) -> bytes:
    """What a process that has just ended says is nothing."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
