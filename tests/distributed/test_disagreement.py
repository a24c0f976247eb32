"""Ranks that do not hold or say the same: an error on all of them, at once, and never a mixture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks

# Less than the limit of `run_ranks`, and far more than all of this takes on a busy machine.
TIMEOUT_SECONDS = 240.0


def tried(act: Any) -> tuple[str, str]:
    try:
        act()
    except holdfast.HoldfastError as error:
        return type(error).__name__, str(error)
    return "", ""


def disagree(rank: int, folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    start = time.monotonic()
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 0.001)
    state = {"model": model, "optimizer": optimizer}
    manager = holdfast.CheckpointManager(f"{folder}/a", state, timeout=TIMEOUT_SECONDS)
    seen["options"] = tried(lambda: manager.save(0))
    seen["mode"] = tried(
        lambda: holdfast.CheckpointManager(
            f"{folder}/b", state, mode="sync" if rank else "fast", timeout=TIMEOUT_SECONDS
        )
    )
    seen["attach"] = tried(lambda: manager.attach("other" if rank else "a b", nn.Linear(1, 1)))
    optimizer.param_groups[0]["lr"] = 0.1
    seen["saved"] = tried(lambda: manager.save(0))
    strategy = holdfast.LoadStrategy(only=["model"]) if rank else holdfast.LoadStrategy()
    seen["strategy"] = tried(lambda: manager.restore(strategy=strategy))
    seen["selector"] = tried(lambda: manager.restore("best:loss" if rank else "latest"))
    seen["path"] = tried(lambda: manager.restore(f"{folder}/a" if rank else "latest"))
    seen["restored"] = manager.restore().restored
    Path(f"{folder}/leader.txt").write_text("x") if rank == 0 else None
    dist.barrier()
    asset = f"{folder}/leader.txt" if rank == 0 else f"{folder}/nowhere.txt"
    with holdfast.CheckpointManager(f"{folder}/c", state, assets=[asset], timeout=TIMEOUT_SECONDS) as other:
        seen["assets"] = tried(lambda: other.save(0))
    seen["seconds"] = time.monotonic() - start
    return seen


@pytest.mark.guarantee("G5")
def test_ranks_that_disagree_are_told_so_on_all_and_go_on(tmp_path: Path) -> None:
    first, second = values(run_ranks(2, disagree, str(tmp_path)))
    for case, (kind, words) in {
        "options": ("UsageError", "different options for it: lr"),
        "mode": ("UsageError", "mode='fast'"),
        "attach": ("UsageError", "'a b' cannot name a component"),
        "strategy": ("UsageError", "the ranks disagree in the strategy of restore"),
        "selector": ("UsageError", "the selector of restore: latest on rank 0 and best:loss on rank 1"),
        "path": ("UsageError", "the selector of restore: latest on rank 0 and a path on rank 1"),
        "saved": ("", ""),
        "assets": ("", ""),
    }.items():
        assert first[case] == second[case], case
        assert first[case][0] == kind, first[case]
        assert words in first[case][1], case
    assert first["restored"] == second["restored"] == ("model", "optimizer", "rng")
    assert max(first["seconds"], second["seconds"]) < TIMEOUT_SECONDS, "nobody waited for the time limit"


def save_after_a_look(rank: int, folder: str) -> tuple[list[str], bool]:
    """After a forward pass without a backward one FSDP2 shows whole parameters, which the optimizer does not know."""
    mesh = init_device_mesh("cpu", (2,))

    def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = parts(0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    with holdfast.CheckpointManager(folder, {"optimizer": optimizer, "model": model}) as manager:
        checkpoint = manager.save(0).wait()
    names = sorted(tensor.name for tensor in checkpoint.manifest.tensors if tensor.name.startswith("optimizer"))
    other, other_optimizer = parts(1)
    with torch.no_grad():
        other(torch.ones(2, 4))
    with holdfast.CheckpointManager(folder, {"optimizer": other_optimizer, "model": other}) as manager:
        manager.restore()
    moments = [
        torch.equal(optimizer.state[a]["exp_avg"].to_local(), other_optimizer.state[b]["exp_avg"].to_local())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    ]
    return names, all(moments) and len(moments) == 4


def test_fsdp_after_a_validation_pass_saves_and_restores_by_name(tmp_path: Path) -> None:
    for names, equal in values(run_ranks(2, save_after_a_look, str(tmp_path))):
        assert "optimizer.state.0.weight.exp_avg" in names
        assert "optimizer.state.1.bias.exp_avg_sq" in names
        assert equal
