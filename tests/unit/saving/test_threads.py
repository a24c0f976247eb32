"""Helper threads at a limit of threads, and joins that are interrupted."""

from __future__ import annotations

import threading

import pytest

from holdfast.saving.threads import join_all, start_all


class Refused(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


class Interrupted(threading.Thread):
    """A thread whose first joins are interrupted while it goes on."""

    interrupts = 3

    def join(self, timeout: float | None = None) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        go_on.set()
        super().join(timeout)


go_on = threading.Event()


def test_at_a_limit_as_many_threads_run_as_there_may_be() -> None:
    done: list[int] = []
    first = threading.Thread(target=lambda: done.append(1))
    start_all([first, Refused(), threading.Thread(target=lambda: done.append(3))])
    join_all([first, Refused()])
    assert done == [1]


def test_an_interrupt_of_the_wait_is_raised_when_the_threads_have_ended() -> None:
    go_on.clear()
    threads = [Interrupted(target=go_on.wait, args=(60,), daemon=True), threading.Thread(target=go_on.wait, args=(60,))]
    start_all(threads)
    with pytest.raises(KeyboardInterrupt):
        join_all(threads)
    assert not any(thread.is_alive() for thread in threads)
