"""Copy bytes from many places to many others, by several threads. Addresses enter; nothing leaves. Knows no torch.

torch shares each tensor out among its threads and waits for all of them before the next one. Here each thread takes the
next piece when it is done with one, so that none waits for another: a state of 600 tensors is copied as fast as one
large tensor.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from holdfast.storage.threads import HeldSignals, HelperThread, join_all, start_all

__all__ = ["Move", "memmove_holding_gil", "move", "move_all", "move_small"]

_MOVE_BYTES = 4 << 20
# One call copies no more than this. Twice as much takes a tenth longer per byte where it no longer fits into a
# processor's own cache.
_CALL_BYTES = 512 << 10
_MAX_THREADS = 8
# After so many small copies, some milliseconds, another thread may run.
_SMALL_MOVES = 4096


class Move(NamedTuple):
    """Bytes to copy. Both places must stay where they are until it is done."""

    target: int
    source: int
    size_bytes: int


def move_all(moves: Sequence[Move], *, threads: int, on_progress: Callable[[int], None]) -> None:
    """Copy everything. `on_progress` gets a target address below which all is done; the targets must ascend."""
    pieces = list(_pieces(moves))
    count = max(min(threads, _MAX_THREADS, len(pieces)), 1)
    team = _Team(pieces, on_progress)
    helpers = [HelperThread(target=team.work, name="holdfast-copy", daemon=True) for _ in range(count - 1)]
    with HeldSignals() as held:
        try:
            start_all(helpers)
            team.work(held.deliver)
        except BaseException:
            # Such as an interrupt. Not one byte may be copied after this: the next save uses the same places.
            team.stop()
            raise
        finally:
            join_all(helpers, held)


def move_small(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy that many bytes from each source to each target, where there are very many and each is small: what one copy
    costs besides its bytes is most of the time then."""
    for start in range(0, len(targets), _SMALL_MOVES):
        some = slice(start, start + _SMALL_MOVES)
        deque(map(memmove_holding_gil, targets[some], sources[some], sizes[some]), maxlen=0)


# Unlike ctypes.memmove it does not let another thread run meanwhile: with very many small copies, to take turns at each
# would take longer than all of the copies.
memmove_holding_gil = ctypes.PyDLL(None).memmove
memmove_holding_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove_holding_gil.restype = None


def _pieces(moves: Sequence[Move]) -> Iterator[Move]:
    for target, source, size_bytes in moves:
        for start in range(0, size_bytes, _MOVE_BYTES):
            yield Move(target + start, source + start, min(_MOVE_BYTES, size_bytes - start))


def move(target: int, source: int, size_bytes: int) -> None:
    """Copy bytes while other threads run."""
    for start in range(0, size_bytes, _CALL_BYTES):
        ctypes.memmove(target + start, source + start, min(_CALL_BYTES, size_bytes - start))


class _Team:
    """Threads that share out a list of pieces."""

    def __init__(self, pieces: Sequence[Move], on_progress: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._next = 0
        self._stopped = False
        self._under_way: set[int] = set()

    def work(self, on_piece: Callable[[], object] = lambda: None) -> None:
        """Copy pieces until there are no more. `on_piece` is called after each, and may raise."""
        piece = self._take(None)
        while piece is not None:
            move(*self._pieces[piece])
            on_piece()
            piece = self._take(piece)

    def stop(self) -> None:
        """Have every thread end after the piece that it copies now, and report no more progress."""
        self._stopped = True

    def _take(self, done: int | None) -> int | None:
        with self._lock:
            if self._stopped:
                return None
            if done is not None:
                self._under_way.discard(done)
                first = min(self._under_way, default=self._next)
                if first < len(self._pieces):
                    self._on_progress(self._pieces[first].target)
            if self._next == len(self._pieces):
                return None
            piece, self._next = self._next, self._next + 1
            self._under_way.add(piece)
            return piece
