"""Calls of one manager: one at a time, and none inside of another."""

from __future__ import annotations

import sys
import threading

import pytest

from holdfast.errors import UsageError
from holdfast.saving.call_guard import CallGuard
from tests.interrupting import interrupt_everywhere


def test_a_call_inside_of_another_is_refused_and_one_after_it_is_not() -> None:
    guard = CallGuard("run", 60)
    guard.take("restore()", sys._getframe())
    with pytest.raises(UsageError, match=r"step 3: save\(\) was called in the middle of restore\(\)"):
        guard.refuse_nested("save()", 3)
    guard.leave()
    guard.refuse_nested("save()")


def test_another_thread_takes_its_turn_when_the_first_has_left() -> None:
    guard, order = CallGuard("run", 60), list[str]()

    def work() -> None:
        guard.refuse_nested("save()")
        guard.leave()  # what it does not have
        guard.take("save()", sys._getframe())
        order.append("second")
        guard.leave()

    guard.take("save()", sys._getframe())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    order.append("first")
    guard.leave()
    thread.join(60)
    assert order == ["first", "second"]
    guard.take("save()", sys._getframe())


def test_a_turn_is_not_waited_for_for_ever() -> None:
    guard, taken, end = CallGuard("run", 0.01), threading.Event(), threading.Event()

    def stay() -> None:
        guard.take("restore()", sys._getframe())
        taken.set()
        end.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert taken.wait(60)
    with pytest.raises(UsageError, match=r"waited 0 s for restore\(\) in another thread"):
        guard.take("save()", sys._getframe())
    end.set()
    thread.join(60)
    guard.take("save()", sys._getframe())


@pytest.mark.guarantee("G6")
def test_an_interrupt_at_any_moment_keeps_no_later_call_from_its_turn() -> None:
    """Also one of the cleanup: the call that has not left its turn has ended."""
    guard = CallGuard("run", 0.01)

    def call() -> None:
        guard.refuse_nested("save()")
        try:
            guard.take("save()", sys._getframe())
        finally:
            guard.leave()

    places = []
    for place in interrupt_everywhere(call):
        places.append(place)
        call()
    assert any("in leave" in place for place in places)
