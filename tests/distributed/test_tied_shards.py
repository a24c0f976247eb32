"""Tied weights of which some rank holds nothing are one leaf on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks


class Tied(nn.Module):
    """One row on two ranks: the second one's shard is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 1, bias=False), nn.Linear(6, 1, bias=False)
        self.b.weight = self.a.weight


def made(seed: int) -> Any:
    torch.manual_seed(seed)
    model = Tied()
    fully_shard(model)
    return model


def tied(rank: int, folder: str, mode: Any) -> tuple[list[str], bool]:
    first, second = made(0), made(1)
    with holdfast.CheckpointManager(folder, {"model": first}, timeout=200, mode=mode, rng=False) as manager:
        stored = [leaf.name for leaf in manager.save(1).wait().manifest.tensors]
    with holdfast.CheckpointManager(folder, {"model": second}, timeout=200, mode=mode, rng=False) as manager:
        manager.restore()
    return stored, torch.equal(second.b.weight.full_tensor(), first.a.weight.full_tensor())


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tied_weights_of_which_a_rank_holds_nothing_are_saved_once(tmp_path: Path, mode: str) -> None:
    outcomes = values(run_ranks(2, tied, str(tmp_path), mode))
    assert outcomes == [(["model.a.weight"], True)] * 2
