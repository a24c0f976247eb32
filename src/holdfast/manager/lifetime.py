"""End a manager: finish its background work, its saves and its process-wide changes, in the order that loses nothing.

The parts of a manager enter when it is built. A `close` that is interrupted is finished by the next one. A forked child
closes nothing: what its parent built is its parent's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from holdfast.errors import ClosedError, HoldfastError
from holdfast.manager.open_run import OpenRun

logger = logging.getLogger("holdfast")

__all__ = ["Closable", "Lifetime"]


class Lifetime:
    """Knows whether a manager is open, and closes it."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._closed = False
        self._ended = False

    def require_open(self) -> None:
        """Raise when the manager was closed, or when this process is a forked child of the one that built it."""
        self._run.saver.require_own_process()
        if self._closed:
            raise ClosedError("the manager was closed", run=self._run.catalog.storage.url, advice="build a new one")

    def close(self) -> None:
        """Finish what is pending and give everything back; raise what failed, once. Idempotent."""
        self._refuse_in_the_middle()
        with self._ending() as goes_on:
            if not goes_on:
                return
            self._run.deferred_rng.warn_if_unset()
            failure = self._finish_background_work()
            self._run.saver.close()
            if failure is not None:
                raise failure

    def _refuse_in_the_middle(self) -> None:
        """Raise in the middle of another call of the manager, and in a callback that closing would wait for: before
        anything is closed."""
        if not self._ended and not self._run.saver.is_inherited:
            self._run.saver.calls.refuse_nested("close()")
            self._run.housekeeper.refuse_own_thread()
            pending = self._run.saver.pending
            if pending is not None:
                pending.wait(0)

    def close_after(self, error: BaseException | None) -> None:
        """Close at the end of a `with` block. An error that ended the block is not replaced by one of closing."""
        self._refuse_in_the_middle()
        with self._ending() as goes_on:
            if not goes_on:
                return
            if error is None:
                self._run.deferred_rng.warn_if_unset()
            failure = self._finish_background_work()
            self._run.saver.close_after(error)
            if failure is not None and error is None:
                raise failure
            if failure is not None:
                logger.error("%s", failure)

    @contextmanager
    def _ending(self) -> Iterator[bool]:
        """Yield whether there is anything to close. The manager has ended after the `with` block, but for an interrupt:
        then the next `close` goes on."""
        if self._ended or self._run.saver.is_inherited:
            yield False
            return
        self._closed = True
        try:
            yield True
        except Exception:
            self._ended = True
            raise
        self._ended = True

    def _finish_background_work(self) -> HoldfastError | None:
        """Finish all that runs beside the saves. Return why reported metrics could not be written."""
        self._run.saver.drain()
        self._run.components.close()
        self._run.housekeeper.wait()
        failure = self._run.reports.end()
        self._run.housekeeper.close()
        self._run.pace.close()
        return failure


class Closable:
    """Something with a `_lifetime`: `close` and the end of a `with` block end it."""

    _lifetime: Lifetime

    def close(self) -> None:
        """Finish what is pending, end the writer process and give its memory back; raise what failed, once.
        Idempotent."""
        self._lifetime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifetime.close_after(error)
