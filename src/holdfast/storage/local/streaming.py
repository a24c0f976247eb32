"""Stream bytes into one new file of a disk, in large aligned pieces. Knows file handles; knows no keys and no folders.

The caller's bytes are copied into a page-aligned buffer. A full buffer goes to a thread that writes it past the page
cache (O_DIRECT) while the caller fills the next one, so copying and writing overlap, and the page cache is left to
the training. Bytes that come in whole, aligned pages, as from an arena, are written from where they lie, without a
copy. A file system that refuses O_DIRECT gets ordinary writes from the same code.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from holdfast.errors import StorageError
from holdfast.storage.base import WRITE_PIECE_BYTES, Bytes
from holdfast.storage.local.advice import explained
from holdfast.storage.local.disk import Disk
from holdfast.storage.threads import HelperThread, join_all

__all__ = ["FileSink", "Pen"]

# One buffer is being written, one waits, one is being filled: a caller that comes in bursts does not stop the disk.
_BUFFERS_PER_SINK = 3
_POOLED_BUFFERS = 4
# A file up to this size is gathered in plain memory and written at once: neither a thread nor O_DIRECT pays there.
_SMALL_BYTES = 1 << 20
_ALIGNMENT_BYTES = 4096
_EARLY_BYTES = 4 << 20


class FileSink:
    """A `Sink` into the new, empty file of the handle `file`, which it owns from now on.

    `path` is for messages. `discard` removes the file when it is given up, after its handle was closed. An error, also
    one of the thread, is raised once, by the `write` or `close` that meets it; from then on the sink is given up, and
    every further call raises. A sink that is dropped without `close` leaves its file as a crash would.
    """

    _filler: _Gathered | _Pieces

    def __init__(self, disk: Disk, file: int, path: str, size_bytes: int, *, discard: Callable[[], None]) -> None:
        self._disk = disk
        self._file = file
        self._path = path
        self._size_bytes = size_bytes
        self._discard = discard
        self._taken_bytes = 0
        try:
            self._pen = Pen(disk, file)
            self._filler = _Gathered(size_bytes) if size_bytes <= _SMALL_BYTES else _Pieces(self._pen)
        except BaseException:
            disk.close(file)
            raise
        # Last: a sink that was not made to its end, because of an interrupt, has nothing to release.
        self._state = "open"

    def write(self, data: Bytes) -> None:
        self._require_open()
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        # What is too much is only counted: `close` refuses the file.
        room_bytes = max(0, self._size_bytes - self._taken_bytes)
        self._taken_bytes += len(view)
        with self._given_up_on_error():
            self._filler.take(view[:room_bytes])

    def close(self) -> None:
        if self._state == "closed":
            return
        self._require_open()
        with self._given_up_on_error():
            self._require_announced_size()
            self._filler.finish(self._pen)
            # A failed sync is final: the kernel may have dropped the pages, and a second one would report success.
            self._disk.fsync_file(self._file)
        self._state = "closed"
        self._release()

    def abort(self) -> None:
        if self._state != "open":
            return
        self._state = "given up"
        self._release()
        try:
            self._discard()
        except Exception:
            # What stays is debris that nothing refers to; the error that led here is the one that matters.
            pass

    @contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            if isinstance(error, StorageError):
                raise
            raise explained(error, f"writing a file of {self._size_bytes} bytes", self._path) from error
        except BaseException:
            self.abort()
            raise

    def _require_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"the sink takes no more bytes: it was {self._state} before", file=self._path)

    def _require_announced_size(self) -> None:
        if self._taken_bytes != self._size_bytes:
            raise StorageError(
                f"{self._taken_bytes} bytes were written, but {self._size_bytes} were announced", file=self._path
            )

    def _release(self) -> None:
        try:
            self._filler.release()
        finally:
            self._disk.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if getattr(self, "_state", "") == "open":
            self._state = "given up"
            if not self._filler.end_in_own_thread(partial(self._disk.close, self._file)):
                self._release()


class Pen:
    """Writes one file front to back, past the page cache as long as the file system and the pieces allow it."""

    def __init__(self, disk: Disk, file: int) -> None:
        self._disk = disk
        self._file = file
        self._offset = 0
        self._direct = False

    def try_direct(self) -> None:
        """Ask for O_DIRECT; what is written from now on must be in page-aligned memory."""
        if self._direct:
            return
        try:
            self._disk.cache.set_direct(self._file, True)
        except OSError:
            # Refused, as by many network file systems: ordinary writes do the same, only slower.
            return
        self._direct = True

    def write(self, data: memoryview) -> None:
        aligned_bytes = len(data) - len(data) % _ALIGNMENT_BYTES if self._direct else 0
        self._write_all(data[:aligned_bytes])
        if aligned_bytes < len(data):
            self._leave_direct()
            self._write_all(data[aligned_bytes:])

    def _write_all(self, data: memoryview) -> None:
        start = self._offset
        while len(data) > 0:
            count = self._write_some(data)
            self._offset += count
            data = data[count:]
        if not self._direct and self._offset - start >= _EARLY_BYTES:
            # Through the page cache the disk would stand still until the sync at the end.
            self._disk.cache.start_write_back(self._file, start, self._offset - start)

    def _write_some(self, data: memoryview) -> int:
        try:
            count = self._disk.write_at(self._file, data, self._offset)
        except OSError as error:
            # Some file systems accept O_DIRECT and refuse the write; and after a short write nothing is aligned.
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._leave_direct()
            return 0
        if count == 0:
            raise OSError(errno.EIO, "the system took no byte and gave no reason")
        return count

    def _leave_direct(self) -> None:
        if self._direct:
            self._disk.cache.set_direct(self._file, False)
            self._direct = False


class _Gathered:
    """The whole of a small file, written in one call at its end."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = memoryview(bytearray(size_bytes))
        self._filled_bytes = 0

    def take(self, data: memoryview) -> None:
        self._memory[self._filled_bytes : self._filled_bytes + len(data)] = data
        self._filled_bytes += len(data)

    def finish(self, pen: Pen) -> None:
        pen.write(self._memory)

    def release(self) -> None:
        self._memory = memoryview(b"")

    def end_in_own_thread(self, then: Callable[[], None]) -> bool:
        return False


class _Pieces:
    """A large file as pieces: the caller's thread fills them, a thread of ours writes them in their order."""

    def __init__(self, pen: Pen) -> None:
        self._pen = pen
        self._lane = _Lane(pen)
        self._buffer: memoryview | None = None
        self._filled_bytes = 0

    def take(self, data: memoryview) -> None:
        if self._lane.unused and _is_aligned(data):
            self._pen.try_direct()
            self._pen.write(data)
            return
        while len(data) > 0:
            buffer = self._buffer_with_room()
            count = min(len(data), len(buffer) - self._filled_bytes)
            buffer[self._filled_bytes : self._filled_bytes + count] = data[:count]
            self._filled_bytes += count
            data = data[count:]
            if self._filled_bytes == len(buffer):
                self._buffer = None
                self._lane.submit(buffer)

    def finish(self, pen: Pen) -> None:
        self._lane.drain()
        if self._buffer is not None:
            pen.write(self._buffer[: self._filled_bytes])

    def release(self) -> None:
        self._lane.stop()
        if self._buffer is not None:
            _give_buffer(self._buffer)
            self._buffer = None

    def end_in_own_thread(self, then: Callable[[], None]) -> bool:
        return self._lane.end_in_own_thread(then)

    def _buffer_with_room(self) -> memoryview:
        if self._buffer is None:
            self._buffer, self._filled_bytes = self._lane.free_buffer(), 0
        return self._buffer


class _Lane:
    """A thread that writes full buffers with a pen. It knows nothing of the sink, so that a dropped sink can end it."""

    def __init__(self, pen: Pen) -> None:
        self._pen = pen
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._buffers_taken = 0
        self._thread: HelperThread | None = None
        self._error: BaseException | None = None
        self._then: Callable[[], None] = lambda: None

    @property
    def unused(self) -> bool:
        return self._buffers_taken == 0

    def free_buffer(self) -> memoryview:
        """Return a buffer to fill; waits for the disk when all are full."""
        if self._buffers_taken == 0:
            self._pen.try_direct()
        if self._buffers_taken < _BUFFERS_PER_SINK:
            self._buffers_taken += 1
            return _take_buffer()
        buffer = self._free.get()
        if self._error is not None:
            self._free.put(buffer)
        self._raise_error()
        return buffer

    def submit(self, buffer: memoryview) -> None:
        if self._thread is None:
            self._thread = HelperThread(target=self._run, name="holdfast-sink", daemon=True)
            self._thread.start()
        self._full.put(buffer)

    def drain(self) -> None:
        """Return when every buffer is written; raises what the thread met."""
        self.stop()
        self._raise_error()

    def stop(self) -> None:
        """End the thread after the buffers that it has, and give the buffers back."""
        if self._thread is not None:
            self._full.put(None)
            # Whatever interrupts it: the handle is closed next, and may then be that of another file.
            join_all([self._thread])
            self._thread = None
        while not self._free.empty():
            _give_buffer(self._free.get())

    def end_in_own_thread(self, then: Callable[[], None]) -> bool:
        """Have the thread end and then call `then`, if this is that thread: a collection of garbage that runs in it may
        be what finds the dropped sink. Return whether it is."""
        if self._thread is not threading.current_thread():
            return False
        self._then = then
        self._full.put(None)
        return True

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (buffer := self._full.get()) is not None:
            # After an error the rest is not written, but its buffers come back: the caller may be waiting for one.
            if self._error is None:
                try:
                    self._pen.write(buffer)
                except BaseException as error:
                    self._error = error
            self._free.put(buffer)
        self._then()


def _is_aligned(data: memoryview) -> bool:
    """Return whether these bytes can be written past the page cache from where they lie."""
    if len(data) < _ALIGNMENT_BYTES or data.readonly:
        return False
    # Imported here: a process that only reads, as the command line does, does not need it.
    import ctypes

    return ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) % _ALIGNMENT_BYTES == 0


# Fresh pages cost more than the copy into them, so buffers go from sink to sink. A deque needs no lock, which a fork
# in the middle of another thread's call could leave locked for ever.
_pool: deque[memoryview] = deque(maxlen=_POOLED_BUFFERS)


def _take_buffer() -> memoryview:
    try:
        return _pool.pop()
    except IndexError:
        return _new_buffer()


def _give_buffer(buffer: memoryview) -> None:
    _pool.append(buffer)


def _new_buffer() -> memoryview:
    # Private, for a forked child must not write into the buffers of its parent.
    memory = mmap.mmap(-1, WRITE_PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        # Only a hint: a kernel without huge pages for programs works as well, a little slower.
        pass
    return memoryview(memory)
