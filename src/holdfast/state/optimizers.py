"""The state of optimizers: take it by the names of parameters, and give it back bit for bit. Knows torch alone.

PyTorch's `get_optimizer_state_dict` is not used, because it steps an optimizer that has no state yet
(docs/decisions/0002).
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.state.tensors import flattened

logger = logging.getLogger("holdfast")

__all__ = [
    "OPTIONS_OF_SCHEDULERS",
    "load_optimizer",
    "load_own_layout",
    "optimizer_state",
    "state_keys",
    "state_keys_with",
]

# Options that a scheduler adds to the groups of its optimizer, and torch's own note of the parameters' names.
OPTIONS_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
)


def optimizer_state(component: str, optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state with its parameters' names in place of their numbers, as PyTorch's own API spells
    it."""
    packed = optimizer.state_dict()
    try:
        state = {names[key] if isinstance(key, int) else key: value for key, value in packed["state"].items()}
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UsageError(
            "state_dict() of the optimizer has another layout than when it was first seen",
            component=component,
            advice="give it the same layout at all times, or wrap the optimizer in an object with its own state_dict()",
        ) from error
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, **rest}


def load_optimizer(
    optimizer: torch.optim.Optimizer, states: Mapping[Any, Any], groups: list[Any], rest: Mapping[str, Any]
) -> None:
    """Give an optimizer its state, by its parameters' numbers, bit for bit."""
    devices = [
        {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]
    for group, live in zip(groups, devices, strict=True):
        for key, device in live.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key] = group[key].to(device)
    optimizer.load_state_dict({"state": dict(states), "param_groups": groups, **rest})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in states.items():
        if isinstance(index, int) and isinstance(state, Mapping):
            loaded = optimizer.state[parameters[index]]
            loaded.update({key: _as_it_was(value, loaded.get(key)) for key, value in state.items()})


def _as_it_was(value: Any, loaded: Any) -> Any:
    """Return a value as it was saved: `load_state_dict` casts moments to their parameter's type, which loses bits of
    any kept in a wider one, and spoils texts. What it moved to another device stays there."""
    if isinstance(value, torch.Tensor):
        if not isinstance(loaded, torch.Tensor) or flattened(value) is not None:
            return value
        return loaded if loaded.dtype == value.dtype else value.to(loaded.device)
    if type(value) is dict and isinstance(loaded, Mapping):
        return {key: _as_it_was(inner, loaded.get(key)) for key, inner in value.items()}
    if type(value) in (list, tuple) and isinstance(loaded, list | tuple) and len(loaded) == len(value):
        return type(value)(_as_it_was(inner, other) for inner, other in zip(value, loaded, strict=True))
    return value if type(value) is type(loaded) else loaded


def load_own_layout(component: str, optimizer: torch.optim.Optimizer, state: Callable[[], Any]) -> None:
    """Give an optimizer its state in its own layout through `load_state_dict`, with the types that were saved."""
    optimizer.load_state_dict(state())
    saved = state()
    for container, key, value in _cast(optimizer.state_dict(), saved):
        container[key] = value.to(container[key].device)
    changed = [str(key) for _, key, _ in _cast(optimizer.state_dict(), saved)]
    if changed:
        logger.warning(
            "component '%s': load_state_dict() of %s changed the type of %d tensors, such as '%s'; they lost precision",
            component,
            type(optimizer).__name__,
            len(changed),
            changed[0],
        )


def _cast(live: Any, saved: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Find the tensors that have another type than they were saved with: the dict or list that holds each, its key."""
    if isinstance(saved, Mapping) and isinstance(live, dict):
        keys: Sequence[Any] = [key for key in saved if key in live]
    elif isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live):
        keys = range(len(saved))
    else:
        return
    for key in keys:
        one, other = live[key], saved[key]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if one.dtype != other.dtype:
                yield live, key, other
        else:
            yield from _cast(one, other)


def state_keys(optimizer: torch.optim.Optimizer) -> frozenset[str] | None:
    """Return the names of what an optimizer keeps for a parameter. One that has no state yet is asked by way of a
    stand-in with one small parameter, which makes a step. None where that cannot be found out."""
    for state in optimizer.state.values():
        if isinstance(state, Mapping) and state:
            return frozenset(map(str, state))
    return state_keys_with(optimizer, optimizer.param_groups[0], 2) if optimizer.param_groups else None


def state_keys_with(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], dimensions: int
) -> frozenset[str] | None:
    """Return the names of what an optimizer of this class keeps with these options for a parameter with so many
    dimensions; None where that cannot be found out."""
    try:
        return frozenset(map(str, _state_after_a_step(optimizer, options, (1,) * dimensions)))
    except Exception:  # foreign code with a parameter that it was not made for
        return None


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: tuple[int, ...]
) -> Mapping[Any, Any]:
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    options = {key: value for key, value in options.items() if key != "param_names"}
    options.update({key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in options})
    rate = options.get("lr")
    options["lr"] = float(rate) if isinstance(rate, torch.Tensor) else rate
    stand_in.param_groups = [{**options, "params": [parameter]}]
    stand_in.state = defaultdict(dict)
    stand_in._optimizer_step_pre_hooks = OrderedDict()
    stand_in._optimizer_step_post_hooks = OrderedDict()
    # The class's own method: a scheduler puts another one into the object.
    type(optimizer).step(stand_in)
    return stand_in.state[parameter]  # type: ignore[no-any-return]
