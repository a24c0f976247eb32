"""Modules whose state dict is not what their parameters are: nothing in it, other names, other code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import StateMismatchError, UsageError
from holdfast.state.state_dicts import live_tree


class Metric(nn.Module):
    """A metric: it counts in a buffer that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3), persistent=False)


class NotStored(nn.Module):
    """A teacher whose weights never belong into a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {}

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        assert not state_dict


WITHOUT_STATE: dict[str, Callable[[], nn.Module]] = {
    "buffers that are not persistent": Metric,
    "such buffers in a part": lambda: nn.Sequential(Metric(), nn.ReLU()),
    "no parameter at all": nn.CrossEntropyLoss,
    "no part at all": nn.Sequential,
    "a state dict of its own": NotStored,
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda module: module,
    "Trainable": holdfast.Trainable,
    "PerRank": holdfast.PerRank,
    "Shared": holdfast.Shared,
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("module", WITHOUT_STATE)
def test_a_module_without_persistent_state_is_saved_and_restored(
    tmp_path: Path, module: str, wrapper: str, mode: Any
) -> None:
    model, other = nn.Linear(2, 2), WRAPPERS[wrapper](WITHOUT_STATE[module]())
    with CheckpointManager(tmp_path, {"model": model, "other": other}, rng=False, mode=mode) as manager:
        manager.save(0)
        manager.save(1, wait=True)
        expected = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert manager.restore().restored == ("model", "other")
    assert torch.equal(model.weight, expected)


# Names


def renamed(model: nn.Module, *, back: bool = True) -> nn.Module:
    """The model with hooks that put 'net.' before every key of its state dict, and take it off again."""

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}net.{key[len(prefix) :]}"] = state.pop(key)

    def rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}net.")]:
            state[prefix + key[len(prefix) + 4 :]] = state.pop(key)

    model.register_state_dict_post_hook(rename)
    if back:
        model.register_load_state_dict_pre_hook(rename_back)
    return model


class Transposed(nn.Module):
    """Stores its weight the other way round, as some conversions do."""

    def __init__(self, *, takes_it: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_state_dict_post_hook(self._turn)
        if takes_it:
            self.register_load_state_dict_pre_hook(self._turn_back)

    @staticmethod
    def _turn(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").t().contiguous()

    @staticmethod
    def _turn_back(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()


class OwnDict(nn.Module):
    """A module whose state dict is its own affair, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.epoch = 0

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"parts": {"w": self.weight.detach()}, "epoch": self.epoch}

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state_dict["parts"]["w"])
        self.epoch = state_dict["epoch"]


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


RENAMED: dict[str, Callable[[], nn.Module]] = {
    "hooks of the root": lambda: renamed(tower()),
    "hooks of a part": lambda: nn.Sequential(renamed(tower()), nn.Linear(2, 2)),
    "no hook that renames back": lambda: renamed(tower(), back=False),
    "compiled": lambda: torch.compile(renamed(tower())),  # type: ignore[return-value]
    "activation checkpointing": lambda: nn.Sequential(checkpoint_wrapper(renamed(nn.Linear(2, 2))), nn.Linear(2, 2)),
    "another layout": lambda: nn.Sequential(Transposed(), nn.Linear(2, 2)),
    "another layout, compiled": lambda: torch.compile(nn.Sequential(Transposed())),  # type: ignore[return-value]
    "state_dict and load_state_dict of its own": OwnDict,
}


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values() if not isinstance(model, OwnDict) else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.normal_()
    return model


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("case", RENAMED)
def test_keys_that_hooks_rename_come_back_with_the_optimizer_of_their_parameters(
    tmp_path: Path, case: str, mode: Any
) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = filled(RENAMED[case]())
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = parts()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, rng=False, mode=mode) as manager:
        manager.save(0)
        manager.save(1, wait=True)
    second, its_optimizer = parts()
    with CheckpointManager(tmp_path, {"model": second, "optimizer": its_optimizer}, rng=False) as manager:
        manager.restore()
    for one, other in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg"], its_optimizer.state[other]["exp_avg"])
    for one, other in zip(model.buffers(), second.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_names_in_a_checkpoint_are_those_of_the_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(renamed(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, rng=False) as manager:
        manager.save(0, wait=True)
        leaves = {leaf.name for leaf in manager.checkpoints()[0].manifest.tensors}
    assert {"model.0.net.weight", "model.0.net.bias"} <= leaves
    assert "optimizer.state.0.weight.momentum_buffer" in leaves


@pytest.mark.guarantee("G7")
def test_state_that_load_state_dict_does_not_take_is_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"model": Transposed()}, rng=False) as manager:
        manager.save(0, wait=True)
    model = Transposed(takes_it=False)
    with (
        CheckpointManager(tmp_path, {"model": model}, rng=False) as manager,
        pytest.raises(StateMismatchError, match=r"model\.kernel.*load_state_dict"),
    ):
        manager.restore()


class Quantized(nn.Module):
    """Keeps tensors outside of parameters and buffers, and stores them and a constant, as 4-bit layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.absmax = torch.randn(3)
        self.register_state_dict_post_hook(self._add)

    @staticmethod
    def _add(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight.absmax"] = module.absmax
        state[f"{prefix}weight.kind"] = torch.tensor([4, float("nan")])
        state[f"{prefix}weight.version"] = 1


def test_tensors_that_only_a_state_dict_shows_are_filled_in_place(tmp_path: Path) -> None:
    first, second = Quantized(), Quantized()
    with CheckpointManager(tmp_path, {"model": first}, rng=False) as manager:
        manager.save(0, wait=True)
    with CheckpointManager(tmp_path, {"model": second}, rng=False) as manager:
        manager.restore()
    assert torch.equal(first.absmax, second.absmax)


def test_frozen_parameters_are_left_out_under_the_names_that_hooks_gave_them(tmp_path: Path) -> None:
    def adapter() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(renamed(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2))
        model[2].weight = model[0].weight  # tied: frozen under both of its names
        model[0].requires_grad_(False)
        return model

    model = adapter()
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    with CheckpointManager(tmp_path, {"model": holdfast.Trainable(model)}, rng=False) as manager:
        manager.save(0, wait=True)
        leaves = {leaf.name for leaf in manager.checkpoints()[0].manifest.tensors}
    assert leaves == {"model.1.weight", "model.1.bias", "model.2.bias"}
    second = adapter()
    with CheckpointManager(tmp_path, {"model": holdfast.Trainable(second)}, rng=False) as manager:
        manager.restore()
    assert torch.equal(second[1].weight, model[1].weight)


def test_only_buffers_are_the_first_ranks_to_say_also_where_hooks_rename_parameters() -> None:
    components = {"model": renamed(tower())}
    tree = live_tree("model", components["model"], components, "")
    assert tree.led == {"net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"}


def test_two_keys_that_would_get_one_name_are_refused(tmp_path: Path) -> None:
    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["weight"] = torch.zeros(1)

    model: Any = torch.compile(nn.Linear(2, 2))
    model.register_state_dict_post_hook(add)
    with pytest.raises(UsageError, match=r"'_orig_mod.weight' and 'weight'"):
        with CheckpointManager(tmp_path, {"model": model}, rng=False) as manager:
            manager.save(0, wait=True)


def test_a_train_state_goes_through_the_hooks_as_a_checkpoint_does() -> None:
    first = {"model": renamed(tower()), "metric": Metric()}
    second = {"model": renamed(tower()), "metric": Metric()}
    holdfast.restore_train_state(second, holdfast.build_train_state(first))
    for one, other in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(one, other)


class Versioned(nn.Module):
    """Takes a state dict without its version for one of the first version, as quantized modules do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.version = 0

    def _load_from_state_dict(  # type: ignore[override]
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.version = local_metadata.get("version", 1)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_module_gets_its_state_with_its_version(tmp_path: Path) -> None:
    model = nn.Sequential(Versioned())
    with CheckpointManager(tmp_path, {"model": model}, rng=False) as manager:
        manager.save(0, wait=True)
        manager.restore()
    assert model[0].version == 2
