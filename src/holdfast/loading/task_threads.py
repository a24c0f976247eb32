"""Do tasks in several threads. Tasks enter; what was found in each leaves. Knows nothing of files and tensors.

A system that gives fewer threads than asked for, such as under a limit on processes, makes it slower; where it gives
none the caller does all of the work.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from holdfast.runs.interrupts import finish
from holdfast.storage.threads import HeldSignals, HelperThread, join_all

__all__ = ["in_two_stages", "side_by_side"]

logger = logging.getLogger("holdfast")

_Task = TypeVar("_Task")
_Fetched = TypeVar("_Fetched")
_Found = TypeVar("_Found")


def side_by_side(act: Callable[[_Task], _Found], tasks: Iterator[_Task], threads: int) -> list[_Found]:
    """Do the tasks in several threads, which take them one by one. The first error ends them all.

    Each thread makes the task that it does: one that made them for all would keep the GIL for
    milliseconds at a time, and the others, back from reading or digesting, would wait for it.
    """
    lock = threading.Lock()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True

    def work() -> list[_Found]:
        found: list[_Found] = []
        try:
            while not stopped:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return found
                found.append(act(task))
        except BaseException:
            stop()
            raise
        return found

    running = _Threads[_Found](stop)
    with HeldSignals() as held:
        try:
            running.start([work] * threads)
            if running.count:
                return running.found(held)
        except BaseException:
            running.end(held)
            raise
    return work()


def in_two_stages(
    fetch: Callable[[_Task], _Fetched | None],
    handle: Callable[[_Fetched], _Found],
    tasks: Iterator[_Task],
    threads: tuple[int, int],
    on_stop: Callable[[], object],
) -> list[_Found]:
    """Do the tasks in two stages, each in as many threads of its own as `threads` gives: the first need not wait for
    the second. The first error ends them all.

    What `fetch` waits for, such as memory that `handle` gives back, bounds how far the first stage is ahead. After
    `on_stop` it must wait no more, and return None.
    """
    fetchers, handlers = threads
    stages = _TwoStages(fetch, handle, tasks, threads, on_stop)
    running = _Threads[_Found](stages.stop)
    # One of each first: two threads are enough.
    works = [stages.second, *[stages.first] * fetchers, *[stages.second] * (handlers - 1)]
    try:
        with HeldSignals() as held:
            try:
                running.start(works)
                missing = works[running.count :]
                for work in missing[1:] if running.count == 1 else missing:
                    if work == stages.first:
                        stages.leave_first()
                if running.count > 1:
                    return running.found(held)
            except BaseException:
                running.end(held)
                raise
        if not running.count:
            return [handle(one) for task in tasks if (one := fetch(task)) is not None]
        # The caller is the first stage, in which a signal may raise at any moment.
        return stages.first() + running.found()
    except BaseException:
        running.end()
        raise


class _Threads(Generic[_Found]):
    """Threads of one call, none of which outlives it. `stop`: has them end soon."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self._stop = stop
        self._threads: list[HelperThread] = []
        self._found: list[_Found] = []
        self._errors: list[BaseException] = []

    @property
    def count(self) -> int:
        """Return how many were started."""
        return len(self._threads)

    def start(self, works: Sequence[Callable[[], list[_Found]]]) -> None:
        """Start a thread for each of these, in their order, as far as the system gives threads."""
        for number, work in enumerate(works):
            thread = HelperThread(target=self._run, args=(work,), name=f"holdfast-read-{number}", daemon=True)
            # First: an interrupt in between must not leave a thread that nothing waits for.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._threads.pop()
                logger.debug("reading with %d of %d threads: %s", number, len(works), error)
                return

    def found(self, held: HeldSignals | None = None) -> list[_Found]:
        """Return what all of them found when they have ended, or raise the first error, or what a signal raises that is
        held back meanwhile."""
        for thread in self._threads:
            thread.wait(held.deliver if held is not None else lambda: None)
        if not self._errors:
            return self._found
        error = self._errors[0]
        # What the tasks hold must not be kept by the error, whose traceback refers to this, until a collection.
        self._errors.clear()
        try:
            raise error
        finally:
            del error

    def end(self, held: HeldSignals | None = None) -> None:
        """Return when they have ended, whatever they were doing. An interrupt that comes meanwhile is raised after
        that: they write to memory that the caller of a restore uses again. `held`: what holds signals back."""
        try:
            # Also after another interrupt: those that wait for each other would wait for ever.
            finish(self._stop)
        finally:
            join_all(self._threads, held)

    def _run(self, work: Callable[[], list[_Found]]) -> None:
        try:
            self._found += work()
        except BaseException as error:
            self._errors.append(error)


class _TwoStages(Generic[_Task, _Fetched, _Found]):
    """What the threads of `in_two_stages` do and share."""

    def __init__(
        self,
        fetch: Callable[[_Task], _Fetched | None],
        handle: Callable[[_Fetched], _Found],
        tasks: Iterator[_Task],
        threads: tuple[int, int],
        on_stop: Callable[[], object],
    ) -> None:
        self._fetch = fetch
        self._handle = handle
        self._tasks = tasks
        self._fetching, self._handlers = threads
        self._on_stop = on_stop
        self._lock = threading.Lock()
        # No threading.Event: an interrupt in its `set` can leave its lock locked.
        self._stopped = False
        self._fetched: queue.SimpleQueue[_Fetched | None] = queue.SimpleQueue()

    def first(self) -> list[_Found]:
        """Fetch tasks until there are no more."""
        try:
            while not self._stopped:
                with self._lock:
                    task = next(self._tasks, None)
                one = None if task is None else self._fetch(task)
                if one is None:
                    break
                self._fetched.put(one)
        except BaseException:
            self.stop()
            raise
        finally:
            self.leave_first()
        return []

    def leave_first(self) -> None:
        """Note that a thread of the first stage has ended, or was never started. The last one ends the second stage,
        behind everything that was fetched."""
        with self._lock:
            self._fetching -= 1
            is_last = self._fetching == 0
        if is_last:
            self._end_second()

    def second(self) -> list[_Found]:
        """Handle what was fetched until there is no more."""
        found: list[_Found] = []
        try:
            while not self._stopped and (one := self._fetched.get()) is not None:
                found.append(self._handle(one))
        except BaseException:
            self.stop()
            raise
        return found

    def stop(self) -> None:
        """End all threads, also those that wait for each other. Can be repeated after an interrupt."""
        self._on_stop()
        self._stopped = True
        self._end_second()

    def _end_second(self) -> None:
        for _ in range(self._handlers):
            self._fetched.put(None)
