"""Shared memory between two processes: whoever has read how much is staged may read the bytes."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.ondisk.manifest import BLOCK_BYTES
from holdfast.saving.staging.arena import PAGE_BYTES, Arena
from holdfast.saving.staging.shared_memory import HUGE_PAGE_BYTES
from holdfast.saving.writer.drain import drain
from holdfast.saving.writer.messages import Image, Place
from holdfast.state.budget import own_processors
from holdfast.storage.base import WRITE_PIECE_BYTES
from holdfast.storage.local.local import LocalStorage
from tests.interrupting import interrupt_everywhere

SIZE_BYTES = 3 * WRITE_PIECE_BYTES
# Pages are taken in pieces of 32 MiB, one on each thread.
LARGE_BYTES = min(own_processors(), 8) * (32 << 20) + (5 << 20)
# A processor may keep any two accesses in order by luck. What can be tested is that each side passes the fence in the
# right place: the fence writes a byte of the control page through the file, which is seen in the mapped page.
FENCE_BYTE = 64


@pytest.fixture
def pair() -> Iterator[tuple[Arena, Arena]]:
    """The same memory, as the trainer has it and as the writer does."""
    trainer = Arena.make(SIZE_BYTES)
    writer = Arena(os.dup(trainer.handle), SIZE_BYTES)
    trainer.begin()
    yield trainer, writer
    trainer.close()
    writer.close()


class Words:
    """The words of a control page that note, at each access, whether the fence was passed since the last one."""

    def __init__(self, arena: Arena) -> None:
        self.inner = arena._words
        self.page = arena._words.cast("B")
        self.log: list[str] = []

    def __getitem__(self, index: int) -> int:
        self._note("load")
        return self.inner[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._note("store")
        self.inner[index] = value

    def _note(self, access: str) -> None:
        self.log += ["fence"] * self.passed() + [access]

    def passed(self) -> int:
        mark, self.page[FENCE_BYTE] = self.page[FENCE_BYTE], 0
        return mark


def test_a_trainer_passes_the_fence_before_it_says_what_is_staged(pair: tuple[Arena, Arena]) -> None:
    trainer, writer = pair
    words: Any = Words(trainer)
    trainer._words = words
    trainer.staged = 77
    assert words.log == ["fence", "store"]
    assert not words.passed(), "nothing that comes after the word needs it"
    assert writer.staged == 77


def test_a_writer_passes_the_fence_after_it_has_read_what_is_staged(pair: tuple[Arena, Arena]) -> None:
    trainer, writer = pair
    trainer.staged = 77
    words: Any = Words(writer)
    words.passed()
    writer._words = words
    assert writer.staged == 77
    assert words.log == ["load"]
    assert words.passed(), "before anything is read"


class GuardedMemory:
    """The memory of an arena that gives out only what the reader has learned to be staged."""

    def __init__(self, arena: ReadingArena) -> None:
        self.arena = arena

    def __getitem__(self, part: slice) -> memoryview:
        if part.stop > self.arena.seen:
            self.arena.ahead.append((part.start, part.stop, self.arena.seen))
        return self.arena.inner.memory[part]


class ReadingArena:
    """The writer's side of an arena that notes how far it was told to be staged, and what is read ahead of that."""

    def __init__(self, inner: Arena) -> None:
        self.inner = inner
        self.seen = 0
        self.ahead: list[tuple[int, int, int]] = []
        self.memory = GuardedMemory(self)
        self.written = 0

    @property
    def staged(self) -> int:
        self.seen = max(self.seen, self.inner.staged)
        return self.seen


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("eager", [True, False])
def test_nothing_is_read_before_it_is_known_to_be_staged(
    eager: bool, pair: tuple[Arena, Arena], tmp_path: Path
) -> None:
    trainer, writer = pair
    trainer.memory[:] = random.Random(1).randbytes(SIZE_BYTES)
    place = Place("leaf", 4096, SIZE_BYTES - 4096, (0,), (1,))
    image = Image("a.safetensors", 0, SIZE_BYTES, 4096, (place,), BLOCK_BYTES)
    reading: Any = ReadingArena(writer)
    looks = iter(range(0, SIZE_BYTES, 1 << 20))

    def stage_more() -> None:
        """Called whenever the writer has nothing to do."""
        trainer.staged = next(looks, SIZE_BYTES)

    thread = threading.Thread(
        target=drain,
        args=("step-000000001", [image], [], reading, LocalStorage(tmp_path)),
        kwargs={"eager": eager, "check_source": stage_more, "on_created": lambda name: None},
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert reading.ahead == []
    assert (tmp_path / "step-000000001" / "a.safetensors").read_bytes() == bytes(trainer.memory)


def taken_bytes(arena: Arena) -> int:
    """Return how much memory the system says that the arena takes."""
    return os.fstat(arena.handle).st_blocks * 512


def arena_handles() -> int:
    gc.collect()
    handles = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
    return sum("holdfast-arena" in name for name in handles)


@pytest.fixture
def large() -> Iterator[Arena]:
    """An arena of more than one piece for each thread that takes pages, whatever the machine, and no whole pieces."""
    arena = Arena.reserve(LARGE_BYTES)
    yield arena
    arena.close()


def test_an_arena_that_is_made_has_all_of_its_pages() -> None:
    arena = Arena.make(SIZE_BYTES)
    assert taken_bytes(arena) == arena.taken_bytes == PAGE_BYTES + SIZE_BYTES
    assert arena.missing_bytes == 0
    assert (arena.address - PAGE_BYTES) % HUGE_PAGE_BYTES == 0, "or no page can be a huge one"
    arena.close()


def test_on_a_kernel_that_takes_no_ranges_all_pages_are_taken_at_once_and_counted() -> None:
    def refuse(address: int, size_bytes: int) -> None:
        raise OSError(errno.EINVAL, "before Linux 5.14")

    arena = Arena.reserve(LARGE_BYTES, refuse)
    assert not arena.take_more()
    assert taken_bytes(arena) == arena.taken_bytes == PAGE_BYTES + LARGE_BYTES
    assert arena.missing_bytes == 0
    arena.close()


def test_an_arena_is_made_by_the_caller_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    arena = Arena.make(LARGE_BYTES)
    assert arena.missing_bytes == 0
    assert taken_bytes(arena) >= LARGE_BYTES
    arena.close()


def test_a_reserved_arena_takes_its_pages_front_to_back_and_goes_on_where_it_stopped(large: Arena) -> None:
    assert taken_bytes(large) == large.taken_bytes == 0
    sizes = []
    while large.take_more():
        assert taken_bytes(large) == large.taken_bytes, "no page is taken twice, and none that is not counted"
        assert large.missing_bytes == PAGE_BYTES + LARGE_BYTES - large.taken_bytes
        sizes.append(large.taken_bytes)
    assert sizes == sorted(set(sizes))
    assert len(sizes) >= 1
    assert taken_bytes(large) == large.taken_bytes == PAGE_BYTES + LARGE_BYTES
    assert not large.take_more()
    large.memory[-4:] = b"last"
    assert os.pread(large.handle, 4, LARGE_BYTES + PAGE_BYTES - 4) == b"last"


def test_the_rest_is_what_was_not_taken_so_far(large: Arena) -> None:
    assert large.take_more()
    large.memory[:5] = b"first"
    large.take_rest()
    assert taken_bytes(large) == large.taken_bytes == PAGE_BYTES + LARGE_BYTES
    assert large.memory[:5] == b"first"


@pytest.mark.parametrize("all_taken", [True, False])
def test_shrinking_gives_memory_back_and_the_rest_stays(all_taken: bool, large: Arena) -> None:
    if all_taken:
        large.take_rest()
    else:
        large.take_more()
    address, kept = large.address, 3 * HUGE_PAGE_BYTES
    large.memory[:5], large.memory[kept - 4 : kept] = b"first", b"last"
    large.shrink(kept)
    assert (large.address, large.size_bytes, len(large.memory)) == (address, kept, kept)
    assert large.taken_bytes == PAGE_BYTES + kept
    assert taken_bytes(large) <= PAGE_BYTES + kept + HUGE_PAGE_BYTES
    assert (large.memory[:5], large.memory[kept - 4 :]) == (b"first", b"last")
    assert not large.take_more()
    writer = Arena(os.dup(large.handle), kept)
    assert writer.memory[:5] == b"first"
    writer.close()


def test_a_shrunk_arena_takes_what_it_still_misses(large: Arena) -> None:
    large.shrink(3 * HUGE_PAGE_BYTES)
    assert large.taken_bytes == taken_bytes(large) == 0
    large.take_rest()
    assert large.taken_bytes == PAGE_BYTES + 3 * HUGE_PAGE_BYTES == taken_bytes(large)


@pytest.mark.parametrize("size_bytes", [1 << 60, 1 << 50])
def test_an_arena_that_no_system_has_room_for_is_an_error_and_leaves_no_handle(size_bytes: int) -> None:
    before = arena_handles()
    with pytest.raises(StorageError, match=r"MiB of memory for staging.*staging_limit_bytes="):
        Arena.make(size_bytes)
    assert arena_handles() == before


def test_pages_that_cannot_be_taken_are_an_error_and_the_handle_is_closed(large: Arena) -> None:
    before = arena_handles()
    # As if there were no memory: pages behind the end of the file cannot be had either.
    os.ftruncate(large.handle, PAGE_BYTES)
    with pytest.raises(StorageError, match=r"MiB of memory for staging.*use mode='sync'"):
        large.take_rest()
    assert arena_handles() == before - 1
    large.close()


def test_an_arena_that_is_dropped_without_being_closed_leaves_no_handle() -> None:
    before = arena_handles()
    arena = Arena.make(PAGE_BYTES)
    assert arena_handles() == before + 1
    del arena
    assert arena_handles() == before


def test_to_close_twice_closes_no_handle_of_another(large: Arena) -> None:
    number = large.handle
    large.close()
    other = os.dup(0)
    assert other == number, "the system gives the lowest number that is free"
    large.close()
    os.fstat(other)
    os.close(other)


# Python ignores an interrupt that comes in a finalizer.
@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_an_arena_is_reserved_leaves_no_handle() -> None:
    before, lost, moments = arena_handles(), [], 0
    for place in interrupt_everywhere(lambda: Arena.reserve(PAGE_BYTES).close()):
        gc.collect()
        lost += [place] * (arena_handles() - before)
        before = arena_handles()
        moments += 1
    assert moments > 5
    # Where a system call has just returned, or is about to be made, nothing can hold the handle.
    assert len(lost) <= 3, lost
