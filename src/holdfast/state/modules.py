"""The state of models: take it under names without wrappers, and give it back. Knows torch; knows no files."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.errors import StateMismatchError, UsageError
from holdfast.state.names import clean_name, parameter_names
from holdfast.state.tensors import address, flattened, is_same_memory, is_sharded, plain_parts

__all__ = ["buffer_paths", "load_module", "module_state", "own_tensors", "tied_names", "without_frozen"]


def module_state(name: str, module: torch.nn.Module) -> dict[str, Any]:
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


def without_frozen(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without what is frozen, found by its name and, for what a hook has renamed, by its memory."""
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

    What `load_state_dict` does not know must be there already, or it would be lost silently.
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
    """Return whether two values of a state dict are the same, tensors bit for bit."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if is_same_memory(one, other):
        return True
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape or is_sharded(one):
        return False
    bits = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return bool(torch.equal(bits[0], bits[1].to(bits[0].device)))


def _takes_copies(own: torch.Tensor) -> bool:
    """Return whether `load_state_dict` can copy a module's own tensor, which is filled already, onto itself: not every
    wrapper subclass knows how to be copied."""
    if flattened(own) is None:
        return True
    try:
        with torch.no_grad():
            own.copy_(own)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _load_loosely(module: torch.nn.Module, state: OrderedDict[str, Any]) -> Any:
    """Load with any keys: the names were compared, and a hook may keep some out of the state dict."""
    parameters = inspect.signature(module.load_state_dict).parameters
    if "strict" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return module.load_state_dict(state, strict=False)
    return module.load_state_dict(state)


def own_tensors(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the module's own parameters and buffers in place of the aliases that its state dict has of them.

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


def tied_names(module: torch.nn.Module) -> dict[str, str]:
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


def buffer_paths(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Set[str]:
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
