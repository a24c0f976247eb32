"""Stand-ins for what training frameworks put around several optimizers and models: flat keys, shards in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["FlatContainer", "ModelParts"]


class FlatContainer(Optimizer):
    """Several optimizers as one, as torchtitan has them: the keys of its state are flat, and to ask for it makes the
    state of optimizers that have none, by a step with a learning rate of 0."""

    def __init__(self, model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        named = list(model.named_parameters())
        halves = [named[: len(named) // 2], named[len(named) // 2 :]]
        self.optimizers = [kind(half, lr=0.1, **options) for half in halves]
        super().__init__([parameter for _, parameter in named], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for one in self.optimizers:
            _make_state(one)
            packed = one.state_dict()
            for group in packed["param_groups"]:
                for number, name in zip(group["params"], group["param_names"], strict=True):
                    state = packed["state"].get(number, {})
                    flat.update({f"state.{name}.{key}": value for key, value in state.items()})
                    options = {key: value for key, value in group.items() if not key.startswith("param")}
                    flat.update({f"param_groups.{name}.{key}": value for key, value in options.items()})
        return flat

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for one in self.optimizers:
            _make_state(one)
            packed = one.state_dict()
            for group in packed["param_groups"]:
                for key in [key for key in group if not key.startswith("param")]:
                    group[key] = state_dict[f"param_groups.{group['param_names'][0]}.{key}"]
                for number, name in zip(group["params"], group["param_names"], strict=True):
                    state = packed["state"].get(number, {})
                    packed["state"][number] = {key: state_dict[f"state.{name}.{key}"] for key in state}
            one.load_state_dict(packed)


def _make_state(optimizer: Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


class ModelParts:
    """A model that is no module, as torchtitan's ModelWrapper is: it loads the keys that it finds."""

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    def state_dict(self) -> dict[str, Any]:
        return {key: value for model in self.models for key, value in model.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for model in self.models:
            model.load_state_dict(state_dict, strict=False)
