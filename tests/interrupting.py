"""Interrupt a call wherever a signal could. Unlike real signals, these come at the same moments each time."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import holdfast

__all__ = ["interrupt_everywhere", "interrupt_main_thread_inside", "is_inside"]

# `with` statements pass through contextlib; what else the standard library does inside is not ours to mend.
_PLACES = (str(Path(holdfast.__file__).parent), contextlib.__file__)


def interrupt_everywhere(work: Callable[[], object], *, only_if: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """Do the work again and again, each time with a KeyboardInterrupt at the next of the moments at which the
    interpreter runs signal handlers in it: when a function begins, and when a builtin has returned. Yield where it was
    after each, until the work ends without one. `only_if`: moments at which this returns False do not
    count."""
    number = 1
    while True:
        place = _interrupted_at(number, work, only_if)
        if not place:
            return
        yield place
        number += 1


def _interrupted_at(number: int, work: Callable[[], object], only_if: Callable[[], bool]) -> str:
    """Return where the work was interrupted; empty when it ended before."""
    count, place = 0, ""

    def strike(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count, place
        # No generator that goes on: an error of the profiler ends it without its `finally`, a signal does not.
        is_moment = event == "c_return" or (event == "call" and frame.f_lasti < 0)
        if not is_moment or not frame.f_code.co_filename.startswith(_PLACES) or not only_if():
            return
        count += 1
        if count == number:
            place = f"moment {number}: {event} in {frame.f_code.co_name} at {frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt

    sys.setprofile(strike)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return place


def is_inside(frame: FrameType | None, name: str) -> bool:
    """Return whether a function of this name has led to a frame."""
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def interrupt_main_thread_inside(name: str) -> None:
    """Interrupt the main thread, as by Ctrl-C, once it is inside of a function of this name."""
    main = threading.main_thread().ident or 0
    while not is_inside(sys._current_frames().get(main), name):
        time.sleep(0.001)
    # From there it goes on to a wait, in which it stays.
    time.sleep(0.05)
    signal.pthread_kill(main, signal.SIGINT)
