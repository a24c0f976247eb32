"""Notice signals without acting on them. Names enter; which of them came leaves. Knows nothing of what follows."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

from holdfast.errors import UsageError

logger = logging.getLogger("holdfast")

__all__ = ["SignalWatch"]


class SignalWatch:
    """Notes the signals that come to this process. Handlers that were there before are called, and put back at the
    end; what a signal does by default, such as to end the process, it does not do meanwhile. A watch that is dropped
    without being closed has no further effect: the next signal does what it did before."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts: Counter[str] = Counter()
        self.is_closed = False
        self._handlers: dict[signal.Signals, _Handler] = {}
        wanted = [signal.Signals[name] for name in sorted(names)]
        if wanted and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"signals ({', '.join(one.name for one in wanted)}) can only be watched from the main thread",
                advice="build the manager there, or leave OnSignal out",
            )
        for number in wanted:
            handler = self._handlers[number] = _Handler(self, signal.getsignal(number))
            signal.signal(number, handler)

    @property
    def received(self) -> set[str]:
        """Return the names of the signals that came."""
        return set(self.counts)

    def close(self) -> None:
        """Restore the handlers that were installed before, unless others were installed since."""
        if self.is_closed:
            return
        for number, handler in self._handlers.items():
            previous = _still_wanted(handler.previous)
            if threading.current_thread() is not threading.main_thread():
                logger.warning("the handler of %s stays: it can only be put back in the main thread", number.name)
            elif signal.getsignal(number) == handler:
                signal.signal(number, previous)
        self.is_closed = True


class _Handler:
    """The handler of a signal. It holds its watch by a weak reference, so that a dropped watch can end."""

    def __init__(self, watch: SignalWatch, previous: Any) -> None:
        self.previous = previous
        self._watch = weakref.ref(watch)
        self._owner = os.getpid()

    @property
    def is_wanted(self) -> bool:
        watch = self._watch()
        return watch is not None and not watch.is_closed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watch = self._watch()
        if watch is None or os.getpid() != self._owner:
            self._do_as_before(number)
            return
        # Nothing else here: the handler may run in the middle of anything, also of a save.
        watch.counts[signal.Signals(number).name] += 1
        # Python's own handler of SIGINT is only its way to do what the signal does by default.
        if callable(self.previous) and self.previous is not signal.default_int_handler:
            self.previous(number, frame)

    def _do_as_before(self, number: int) -> None:
        """Let a signal do what it did before. The watch has ended, or this is a forked child, such as a data loader's
        worker, which the signal must end."""
        signal.signal(number, _still_wanted(self.previous))
        os.kill(os.getpid(), number)


def _still_wanted(handler: Any) -> Any:
    """Return a handler, or, for a watch that has ended, the handler that was installed before it."""
    while isinstance(handler, _Handler) and not handler.is_wanted:
        handler = handler.previous
    return handler if handler is not None else signal.SIG_DFL
