"""What live objects hold: their state as nested dicts, and its tensors by their path. Knows torch; knows no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin

from holdfast.errors import StateMismatchError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.codec import MAX_DEPTH, encode
from holdfast.state.descriptions import description_of, differing_values
from holdfast.state.framework_wrappers import loader_inside
from holdfast.state.loaders import load_loader_state, loader_state, shield_random_state
from holdfast.state.modules import buffer_paths, load_module, module_state, tied_names, without_frozen
from holdfast.state.names import (
    has_torch_layout,
    is_stateful_loader,
    kind_of,
    optimizer_names,
    random_state_last,
    unwrap,
)
from holdfast.state.optimizers import (
    OPTIONS_OF_SCHEDULERS,
    load_optimizer,
    load_own_layout,
    optimizer_state,
    own_layout_state,
    state_keys_with,
)
from holdfast.state.tensors import (
    address,
    check_storable,
    flattened,
    held_piece,
    is_same_memory,
    is_sharded,
    shares_elements,
)
from holdfast.state.trees import CapturedTree
from holdfast.state.wrappers import (
    PerRank,
    Shared,
    Trainable,
    United,
    check_plain_state,
    has_plain_state,
    load_state,
    state_of,
)

__all__ = [
    "check_components",
    "component_state",
    "live_subclasses",
    "live_tree",
    "load_values",
    "restore_state",
    "tree_of",
    "values_state",
]


def live_tree(name: str, component: Any, components: Mapping[str, Any], scope: str | None) -> CapturedTree:
    """Return a component's state with its values encoded and its tensors, still the live ones, by their path."""
    return tree_of(name, component, component_state(name, component, components), scope)


def check_components(names: Iterable[str], components: Mapping[str, Any]) -> None:
    """Refuse, before anything is saved, what a save would refuse of the named models and optimizers.

    Nothing is copied. Other components are not asked: their `state_dict` may be costly, or change something. A model
    that has no memory yet, on the meta device or lazy, is looked at when it is saved.
    """
    for name in names:
        inner = unwrap(components[name])
        if isinstance(inner, dict):
            _refuse_copied_states(name, inner)
        if isinstance(inner, torch.optim.Optimizer):
            _refuse_hidden_state(name, inner, components)
        elif not isinstance(inner, torch.nn.Module) or _has_no_memory(inner):
            continue
        tree = live_tree(name, components[name], components, None)
        for path, tensor in tree.tensors.items():
            if is_sharded(tensor):
                held_piece(tensor, leaf=f"{name}.{path}")


def _has_no_memory(module: torch.nn.Module) -> bool:
    tensors = (*module.parameters(), *module.buffers())
    return any(isinstance(one, UninitializedTensorMixin) or one.is_meta for one in tensors)


def _refuse_copied_states(name: str, state: Any, depth: int = 0) -> None:
    """Refuse such a copy at any place of a dict component."""
    if isinstance(state, dict):
        _refuse_copied_state(name, state)
    for inner in state.values() if isinstance(state, dict) else state:
        if isinstance(inner, dict | list | tuple) and depth < MAX_DEPTH:
            _refuse_copied_states(name, inner, depth + 1)


def _refuse_copied_state(name: str, state: dict[Any, Any]) -> None:
    """Refuse the `state_dict()` of an optimizer or a scheduler in place of the object: it is a copy, so a restore would
    fill it and leave the object as it is. That of a model shares the model's memory, and is filled in place."""
    groups = state.get("param_groups")
    if (
        "state" in state
        and isinstance(groups, list)
        and all(isinstance(one, dict) and "params" in one for one in groups)
    ):
        owner = "optimizer"
    elif {"last_epoch", "_step_count"} <= state.keys():
        owner = "scheduler"
    else:
        return
    raise UsageError(
        f"this is the state_dict() of the {owner}, a copy that a restore would fill without the {owner} taking it up",
        component=name,
        advice=f"give the {owner} itself",
    )


def _refuse_hidden_state(name: str, optimizer: torch.optim.Optimizer, components: Mapping[str, Any]) -> None:
    """Refuse an optimizer around another one, as SAM is, whose inherited `state_dict` lacks the state of the other."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return
    known = {id(unwrap(component)) for component in components.values()}
    for attribute, value in vars(optimizer).items():
        for inner in value if isinstance(value, list | tuple) else (value,):
            hidden = isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state
            if hidden and id(inner) not in known:
                raise UsageError(
                    f"the attribute '{attribute}' is an optimizer, whose state is not in the state_dict() around it",
                    component=name,
                    advice=f"make it a component, too, or give {type(optimizer).__name__} a state_dict() of both",
                )


def tree_of(name: str, component: Any, state: Any, scope: str | None) -> CapturedTree:
    """Return the tree of a component's state that was taken already."""
    tensors: dict[str, torch.Tensor] = {}
    kind = kind_of(name, component)
    ties = partial(tied_names, unwrap(component)) if kind == "module" else dict
    values = encode(state, path=name, on_tensor=_collector(name, tensors, ties), flatten=flattened)
    type_name = description_of(loader_inside(unwrap(component))) if kind != "module" else ""
    if kind == "module":
        _refuse_shared_elements(name, tensors)
    # The name of a private class is an implementation's own affair, and may change.
    type_name = "" if type_name.startswith("_") else type_name
    led, united = _led(component, kind, scope, tensors), isinstance(component, United)
    return CapturedTree(name, kind, scope, values, tensors, led, type_name, united)


def _refuse_shared_elements(component: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for an expanded tensor: `load_state_dict` cannot fill it, so a checkpoint of it could never be restored."""
    for path, tensor in tensors.items():
        if not tensor.is_contiguous() and shares_elements(tensor):
            raise UsageError(
                "a tensor whose elements share memory (expand) could not be restored",
                component=component,
                leaf=f"{component}.{path}",
                advice="make it .contiguous(), or register it with persistent=False",
            )


def _led(component: Any, kind: str, scope: str | None, tensors: Mapping[str, Any]) -> Set[str]:
    """Return the tensors of which the first rank's replica counts: where ranks share a state, as their wrapper has it;
    and a model's buffers, which differ between the replicas of DDP until the next forward pass gives the leader's to
    all."""
    if isinstance(component, Shared | PerRank):
        return tensors.keys()
    if kind == "module":
        return buffer_paths(unwrap(component), tensors)
    return tensors.keys() if kind == "values" and scope is not None else frozenset()


def component_state(name: str, component: Any, components: Mapping[str, Any]) -> Any:
    """Return a component's state as nested dicts, in the form in which it is stored."""
    kind = kind_of(name, component)
    inner = unwrap(component)
    if kind == "module":
        state = module_state(name, inner)
        return without_frozen(inner, state) if isinstance(component, Trainable) else state
    if kind == "optimizer":
        return optimizer_state(name, inner, optimizer_names(inner, components, name))
    return values_state(inner)


def values_state(inner: Any) -> Any:
    """Return the state of an object that is stored as its own `state_dict` gives it."""
    if isinstance(inner, torch.optim.Optimizer):
        return own_layout_state(inner)
    return loader_state(inner) if is_stateful_loader(inner) else state_of(inner)


def _collector(
    component: str, tensors: dict[str, torch.Tensor], ties: Callable[[], Mapping[str, str]] = dict
) -> Callable[[str, Any], str]:
    """Note each tensor under its path inside the component; one that is the same memory as another, under the first.
    `ties` gives the first name of those that have several, for tensors that have no memory here."""
    known: dict[int, str] = {}

    def note(full_path: str, tensor: torch.Tensor) -> str:
        check_storable(tensor, component=component, leaf=full_path)
        path = full_path[len(component) + 1 :]
        if len(full_path) + len("@stage-00000") > paths.MAX_NAME_CHARACTERS:
            raise UsageError(f"a leaf's name has {len(full_path)} characters", component=component, leaf=full_path[:80])
        place = address(tensor)
        first = known.get(place) if place else ties().get(path)
        if first in tensors and (not place or is_same_memory(tensor, tensors[first])):
            return first
        path = _unused(path, tensors)
        tensors[path] = tensor
        known.setdefault(place, path)
        return path

    return note


def _unused(path: str, taken: Mapping[str, Any]) -> str:
    """Return the path itself, or, for two tensors whose keys spell the same dotted path, the path with a number
    added."""
    if path not in taken:
        return path
    number = 2
    while f"{path}~{number}" in taken:
        number += 1
    return f"{path}~{number}"


def load_values(name: str, component: Any, state: Callable[[], Any]) -> None:
    """Give a component back what its own `state_dict` gave; to an optimizer, bit for bit.

    `state` makes the state anew at each call: an optimizer may take what it is given apart.
    """
    if is_stateful_loader(component):
        load_loader_state(component, state())
    elif not isinstance(component, torch.optim.Optimizer):
        load_state(component, state())
    elif not has_torch_layout(name, component):
        load_own_layout(name, component, state)
    else:
        saved = state()
        rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        load_optimizer(component, saved["state"], saved["param_groups"], rest)


def restore_state(components: Mapping[str, Any], train_state: Mapping[str, Any]) -> None:
    """Give nested state back to the components. Names are compared before anything changes."""
    missing = [name for name in components if name not in train_state]
    unexpected = [name for name in train_state if name not in components]
    if missing or unexpected:
        raise StateMismatchError("state and components do not fit together", missing=missing, unexpected=unexpected)
    acts = {name: _restoring(name, components, train_state[name]) for name in components}
    for name, component in random_state_last(components):
        acts[name]()
        shield_random_state(unwrap(component))


def _restoring(name: str, components: Mapping[str, Any], state: Any) -> Callable[[], None]:
    component = components[name]
    inner = unwrap(component)
    kind = kind_of(name, component)
    if kind == "values":
        _compare_values(name, inner, state)
        return partial(load_values, name, inner, lambda: _copied(state))
    current = component_state(name, component, components)
    if kind == "module":
        _compare_keys(name, current, state)
        return partial(load_module, name, inner, state)
    names = optimizer_names(inner, components, name)
    _compare_optimizer(name, inner, names, state)
    numbers = {parameter: number for number, parameter in enumerate(names)}
    groups = [
        {**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in state["param_groups"]
    ]
    states = {numbers.get(key, key): value for key, value in state["state"].items()}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return partial(load_optimizer, inner, states, groups, rest)


def _compare_values(name: str, component: Any, state: Any) -> None:
    """Refuse state that a dict or a generator cannot take, or that has other forms than a dict's values have."""
    if not has_plain_state(component):
        return
    try:
        check_plain_state(component, state)
    except StateMismatchError as error:
        raise error.at(component=name) from None
    found = differing_values(component, state, name) if isinstance(component, dict) else ()
    mismatched = [f"{path}: {before} in the state, {now} now" for path, before, now in found]
    if mismatched:
        raise StateMismatchError(
            "state and dict do not fit together",
            component=name,
            mismatched=mismatched,
            advice="no live object was changed",
        )


def _copied(state: Any) -> Any:
    """Return the same tensors in other dicts and lists."""
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if type(state) is list else state


def _compare_optimizer(name: str, optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any]) -> None:
    known = [parameter for group in state["param_groups"] for parameter in group["params"]]
    sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)]
    if set(known) != set(names) or sizes[0] != sizes[1]:
        raise StateMismatchError(
            "state and optimizer do not fit together",
            component=name,
            missing=[f"{name}.state.{parameter}" for parameter in names if parameter not in set(known)],
            unexpected=[f"{name}.state.{parameter}" for parameter in known if parameter not in set(names)],
            mismatched=[f"{name}.param_groups: {sizes[0]} parameters in the groups of the state, {sizes[1]} now"],
            advice="no live object was changed",
        )
    _refuse_other_class(name, optimizer, names, state)


def _refuse_other_class(
    name: str, optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any]
) -> None:
    """Refuse state of which this class of optimizer cannot make use: options, or entries of a parameter's state, of
    which each side has some that the other lacks. Such an optimizer would fail at its next step, or begin anew."""
    start = 0
    for live, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        options = live.keys() - OPTIONS_OF_SCHEDULERS, saved.keys() - OPTIONS_OF_SCHEDULERS
        found = [(options, "options")]
        for parameter, key in zip(live["params"], names[start : start + len(live["params"])], strict=True):
            own = state["state"].get(key)
            if isinstance(own, Mapping) and own:
                expected = state_keys_with(optimizer, {**live, **saved}, parameter.dim())
                found += [((expected, own.keys()), "state")] if expected is not None else []
                break
        start += len(live["params"])
        for (now, before), what in found:
            if now - before and before - now:
                raise StateMismatchError(
                    f"the state is of another class of optimizer than {type(optimizer).__name__}: its {what} "
                    f"lack {_first_words(now - before)} and have {_first_words(before - now)}",
                    component=name,
                    advice="no live object was changed; build the optimizer that the state is of",
                )


def _first_words(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))[:3])


def _compare_keys(name: str, current: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing = [f"{name}.{key}" for key in current if key not in state]
    unexpected = [f"{name}.{key}" for key in state if key not in current]
    mismatched = [
        f"{name}.{key}: {list(state[key].shape)} in the state, {list(value.shape)} now"
        for key, value in current.items()
        if isinstance(value, torch.Tensor)
        and isinstance(state.get(key), torch.Tensor)
        and value.shape != state[key].shape
    ]
    if missing or unexpected or mismatched:
        raise StateMismatchError(
            "state and model do not fit together",
            component=name,
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
        )


def live_subclasses(state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of wrapper subclasses in a component's state, by their path."""
    found: dict[str, torch.Tensor] = {}
    _find_subclasses(state, "", found)
    return found


def _find_subclasses(state: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(state, torch.Tensor):
        if flattened(state) is not None:
            found[path] = state
    elif isinstance(state, Mapping | list | tuple):
        items = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in items:
            _find_subclasses(value, f"{path}.{key}" if path else str(key), found)
