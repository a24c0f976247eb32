"""The state of optimizers: take it by the names of parameters, and give it back bit for bit. Knows torch alone.

PyTorch's `get_optimizer_state_dict` is not used, because it steps an optimizer that has no state yet
(docs/decisions/0002).
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.errors import UsageError
from holdfast.state.tensors import flattened

logger = logging.getLogger("holdfast")

__all__ = [
    "OPTIONS_OF_SCHEDULERS",
    "inner_optimizers",
    "load_optimizer",
    "load_own_layout",
    "makes_state_when_asked",
    "optimizer_state",
    "own_layout_state",
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


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that one around others has in its attributes, also in lists and dicts, and theirs."""
    found: dict[int, torch.optim.Optimizer] = {}
    ahead: list[Any] = list(vars(optimizer).values())
    while ahead:
        value = ahead.pop()
        if isinstance(value, torch.optim.Optimizer):
            if value is not optimizer and id(value) not in found:
                found[id(value)] = value
                ahead += vars(value).values()
        elif isinstance(value, list | tuple) and len(value) < _MOST_INNER:
            ahead += [one for one in value if isinstance(one, torch.optim.Optimizer)]
        elif isinstance(value, dict) and len(value) < _MOST_INNER:
            ahead += [one for one in value.values() if isinstance(one, torch.optim.Optimizer)]
    return list(found.values())


# Longer lists hold parameters or their states: there may be very many, and no optimizer is among them.
_MOST_INNER = 10_000


def own_layout_state(optimizer: torch.optim.Optimizer) -> Any:
    """Return the state of an optimizer in its own layout, and leave the optimizer as it was.

    Some make the state of optimizers that have none, by a step with a learning rate of 0, when they are asked for it:
    torchtitan's do. That step is counted, so the training would go on otherwise than without having been asked.
    """
    empty = [one for one in (optimizer, *inner_optimizers(optimizer)) if not getattr(one, "state", None)]
    state = optimizer.state_dict()
    made = [one for one in empty if getattr(one, "state", None)]
    _made_when_asked[optimizer] = bool(made)
    for one in made:
        # What an optimizer that is not torch's own notes elsewhere about its state is not known.
        if type(one).__module__.startswith("torch.optim"):
            one.state.clear()
        else:
            logger.warning(
                "state_dict() of %s gave %s state that it did not have before: it does not train as it would have",
                type(optimizer).__name__,
                type(one).__name__,
            )
    return state


def makes_state_when_asked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state that `own_layout_state` returned last was made for it alone."""
    return bool(_made_when_asked.get(optimizer, False))


_made_when_asked = WeakIdKeyDictionary()


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
    numbered = [{**group, "params": _Numbers(group["params"])} for group in groups]
    optimizer.load_state_dict({"state": dict(states), "param_groups": numbered, **rest})
    _keep_types(optimizer, states)


class _Numbers(list[Any]):
    """The numbers of a group's parameters. torch asks of every tensor of the state whether its parameter is among them:
    with a plain list of 20,000 the answers take seconds."""

    def __init__(self, numbers: Iterable[Any]) -> None:
        super().__init__(numbers)
        self._known = frozenset(self)

    def __contains__(self, number: object) -> bool:
        return number in self._known

    def __deepcopy__(self, memo: object) -> list[Any]:
        return list(self)


def _keep_types(optimizer: torch.optim.Optimizer, states: Mapping[Any, Any]) -> None:
    """Give the state that an optimizer has just loaded the types that it was saved with."""
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
    """Give an optimizer its state in its own layout through `load_state_dict`, with the types that were saved.

    Warns of tensors that it did not take.
    """
    with ExitStack() as hooks:
        for one in inner_optimizers(optimizer):
            if hasattr(one, "_optimizer_load_state_dict_pre_hooks"):
                _keep_types_of_next_load(one, hooks)
        optimizer.load_state_dict(state())
    saved = state()
    for container, key, value in _cast(optimizer.state_dict(), saved):
        container[key] = value.to(container[key].device)
    again = optimizer.state_dict()
    changed = [str(key) for _, key, _ in _cast(again, saved)]
    if changed:
        logger.warning(
            "component '%s': load_state_dict() of %s changed the type of %d tensors, such as '%s'; they lost precision",
            component,
            type(optimizer).__name__,
            len(changed),
            changed[0],
        )
    dropped = list(_not_taken(again, saved))
    if dropped:
        logger.warning(
            "component '%s': load_state_dict() of %s did not take %d tensors of the checkpoint, such as '%s': its "
            "state_dict() lacks them now; the training does not continue as it was saved",
            component,
            type(optimizer).__name__,
            len(dropped),
            dropped[0],
        )


def _keep_types_of_next_load(optimizer: torch.optim.Optimizer, hooks: ExitStack) -> None:
    """Let an optimizer inside of another one keep the types of what it is given, as long as the hooks are there."""
    given: dict[str, Any] = {}

    def before(_: Any, state: Mapping[str, Any]) -> None:
        given.update(state)

    def after(_: Any) -> None:
        if isinstance(given.get("state"), Mapping):
            _keep_types(optimizer, given["state"])

    hooks.callback(optimizer.register_load_state_dict_pre_hook(before).remove)
    hooks.callback(optimizer.register_load_state_dict_post_hook(after).remove)


def _not_taken(live: Any, saved: Any, path: str = "") -> Iterator[str]:
    """Find the saved tensors that are not there now, by their path in the state."""
    if isinstance(saved, torch.Tensor):
        if not isinstance(live, torch.Tensor):
            yield path
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            inner = live.get(key) if isinstance(live, Mapping) else None
            yield from _not_taken(inner, value, f"{path}.{key}" if path else str(key))
    elif isinstance(saved, list | tuple):
        for index, value in enumerate(saved):
            inner = live[index] if isinstance(live, list | tuple) and index < len(live) else None
            yield from _not_taken(inner, value, f"{path}.{index}" if path else str(index))


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
