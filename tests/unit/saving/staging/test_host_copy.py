"""Bytes are moved by any number of threads, and what is said to be there is there."""

from __future__ import annotations

import pytest
import torch

from holdfast.saving.staging.host_copy import Move, move_all


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
