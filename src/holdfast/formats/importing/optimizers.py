"""Bring the state of an optimizer into the form that a manager stores: by the names of parameters. Trees enter and
leave; what cannot be named is an error that says how to name it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from holdfast.errors import UsageError
from holdfast.formats.importing.parameters import Fits, Naming, name_parameters
from holdfast.formats.importing.parts import own_values
from holdfast.formats.importing.shapes import StateShapes
from holdfast.formats.source import TensorEntry
from holdfast.ondisk.regions import Shape
from holdfast.state.names import clean_name

__all__ = ["Model", "NamedState", "Parameters", "named_state"]

Parameters: TypeAlias = "torch.nn.Module | Sequence[str]"
"""How a user names parameters: the model, or the names in the optimizer's own order."""

# Buffers of torch's own normalisation layers, which no optimizer has.
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class Model(NamedTuple):
    """What may be a model of the source: its component, its tensors by their names without wrappers, and the names with
    them. `is_certain`: its own name says that it is a model; others may be averages of one. `is_ordered`: the tensors
    stand in the order of the model, and not by name or size."""

    component: str
    tensors: Mapping[str, TensorEntry]
    cleaned: Mapping[str, str]
    is_certain: bool = True
    is_ordered: bool = True

    def parameters(self) -> dict[str, Shape]:
        """Return the tensors that may be parameters: floating ones, each once, without the buffers that are known."""
        found: dict[str, Shape] = {}
        places: set[Any] = set()
        for name, entry in self.tensors.items():
            place = place_of(entry)
            is_tied = place is not None and place in places
            is_float = entry.dtype.startswith(("float", "bfloat", "complex"))
            if is_float and not is_tied and name.rpartition(".")[2] not in _BUFFERS:
                found[name] = entry.shape
                places.add(place)
        return found


class NamedState(NamedTuple):
    """The state of an optimizer by names, the model whose parameters these are (empty where none has all), and what was
    done."""

    value: dict[str, Any]
    model: str
    changes: tuple[str, ...] = ()


def place_of(entry: TensorEntry) -> object | None:
    """Return where a tensor lies in its source: two that lie in one place are one tensor. None for an empty one."""
    if not entry.chunks or 0 in entry.shape:
        return None
    chunks = tuple((chunk.file.name, chunk.start, chunk.box, chunk.strides) for chunk in entry.chunks)
    return entry.dtype, entry.shape, chunks


def named_state(
    component: str, stored: Mapping[str, Any], models: Sequence[Model], given: Parameters | None, location: str
) -> NamedState:
    """Return the state of an optimizer in the form in which a manager stores it. `models`: those that are certain come
    first, and count more than others that fit as well."""
    value = _unflattened(stored, models) if "param_groups" not in stored else own_values(stored)
    value["state"] = dict(value.get("state", {}))
    value["param_groups"] = _listed(value["param_groups"])
    value = _numbered(value, models)
    _require_known_state(component, value, location)
    numbers = [number for group in value["param_groups"] for number in group["params"]]
    if all(isinstance(name, str) for name in numbers):
        return _by_name(value, models)
    if not all(isinstance(number, int) for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(
            "the groups of the optimizer name their parameters neither by number nor by name",
            component=component,
            file=location,
            advice="leave it out with skip=",
        )
    model, naming = _naming(component, value, models, given, location)
    count = len(naming.names)
    return NamedState(_renamed(value, naming.names), model, (f"{component}: {count} parameters named as in '{model}'",))


def _listed(groups: Any) -> list[dict[str, Any]]:
    """Return the groups as a list of dicts; PyTorch's flattening makes a list a dict with numbers as keys."""
    listed = [groups[key] for key in sorted(groups, key=int)] if isinstance(groups, Mapping) else groups
    return [{**group, "params": list(group["params"])} for group in listed]


def _numbered(value: dict[str, Any], models: Sequence[Model]) -> dict[str, Any]:
    """Return the state with numbers in the place of texts that are numbers, as PyTorch's flattening makes them of the
    keys of a dict. Names of parameters that consist of digits stay names."""
    names = {name for group in value["param_groups"] for name in group["params"]}
    is_by_name = any(isinstance(name, str) and not _is_number(name) for name in names)
    are_texts = all(isinstance(name, str) for name in names)
    if is_by_name or (are_texts and any(names <= model.tensors.keys() for model in models)):
        return value
    groups = [{**group, "params": list(map(_number, group["params"]))} for group in value["param_groups"]]
    state: dict[Any, Any] = {}
    for key, inner in value["state"].items():
        # A text beside the same number would be a second state of one parameter: it stays, and belongs to none.
        state[key if _number(key) in value["state"] else _number(key)] = inner
    return {**value, "state": state, "param_groups": groups}


def _is_number(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isdecimal()


def _number(name: Any) -> Any:
    return int(name) if _is_number(name) else name


def _require_known_state(component: str, value: Mapping[str, Any], location: str) -> None:
    """Refuse state that belongs to no parameter: it is that of a parameter under a key that is not understood, and
    without it the training would begin anew."""
    known = {name for group in value["param_groups"] for name in group["params"]}
    unknown = [key for key in value["state"] if key not in known]
    if unknown:
        raise UsageError(
            f"the optimizer has state under {', '.join(map(repr, unknown[:8]))}"
            f"{' and more' if len(unknown) > 8 else ''}, and no group has such a parameter",
            component=component,
            file=location,
            advice="leave the optimizer out with skip=",
        )


def _by_name(value: dict[str, Any], models: Sequence[Model]) -> NamedState:
    """Return state that has names already, under the names without wrappers."""
    names = {name for group in value["param_groups"] for name in group["params"]}
    for model in models:
        clean = {name: model.cleaned.get(name, name) for name in names}
        if set(clean.values()) <= model.tensors.keys():
            return NamedState(_renamed(value, clean), model.component)
    return NamedState(value, "")


def _renamed(value: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in value["param_groups"]]
    state = {names[key]: inner for key, inner in value["state"].items()}
    return {**value, "state": state, "param_groups": groups}


def _naming(
    component: str, value: Mapping[str, Any], models: Sequence[Model], given: Parameters | None, location: str
) -> tuple[str, Naming]:
    """Return the names of all parameters and the model that has them; an error where that is not certain."""
    groups = [group["params"] for group in value["param_groups"]]
    shapes = {number: StateShapes.of(state) for number, state in value["state"].items()}
    module: Any = given if isinstance(given, torch.nn.Module) else None
    if given is not None and module is None:
        return _as_given(component, groups, shapes, models, list(given), location)
    if module is not None:
        tried = [(model, _by_module(groups, shapes, module)) for model in models if _has(model, module)]
    else:
        tried = [(model, _by_order(groups, shapes, model)) for model in models]
    found = [(model.component, naming) for model, naming in tried if naming.names]
    certain = [(model.component, naming) for model, naming in tried if naming.names and model.is_certain]
    if len(found) > 1 and len(certain) == 1:
        found = certain
    if len(found) == 1 or not sum(map(len, groups)):
        return found[0] if found else ("", Naming({}))
    problems = {f"with '{model.component}', {naming.problem}" for model, naming in tried}
    if len(found) > 1:
        problems = {f"the parameters of {' and '.join(repr(model) for model, _ in found)} have the same shapes"}
    raise UsageError(
        "the optimizer's state goes by number, and which parameter each number is cannot be determined: "
        + ("; ".join(sorted(problems)) or "the source has no model with such parameters"),
        component=component,
        file=location,
        advice="give the model as parameters=, or the names of its parameters in the order of the optimizer",
    )


def _fits(shapes: Mapping[int, StateShapes]) -> Fits:
    return lambda number, shape: number not in shapes or shapes[number].fits(shape)


def _has(model: Model, module: torch.nn.Module) -> bool:
    names = {clean_name(module, raw) for raw, _ in module.named_parameters()}
    return names <= model.tensors.keys()


def _by_order(groups: Sequence[Sequence[int]], shapes: Mapping[int, StateShapes], model: Model) -> Naming:
    if not model.is_ordered:
        return Naming({}, "the tensors do not stand in the order of the model")
    return name_parameters(groups, _fits(shapes), model.parameters())


def _by_module(groups: Sequence[Sequence[int]], shapes: Mapping[int, StateShapes], module: torch.nn.Module) -> Naming:
    """Name parameters by a live model: by all of its parameters, or by those alone that are trained."""
    named = [(clean_name(module, raw), parameter) for raw, parameter in module.named_parameters()]
    every = {name: tuple(parameter.shape) for name, parameter in named}
    trained = {name: tuple(parameter.shape) for name, parameter in named if parameter.requires_grad}
    is_trained = len(trained) == sum(map(len, groups))
    return name_parameters(groups, _fits(shapes), trained if is_trained else every)


def _as_given(
    component: str,
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, StateShapes],
    models: Sequence[Model],
    names: list[str],
    location: str,
) -> tuple[str, Naming]:
    """Return the names that the user gave, in the order of the optimizer, or, where only that fits the shapes of the
    state, in the order of the model."""
    numbers = [number for group in groups for number in group]
    where: dict[str, Any] = {"component": component, "file": location}
    if len(names) != len(numbers) or len(set(names)) < len(names):
        raise UsageError(
            f"parameters= has {len(set(names))} different names, and the optimizer {len(numbers)} parameters",
            advice="give every parameter of the optimizer once, in its order",
            **where,
        )
    owner = next((model for model in models if set(names) <= model.tensors.keys()), None)
    if owner is None:
        known = {name for model in models for name in model.tensors}
        unknown = [name for name in names if name not in known]
        raise UsageError(
            f"no model of the source has all of parameters=; unknown are {', '.join(map(repr, unknown[:8])) or 'none'}",
            advice="give names of one model as its state dict has them, without prefixes of wrappers",
            **where,
        )
    named = dict(zip(numbers, names, strict=True))
    wrong = [number for number in shapes if not shapes[number].fits(owner.tensors[named[number]].shape)]
    if not wrong:
        return owner.component, Naming(named)
    naming = name_parameters(groups, _fits(shapes), {name: owner.tensors[name].shape for name in names})
    if naming.names:
        return owner.component, naming
    name = named[wrong[0]]
    shape = owner.tensors[name].shape
    found = shapes[wrong[0]].contradiction(shape) or ()
    raise UsageError(
        f"parameter {wrong[0]} is '{name}' by parameters=, whose shape is {list(shape)}, and its "
        f"state has {list(found)}; as the order of the model, {naming.problem}",
        advice="give the names in the order of the optimizer",
        **where,
    )


def _unflattened(stored: Mapping[str, Any], models: Sequence[Model]) -> dict[str, Any]:
    """Return flattened state (`state.NAME.KEY`, `param_groups.NAME.OPTION`) by name. Parameters with the same options
    are one group: which of them were in separate groups is not stored."""
    known = {raw for model in models for raw in (*model.tensors, *model.cleaned)}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in stored.items():
        head, _, rest = str(key).partition(".")
        name, entry = _split(rest, known)
        (state if head == "state" else options).setdefault(name, {})[entry] = own_values(value)
    order = {name: number for number, name in enumerate(name for model in models for name in model.tensors)}
    groups: dict[str, dict[str, Any]] = {}
    for name in sorted(options, key=lambda one: order.get(one, len(order))):
        group = groups.setdefault(json.dumps(options[name], sort_keys=True, default=repr), {**options[name]})
        group.setdefault("params", []).append(name)
    return {"state": state, "param_groups": list(groups.values())}


def _split(path: str, known: set[str]) -> tuple[str, str]:
    """Return the parameter and the entry that a flattened key names. Entries may have dots, where the name is known."""
    position = path.rfind(".")
    while position > 0:
        if path[:position] in known:
            return path[:position], path[position + 1 :]
        position = path.rfind(".", 0, position)
    name, _, entry = path.rpartition(".")
    return name, entry
