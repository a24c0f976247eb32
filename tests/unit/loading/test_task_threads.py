"""Tasks in several threads: each is done once, an error ends them all, and nothing waits for ever."""

from __future__ import annotations

import faulthandler
import gc
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from holdfast.loading.copy_ring import Slots
from holdfast.loading.task_threads import in_two_stages, side_by_side
from tests.interrupting import interrupt_main_thread_inside, is_inside

SLOTS = 4
TASKS = 200


class StageError(Exception):
    pass


class Stages:
    """Both stages of some tasks through a few slots, which can fail."""

    def __init__(
        self,
        *,
        fails_fetching: int = -1,
        fails_finishing: int = -1,
        threads: tuple[int, int] = (3, 2),
        slots: int = SLOTS,
    ) -> None:
        self.slots = Slots(slots, 1)
        self.threads = threads
        self.fetched: Counter[int] = Counter()
        self._fails_fetching = fails_fetching
        self._fails_finishing = fails_finishing
        self._lock = threading.Lock()

    def run(self, tasks: int = TASKS) -> list[int]:
        return in_two_stages(self.fetch, self.finish, iter(range(tasks)), self.threads, self.slots.stop)

    def fetch(self, task: int) -> tuple[int, object] | None:
        slot = self.slots.take()
        if slot is None:
            return None
        with self._lock:
            self.fetched[task] += 1
        if task == self._fails_fetching:
            raise StageError
        return task, slot

    def finish(self, one: tuple[int, object]) -> int:
        task, slot = one
        if task == self._fails_finishing:
            raise StageError
        self.slots.give_back(slot)  # type: ignore[arg-type]
        return task


def in_time(work: Callable[[], object]) -> object:
    """Do the work in a thread; a thread that waits for ever fails the test instead of stopping all of them."""
    found: list[object] = []

    def act() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(60)
    if not found:
        # At the end of the tests Python waits for these threads, too.
        faulthandler.dump_traceback_later(30, exit=True)
    assert found, "it waits for ever"
    return found[0]


@pytest.mark.parametrize("threads", [(1, 1), (3, 2), (4, 8), (8, 1)])
@pytest.mark.parametrize("tasks", [0, 1, TASKS])
def test_every_task_goes_through_both_stages_once(threads: tuple[int, int], tasks: int) -> None:
    stages = Stages(threads=threads)
    assert sorted(in_time(lambda: stages.run(tasks))) == list(range(tasks))  # type: ignore[call-overload]
    assert stages.fetched == Counter(range(tasks))


@pytest.mark.parametrize("at", [0, 1, TASKS // 2, TASKS - 1])
@pytest.mark.parametrize("slots", [1, SLOTS])
@pytest.mark.parametrize("threads", [(1, 1), (3, 2), (8, 1)])
def test_an_error_of_either_stage_is_raised_and_ends_all_threads(threads: tuple[int, int], slots: int, at: int) -> None:
    before = set(threading.enumerate())
    for stages in (
        Stages(fails_fetching=at, threads=threads, slots=slots),
        Stages(fails_finishing=at, threads=threads, slots=slots),
    ):
        assert isinstance(in_time(stages.run), StageError)
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("holdfast-read")]
    assert not left


def test_an_error_while_the_tasks_are_made_is_raised() -> None:
    def tasks() -> object:
        yield from range(10)
        raise StageError

    stages = Stages()
    act = lambda: in_two_stages(stages.fetch, stages.finish, tasks(), (3, 2), stages.slots.stop)  # type: ignore[arg-type]  # noqa: E731
    assert isinstance(in_time(act), StageError)
    assert isinstance(in_time(lambda: side_by_side(lambda task: task, tasks(), 3)), StageError)  # type: ignore[arg-type]


@pytest.mark.parametrize("allowed", range(6))
def test_fewer_threads_than_asked_for_are_enough_and_so_are_none(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    start, before = threading.Thread.start, set(threading.enumerate())
    started: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("holdfast-read"):
            started.append(thread)
            if len(started) > allowed:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert sorted(in_time(Stages().run)) == list(range(TASKS))  # type: ignore[call-overload]
    started.clear()
    assert isinstance(in_time(Stages(fails_finishing=5).run), StageError)
    started.clear()
    assert isinstance(in_time(Stages(fails_fetching=5).run), StageError)
    started.clear()
    assert sorted(side_by_side(lambda task: task, iter(range(TASKS)), 3)) == list(range(TASKS))
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("holdfast-read")]


def test_tasks_are_done_side_by_side_once_each() -> None:
    assert sorted(side_by_side(lambda task: task * 2, iter(range(TASKS)), 3)) == [2 * task for task in range(TASKS)]


def test_the_slot_that_was_given_back_first_is_filled_first() -> None:
    slots = Slots(3, 1)
    taken = [slots.take() for _ in range(3)]
    places = [slot.data_ptr() for slot in taken if slot is not None]
    for slot in (taken[1], taken[0], taken[2]):
        assert slot is not None
        slots.give_back(slot)
    again = [slots.take() for _ in range(3)]
    assert [slot.data_ptr() for slot in again if slot is not None] == [places[1], places[0], places[2]]
    slots.stop()
    assert slots.take() is None
    assert slots.take() is None, "for every thread that waits"


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("interrupts", [1, 2, 3])
@pytest.mark.parametrize("stage", ["one", "two"])
def test_after_interrupts_of_the_wait_no_thread_works_on(stage: str, interrupts: int) -> None:
    """A thread that does would write to tensors after restore() has raised."""
    slots, raised, begun = Slots(SLOTS, 1), threading.Event(), threading.Event()
    late: list[int] = []

    def act(task: int) -> int:
        # The one that is waited for first: an interrupt of Thread.join takes it for ended.
        if threading.current_thread().name != "holdfast-read-0":
            begun.wait(60)
        elif not begun.is_set():
            begun.set()
            interrupt_main_thread_inside("found")
            for _ in range(interrupts - 1):
                interrupt_main_thread_inside("join_all")
            if raised.wait(1):
                late.append(task)
        return task

    def two_stages() -> object:
        def finish(one: tuple[int, object]) -> int:
            slots.give_back(one[1])  # type: ignore[arg-type]
            return act(one[0])

        return in_two_stages(lambda task: (task, slots.take()), finish, iter(range(TASKS)), (3, 2), slots.stop)

    with pytest.raises(KeyboardInterrupt):
        two_stages() if stage == "two" else side_by_side(act, iter(range(TASKS)), 3)
    left = [one for one in threading.enumerate() if one.name.startswith("holdfast-read")]
    raised.set()
    assert not left
    assert not late


@pytest.mark.parametrize("stopped", [False, True])
def test_a_second_interrupt_leaves_no_thread_that_waits_for_ever(stopped: bool) -> None:
    slots, interrupted = Slots(SLOTS, 1), threading.Event()
    interrupts = [KeyboardInterrupt]

    def stop() -> None:
        if stopped or not interrupts:
            slots.stop()
        if interrupts:
            raise interrupts.pop()

    def finish(one: tuple[int, object]) -> int:
        if not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        slots.give_back(one[1])  # type: ignore[arg-type]
        return one[0]

    def fetch(task: int) -> tuple[int, object] | None:
        slot = slots.take()
        return None if slot is None else (task, slot)

    with pytest.raises(KeyboardInterrupt):
        in_two_stages(fetch, finish, iter(range(TASKS)), (3, 2), stop)
    for thread in threading.enumerate():
        # One whose start was interrupted may be listed for ever, and never begin.
        if thread.name.startswith("holdfast-read") and thread.ident is not None:
            thread.join(60)
            assert not thread.is_alive()


def test_an_error_keeps_nothing_of_the_tasks_until_a_collection() -> None:
    class Held:
        pass

    held = Held()
    kept = weakref.ref(held)

    def act(task: int, held: Held = held) -> int:
        raise StageError

    gc.disable()
    try:
        with pytest.raises(StageError):
            side_by_side(act, iter(range(3)), 2)
        del act, held
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.guarantee("G7")
def test_no_burst_of_interrupts_leaves_a_thread_behind() -> None:
    """As of a user who holds Ctrl-C: each of them could come where the one before is being dealt with."""
    main = threading.main_thread().ident or 0
    left, raised = list[str](), 0

    def raise_inside(number: int, frame: FrameType | None) -> None:
        if is_inside(frame, "side_by_side"):
            raise KeyboardInterrupt

    def interrupt() -> None:
        for _ in range(40):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.00005)

    before = signal.signal(signal.SIGINT, raise_inside)
    try:
        for _ in range(40):
            burst = threading.Thread(target=interrupt)
            try:
                burst.start()
                side_by_side(lambda task: time.sleep(0.002), iter(range(20)), 3)
            except KeyboardInterrupt:
                raised += 1
            left += [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]
            burst.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised > 0
    assert left == []
