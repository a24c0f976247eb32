"""Ranks as real processes: what each returned, raised, or died of, within the time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.testing import Outcome, run_ranks, values


def add_up(rank: int, first: int) -> tuple[int, int, str, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([first + rank])
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), os.environ["LOCAL_RANK"], torch.get_num_threads()


def fail_on_one(rank: int) -> str:
    if rank == 1:
        raise KeyError("the reason")
    return "fine"


def be_killed_on_one(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def outlive_rank_zero(rank: int) -> str:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("last words", "of rank 0")
        os.kill(os.getpid(), signal.SIGKILL)
    return str(store.get("last words").decode())


def start_method(rank: int) -> tuple[str, str]:
    import torch

    return multiprocessing.get_start_method(), torch.multiprocessing.get_start_method()


def be_killed_with_a_server(rank: int, notes: str) -> None:
    with multiprocessing.Pool(1) as pool:
        Path(notes).write_text(str(pool.apply(os.getppid)))
        os.kill(os.getpid(), signal.SIGKILL)


def hang_beside_a_child(rank: int, notes: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    Path(notes).write_text(str(child.pid))
    signal.pause()


def leave(rank: int) -> None:
    os._exit(7)


def hang_on_one(rank: int) -> int:
    if rank == 1:
        signal.pause()
    return os.getpid()


def show_surroundings(rank: int) -> tuple[str | None, str | None, str]:
    os.write(1, b"to standard output")
    os.write(2, b"to standard error")
    return os.environ.get("SET_LATER"), os.environ.get("UNSET_LATER"), os.getcwd()


def draw(rank: int) -> tuple[float, float]:
    import numpy

    return random.random(), float(numpy.random.random())


def answer_at_length(rank: int) -> bytes:
    return bytes([rank]) * 5_000_000


def answer_with_a_function(rank: int) -> object:
    return lambda: rank


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("two arguments, of which pickle knows one")


def raise_unpicklable(rank: int) -> None:
    raise Unpicklable(1, 2)


@pytest.fixture(autouse=True)
def _no_test_waits_for_the_time_limit() -> Iterator[None]:
    """A rank that has ended is not waited for: that would take all of the 120 s, however busy the machine is."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 110.0, "a rank that had ended was waited for"


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_every_rank_has_its_value_and_a_process_group(start: Any) -> None:
    outcomes = run_ranks(2, add_up, 10, start=start)
    assert values(outcomes) == [(21, 2, "0", 1), (21, 2, "1", 1)]
    assert [outcome.rank for outcome in outcomes] == [0, 1]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_killed_rank_takes_neither_the_others_nor_the_store_with_it(start: Any) -> None:
    killed, living = run_ranks(2, outlive_rank_zero, start=start)
    assert (killed.exit_code, killed.error) == (-signal.SIGKILL, None)
    assert living.unwrap() == "of rank 0"


def test_an_exception_comes_back_with_its_traceback() -> None:
    fine, failed = run_ranks(2, fail_on_one, backend=None)
    assert fine.unwrap() == "fine"
    assert isinstance(failed.error, KeyError)
    assert "in fail_on_one" in failed.traceback_text
    with pytest.raises(RuntimeError, match=r"rank 1: KeyError\('the reason'\)(.|\n)*in fail_on_one"):
        failed.unwrap()
    with pytest.raises(RuntimeError, match="rank 1"):
        values([fine, failed])


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_killed_rank_has_a_negative_exit_code(start: Any) -> None:
    fine, killed = run_ranks(2, be_killed_on_one, backend=None, start=start)
    assert fine.unwrap() == "fine"
    assert killed == Outcome(1, exit_code=-signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9"):
        killed.unwrap()


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_rank_that_leaves_without_an_answer_is_no_success(start: Any) -> None:
    (left,) = run_ranks(1, leave, backend=None, start=start)
    assert left == Outcome(0, exit_code=7)
    with pytest.raises(RuntimeError, match="exit code 7"):
        left.unwrap()


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_rank_that_hangs_is_killed_when_the_time_is_over(start: Any) -> None:
    begin = time.monotonic()
    _, hung = run_ranks(2, hang_on_one, backend=None, timeout_seconds=3.0, start=start)
    assert time.monotonic() - begin >= 3.0
    assert hung.timed_out
    assert hung.exit_code == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="still running after 3 s"):
        hung.unwrap()


def test_ranks_of_a_server_have_the_environment_the_folder_and_the_outputs_of_their_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("UNSET_LATER", "still")
    run_ranks(1, show_surroundings, backend=None, start="forkserver")  # the server is there from now on
    capfd = request.getfixturevalue("capfd")
    monkeypatch.delenv("UNSET_LATER")
    monkeypatch.setenv("SET_LATER", "seen")
    monkeypatch.chdir(tmp_path)
    outcomes = run_ranks(1, show_surroundings, backend=None, start="forkserver")
    assert values(outcomes) == [("seen", None, str(tmp_path))]
    assert capfd.readouterr() == ("to standard output", "to standard error")


def test_ranks_of_a_server_do_not_draw_the_same_random_numbers() -> None:
    drawn = values(run_ranks(2, draw, backend=None, start="forkserver"))
    drawn += values(run_ranks(1, draw, backend=None, start="forkserver"))
    assert len({number for numbers in drawn for number in numbers}) == 6


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_rank_forks_none_of_the_processes_that_it_starts(start: Any) -> None:
    assert values(run_ranks(1, start_method, start=start)) == [("forkserver", "forkserver")]


def test_a_rank_that_is_killed_at_the_time_limit_takes_its_children_with_it(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, hang_beside_a_child, str(tmp_path / "child"), backend=None, timeout_seconds=4.0)
    assert outcome.timed_out
    assert has_ended(tmp_path / "child")


def test_the_server_that_a_rank_starts_its_processes_from_ends_with_it(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, be_killed_with_a_server, str(tmp_path / "server"), backend=None)
    assert outcome.exit_code == -signal.SIGKILL
    assert has_ended(tmp_path / "server")


def has_ended(note: Path) -> bool:
    """Return whether the process that a note names ends within a while."""
    stat = Path(f"/proc/{note.read_text()}/stat")
    end = time.monotonic() + 20.0
    # It may stay listed, as a zombie, where nothing collects the children of others.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_start_method_that_copies_held_locks_is_refused() -> None:
    start: Any = "fork"
    with pytest.raises(UsageError, match="start='fork'"):
        run_ranks(1, leave, start=start)


def test_an_answer_may_be_larger_than_a_pipe_holds() -> None:
    assert values(run_ranks(2, answer_at_length, backend=None)) == [b"\0" * 5_000_000, b"\1" * 5_000_000]


def test_what_cannot_be_sent_back_is_said() -> None:
    (outcome,) = run_ranks(1, answer_with_a_function, backend=None)
    assert "pickle" in str(outcome.error)
    (outcome,) = run_ranks(1, raise_unpicklable, backend=None)
    assert "Unpicklable: two arguments" in str(outcome.error)


def test_the_kit_brings_torch_only_where_it_is_needed() -> None:
    code = (
        "import sys, holdfast.testing as kit; kit.MemoryStorage, kit.PowerLossStorage, kit.run_ranks; "
        "sys.exit(bool({'torch', 'pytest'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
