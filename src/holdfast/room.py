"""A rank's share of its machine: the host memory that is left, or that the limit of its job leaves; the processors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["own_processors", "room_for_staging"]

_GROUPS = Path("/sys/fs/cgroup")
_SHARE = 0.9


def room_for_staging() -> int:
    """This rank's share of the memory that is free; the other ranks of the machine stage at the same time."""
    free = min([_free_on_machine(), *_free_in_groups()])
    return int(_SHARE * max(free, 0)) // _ranks_here()


def own_processors() -> int:
    """How many processors there are for each rank of this machine."""
    return max(len(os.sched_getaffinity(0)) // _ranks_here(), 1)


def _ranks_here() -> int:
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    except ValueError:
        return 1


def _free_on_machine() -> int:
    lines = (line.split() for line in _text(Path("/proc/meminfo")).splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), 1 << 62)


def _free_in_groups() -> Iterator[int]:
    """What is left under each limit that batch systems and containers set: on this process's group and those above."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds:
            continue  # the older kind of groups
        group = _GROUPS / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(_GROUPS):
                yield from _free_in_group(folder)


def _free_in_group(folder: Path) -> Iterator[int]:
    limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # Clean pages of files count as used, and are given up when somebody needs the room.
        clean = (line.split() for line in _text(folder / "memory.stat").splitlines())
        yield int(limit) - int(used) + next((int(line[1]) for line in clean if line[0] == "inactive_file"), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
