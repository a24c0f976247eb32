"""A rank's share of its machine: the host memory that is left, or that the limit of its job leaves; the processors.

Launchers tell how many ranks share a machine, each in its own way, or not at all; the ranks that save
together count themselves (`note_ranks_here`). The larger number holds: a group may be a part of what runs here.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

__all__ = ["free_for_staging", "machine_name", "note_ranks_here", "own_processors", "processors_here", "ranks_here"]

_SHARE = 0.9
_ROOT = Path("/")
# torchrun sets it exactly, whatever started torchrun. The others: Open MPI, Intel MPI and MPICH, MVAPICH, Cray, jsrun.
_EXACT = "LOCAL_WORLD_SIZE"
_LAUNCHERS = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
_SLURM_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_PROCESSORS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)
_MOST_RANKS = 10**12

_counted = 1


def free_for_staging(root: Path = _ROOT) -> int:
    """Return the memory that all ranks of this machine together may take. `root`: where `proc` and `sys` are."""
    # Each rank has addresses of its own, and takes its share of this.
    free = min([_free_on_machine(root), _free_addresses(root) * ranks_here(), *_free_in_groups(root)])
    return int(_SHARE * max(free, 0))


def own_processors(allowed: int | None = None, present: int | None = None) -> int:
    """Return how many processors there are for each rank of this machine. `allowed`: how many this process may use.
    `present`: how many all ranks of the machine together may use."""
    allowed = allowed if allowed is not None else len(os.sched_getaffinity(0))
    present = present if present is not None else processors_here()
    if allowed * ranks_here() <= present:
        # A launcher that binds ranks to processors, as srun and numactl do, has shared them out already.
        return allowed
    # A limit on the processors' time, as of a container, is less than what a process may run on.
    return max(min(allowed, present) // ranks_here(), 1)


@cache
def processors_here(root: Path = _ROOT) -> int:
    """Return how many processors this machine has, or the container or the job that this process is in. `root`: where
    `proc` and `sys` are."""
    return min([os.cpu_count() or 1, *_processors_in_groups(root)])


def ranks_here() -> int:
    """Return how many ranks share this machine, as far as is known."""
    return max(_counted, _launched())


def note_ranks_here(count: int) -> None:
    """Take note of how many of the ranks that save together are on this machine."""
    global _counted
    _counted = max(_counted, count)


@cache
def machine_name() -> str:
    """Return what is the same for all processes of this machine, containers included, and for no others."""
    return _text(_ROOT / "proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def _launched() -> int:
    exact = _count(os.environ.get(_EXACT, ""))
    return exact or max([1, _launched_by_slurm(), *(_count(os.environ.get(name, "")) for name in _LAUNCHERS)])


def _launched_by_slurm() -> int:
    """Return how many tasks of this job step are on this node; 0 outside of a step, such as in a batch script."""
    if "SLURM_STEP_ID" not in os.environ and "SLURM_STEPID" not in os.environ:
        return 0
    tasks = _tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _count(os.environ.get("SLURM_NODEID", ""))
    if node < len(tasks):
        return tasks[node]
    return max([_count(os.environ.get("SLURM_NTASKS_PER_NODE", "")), *tasks])


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers of a text such as "4(x2),3", a number for each node; nothing for any other text."""
    found = [_SLURM_COUNT.fullmatch(part.strip()) for part in text.split(",")]
    runs = [(int(match[1]), int(match[2] or 1)) for match in found if match is not None]
    if len(runs) < len(found) or sum(times for _, times in runs) > 1 << 20:
        return []
    return [tasks for tasks, times in runs for _ in range(times)]


def _count(text: str) -> int:
    stripped = text.strip()
    return min(int(stripped), _MOST_RANKS) if stripped.isascii() and stripped.isdigit() and len(stripped) < 20 else 0


def _free_on_machine(root: Path) -> int:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), 1 << 62)


def _free_addresses(root: Path) -> int:
    """Return what a limit on the address space of this process leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _text(root / "proc/self/statm").split()
    return 1 << 62 if limit == resource.RLIM_INFINITY or not used else limit - int(used[0]) * resource.getpagesize()


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield what each limit leaves that a batch system or a container sets: on this process's group and those above."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            for mount in (groups, groups / "unified"):
                yield from _free_up_to(mount, path, _LIMITS_V2)
        elif "memory" in kinds.split(","):
            yield from _free_up_to(groups / "memory", path, _LIMITS_V1)


def _processors_in_groups(root: Path) -> Iterator[int]:
    """Yield how many processors each group has that this process is in, or of how many it may take the time."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        # In a container the path may be the host's, and only the mount itself be there.
        places = (path.strip("/"), ".")
        sets: Sequence[str] = ()
        quotas: Sequence[str] = ()
        if not kinds:
            sets = ("{}/cpuset.cpus.effective", "unified/{}/cpuset.cpus.effective")
            quotas = ("{}/cpu.max", "unified/{}/cpu.max")
        if "cpuset" in kinds.split(","):
            sets = ("cpuset/{}/cpuset.effective_cpus", "cpuset/{}/cpuset.cpus")
        if "cpu" in kinds.split(","):
            quotas = ("cpu/{}/cpu.cfs_%s_us", "cpu,cpuacct/{}/cpu.cfs_%s_us")
        yield from filter(None, (_processors_in(_text(groups / name.format(at))) for name in sets for at in places))
        yield from filter(None, (_quota_of(groups / name.format(at)) for name in quotas for at in places))


def _quota_of(path: Path) -> int:
    """Return how many processors' time a limit allows, rounded up; 0 where there is none. `path`: of a file with the
    limit and its period, or of two files, whose names differ in a part that is `%s` here."""
    if "%s" in path.name:
        texts = [_text(path.with_name(path.name % part)).strip() for part in ("quota", "period")]
    else:
        texts = _text(path).split()
    if len(texts) != 2 or not all(text.isascii() and text.isdigit() and int(text) for text in texts):
        return 0
    return -(-int(texts[0]) // int(texts[1]))


def _processors_in(text: str) -> int:
    """Return how many processors a text such as "0-7,16" names; parts of any other form count for none."""
    found = [_PROCESSORS.fullmatch(part) for part in text.strip().split(",")]
    return sum(int(match[2] or match[1]) - int(match[1]) + 1 for match in found if match is not None)


# The files of a group that state a limit and how much is used, and what of that is clean pages of files.
_LIMITS_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_LIMITS_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def _free_up_to(mount: Path, path: str, files: tuple[tuple[str, ...], str, str]) -> Iterator[int]:
    """Yield what each group from a process's own up to the mount leaves. In a container the path may be the host's, and
    only the mount itself be there: it is the container's own group then."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(mount):
            yield from _free_in_group(folder, *files)


def _free_in_group(folder: Path, limits: tuple[str, ...], usage: str, clean: str) -> Iterator[int]:
    used = _text(folder / usage).strip()
    stated = [_text(folder / name).strip() for name in limits]
    for limit in stated:
        if limit.isdigit() and used.isdigit():
            # Clean pages of files count as used, and are given up when memory is needed.
            lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
            yield int(limit) - int(used) + next((int(line[1]) for line in lines if line[:1] == [clean]), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
