"""Work that must not be left half done is done to its end, and the interrupt is raised afterwards."""

from __future__ import annotations

import pytest

from holdfast.runs.interrupts import finish


class Work:
    """Three steps, of which the calls with these numbers are interrupted or fail."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.done: list[int] = []

    def __call__(self) -> None:
        self.done = []
        for step in range(3):
            if step == 1 and self.errors:
                raise self.errors.pop(0)
            self.done.append(step)


def test_work_without_interrupts_is_done_once() -> None:
    work = Work()
    finish(work)
    assert work.done == [0, 1, 2]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_raised_after_the_work(kind: type[BaseException]) -> None:
    work = Work(kind(), kind())
    with pytest.raises(kind):
        finish(work)
    assert work.done == [0, 1, 2]


def test_an_error_of_the_work_is_raised_at_once() -> None:
    work = Work(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        finish(work)
    assert work.done == [0]


def test_a_user_who_goes_on_interrupting_gets_out() -> None:
    work = Work(*(KeyboardInterrupt() for _ in range(100)))
    with pytest.raises(KeyboardInterrupt):
        finish(work)
    assert work.done == [0]
