"""Hold the lease of a save or the claim of a load, and release it when PyTorch's call has ended, however it ended.

PyTorch calls no method of a writer or a reader when a save or a load fails elsewhere: on another rank, in the planner,
by an interrupt. So a thread checks whether the call still runs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from holdfast.errors import CheckpointNotFoundError
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.readers import reading
from holdfast.runs.selector import Selector

__all__ = ["FUNCTION_OF_SAVE", "Hold", "claim_checkpoint"]

FUNCTION_OF_SAVE = "_save_state_dict"
_FUNCTION_OF_LOAD = "_load_state_dict"
_LOOK_SECONDS = 0.25


class Hold:
    """The lease of a save or the claim of a load. Released at the latest when PyTorch's call of it ends."""

    def __init__(self, release: Callable[[], None], function: str) -> None:
        self._release = _Once(release)
        call = _frame_of(function)
        self.is_watched = call is not None
        if call is not None:
            watched = (call, threading.get_ident(), self._release)
            threading.Thread(target=_release_after, args=watched, name="holdfast-dcp", daemon=True).start()
        # For a caller that is not PyTorch, and drops the writer or the reader on the way.
        weakref.finalize(self, self._release)

    def release(self) -> None:
        self._release()


def claim_checkpoint(meant: Checkpoint) -> tuple[Checkpoint, Hold]:
    """Claim a checkpoint for a load, and return it with the claim. A checkpoint that was deleted just before the claim
    is an error; from here on it stays."""
    claim = ExitStack()
    claim.enter_context(reading(meant.storage, meant.folder))
    hold = Hold(claim.close, _FUNCTION_OF_LOAD)
    try:
        found = Catalog(meant.storage).find(Selector("folder", name=meant.folder))
        if found.digest != meant.digest:
            raise CheckpointNotFoundError(
                "another checkpoint has taken the place of the one to load",
                run=meant.storage.url,
                step=meant.step,
                advice="load again",
            )
    except BaseException:
        hold.release()
        raise
    return found, hold


class _Once:
    """A function of which only the first call, from whatever thread, does something."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self.called = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            is_first = not self.called.is_set()
            self.called.set()
        if is_first:
            self._function()


def _frame_of(function: str) -> FrameType | None:
    """Return the frame of PyTorch's function that carries this thread's save or load through from beginning to end."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame


def _release_after(call: FrameType, thread: int, release: _Once) -> None:
    """Release what a call needed when it has ended. An exception that is kept keeps the frame, not its place on the
    stack."""
    while not release.called.wait(_LOOK_SECONDS):
        if not _runs(call, thread):
            release()


def _runs(call: FrameType, thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None
