"""One save at a time: wait for the one under way, take the next turn, raise a failure once, warn of saves that are too
slow for their pace.

Knows every saver of this process, so that a save of another one to the same run can be waited for. Knows no torch.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from holdfast.errors import HoldfastError
from holdfast.runs.progress import Progress
from holdfast.saving.call_guard import CallGuard
from holdfast.saving.outcome import InterruptedSaveError
from holdfast.saving.pending import PendingSave
from holdfast.storage.base import Storage
from holdfast.storage.registry import same_place

__all__ = ["CurrentSave", "SlowSaveWarning", "finish_saves"]

logger = logging.getLogger("holdfast")

_POLL_SECONDS = 0.1
_NOTABLE_SECONDS = 0.1
_NOTABLE_SHARE = 0.1
_WAITS_IN_A_ROW = 3


class CurrentSave:
    """The save of one saver that is under way, or its last one: `latest`."""

    def __init__(self, storage: Storage, rank: int, calls: CallGuard) -> None:
        self.latest: PendingSave | None = None
        self.owner = os.getpid()
        self._storage = storage
        self._rank = rank
        self._calls = calls
        self._warning = SlowSaveWarning()
        _current_saves.add(self)

    @property
    def is_inherited(self) -> bool:
        """Return whether this process is a forked child, which has no part in what its parent saves."""
        return self.owner != os.getpid()

    @property
    def is_pending(self) -> bool:
        return self.latest is not None and not self.latest.done()

    @property
    def is_over(self) -> bool:
        """Return whether the next save may begin: none is under way, or this is a callback of a committed one."""
        return self.latest is None or self.latest.wait(0)

    def drain(self) -> None:
        """Return when no save is under way, whatever its outcome; also none that a callback of the last one has made
        meanwhile."""
        while (pending := self.latest) is not None and not pending.wait(0):
            label, total = f"saving step {pending.step}", pending.size_bytes
            with Progress(label, total, shown=self._rank == 0) as progress:
                while not pending.wait(_POLL_SECONDS):
                    progress.set(min(pending.written_bytes(), total))

    def wait_for_previous(self, step: int) -> float:
        """Return when the save of `step` may start, and how many seconds that took."""
        previous = self.latest
        if previous is None or previous.done():
            self._warning.in_a_row = 0
            return 0.0
        begin = time.monotonic()
        self.drain()
        waited = time.monotonic() - begin
        between = begin - previous.started
        if self._warning.is_due(waited, between, at_start=previous.starts_writer) and self._rank == 0:
            logger.warning(
                "saves take longer than the time between them: the save of step %d waited %.2f s for the save of step "
                "%d, which took %.2f s and had begun %.2f s before, and so did the saves before it; save less often, "
                "or to faster storage",
                step,
                waited,
                previous.step,
                previous.seconds,
                between,
            )
        return waited

    def take_turn(self, name: str, frame: FrameType) -> None:
        """Return when no save is under way and no other thread is in a call of the manager. None begins then before the
        function of this frame has called `CallGuard.leave`, in a `finally`."""
        self._take_turn_after(self.drain, name, frame)

    def take_turn_to_save(self, step: int, frame: FrameType) -> float:
        """Take the turn of a save, and return how many seconds it has waited for the save before."""
        waited: list[float] = []
        self._take_turn_after(lambda: waited.append(self.wait_for_previous(step)), "save()", frame)
        return sum(waited)

    def _take_turn_after(self, wait: Callable[[], None], name: str, frame: FrameType) -> None:
        while True:
            # Not in its turn: a callback of that save may save, too, and is waited for here.
            wait()
            self._calls.take(name, frame)
            if self.is_over:
                return
            self._calls.leave()

    def finish_others(self, storage: Storage) -> None:
        """Wait for the pending saves of other savers of this process to the run of a storage."""
        finish_saves(storage, but=self)

    @property
    def unreported_error(self) -> HoldfastError | None:
        """Return the failure of the last save, as long as it was not raised."""
        pending = self.latest
        if pending is None or not pending.done() or pending.reported:
            return None
        if pending.interrupted and isinstance(pending.error, InterruptedSaveError):
            return None
        return pending.error

    def raise_failure(self) -> None:
        """Raise the failure of the last save, once."""
        if self.unreported_error is not None and self.latest is not None:
            self.latest.result()

    def log_failure(self) -> None:
        """Log the failure of the last save instead of raising it: another rank has raised it already, in `poll`, and to
        raise it here too would let the ranks take different branches."""
        if self.unreported_error is not None and self.latest is not None:
            logger.error("%s", self.latest.error)
            self.latest.reported = True


@dataclass(slots=True)
class SlowSaveWarning:
    """How often saves have waited for the one before, in a row. One warning is enough for a run."""

    in_a_row: int = 0
    warned: bool = False

    def is_due(self, waited_seconds: float, between_seconds: float, *, at_start: bool) -> bool:
        """Return whether this wait is one that recurs and takes a notable part of the training's time. A wait for the
        save that started the writer process (`at_start`) does not count: the start is most of it."""
        notable = waited_seconds >= max(_NOTABLE_SECONDS, _NOTABLE_SHARE * (waited_seconds + between_seconds))
        self.in_a_row = self.in_a_row + 1 if notable and not at_start else 0
        if self.warned or self.in_a_row < _WAITS_IN_A_ROW:
            return False
        self.warned = True
        return True


def finish_saves(storage: Storage, *, but: CurrentSave | None = None) -> None:
    """Wait for the pending saves of this process to the run of a storage. A process that takes the run over would
    abandon them, and one that reads it would find an older checkpoint, though their state is staged."""
    for current in list(_current_saves):
        is_meant = current is not but and not current.is_inherited and current.is_pending
        if is_meant and same_place(current._storage, storage):
            current.drain()


_current_saves: weakref.WeakSet[CurrentSave] = weakref.WeakSet()
