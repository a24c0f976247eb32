"""Finish what an interrupt must not leave half done. A function enters; it has run to its end when the call ends."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["finish"]

# A user who goes on pressing Ctrl-C wants to get out, also of a cleanup that waits for a storage that is gone.
_MAX_INTERRUPTS = 4


def finish(work: Callable[[], object]) -> None:
    """Do the work to its end. After an interrupt it is begun anew, so it must be possible to do any part of it twice;
    the interrupt is raised when it is done. An error of the work itself is raised at once."""
    interrupt: BaseException | None = None
    for _ in range(_MAX_INTERRUPTS):
        try:
            work()
            break
        except Exception:
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
