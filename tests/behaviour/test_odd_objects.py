"""Objects that are legal and odd: each either comes back right, or is refused before anything changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast


def restored(run: Path, components: dict[str, Any], **options: Any) -> holdfast.RestoreResult:
    with holdfast.CheckpointManager(run, components, rng=False) as manager:
        return manager.restore(**options)


def saved(run: Path, components: dict[str, Any], step: int = 0) -> None:
    with holdfast.CheckpointManager(run, components, rng=False) as manager:
        manager.save(step)


class Extra(nn.Module):
    """An extra state with tensors in it, or that is one."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_states_may_hold_tensors_and_grow(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"model": Extra({"t": torch.arange(3.0), "n": 4})})
    model = Extra({"t": torch.zeros(3), "n": 0})
    restored(tmp_path / "a", {"model": model})
    assert model.extra["n"] == 4
    assert torch.equal(model.extra["t"], torch.arange(3.0))
    saved(tmp_path / "b", {"model": Extra(torch.arange(5.0))})
    model = Extra(torch.zeros(2))
    restored(tmp_path / "b", {"model": model})
    assert torch.equal(model.extra, torch.arange(5.0))


def test_a_module_without_state_is_a_component_too(tmp_path: Path) -> None:
    components = {"model": nn.Linear(2, 2), "loss": nn.CrossEntropyLoss()}
    saved(tmp_path, components)
    assert restored(tmp_path, components).restored == ("model", "loss")


@pytest.mark.guarantee("G7")
def test_a_buffer_that_could_not_be_restored_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 1).expand(3, 3))
    with pytest.raises(holdfast.UsageError, match=r"model\.mask.*share memory"):
        saved(tmp_path / "a", {"model": model})
    assert not (tmp_path / "a").exists()
    plain = nn.Linear(2, 2)
    plain.register_buffer("mask", torch.zeros(3, 3))
    saved(tmp_path / "b", {"model": plain})
    before = model.weight.detach().clone()
    with pytest.raises(holdfast.HoldfastError, match="share memory"):
        restored(tmp_path / "b", {"model": model})
    assert torch.equal(model.weight, before)


def test_a_hook_that_keeps_keys_out_of_the_state_dict_is_respected(tmp_path: Path) -> None:
    def keep_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state[f"{prefix}0.weight"]

    def tower() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model.register_state_dict_post_hook(keep_out)
        return model

    first, second = tower(), tower()
    saved(tmp_path, {"model": first})
    restored(tmp_path, {"model": second})
    assert torch.equal(second[1].weight, first[1].weight)
    assert not torch.equal(second[0].weight, first[0].weight)


@pytest.mark.guarantee("G7")
def test_state_of_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saved(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)})
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    before = other.weight.detach().clone()
    with pytest.raises(holdfast.StateMismatchError, match="state of SGD in the checkpoint, AdamW now"):
        restored(tmp_path, {"model": other, "optimizer": optimizer})
    assert torch.equal(other.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_group_that_is_new_keeps_its_own_options(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saved(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)})
    model.register_parameter("more", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW([model.weight, model.bias], lr=0.1)
    optimizer.add_param_group({"params": [model.more], "lr": 0.01, "betas": (0.5, 0.6)})
    strategy = holdfast.LoadStrategy(strict=False)
    restored(tmp_path, {"model": model, "optimizer": optimizer}, strategy=strategy)
    assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [
        (0.5, (0.9, 0.999)),
        (0.01, (0.5, 0.6)),
    ]
    (model(torch.ones(1, 2)).sum() + model.more.sum()).backward()
    optimizer.step()


def test_an_optimizer_that_keeps_vectors_of_all_parameters(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1))
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3) * torch.arange(3.0)).pow(2).mean()
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    model, optimizer = parts()
    train(model, optimizer)
    saved(tmp_path, {"model": model, "optimizer": optimizer})
    expected = [train(model, optimizer) for _ in range(3)]
    model, optimizer = parts()
    restored(tmp_path, {"model": model, "optimizer": optimizer})
    assert [train(model, optimizer) for _ in range(3)] == expected


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_made_in_inference_mode_is_refused_before_anything_changes(tmp_path: Path, inside: bool) -> None:
    model = torch.nn.Linear(3, 3)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, rng=False) as manager:
        manager.save(1)
    with torch.inference_mode():
        made = torch.nn.Linear(3, 3)
    before = made.weight.clone()
    with torch.inference_mode(inside), holdfast.CheckpointManager(tmp_path, {"model": made}, rng=False) as manager:
        with pytest.raises(holdfast.StateMismatchError, match=r"model.weight: was made in torch.inference_mode\(\)"):
            manager.restore()
    assert torch.equal(made.weight, before)


def test_a_restore_inside_inference_mode_leaves_an_optimizer_that_can_step(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    first, second = parts(), parts()
    first["model"](torch.ones(1, 2)).sum().backward()
    first["optimizer"].step()
    saved(tmp_path, first)
    with torch.inference_mode():
        restored(tmp_path, second)
    second["model"](torch.ones(1, 2)).sum().backward()
    second["optimizer"].step()


@pytest.mark.guarantee("G3")
def test_a_manager_believes_the_disk_and_not_its_memory(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(2, 2)}, rng=False) as manager:
        manager.save(0)
        manager.save(1)
        manager.wait()
        os.remove(tmp_path / "step-000000001" / "manifest.json")
        assert [found.step for found in manager.checkpoints()] == [0]
        assert manager.restore().step == 0
        manifest = tmp_path / "step-000000000" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"step":0', b'"step":1'))
        assert manager.checkpoints() == []
        with pytest.raises(holdfast.CorruptCheckpointError):
            manager.restore()


def test_a_frozen_base_that_was_written_behind_torchs_back_is_another_base(tmp_path: Path) -> None:
    def adapter() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return model

    model = adapter()
    with holdfast.CheckpointManager(tmp_path, {"model": holdfast.Trainable(model)}, rng=False) as manager:
        manager.save(0)
        model[0].weight.data.fill_(7.0)
        manager.save(1)
    assert restored(tmp_path, {"model": holdfast.Trainable(adapter())}, selector=0).step == 0
    with pytest.raises(holdfast.GuardMismatchError, match="frozen:model"):
        restored(tmp_path, {"model": holdfast.Trainable(adapter())}, selector=1)


def test_excluding_one_name_of_a_tied_tensor_excludes_it_and_is_listed(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Module()
        model.a, model.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        model.b.weight = model.a.weight
        model.c = nn.Linear(2, 2, bias=False)
        return model

    saved(tmp_path, {"model": tied()})
    model = tied()
    before = model.a.weight.detach().clone()
    start = restored(tmp_path, {"model": model}, strategy=holdfast.LoadStrategy(exclude=["model.b.*"]))
    assert torch.equal(model.a.weight, before)
    assert start.skipped == ("model.b.weight: left out by exclude",)


@pytest.mark.parametrize(
    "arguments", [{"metrics": [1]}, {"metrics": {"a": "low"}}, {"progress": 3}, {"extra": {1: 2}}, {"guards": "x"}]
)
def test_odd_arguments_of_a_save_are_usage_errors(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", {"model": nn.Linear(2, 2)}) as manager:
        with pytest.raises(holdfast.UsageError):
            manager.save(0, **arguments)
        with pytest.raises(holdfast.UsageError, match="LoadStrategy"):
            manager.restore(strategy={"strict": False})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_tilde_means_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(Path("~/runs/a"), {"model": nn.Linear(2, 2)})
    assert (tmp_path / "runs" / "a" / "run.json").exists()
    assert holdfast.resolve("~/runs/a").step == 0
