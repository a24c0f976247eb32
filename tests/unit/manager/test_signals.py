"""Signals are noticed and nothing else: who was asked before is asked still, and everything is put back at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.manager.signals import SignalWatch

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in CAUGHT}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    """Handlers run in the main thread, before `kill` is left there."""
    os.kill(os.getpid(), number)


def in_thread(work: Callable[[], Any]) -> Any:
    """What the work raises in a thread that is not the main one, or None."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return raised[0]


def test_what_came_is_known_by_its_name_and_nothing_else_happens() -> None:
    watch = SignalWatch(["SIGTERM", "SIGHUP"])
    assert watch.received == set()
    send(signal.SIGTERM)
    assert watch.received == {"SIGTERM"}
    send(signal.SIGTERM)
    send(signal.SIGHUP)
    assert watch.received == {"SIGTERM", "SIGHUP"}
    watch.close()


def test_only_what_is_watched_is_touched() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watch = SignalWatch(["SIGTERM"])
    assert signal.getsignal(signal.SIGUSR1) is before
    watch.close()


def test_nothing_to_watch_needs_no_main_thread_and_touches_nothing() -> None:
    before = {number: signal.getsignal(number) for number in CAUGHT}
    assert in_thread(lambda: SignalWatch(()).close()) is None
    assert {number: signal.getsignal(number) for number in CAUGHT} == before


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_a_handler_of_the_system_is_not_called_and_is_put_back(before: Any) -> None:
    signal.signal(signal.SIGTERM, before)
    watch = SignalWatch(["SIGTERM"])
    send(signal.SIGTERM)
    assert watch.received == {"SIGTERM"}
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handler_that_was_there_is_called_each_time_with_what_a_handler_gets_and_put_back() -> None:
    seen: list[tuple[int, bool]] = []

    def before(number: int, frame: Any) -> None:
        seen.append((number, frame is not None))

    signal.signal(signal.SIGTERM, before)
    watch = SignalWatch(["SIGTERM"])
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    watch.close()
    assert seen == [(signal.SIGTERM, True)] * 2
    assert signal.getsignal(signal.SIGTERM) is before
    send(signal.SIGTERM)
    assert len(seen) == 3
    assert watch.received == {"SIGTERM"}


def test_a_handler_that_raises_does_not_keep_the_signal_from_being_known() -> None:
    def before(number: int, frame: Any) -> None:
        raise RuntimeError("mine")

    signal.signal(signal.SIGTERM, before)
    watch = SignalWatch(["SIGTERM"])
    with pytest.raises(RuntimeError, match="mine"):
        send(signal.SIGTERM)
    assert watch.received == {"SIGTERM"}
    watch.close()


def test_pythons_own_handler_of_sigint_is_not_called_but_put_back() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = SignalWatch(["SIGINT"])
    send(signal.SIGINT)  # would be a KeyboardInterrupt, in the middle of anything
    assert watch.received == {"SIGINT"}
    watch.close()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_handler_of_sigint_that_somebody_made_is_called() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    watch = SignalWatch(["SIGINT"])
    send(signal.SIGINT)
    watch.close()
    assert seen == [signal.SIGINT]


def test_two_that_watch_the_same_both_know_it_and_the_first_handler_comes_back() -> None:
    seen: list[int] = []

    def before(number: int, frame: Any) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, before)
    outer = SignalWatch(["SIGTERM"])
    inner = SignalWatch(["SIGTERM"])
    send(signal.SIGTERM)
    assert outer.received == inner.received == {"SIGTERM"}
    assert seen == [signal.SIGTERM], "once, whoever watches"
    inner.close()
    outer.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_somebody_put_in_its_place_stays() -> None:
    watch = SignalWatch(["SIGTERM"])

    def later(number: int, frame: Any) -> None:
        pass

    signal.signal(signal.SIGTERM, later)
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is later


def test_closed_in_the_wrong_order_no_signal_is_lost_on_the_one_that_is_open() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outer = SignalWatch(["SIGTERM"])
    inner = SignalWatch(["SIGTERM"])
    outer.close()
    send(signal.SIGTERM)
    assert inner.received == {"SIGTERM"}
    inner.close()


def test_closed_in_the_wrong_order_the_first_handler_comes_back_all_the_same() -> None:
    """Two managers in one process, closed in the order in which they were made: a SIGTERM must end it afterwards."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outer = SignalWatch(["SIGTERM"])
    inner = SignalWatch(["SIGTERM"])
    outer.close()
    inner.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_to_close_twice_is_to_close_once() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = SignalWatch(["SIGTERM"])
    watch.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_outside_of_the_main_thread_it_is_an_error_that_says_which_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    error = in_thread(lambda: SignalWatch(["SIGTERM", "SIGINT"]))
    assert isinstance(error, UsageError)
    assert "SIGTERM" in error.problem
    assert "SIGINT" in error.problem
    assert "main thread" in error.problem
    assert signal.getsignal(signal.SIGTERM) is before


def test_closed_outside_of_the_main_thread_it_says_so_and_goes_on_watching(caplog: pytest.LogCaptureFixture) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = SignalWatch(["SIGTERM"])
    assert in_thread(watch.close) is None
    assert "SIGTERM" in caplog.text
    send(signal.SIGTERM)
    assert watch.received == {"SIGTERM"}, "the process lives"


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_of_watches_that_are_gone_the_first_handler_is_left(before: Any) -> None:
    signal.signal(signal.SIGUSR1, before)
    watches = [SignalWatch(["SIGUSR1"]) for _ in range(3)]
    del watches[1:]
    send(signal.SIGUSR1)
    assert watches[0].received == {"SIGUSR1"}, "one that is covered by some that are gone is told"
    watches[0].close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_process_whose_watch_is_gone_can_be_ended() -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            SignalWatch(["SIGTERM"])
            send(signal.SIGTERM)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_a_forked_child_is_ended_by_what_ends_a_process() -> None:
    """`Process.terminate` and `Pool.terminate` send SIGTERM, and the latter waits for its workers without end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = SignalWatch(["SIGTERM"])
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"1")
            for _ in range(2):  # it is sent twice: the second comes when the first was not heeded
                signal.pause()
        finally:
            os._exit(0)
    assert os.read(told, 1) == b"1"
    for _ in range(1000):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            break
        time.sleep(0.01)
    os.close(told)
    os.close(tell)
    watch.close()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
