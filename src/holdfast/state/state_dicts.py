"""What live objects hold: their state as nested dicts, and its tensors by their path. Knows torch; changes nothing.

PyTorch's `get_optimizer_state_dict` is not used, because it steps an optimizer that has no state yet
(docs/decisions/0002).
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.errors import StateMismatchError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.codec import encode
from holdfast.state.loaders import shield_random_state
from holdfast.state.names import (
    clean_name,
    has_torch_layout,
    kind_of,
    optimizer_names,
    parameter_names,
    random_state_last,
    unwrap,
)
from holdfast.state.records import CapturedTree
from holdfast.state.tensors import (
    address,
    check_storable,
    flattened,
    held_piece,
    is_same_memory,
    is_sharded,
    plain_parts,
    shares_elements,
)
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

logger = logging.getLogger("holdfast")

# Options that a scheduler adds to the groups of its optimizer, and torch's own note of the parameters' names.
OPTIONS_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
)


def live_tree(name: str, component: Any, components: Mapping[str, Any], scope: str | None) -> CapturedTree:
    """A component's state with its values encoded and its tensors, still the live ones, by their path."""
    return tree_of(name, component, component_state(name, component, components), scope)


def check_components(names: Iterable[str], components: Mapping[str, Any]) -> None:
    """Refuse, before anything is saved, what a save would refuse of the named models and optimizers.

    Nothing is copied. Other components are not asked: their `state_dict` may be costly, or change something. A model
    that has no memory yet, on the meta device or lazy, is looked at when it is saved.
    """
    for name in names:
        inner = unwrap(components[name])
        if isinstance(inner, dict):
            _refuse_copied_state(name, inner)
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
    """The same for state that was taken already."""
    tensors: dict[str, torch.Tensor] = {}
    kind = kind_of(name, component)
    ties = partial(_ties, unwrap(component)) if kind == "module" else dict
    values = encode(state, path=name, on_tensor=_collector(name, tensors, ties), flatten=flattened)
    type_name = description_of(unwrap(component)) if kind != "module" else ""
    if kind == "module":
        _refuse_shared_elements(name, tensors)
    # The name of a private class is an implementation's own affair, and may change.
    type_name = "" if type_name.startswith("_") else type_name
    led, united = _led(component, kind, scope, tensors), isinstance(component, United)
    return CapturedTree(name, kind, scope, values, tensors, led, type_name, united)


def description_of(inner: Any) -> str:
    """Return the name of an object's class; of a scheduler around others, with their descriptions in parentheses."""
    parts = _inner_schedulers(inner)
    return type(inner).__name__ + (f"({','.join(map(description_of, parts))})" if parts else "")


def is_described(inner: Any, description: str) -> bool:
    """Return whether the description is of the object's class or one that it derives from, and so for the schedulers
    inside of it, if it names them."""
    outer, opened, rest = description.partition("(")
    if outer not in ("", *(base.__name__ for base in type(inner).__mro__)):
        return False
    if not opened:
        return True
    parts, named = _inner_schedulers(inner), _split(rest.removesuffix(")"))
    return bool(parts) and len(parts) == len(named) and all(map(is_described, parts, named))


def _split(descriptions: str) -> list[str]:
    """Return what the commas outside of all parentheses separate."""
    found, depth = [""], 0
    for character in descriptions:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _inner_schedulers(inner: Any) -> list[Any]:
    parts = getattr(inner, "_schedulers", None) if isinstance(inner, LRScheduler) else None
    return list(parts) if isinstance(parts, list | tuple) else []


def _refuse_shared_elements(component: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """`load_state_dict` cannot fill an expanded tensor, so a checkpoint of one could never be taken back."""
    for path, tensor in tensors.items():
        if not tensor.is_contiguous() and shares_elements(tensor):
            raise UsageError(
                "a tensor whose elements share memory (expand) could not be restored",
                component=component,
                leaf=f"{component}.{path}",
                advice="make it .contiguous(), or register it with persistent=False",
            )


def _led(component: Any, kind: str, scope: str | None, tensors: Mapping[str, Any]) -> Set[str]:
    """The tensors of which the first rank's replica counts: where a user said that ranks share a state; and a model's
    buffers, which differ between the replicas of DDP until the next forward pass gives the leader's to all."""
    if isinstance(component, Shared | PerRank):
        return tensors.keys()
    if kind == "module":
        return _buffers(unwrap(component), tensors)
    return tensors.keys() if kind == "values" and scope is not None else frozenset()


def _buffers(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Set[str]:
    """Return the paths of the module's own buffers, found by their memory. An extra state, or a tensor that a hook
    made, is compared as parameters are: nothing makes it the same on all ranks at the next forward pass."""
    rest = tensors.keys() - set(parameter_names(module).values())
    if not rest:
        return rest
    own, buffers = (
        {address(part) for tensor in some for _, part in plain_parts(tensor)} - {0}
        for some in (module.parameters(), module.buffers())
    )
    return {path for path in rest if address(tensors[path]) in buffers - own}


def component_state(name: str, component: Any, components: Mapping[str, Any]) -> Any:
    """A component's state as nested dicts, in the form in which it is stored."""
    kind = kind_of(name, component)
    inner = unwrap(component)
    if kind == "module":
        state = _model_state(name, inner)
        return _without_frozen(inner, state) if isinstance(component, Trainable) else state
    if kind == "optimizer":
        return _optimizer_state(name, inner, optimizer_names(inner, components, name))
    return state_of(inner)


def _model_state(name: str, module: torch.nn.Module) -> dict[str, Any]:
    """Return what the module's own `state_dict` gives, under the names that the model has without its wrappers.

    PyTorch's `get_model_state_dict` looks each key up among the module's attributes, and fails for a key that a hook or
    an overridden `state_dict` made, and for a module that has no persistent state.
    """
    raw = module.state_dict()
    keys = tuple(raw)
    known: _ModelKeys | None = _model_keys.get(module)
    if known is None or known.keys != keys:
        names = _model_names(name, module, keys)
        known = _model_keys[module] = _ModelKeys(keys, names, getattr(raw, "_metadata", None))
    return dict(zip(known.names, raw.values(), strict=True))


class _ModelKeys(NamedTuple):
    """The keys that a module's own state dict had, the names that a checkpoint has for them, and the versions of the
    modules, without which some take the state for that of an old one."""

    keys: tuple[str, ...]
    names: list[str]
    metadata: Any


_model_keys = WeakIdKeyDictionary()


def _model_names(component: str, module: torch.nn.Module, keys: Sequence[Any]) -> list[str]:
    names: dict[str, str] = {}
    for key in keys:
        if not isinstance(key, str) or key.startswith("$"):
            raise UsageError(
                f"state_dict() of the module has the key {key!r:.100}, which is no name",
                component=component,
                advice="use names without a leading '$', or wrap the module in an object with its own state_dict()",
            )
        name = clean_name(module, key)
        if name in names:
            raise UsageError(
                f"the keys '{names[name]}' and '{key}' of its state_dict() would both be stored as '{name}'",
                component=component,
                advice="rename one of them",
            )
        names[name] = key
    return list(names)


def _without_frozen(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is frozen, found by its name and, for what a hook has renamed, by its memory."""
    names, places = set(), set()
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            names.add(clean_name(module, raw))
            places.add(address(parameter))
    places.discard(0)
    return {
        name: value
        for name, value in state.items()
        if name not in names and not (isinstance(value, torch.Tensor) and address(value) in places)
    }


def load_module(name: str, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module its state through its own `load_state_dict`, under the keys that its own `state_dict` has.

    What `load_state_dict` does not know must be there already, or it would be lost without a word.
    """
    known: _ModelKeys | None = _model_keys.get(module)
    raw_keys = dict(zip(known.names, known.keys, strict=True)) if known is not None else {}
    own = own_tensors(module, state)
    full = {key: value for key, value in {**state, **own}.items() if key not in own or _takes_copies(value)}
    renamed = OrderedDict((raw_keys.get(key, key), value) for key, value in full.items())
    if known is not None and known.metadata is not None:
        vars(renamed)["_metadata"] = known.metadata
    with torch.no_grad():
        answer = _load_loosely(module, renamed)
    refused = [raw for raw in getattr(answer, "unexpected_keys", ()) if raw in renamed]
    # Taken up all the same if the module gives it back: a tensor that is filled in place, or a value that was right.
    again = module.state_dict() if refused else {}
    for raw in refused:
        key = clean_name(module, raw)
        if not _is_equal(again.get(raw), renamed[raw]):
            raise StateMismatchError(
                "load_state_dict() did not take it: a hook stores it under this name and none takes it from there",
                component=name,
                leaf=f"{name}.{key}",
                advice="register a load_state_dict pre-hook that gives it the name that the module expects",
            )


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values of a state dict are the same, tensors bit for bit."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if is_same_memory(one, other):
        return True
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape or is_sharded(one):
        return False
    bits = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return bool(torch.equal(bits[0], bits[1].to(bits[0].device)))


def _takes_copies(own: torch.Tensor) -> bool:
    """Whether `load_state_dict` can copy a module's own tensor, which is filled already, onto itself: not every wrapper
    subclass knows how to be copied."""
    if flattened(own) is None:
        return True
    try:
        with torch.no_grad():
            own.copy_(own)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _load_loosely(module: torch.nn.Module, state: OrderedDict[str, Any]) -> Any:
    """Load without complaint about keys: the names were compared, and a hook may keep some out of the state dict."""
    parameters = inspect.signature(module.load_state_dict).parameters
    if "strict" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return module.load_state_dict(state, strict=False)
    return module.load_state_dict(state)


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


def _ties(module: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each parameter's further names. A rank whose shard is empty cannot tell by the memory,
    and must find what the others find."""
    firsts: dict[int, str] = {}
    ties: dict[str, str] = {}
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        name = clean_name(module, raw)
        first = firsts.setdefault(id(parameter), name)
        if first != name:
            ties[name] = first
    return ties


def _unused(path: str, taken: Mapping[str, Any]) -> str:
    """The path itself, or, for two tensors whose keys spell the same dotted path, the path with a number behind it."""
    if path not in taken:
        return path
    number = 2
    while f"{path}~{number}" in taken:
        number += 1
    return f"{path}~{number}"


def _optimizer_state(component: str, optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """An optimizer's state with its parameters' names in place of their numbers, as PyTorch's own API spells it."""
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


def own_tensors(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The module's own parameters and buffers in place of the aliases that its state dict has of them.

    To copy a tensor onto itself costs nothing when it is the same object, and a pass over the memory when it is not.
    """
    own: dict[int, list[torch.Tensor]] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        own.setdefault(address(tensor), []).append(tensor)
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        for tensor in own.get(address(value), ()) if isinstance(value, torch.Tensor) else ():
            if is_same_memory(tensor, value):
                found[name] = tensor
    return found


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


def load_values(name: str, component: Any, state: Callable[[], Any]) -> None:
    """Give a component back what its own `state_dict` gave; to an optimizer, bit for bit.

    `state` makes the state anew at each call: an optimizer may take what it is given apart.
    """
    if not isinstance(component, torch.optim.Optimizer):
        load_state(component, state())
    elif not has_torch_layout(name, component):
        _load_own_layout(name, component, state)
    else:
        saved = state()
        rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        load_optimizer(component, saved["state"], saved["param_groups"], rest)


def _load_own_layout(component: str, optimizer: torch.optim.Optimizer, state: Callable[[], Any]) -> None:
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


def _as_it_was(value: Any, loaded: Any) -> Any:
    """A value as it was saved: `load_state_dict` casts moments to their parameter's type, which loses bits of any kept
    in a wider one, and spoils texts. What it moved to another device stays there."""
    if isinstance(value, torch.Tensor):
        if not isinstance(loaded, torch.Tensor) or flattened(value) is not None:
            return value
        return loaded if loaded.dtype == value.dtype else value.to(loaded.device)
    if type(value) is dict and isinstance(loaded, Mapping):
        return {key: _as_it_was(inner, loaded.get(key)) for key, inner in value.items()}
    if type(value) in (list, tuple) and isinstance(loaded, list | tuple) and len(loaded) == len(value):
        return type(value)(_as_it_was(inner, other) for inner, other in zip(value, loaded, strict=True))
    return value if type(value) is type(loaded) else loaded


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
    """The same tensors in other dicts and lists."""
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


def differing_values(live: Any, saved: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the path of each value that has another form than the saved one, with the saved form and the live one.

    Tensors and arrays have their type and shape; a dict, a list and a plain value are three other forms. None stands
    for what is not there yet and fits any. Dicts are compared in the keys that both have, lists of one length item by
    item.
    """
    if live is None or saved is None:
        return
    before, now = _form_of(saved), _form_of(live)
    if before != now:
        yield path, before, now
    elif isinstance(live, Mapping):
        for key in live:
            if key in saved:
                yield from differing_values(live[key], saved[key], f"{path}.{key}")
    elif isinstance(live, list | tuple) and len(live) == len(saved):
        for index, (one, other) in enumerate(zip(live, saved, strict=True)):
            yield from differing_values(one, other, f"{path}.{index}")


def _form_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, numpy.ndarray):
        return f"array {value.dtype.name} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict"
    return "a list" if isinstance(value, list | tuple) else "a plain value"


def live_subclasses(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of wrapper subclasses in a component's state, by their path."""
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
