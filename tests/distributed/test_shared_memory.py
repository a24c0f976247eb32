"""Live tensors that share memory on one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.testing import values
from tests.ranks import run_ranks


def linear(value: float) -> nn.Linear:
    model = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def opened(folder: str, components: dict[str, Any]) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(folder, components, mode="sync", rng=False, timeout=200)


def shared_on_one_rank(rank: int, folder: str) -> tuple[str, bool]:
    with opened(folder, {"model": linear(9.0), "best": {"weights": linear(1.0).state_dict()}}) as manager:
        manager.save(1)
    model = linear(0.0)
    weights = model.state_dict() if rank == 1 else linear(0.0).state_dict()
    with opened(folder, {"model": model, "best": {"weights": weights}}) as manager:
        try:
            manager.restore()
        except StateMismatchError as error:
            return error.problem, torch.equal(model.weight, torch.zeros(2, 3))
    return "restored", False


@pytest.mark.guarantee("G7")
def test_memory_that_is_shared_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    problem = "model.weight and best.weights.weight share memory now, and differed when saved"
    assert values(run_ranks(2, shared_on_one_rank, str(tmp_path))) == [(problem, True)] * 2
