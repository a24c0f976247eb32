"""Get ready for the first asynchronous save beside the training: the writer, the pages of the arena, their page lock.

A thread does it in small pieces with rests between them, within the memory that staging may take. What it has made when
the first save comes is used, and the save makes the rest. Nothing is decided here: without it a first save only takes
longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast.saving.stage import Stager
from holdfast.saving.writer.supervisor import WriterSupervisor
from holdfast.state.budget import free_for_staging, ranks_here
from holdfast.state.sizes import StateSize, estimate_size
from holdfast.storage.threads import HelperThread, Latch

__all__ = ["Preparation", "Waits"]

logger = logging.getLogger("holdfast")

# Of its own time: how long the thread rests after a piece, and after a look.
_REST_OF_PIECE, _REST_OF_LOOK = 1.5, 20.0
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 0.001
_UNKNOWN = StateSize(0, 0, frozenset(), growing=True)

Components = Callable[[], Mapping[str, Any] | None]


class Waits(NamedTuple):
    """When the thread does what, in seconds.

    begin: managers that live shorter than this, as in a program that only restores, get nothing ready
    growing: an optimizer makes its state in its first step; one that has none by then may be of a kind that needs none
    look: how long it rests at least before it looks at the state again
    last_look: it looks no more after this time
    """

    begin: float = 1.0
    growing: float = 8.0
    look: float = 0.25
    last_look: float = 120.0


class Preparation:
    """The thread that gets one saver ready, until `stop` is called.

    `free_bytes` returns the memory that all ranks of this machine may take for staging; `limit_bytes` is this rank's
    own limit.
    """

    def __init__(
        self,
        stager: Stager,
        supervisor: WriterSupervisor,
        *,
        ranks: int,
        limit_bytes: int | None = None,
        free_bytes: Callable[[], int] = free_for_staging,
        waits: Waits = Waits(),  # noqa: B008, it is immutable
    ) -> None:
        self._stager = stager
        self._supervisor = supervisor
        self._ranks = ranks
        self._limit_bytes = limit_bytes
        self._free_bytes = free_bytes
        self._waits = waits
        self._stopping = Latch()
        # Whether the thread works on the arena, and whether it must not.
        self._is_busy = self._is_paused = False
        self._thread: HelperThread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, components: Components) -> None:
        """Start. `components` returns the live objects, or None when their owner is gone; only a weak reference to them
        may be in it, and it is called in the thread."""
        thread = HelperThread(target=self._run, args=(components,), name="holdfast-prepare", daemon=True)
        # First: an interrupt in between must not leave a thread that nothing waits for.
        self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = None
            logger.debug("nothing is got ready for the first save: %s", error)

    def cancel(self) -> None:
        """Have the thread end soon. Does not wait for it."""
        self._stopping.set()

    def stop(self) -> None:
        """Return when the thread does nothing any more. What it has made stays."""
        self.cancel()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.wait()
        # Not before: a wait that was interrupted must not let the next save use what the thread still works on.
        self._thread = None

    def pause(self) -> None:
        """Have the thread leave the arena alone until `resume`. Return when it does."""
        # No lock: an interrupt could leave it locked, and the next restore would wait for ever.
        self._is_paused = True
        while self._is_busy and self.is_running:
            time.sleep(_PAUSE_SECONDS)

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_paused = False

    def _run(self, components: Components) -> None:
        try:
            self._prepare(components)
        except Exception as error:
            # The save itself does what is missing, and raises what is wrong.
            logger.debug("getting ready for the first save ended: %s: %s", type(error).__name__, error)

    def _prepare(self, components: Components) -> None:
        waits, begin = self._waits, time.monotonic()
        if self._rest(waits.begin):
            return
        self._supervisor.start_early()
        while time.monotonic() - begin < waits.last_look:
            looked = time.monotonic()
            size = _estimate(components, self._ranks)
            if size is None:
                return
            now = time.monotonic()
            if not (size.growing and now - begin < waits.growing) and not self._make_ready(size):
                return
            if self._rest(max(waits.look, _REST_OF_LOOK * (now - looked))):
                return

    def _make_ready(self, size: StateSize) -> bool:
        """Make the arena for a state of this size ready. Return whether to go on."""
        if size.size_bytes == 0 or not self._stager.is_short_of(size.size_bytes, size.tensors):
            return True
        with self._turn() as is_ours:
            if not is_ours or not self._stager.reserve(size.size_bytes, size.tensors, self._room_bytes()):
                return False
        more = True
        while more:
            begin = time.monotonic()
            with self._turn() as is_ours:
                if not is_ours:
                    return False
                if self._stager.missing_bytes > self._free_bytes():
                    # The training has taken the memory meanwhile, and comes first.
                    self._stager.close()
                    return False
                more = self._stager.take_more()
            if self._rest(_REST_OF_PIECE * (time.monotonic() - begin)):
                return False
        with self._turn() as is_ours:
            if is_ours:
                self._stager.page_lock(size.devices)
        return is_ours

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Keep others from the arena inside of the block; False where it is time to stop instead."""
        # First: a thread that pauses this one looks at it after that.
        self._is_busy = True
        while self._is_paused:
            self._is_busy = False
            if self._stopping.wait(_LOOK_SECONDS):
                yield False
                return
            self._is_busy = True
        try:
            yield True
        finally:
            self._is_busy = False

    def _room_bytes(self) -> int:
        """Return how large the arena may be."""
        room_bytes = self._free_bytes() // ranks_here() + self._stager.held_bytes
        return room_bytes if self._limit_bytes is None else min(room_bytes, self._limit_bytes)

    def _rest(self, seconds: float) -> bool:
        """Return whether to stop."""
        return self._stopping.wait(seconds)


def _estimate(components: Components, ranks: int) -> StateSize | None:
    """Return the size of the state now; None when there is no state any more."""
    live = components()
    if live is None:
        return None
    try:
        return estimate_size(live, ranks)
    except RuntimeError as error:
        # The training has changed a dict while it was walked through, such as the state of an optimizer.
        logger.debug("the size of the state is not known yet: %s", error)
        return _UNKNOWN
