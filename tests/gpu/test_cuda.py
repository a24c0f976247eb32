"""What only a GPU can show: device memory, device random state, and ranks whose only group is NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.testing import run_ranks, values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def parts(seed: int, device: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 300), nn.Dropout(0.3), nn.BatchNorm1d(300), nn.Linear(300, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(32, 64, device="cuda")).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.guarantee("G8")
def test_a_run_on_a_gpu_resumes_exactly(tmp_path: Path) -> None:
    state = parts(0, "cuda")
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        train(state, 4)
        manager.save(3)
        expected = train(state, 6)
    state = parts(1, "cuda")
    torch.manual_seed(77)
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        assert manager.restore().next_step == 4
    assert train(state, 6) == expected
    train(state, 1)
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        manager.restore()
    assert train(state, 6) == expected, "also over tensors that are live"


def test_a_checkpoint_of_a_gpu_loads_on_a_cpu_and_back(tmp_path: Path) -> None:
    on_gpu, on_cpu = parts(0, "cuda"), parts(1, "cpu")
    train(on_gpu, 2)
    with holdfast.CheckpointManager(tmp_path / "a", on_gpu, rng=False) as manager:
        manager.save(0)
    with holdfast.CheckpointManager(tmp_path / "a", on_cpu, rng=False) as manager:
        manager.restore()
    for one, other in zip(on_gpu["model"].parameters(), on_cpu["model"].parameters(), strict=True):
        assert torch.equal(one.cpu(), other)
        for key, value in on_gpu["optimizer"].state[one].items():
            assert torch.equal(value.cpu(), on_cpu["optimizer"].state[other][key].cpu()), key


def test_large_and_strided_device_tensors_are_exact(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self.tensors = tensors

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.tensors

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.tensors = state

    torch.manual_seed(0)
    large = torch.randn(40_000_000, device="cuda")
    holder = Holder({"large": large, "strided": large[:3_000_000].reshape(1000, 3000).t(), "empty": large[:0]})
    with holdfast.CheckpointManager(tmp_path, {"holder": holder}, rng=False) as manager:
        manager.save(0)
    again = Holder({name: torch.zeros_like(tensor) for name, tensor in holder.tensors.items()})
    with holdfast.CheckpointManager(tmp_path, {"holder": again}, rng=False) as manager:
        manager.restore()
    for name, tensor in holder.tensors.items():
        assert torch.equal(again.tensors[name], tensor)
        assert again.tensors[name].device == tensor.device


def save_with_nccl(rank: int, folder: str) -> float:
    """Both ranks on one device: NCCL itself could not run a collective here, so none may be needed."""
    torch.cuda.set_device(0)
    state = parts(0, "cuda")
    with holdfast.CheckpointManager(folder, state, timeout=60) as manager:
        manager.save(0)
    other = parts(1, "cuda")
    with holdfast.CheckpointManager(folder, other, timeout=60) as manager:
        assert manager.restore().resumed
    return float(
        sum(
            (one - two).abs().sum()
            for one, two in zip(state["model"].parameters(), other["model"].parameters(), strict=True)
        ).item()
    )


@pytest.mark.guarantee("G5")
def test_ranks_whose_only_group_is_nccl(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_with_nccl, str(tmp_path), backend="nccl")) == [0.0, 0.0]
