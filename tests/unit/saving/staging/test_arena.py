"""Shared memory between two processes: whoever has read how much is staged may read the bytes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.drain import drain
from holdfast.saving.writer.messages import Image, Place
from holdfast.storage.base import WRITE_PIECE_BYTES
from holdfast.storage.local.local import LocalStorage

SIZE_BYTES = 3 * WRITE_PIECE_BYTES
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
    image = Image("a.safetensors", 0, SIZE_BYTES, 4096, (Place("leaf", 4096, SIZE_BYTES - 4096, (0,), (1,)),))
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
