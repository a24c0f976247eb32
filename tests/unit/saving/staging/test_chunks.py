"""Chunks of an arena as tensors, of every kind that torch copies or does not."""

from __future__ import annotations

import pytest
import torch

from holdfast.saving.staging.arena import Arena
from holdfast.saving.staging.chunks import Chunk, Placement, copy_all


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(6, dtype=torch.float32).view(2, 3),
        torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor(3.5, dtype=torch.bfloat16),
    ],
    ids=["dense", "transposed", "complex", "conjugated", "scalar"],
)
def test_a_chunk_has_the_bytes_of_its_tensor(source: torch.Tensor) -> None:
    arena = Arena.make(4096)
    placement = Placement(arena)
    placement.add(0, Chunk(16, 16 + source.nbytes, source.dtype, tuple(source.shape)))
    copy_all(placement.views, placement.sources([source]))
    found = bytes(arena.memory[16 : 16 + source.nbytes])
    assert found == bytes(source.resolve_conj().contiguous().flatten().view(torch.uint8).tolist())
    placement.views.clear()
    arena.close()
