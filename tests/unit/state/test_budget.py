"""A rank's share of its machine: who else is on it, by whatever launcher, and what groups of processes may take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.saving.coordinator import neighbours, rooms_for_staging
from holdfast.saving.messages import StateSummary
from holdfast.state.budget import free_for_staging, processors_here

GIB = 1 << 30
_ASK = "from holdfast.state.budget import own_processors, ranks_here; print({})"
# Every variable that a launcher may have set for the process that runs the tests.
_LAUNCHERS = ("LOCAL_WORLD_SIZE", "SLURM_", "OMPI_", "MPI_", "MV2_", "PMI_", "PALS_", "JSM_")


def ask(variables: dict[str, str], question: str = "ranks_here()") -> int:
    """Return the answer of a new process in this environment: how many ranks it believes to share its machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-c", _ASK.format(question)],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(done.stdout)


SRUN = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "6"}, 6),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"PMI_LOCAL_SIZE": "5"}, 5),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "9"}, 4),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x99999999999)", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8"}, 1),
        ({"LOCAL_WORLD_SIZE": "x", "MPI_LOCALNRANKS": "-3", "PMI_LOCAL_SIZE": ""}, 1),
    ],
)
def test_the_ranks_of_a_machine_are_counted_as_their_launcher_says(variables: dict[str, str], expected: int) -> None:
    assert ask(variables) == expected


@pytest.mark.parametrize(
    ("allowed", "ranks", "own"), [(1, "", 1), (16, "", 16), (16, "2", 8), (16, "x", 16), (16, "-3", 16), (4, "8", 1)]
)
def test_the_ranks_of_a_machine_share_its_processors(allowed: int, ranks: str, own: int) -> None:
    assert ask({"LOCAL_WORLD_SIZE": ranks}, f"own_processors({allowed}, {allowed})") == own


@pytest.mark.parametrize(
    ("allowed", "present", "ranks", "own"),
    [(8, 64, "8", 8), (7, 64, "8", 7), (16, 64, "8", 2), (64, 64, "8", 8), (64, 4, "2", 2)],
)
def test_processors_that_a_launcher_has_shared_out_are_not_shared_again(
    allowed: int, present: int, ranks: str, own: int
) -> None:
    assert ask({"LOCAL_WORLD_SIZE": ranks}, f"own_processors({allowed}, {present})") == own


@pytest.mark.parametrize(
    ("groups", "files", "processors"),
    [
        ("", {}, None),
        ("0::/box\n", {"box/cpuset.cpus.effective": "0\n"}, 1),
        ("0::/docker/17\n", {"cpuset.cpus.effective": "1\n"}, 1),
        ("0::/box\n", {"box/cpuset.cpus.effective": "0-4095,5000\n"}, None),
        ("0::/box\n", {"box/cpuset.cpus.effective": "\n"}, None),
        ("4:cpuset,cpu:/box\n", {"cpuset/box/cpuset.cpus": "1-1\n"}, 1),
        ("4:memory:/box\n", {"cpuset/box/cpuset.cpus": "1-1\n"}, None),
        ("0::/box\n", {"box/cpu.max": "100000 100000\n"}, 1),
        ("0::/docker/17\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/box\n", {"box/cpu.max": "max 100000\n"}, None),
        ("0::/box\n", {"box/cpu.max": "99999999 1000\n"}, None),
        ("0::/box\n", {"box/cpu.max": "100000 0\n"}, None),
        ("4:cpu,cpuacct:/box\n", {"cpu/box/cpu.cfs_quota_us": "70000", "cpu/box/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/box\n", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_processors_of_a_container_are_those_of_its_group(
    tmp_path: Path, groups: str, files: dict[str, str], processors: int | None
) -> None:
    """Ranks that share them are not bound to them: each has a part of them."""
    machine(tmp_path, GIB, groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert processors_here(tmp_path) == (processors or os.cpu_count())


def test_without_a_number_the_processors_are_those_that_this_process_may_use() -> None:
    assert ask({}, "own_processors()") == len(os.sched_getaffinity(0))


def machine(root: Path, free_bytes: int, groups: str) -> Path:
    """A machine as its files under `proc` say."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {free_bytes // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(root: Path, path: str, **files: object) -> None:
    """A group of processes, by the files of its folder; `_` stands for a dot."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{value}\n")


def test_without_limits_it_is_a_share_of_what_is_free(tmp_path: Path) -> None:
    assert free_for_staging(machine(tmp_path, 10 * GIB, "")) == 9 * GIB


@pytest.mark.parametrize("own", ["/job/step/task", "/job/step", "/job"])
def test_the_tightest_limit_of_nested_groups_counts(own: str, tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, f"0::{own}\n")
    group(root, "job", memory_max=20 * GIB, memory_current=15 * GIB)
    group(root, "job/step", memory_max="max", memory_current=GIB)
    group(root, "job/step/task", memory_max=50 * GIB, memory_current=GIB)
    assert free_for_staging(root) == int(0.9 * 5 * GIB)


def test_a_limit_at_which_a_group_is_slowed_down_counts_too(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, "0::/job\n")
    group(root, "job", memory_max=20 * GIB, memory_high=10 * GIB, memory_current=6 * GIB)
    assert free_for_staging(root) == int(0.9 * 4 * GIB)


def test_clean_pages_of_files_count_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, "0::/job\n")
    group(root, "job", memory_max=10 * GIB, memory_current=9 * GIB, memory_stat=f"anon 1\ninactive_file {3 * GIB}")
    assert free_for_staging(root) == int(0.9 * 4 * GIB)


V1 = "9:name=systemd:/\n4:{kinds}:{path}\n3:cpuset:/other\n0::/\n"


@pytest.mark.parametrize("kinds", ["memory", "hugetlb,memory"])
@pytest.mark.parametrize("own", ["/slurm/uid_0/job_1", "/slurm/uid_0/job_1/step_0/task_3"])
def test_limits_of_the_older_kind_of_groups_count(own: str, kinds: str, tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, V1.format(kinds=kinds, path=own))
    group(root, "memory", memory_limit_in_bytes=(1 << 63) - 4096, memory_usage_in_bytes=50 * GIB)
    group(
        root,
        "memory/slurm/uid_0/job_1",
        memory_limit_in_bytes=8 * GIB,
        memory_usage_in_bytes=7 * GIB,
        memory_stat=f"inactive_file 5\ntotal_inactive_file {GIB}",
    )
    group(root, "memory/slurm/uid_0/job_1/step_0/task_3", memory_limit_in_bytes=(1 << 63) - 4096)
    group(root, "cpuset/other", memory_limit_in_bytes=1, memory_usage_in_bytes=0)
    assert free_for_staging(root) == int(0.9 * 2 * GIB)


def test_in_a_container_that_shows_the_hosts_path_the_mount_itself_is_its_group(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, V1.format(kinds="memory", path="/docker/0123456789abcdef"))
    group(root, "memory", memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=GIB)
    assert free_for_staging(root) == int(0.9 * 3 * GIB)


def test_both_kinds_of_groups_at_once_are_looked_at(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, V1.format(kinds="memory", path="/a").replace("0::/\n", "0::/b\n"))
    group(root, "memory/a", memory_limit_in_bytes=9 * GIB, memory_usage_in_bytes=0)
    group(root, "unified/b", memory_max=7 * GIB, memory_current=0)
    assert free_for_staging(root) == int(0.9 * 7 * GIB)


def test_more_that_is_used_than_may_be_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, "0::/job\n")
    group(root, "job", memory_max=GIB, memory_current=2 * GIB)
    assert free_for_staging(root) == 0


def summary(machine: str, room: int | None = 12 * GIB, **more: int) -> StateSummary:
    return StateSummary("structure", (), (), 0, room, machine=machine, **more)


def test_ranks_that_share_a_machine_share_its_memory_whatever_their_launcher_says() -> None:
    summaries = [
        summary("a"),
        summary("b"),
        summary("a"),
        summary("a", ranks_here=6),
        summary("c", held_bytes=5),
        summary("b", None),
    ]
    assert neighbours(summaries) == (3, 2, 3, 3, 1, 2)
    assert rooms_for_staging(summaries, [12 * GIB] * 6) == [4 * GIB, 12 * GIB, 4 * GIB, 2 * GIB, 12 * GIB + 5, None]


def test_ranks_that_hold_their_memory_already_leave_what_is_free_to_the_others() -> None:
    """One rank has got ready for its first save, the other has not: both have room for what they need."""
    ready, other = summary("a", 15 * GIB, held_bytes=11 * GIB), summary("a", 15 * GIB)
    assert rooms_for_staging([ready, other], [10 * GIB, 10 * GIB])[1] == 15 * GIB
    assert rooms_for_staging([ready, other, other], [10 * GIB] * 3)[1] == 5 * GIB, "both need the rest"
    apart = summary("b", 15 * GIB)
    assert rooms_for_staging([ready, other, apart], [10 * GIB] * 3)[1:] == [15 * GIB, 15 * GIB]


def test_ranks_of_another_training_on_the_machine_keep_their_share() -> None:
    ready, other = (summary("a", 16 * GIB, held_bytes=held, ranks_here=4) for held in (11 * GIB, 0))
    assert rooms_for_staging([ready, other], [10 * GIB, 10 * GIB])[1] == 8 * GIB


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_limit_on_the_address_space_of_each_process_counts(ranks: int) -> None:
    lines = (
        "import resource; from holdfast.state.budget import free_for_staging",
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()",
        "resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)",
        "print(free_for_staging())",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "LOCAL_WORLD_SIZE": str(ranks)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert 80 << 20 < int(done.stdout) // ranks <= 90 << 20
