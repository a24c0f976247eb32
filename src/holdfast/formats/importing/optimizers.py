"""Bring the state of an optimizer into the form that a manager stores: by the names of parameters. Trees enter and
leave; what cannot be named is an error that says how to name it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import UsageError
from holdfast.formats.importing.models import Given, Model, Place, likeliest, models_meant
from holdfast.formats.importing.naming import find_names
from holdfast.formats.importing.parts import own_values

__all__ = ["NamedState", "named_state"]


class NamedState(NamedTuple):
    """The state of an optimizer by names, the model whose parameters these are (empty where none has all), and what was
    done."""

    value: dict[str, Any]
    model: str
    changes: tuple[str, ...] = ()


def named_state(
    component: str, stored: Mapping[str, Any], models: Sequence[Model], given: Given, location: str
) -> NamedState:
    """Return the state of an optimizer in the form in which a manager stores it. `models`: those that are certain come
    first, and count more than others that fit as well."""
    place = Place(component, location)
    models = models_meant(models, given, place)
    value = _unflattened(stored, models) if "param_groups" not in stored else own_values(stored)
    value["state"] = dict(value.get("state", {}))
    value["param_groups"] = _listed(value["param_groups"])
    value = _numbered(value, models)
    _require_known_state(value, place)
    numbers = [number for group in value["param_groups"] for number in group["params"]]
    if all(isinstance(name, str) for name in numbers):
        return _by_name(value, models, place)
    if not all(isinstance(number, int) for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(
            "the groups of the optimizer name their parameters neither by number nor by name",
            **place._asdict(),
            advice="leave it out with skip=",
        )
    model, names = find_names(value, models, given.names, place)
    changes = (f"{component}: {len(names)} parameters named as in '{model}'",)
    return NamedState(_renamed(value, names), model, changes)


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


def _require_known_state(value: Mapping[str, Any], place: Place) -> None:
    """Refuse state that belongs to no parameter: it is that of a parameter under a key that is not understood, and
    without it the training would begin anew."""
    known = {name for group in value["param_groups"] for name in group["params"]}
    unknown = [key for key in value["state"] if key not in known]
    if unknown:
        raise UsageError(
            f"the optimizer has state under {', '.join(map(repr, unknown[:8]))}"
            f"{' and more' if len(unknown) > 8 else ''}, and no group has such a parameter",
            **place._asdict(),
            advice="leave the optimizer out with skip=",
        )


def _by_name(value: dict[str, Any], models: Sequence[Model], place: Place) -> NamedState:
    """Return state that has names already, under the names without wrappers."""
    names = {name for group in value["param_groups"] for name in group["params"]}
    cleaned = [(model, {name: model.cleaned.get(name, name) for name in names}) for model in models if names]
    found = [(model, clean) for model, clean in cleaned if set(clean.values()) <= model.tensors.keys()]
    chosen = likeliest(found, "names", place)
    return NamedState(value, "") if chosen is None else NamedState(_renamed(value, chosen[1]), chosen[0].component)


def _renamed(value: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in value["param_groups"]]
    state = {names[key]: inner for key, inner in value["state"].items()}
    return {**value, "state": state, "param_groups": groups}


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
