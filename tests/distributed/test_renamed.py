"""A restore with other names and another floating type on several ranks, sharded, and on another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import LoadStrategy
from holdfast.testing import values
from tests.ranks import run_ranks
from tests.sizes import if_deep

RENAME = {"old.*": "new.*"}


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides evenly."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(5, 7)
        self.add_module(name, torch.nn.Linear(7, 3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("new" if hasattr(self, "new") else "old")(self.a(values))


def build(size: int, form: str, name: str, seed: int, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """A model in one of the forms, and its optimizer after some steps."""
    model: Any = Net(name, seed).to(dtype)
    if form == "fsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 5, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def content(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of model and moments, whole."""
    model = state["model"]
    found: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in state["optimizer"].state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in found.items()}


def save(rank: int, run: str, size: int, form: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    state = build(size, form, "old", 1, dtype, 2)
    with holdfast.CheckpointManager(run, state, mode="sync", timeout=60) as manager:
        manager.save(2)
    return content(state)


def restore(
    rank: int, run: str, size: int, form: str, dtype: torch.dtype, steps: int
) -> tuple[dict[str, torch.Tensor], tuple[str, ...], tuple[str, ...], dict[str, torch.Tensor]]:
    state = build(size, form, "new", 9, dtype, steps)
    strategy = LoadStrategy(rename=RENAME, cast=True, on_world_change="skip")
    with holdfast.CheckpointManager(run, state, mode="sync", timeout=60) as manager:
        result = manager.restore(strategy=strategy)
        manager.save(3)
        later = build(size, form, "new", 10, dtype, 0)
        with holdfast.CheckpointManager(f"{run}-other", later, mode="sync", timeout=60) as other:
            other.restore(f"{run}@latest")
    return content(state), result.renamed, result.cast, content(later)


@pytest.mark.parametrize(
    ("form", "before", "now", "steps"),
    [("fsdp", 2, 3, 0), *if_deep(("fsdp", 2, 2, 1), ("plain", 1, 2, 1), ("fsdp", 3, 2, 1))],
)
@pytest.mark.parametrize(
    ("saved_as", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["down", "up"]
)
def test_sharded_state_is_renamed_and_converted_on_any_number_of_ranks(
    tmp_path: Path, form: str, before: int, now: int, steps: int, saved_as: torch.dtype, dtype: torch.dtype
) -> None:
    run = str(tmp_path / "run")
    expected = values(run_ranks(before, save, run, before, form, saved_as))[0]
    for found, renamed, cast, later in values(run_ranks(now, restore, run, now, form, dtype, steps)):
        assert found.keys() == {name.replace("old.", "new.") for name in expected}
        for name, tensor in expected.items():
            one = found[name.replace("old.", "new.")]
            wanted = tensor if name.endswith("/step") else tensor.to(dtype)
            assert one.dtype == wanted.dtype, name
            assert torch.equal(one, wanted), name
        assert "model.old.weight: is model.new.weight now" in renamed
        assert any(text.startswith("optimizer.state.old.weight.exp_avg_sq: ") for text in cast)
        assert all(torch.equal(later[name], found[name]) for name in found)


def declared(rank: int, name: str, seed: int, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """A model of which the first layer is cut by hand along its rows, and its optimizer after some steps."""
    model = Net(name, seed)
    model.a = torch.nn.Linear(5, 7, bias=False)
    model.a.weight.data += rank
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, place + (rank if parameter is model.a.weight else 0) + 0.1)
        optimizer.step()
    return {"model": holdfast.Sharded(model, {"a.weight": (0, dist.group.WORLD)}), "optimizer": optimizer}


def pieces(state: dict[str, Any]) -> list[torch.Tensor]:
    """What this rank holds of the first layer, and its moments."""
    weight = state["model"].component.a.weight
    moments = state["optimizer"].state[weight]
    return [weight.detach().clone(), moments["exp_avg"].clone(), moments["exp_avg_sq"].clone()]


def save_declared(rank: int, run: str) -> list[torch.Tensor]:
    state = declared(rank, "old", 1, torch.float32, 2)
    with holdfast.CheckpointManager(run, state, mode="sync", timeout=60) as manager:
        manager.save(2)
    return pieces(state)


def restore_declared(rank: int, run: str, steps: int) -> list[torch.Tensor]:
    state = declared(rank, "new", 9, torch.bfloat16, steps)
    with holdfast.CheckpointManager(run, state, mode="sync", timeout=60) as manager:
        manager.restore(strategy=LoadStrategy(rename=RENAME, cast=True))
    return pieces(state)


@pytest.mark.parametrize("steps", [0, 1])
def test_declared_shards_are_renamed_and_converted(tmp_path: Path, steps: int) -> None:
    before = values(run_ranks(2, save_declared, str(tmp_path)))
    now = values(run_ranks(2, restore_declared, str(tmp_path), steps))
    assert not torch.equal(before[0][0], before[1][0])
    for one, other in zip(before, now, strict=True):
        assert all(torch.equal(old.bfloat16(), new) for old, new in zip(one, other, strict=True))


def restore_with(rank: int, run: str, what: str) -> str:
    """Restore with a strategy that is wrong on one rank, or on all; the error, if nothing has changed."""
    state = build(2, "fsdp", "new", 9, torch.bfloat16, 1)
    before = content(state)
    strategies = {
        "another on each rank": LoadStrategy(rename={"old.*": f"new{rank or ''}.*"}, cast=True),
        "matches nothing": LoadStrategy(rename={**RENAME, "nothing": "x"}, cast=True),
        "two become one": LoadStrategy(rename={"old.weight": "a.weight"}, cast=True),
        "no cast": LoadStrategy(rename=RENAME),
        "no rename": LoadStrategy(cast=True),
        "a function": LoadStrategy(rename=lambda name: name.replace("old", "new"), cast=True),
    }
    with holdfast.CheckpointManager(run, state, mode="sync", timeout=60) as manager:
        try:
            manager.restore(strategy=strategies[what])
        except holdfast.HoldfastError as error:
            after = content(state)
            assert all(torch.equal(after[name], before[name]) for name in before)
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.guarantee("G5", "G7")
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("another on each rank", "another"),
        ("matches nothing", "UsageError: step 2: rename: 'nothing' matches no leaf"),
        ("no rename", "to add to the LoadStrategy: rename={'old.*': 'new.*'}"),
        *if_deep(
            ("two become one", "'a.weight' of both"),
            ("no cast", "to add to the LoadStrategy: cast=True"),
            ("a function", ""),
        ),
    ],
)
def test_all_ranks_raise_the_same_error_and_nothing_has_changed(tmp_path: Path, what: str, text: str) -> None:
    values(run_ranks(2, save, str(tmp_path), 2, "fsdp", torch.float32))
    first, second = values(run_ranks(2, restore_with, str(tmp_path), what))
    assert first == second
    if what != "another on each rank":
        assert text in first
    assert bool(first) == (what != "a function")


def flip(run: Path) -> None:
    for file in sorted((run / "step-000000002").glob("*.safetensors"))[-1:]:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)


def restore_damaged(rank: int, run: str) -> str:
    state = build(2, "fsdp", "new", 9, torch.bfloat16, 1)
    before = content(state)
    with holdfast.CheckpointManager(run, state, mode="sync", timeout=60) as manager:
        try:
            manager.restore(strategy=LoadStrategy(rename=RENAME, cast=True))
        except holdfast.CorruptCheckpointError as error:
            after = content(state)
            assert all(torch.equal(after[name], before[name]) for name in before)
            return str(error)
    return ""


@pytest.mark.guarantee("G3", "G7")
def test_damage_for_one_rank_is_found_before_any_rank_converts_anything(tmp_path: Path) -> None:
    values(run_ranks(2, save, str(tmp_path), 2, "fsdp", torch.float32))
    flip(tmp_path)
    first, second = values(run_ranks(2, restore_damaged, str(tmp_path)))
    assert first == second
    assert "digest" in first
