"""Bytes are moved by any number of threads, and what is said to be there is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from holdfast.saving.staging.host_copy import Move, move_all, move_small


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("sizes", [[], [1], [5, 1, 4096], [9 << 20, 3, (4 << 20) + 1, 4 << 20]])
def test_every_byte_arrives_and_nothing_beside_it(sizes: list[int], threads: int) -> None:
    source = torch.randint(0, 256, (sum(sizes) + 64,), dtype=torch.uint8)
    target = torch.zeros(sum(sizes) + 64, dtype=torch.uint8)
    moves, start = [], 0
    for size in sizes:
        moves.append(Move(target.data_ptr() + start, source.data_ptr() + start, size))
        start += size
    heard: list[int] = []

    def hear(address: int) -> None:
        done = address - target.data_ptr()
        assert torch.equal(target[:done], source[:done])
        heard.append(done)

    move_all(moves, threads=threads, on_progress=hear)
    assert torch.equal(target[:start], source[:start])
    assert not target[start:].any()
    assert heard == sorted(heard)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("pieces_before", [0, 1, 3])
def test_after_an_interrupt_nothing_is_copied_and_no_progress_reported(
    pieces_before: int, new_threads: Callable[[], list[str]]
) -> None:
    size = 40 << 20
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    here, heard, interrupts = threading.get_ident(), 0, 0

    def interrupt(address: int) -> None:
        nonlocal heard, interrupts
        heard += 1
        if threading.get_ident() == here and heard > pieces_before:
            interrupts += 1
            raise KeyboardInterrupt

    # On a busy machine the others may have copied all before this thread reports anything.
    for _ in range(100):
        target.zero_()
        heard = 0
        with suppress(KeyboardInterrupt):
            move_all([Move(target.data_ptr(), source.data_ptr(), size)], threads=2, on_progress=interrupt)
        assert new_threads() == []
        before, copied = heard, int(target.sum(dtype=torch.int64))
        time.sleep(0.01)
        assert (heard, int(target.sum(dtype=torch.int64))) == (before, copied)
        if interrupts == 5:
            return
    raise AssertionError("this thread was not interrupted in any of the tries")


def test_one_thread_copies_everything_where_no_other_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source, target = torch.ones(9 << 20, dtype=torch.uint8), torch.zeros(9 << 20, dtype=torch.uint8)
    move_all([Move(target.data_ptr(), source.data_ptr(), 9 << 20)], threads=4, on_progress=lambda address: None)
    assert bool(target.all())


@pytest.mark.parametrize("count", [0, 1, 4096, 10_000])
def test_very_many_small_copies_all_arrive(count: int) -> None:
    sizes = [index % 7 for index in range(count)]
    source = torch.randint(0, 256, (8 * count + 8,), dtype=torch.uint8)
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    places = [8 * index for index in range(count)]
    for place, size in zip(places, sizes, strict=True):
        expected[place : place + size] = source[place : place + size]
    move_small([target.data_ptr() + one for one in places], [source.data_ptr() + one for one in places], sizes)
    assert torch.equal(target, expected)
