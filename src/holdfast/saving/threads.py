"""Start and join helper threads, where a system allows few of them and a user may interrupt the wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

__all__ = ["join_all", "start_all"]


def start_all(threads: Iterable[threading.Thread]) -> None:
    """Start the threads, or as many as the system allows: at a limit, or at the end of a process, the caller has to do
    the work alone."""
    with contextlib.suppress(RuntimeError):
        for thread in threads:
            thread.start()


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Return when those of the threads that were started have ended. An interrupt that comes meanwhile is raised after
    that: nothing may use what they work on before."""
    interrupt: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
