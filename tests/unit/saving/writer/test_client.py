"""The trainer's end of a line: how it learns why its writer is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import SaveFailedError
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.client import start_writer
from holdfast.saving.writer.messages import Commit, NewArena
from holdfast.storage.base import StorageFeatures
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage
from tests.leftovers import own_writer


@pytest.fixture(params=["thread", "process"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStorage() if request.param == "thread" else LocalStorage(tmp_path)


def test_what_ends_a_writer_outside_of_its_answers_is_named(
    storage: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = start_writer(storage)
    arena = Arena.make(4096)

    def give_order() -> None:
        # More than any process can map: the command fails before there is a save to reply for.
        writer.send(NewArena(1 << 60), arena.handle)
        writer.receive(1, lambda: 0, 60.0)

    with pytest.raises(SaveFailedError, match=r"the writer (thread|process) .*before the save was committed") as caught:
        give_order()
    is_thread = isinstance(storage, MemoryStorage)
    assert ("Cannot allocate memory" in str(caught.value)) == is_thread, "a process writes it to stderr"
    told = caplog.text if is_thread else capfd.readouterr().err
    assert "Cannot allocate memory" in told
    assert "Traceback" in told
    writer.shut_down()
    arena.close()


def test_a_writer_that_was_killed_between_two_saves_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, mode="async", rng=False) as manager:
        manager.save(1, wait=True)
        writer = own_writer()
        handle = os.pidfd_open(writer)
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
        os.close(handle)
        manager.save(2, wait=True)
    assert "the writer process was killed by SIGKILL after step 1; a new one is started" in caplog.text


def test_a_writer_that_is_a_thread_is_logged_once_for_each_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reopening(MemoryStorage):
        features = StorageFeatures(reopens_by_url=True)

    model = torch.nn.Linear(2, 2)
    for url in ("memory://logged-once", "memory://logged-once", "memory://another"):
        with holdfast.CheckpointManager(url, {"model": model}, storage=MemoryStorage(url), mode="async") as manager:
            manager.save(1, wait=True)
            manager.save(2, wait=True)
    assert caplog.text.count("MemoryStorage('memory://logged-once') cannot be opened by another process") == 1
    assert caplog.text.count("MemoryStorage('memory://another') cannot be opened by another process") == 1
    caplog.clear()
    for storage in (LocalStorage(tmp_path), Reopening("memory://declared")):
        writer = start_writer(storage)
        assert writer.process_id is not None
        writer.shut_down()
    assert caplog.text == ""


def test_a_living_writer_answers_what_it_cannot_do(storage: Any) -> None:
    writer = start_writer(storage)
    writer.send(Commit(3))
    assert "nothing to commit" in str(writer.receive(3, lambda: 0, 60.0))
    writer.shut_down()


FORK_WHILE_A_WRITER_IS_STARTED = """
import os, subprocess, threading, time
from holdfast.saving.writer import launch

order, started = [], threading.Event()

def start(*arguments, **named):
    started.set()
    time.sleep(0.5)
    order.append("started")

subprocess.Popen = start
thread = threading.Thread(target=launch.start_process, args=(0,))
thread.start()
started.wait()
child = os.fork()
if child == 0:
    os._exit(0)
order.append("forked")
os.waitpid(child, 0)
thread.join()
assert order == ["started", "forked"], order
child = os.fork()  # and one fork after the other works, in a child, too
if child == 0:
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.guarantee("G6")
def test_a_fork_waits_until_a_writer_is_started_whose_pipe_its_child_would_hold() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_WHILE_A_WRITER_IS_STARTED], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
