"""Notice signals without acting on them. Names enter; which of them came leaves. Knows nothing of what follows."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from holdfast.errors import UsageError

logger = logging.getLogger("holdfast")

__all__ = ["SignalWatch"]


class SignalWatch:
    """Notes the signals that come to this process. Handlers that were there before are called, and put back at the
    end; what a signal does by default, such as to end the process, it does not do meanwhile."""

    def __init__(self, names: Iterable[str]) -> None:
        self.received: set[str] = set()
        self._previous: dict[signal.Signals, Any] = {}
        self._closed = False
        self._owner = os.getpid()
        wanted = [signal.Signals[name] for name in sorted(names)]
        if wanted and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"signals ({', '.join(one.name for one in wanted)}) can only be watched from the main thread",
                advice="build the manager there, or leave OnSignal out",
            )
        for number in wanted:
            self._previous[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Put the handlers back that were there, unless somebody has put others in their place since."""
        if self._closed:
            return
        for number, previous in self._previous.items():
            if threading.current_thread() is not threading.main_thread():
                logger.warning("the handler of %s stays: it can only be put back in the main thread", number.name)
            elif signal.getsignal(number) == self._note:
                found = _still_open(number, previous)
                signal.signal(number, found if found is not None else signal.SIG_DFL)
        self._closed = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(signal.Signals(number))
        if os.getpid() != self._owner:
            self._do_as_before(number, previous)
            return
        # Nothing else here: the handler may run in the middle of anything, also of a save.
        self.received.add(signal.Signals(number).name)
        # Python's own handler of SIGINT is only its way to do what the signal does by default.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _do_as_before(self, number: int, previous: Any) -> None:
        """In a forked child, such as a data loader's worker: nobody asks there, and the signal must end it."""
        signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _still_open(number: signal.Signals, handler: Any) -> Any:
    """A handler, or, of a watch that was closed while another one covered it, what was there before that one."""
    watch = getattr(handler, "__self__", None)
    if isinstance(watch, SignalWatch) and watch._closed:
        return _still_open(number, watch._previous.get(number))
    return handler
