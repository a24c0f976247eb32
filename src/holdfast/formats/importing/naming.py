"""Find the model that has the parameters of an optimizer by number, and the name of each. State, models and what the
user says enter; names leave, or an error that says what is in doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.errors import UsageError
from holdfast.formats.importing.models import Model, Place, likeliest
from holdfast.formats.importing.parameters import Naming, name_parameters
from holdfast.formats.importing.parts import without_wrappers
from holdfast.formats.importing.shapes import StateShapes
from holdfast.ondisk.regions import Shape
from holdfast.state.names import clean_name

__all__ = ["find_names"]

_ADVICE = "give the model as parameters=, or the names of its parameters in the order of the optimizer"


def find_names(
    value: Mapping[str, Any], models: Sequence[Model], given: torch.nn.Module | Sequence[str] | None, place: Place
) -> tuple[str, dict[int, str]]:
    """Return the model that has the parameters, and all their names by number; an error where that is not certain.
    Names in the source come before what the user gives, which comes before the order of the model."""
    module: Any = given if isinstance(given, torch.nn.Module) else None
    names = list(given) if given is not None and module is None else None
    numbered = _Numbered.of(value)
    count = len(numbered.numbers)
    if not count:
        return "", {}
    if names is not None and (len(names) != count or len(set(names)) < count):
        raise UsageError(
            f"parameters= has {len(set(names))} different names, and the optimizer {count} parameters",
            advice="give every parameter of the optimizer once, in its order",
            **place._asdict(),
        )
    candidates = models if module is None else [model for model in models if _has(model, module)]
    tried = _by_stated_names(numbered, candidates, names, is_needed=given is None, place=place)
    if tried is None and names is not None:
        tried = [(model, _by_list(numbered, model, names)) for model in _owners(candidates, names, place)]
    elif tried is None and module is not None:
        tried = [(model, _by_module(numbered, module)) for model in candidates]
    elif tried is None:
        tried = [(model, _by_order(numbered, model)) for model in candidates]
    chosen = likeliest([(model, naming.names) for model, naming in tried if naming.names], "shapes", place)
    if chosen is not None:
        return chosen[0].component, chosen[1]
    problems = {f"with '{model.component}', {naming.problem}" for model, naming in tried}
    raise UsageError(
        "the optimizer's state goes by number, and which parameter each number is cannot be determined: "
        + ("; ".join(sorted(problems)) or "the source has no model with such parameters"),
        advice=_ADVICE,
        **place._asdict(),
    )


class _Numbered(NamedTuple):
    """The numbers of an optimizer's parameters by group, what the state of each shows of its shape, and the names that
    the groups state; none where one of them does not."""

    groups: list[list[int]]
    shapes: dict[int, StateShapes]
    stated: list[str]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> _Numbered:
        groups = value["param_groups"]
        shapes = {number: StateShapes.of(state) for number, state in value["state"].items()}
        stated = [_stated_names(group) for group in groups if group["params"]]
        known = [name for names in stated for name in names] if all(stated) else []
        return cls([group["params"] for group in groups], shapes, known)

    @property
    def numbers(self) -> list[int]:
        return [number for group in self.groups for number in group]

    def fits(self, number: int, shape: Shape) -> bool:
        return number not in self.shapes or self.shapes[number].fits(shape)

    def contradiction(self, names: Mapping[int, str], model: Model, origin: str) -> str:
        """Return what is wrong with names of tensors of a model; empty where every state fits."""
        for number, name in names.items():
            shape = model.tensors[name].shape
            if not self.fits(number, shape):
                found = self.shapes[number].contradiction(shape) or ()
                return (
                    f"parameter {number} is '{name}' by {origin}, whose shape is {list(shape)}, and its state has "
                    f"{list(found)}"
                )
        return ""


def _stated_names(group: Mapping[str, Any]) -> list[str]:
    """Return the names that torch notes in a group which was made of named parameters."""
    names = group.get("param_names")
    if not isinstance(names, list | tuple) or len(names) != len(group["params"]):
        return []
    return list(names) if all(isinstance(name, str) for name in names) else []


def _by_stated_names(
    numbered: _Numbered, models: Sequence[Model], given: Sequence[str] | None, *, is_needed: bool, place: Place
) -> list[tuple[Model, Naming]] | None:
    """Return the naming by the names in the groups for each model that has them; None where they say nothing. Names
    that no model has may be made up: then the user has to say what they mean."""
    stated = numbered.stated
    if not stated:
        return None
    twice = next((name for name in stated if stated.count(name) > 1), None) if len(set(stated)) < len(stated) else None
    if twice is not None:
        raise UsageError(f"param_names of the source has '{twice}' twice", advice=_ADVICE, **place._asdict())
    unwrapped = without_wrappers(dict.fromkeys(stated))
    cleaned = [(model, [_clean(model, name, unwrapped[name]) for name in stated]) for model in models]
    owners = [(model, names) for model, names in cleaned if set(names) <= model.tensors.keys()]
    if owners:
        return [(model, _as_stated(numbered, model, names, given)) for model, names in owners]
    if not is_needed:
        return None
    known = {name for model in models for name in (*model.tensors, *model.cleaned)}
    unknown = [name for name in stated if name not in known and unwrapped[name] not in known]
    raise UsageError(
        f"no model of the source has all of param_names of the optimizer; unknown are {_listed(unknown)}",
        advice=_ADVICE,
        **place._asdict(),
    )


def _clean(model: Model, name: str, unwrapped: str) -> str:
    """Return a parameter's name as the model has it: what wraps the one need not wrap the other."""
    return model.cleaned.get(name) or (name if name in model.tensors else unwrapped)


def _as_stated(numbered: _Numbered, model: Model, names: Sequence[str], given: Sequence[str] | None) -> Naming:
    others = [name for name in given or () if name not in names]
    if others:
        return Naming({}, f"parameters= names {_listed(others)}, which param_names of the source does not")
    named = dict(zip(numbered.numbers, names, strict=True))
    problem = numbered.contradiction(named, model, "param_names of the source")
    return Naming({}, problem) if problem else Naming(named)


def _has(model: Model, module: torch.nn.Module) -> bool:
    names = {clean_name(module, raw) for raw, _ in module.named_parameters()}
    return names <= model.tensors.keys()


def _by_order(numbered: _Numbered, model: Model) -> Naming:
    if not model.is_ordered:
        return Naming({}, "the tensors do not stand in the order of the model")
    return name_parameters(numbered.groups, numbered.fits, model.parameters())


def _by_module(numbered: _Numbered, module: torch.nn.Module) -> Naming:
    """Name parameters by a live model: by all of its parameters, or by those alone that are trained."""
    named = [(clean_name(module, raw), parameter) for raw, parameter in module.named_parameters()]
    every = {name: tuple(parameter.shape) for name, parameter in named}
    trained = {name: tuple(parameter.shape) for name, parameter in named if parameter.requires_grad}
    is_trained = len(trained) == len(numbered.numbers)
    return name_parameters(numbered.groups, numbered.fits, trained if is_trained else every)


def _owners(models: Sequence[Model], names: Sequence[str], place: Place) -> list[Model]:
    owners = [model for model in models if set(names) <= model.tensors.keys()]
    if not owners:
        known = {name for model in models for name in model.tensors}
        unknown = [name for name in names if name not in known]
        raise UsageError(
            f"no model of the source has all of parameters=; unknown are {_listed(unknown)}",
            advice="give names of one model as its state dict has them, without prefixes of wrappers",
            **place._asdict(),
        )
    return owners


def _by_list(numbered: _Numbered, model: Model, names: Sequence[str]) -> Naming:
    """Name parameters as the user gave the names: in the order of the optimizer or, where only that fits the shapes of
    the state, in the order of the model."""
    named = dict(zip(numbered.numbers, names, strict=True))
    problem = numbered.contradiction(named, model, "parameters=")
    if not problem:
        return Naming(named)
    shapes = {name: model.tensors[name].shape for name in names}
    naming = name_parameters(numbered.groups, numbered.fits, shapes)
    return naming if naming.names else Naming({}, f"{problem}; as the order of the model, {naming.problem}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) or "none"
