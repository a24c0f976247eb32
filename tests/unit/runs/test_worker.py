"""The worker thread, by itself."""

from __future__ import annotations

import threading

import pytest

from holdfast.runs.worker import WorkerThread


def test_a_worker_thread_does_one_thing_after_another_and_ends_after_the_last() -> None:
    done: list[int] = []
    threads: set[int] = set()
    worker = WorkerThread()
    for number in range(50):
        worker.submit(lambda number=number: (done.append(number), threads.add(threading.get_ident())))
    worker.wait()
    assert done == list(range(50))
    assert len(threads) == 1
    worker.stop()
    worker.stop()


def test_a_worker_thread_goes_on_after_work_that_ends_by_an_error(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    worker = WorkerThread()

    def leave() -> None:
        raise SystemExit("a callback left")

    worker.submit(leave)
    worker.submit(lambda: done.append(1))
    worker.wait()
    assert done == [1]
    assert "a callback left" in caplog.text
    worker.stop()


@pytest.mark.guarantee("G6")
def test_work_is_done_after_a_time_in_which_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    worker = WorkerThread()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.submit(lambda: done.append(1))
        worker.wait()
    worker.submit(lambda: done.append(2))
    worker.wait()
    assert done == [2]
    worker.stop()
