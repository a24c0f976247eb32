"""Helper threads at a limit of threads, and waits that are interrupted."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import pytest

from holdfast.storage.threads import HeldSignals, HelperThread, Latch, join_all, start_all
from tests.interrupting import interrupt_everywhere, is_inside


class Refused(HelperThread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_at_a_limit_as_many_threads_run_as_there_may_be() -> None:
    done: list[int] = []
    first, third = HelperThread(target=lambda: done.append(1)), HelperThread(target=lambda: done.append(3))
    start_all([first, Refused(), third])
    join_all([first, Refused(), third])
    assert done == [1]


@pytest.mark.guarantee("G2")
def test_an_interrupt_of_the_wait_is_raised_when_the_threads_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Thread.join marks a thread that runs as ended then."""
    go_on = threading.Event()
    done: list[int] = []
    interrupts = 0

    def work() -> None:
        go_on.wait(60)
        done.append(1)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        if not is_inside(frame, "join_all"):
            return
        interrupts += 1
        if interrupts == 3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            go_on.set()
        raise KeyboardInterrupt

    threads = [HelperThread(target=work) for _ in range(2)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        start_all(threads)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            join_all(threads)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        go_on.set()
    assert done == [1, 1], "not before they have ended"
    assert interrupts == 3
    assert not any(thread.is_alive() for thread in threads)
    assert caplog.text.count("waiting for the thread") == 1


def test_a_thread_does_not_wait_for_itself() -> None:
    errors: list[str] = []

    def work() -> None:
        for wait in (thread.wait, lambda: join_all([thread])):
            try:
                wait()
            except RuntimeError as error:
                errors.append(str(error))

    thread = HelperThread(target=work)
    thread.start()
    thread.wait()
    assert errors == ["a thread cannot wait for itself"] * 2


class InterruptedStart(HelperThread):
    """A thread whose start is interrupted when the system has it, and before it does anything."""

    def __init__(self, begins: threading.Event, **named: Any) -> None:
        super().__init__(**named)
        self._started = self  # type: ignore[assignment]
        self._begins = begins

    def set(self) -> None:
        self._begins.wait(60)

    def is_set(self) -> bool:
        return self._begins.is_set()

    def wait(self, timeout: float | None = None) -> None:
        if not self._is_started and not self._begins.is_set() and not self.gave_up:
            self.gave_up = True
            raise KeyboardInterrupt
        super().wait()

    gave_up = False


def test_a_thread_whose_start_was_interrupted_does_nothing_after_the_wait() -> None:
    ran: list[int] = []
    begins = threading.Event()
    thread = InterruptedStart(begins, target=lambda: ran.append(1))
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    join_all([thread])
    begins.set()
    while not thread._has_ended:
        thread._running.acquire(timeout=1)
    assert not ran


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    go_on = threading.Event()
    thread = HelperThread(target=go_on.wait, args=(60,))
    thread.start()
    child = os.fork()
    if child == 0:
        thread.wait()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    thread.wait()


def test_a_latch_is_set_once_for_all_that_wait_and_a_wait_can_end_before() -> None:
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.wait(0.01)
    found: list[bool] = []
    threads = [HelperThread(target=lambda: found.append(latch.wait())) for _ in range(4)]
    start_all(threads)
    latch.set()
    latch.set()
    join_all(threads)
    assert found == [True] * 4
    assert latch.is_set()
    assert latch.wait(0)


@pytest.mark.guarantee("G6")
def test_interrupts_of_a_wait_at_any_moment_leave_a_latch_that_can_be_set_and_waited_for() -> None:
    """An interrupt of Event.wait can leave its lock locked: then the thread of a save stands still in `set`."""
    latches = [Latch()]

    def work() -> None:
        latches[0].wait(0.01)
        latches[0].set()
        latches[0].wait(60)

    moments = 0
    for place in interrupt_everywhere(work):
        latches[0].set()
        assert latches[0].wait(60), place
        latches[0] = Latch()
        moments += 1
    assert moments > 5


def test_signals_are_held_back_until_they_are_delivered_and_handled_as_before_afterwards() -> None:
    seen = list[str]()
    names = {signal.SIGUSR1: "one", signal.SIGUSR2: "two"}
    before = {number: signal.signal(number, lambda number, frame: seen.append(names[number])) for number in names}
    try:
        with HeldSignals() as held:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert (seen, held.count) == ([], 2)
            held.deliver()
            assert seen == ["one", "two"]
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR2, lambda number, frame: seen.append("another"))
        assert seen == ["one", "two", "one"], "what is left comes at the end"
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert seen[3:] == ["one", "another"], "a handler that was set meanwhile stays"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_that_raises_ends_the_block_and_the_next_ones_are_not_lost() -> None:
    seen = list[str]()

    def fail(number: int, frame: object) -> None:
        seen.append("failed")
        raise OSError("by a signal")

    before = signal.signal(signal.SIGUSR1, fail)
    try:
        with HeldSignals() as held:
            signal.raise_signal(signal.SIGUSR1)
            with pytest.raises(OSError, match="by a signal"):
                held.deliver()
        assert signal.getsignal(signal.SIGUSR1) is fail
        with pytest.raises(OSError, match="by a signal"), HeldSignals():
            signal.raise_signal(signal.SIGUSR1)
        assert seen == ["failed", "failed"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_no_signal_is_held_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    found = list[object]()

    def work() -> None:
        with HeldSignals() as held:
            found.append(signal.getsignal(signal.SIGINT))
            held.deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
