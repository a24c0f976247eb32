"""The models of a source that may have the parameters of an optimizer, and how a user says which one and how they are
called. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from holdfast.errors import UsageError
from holdfast.formats.source import TensorEntry
from holdfast.ondisk.regions import Shape

__all__ = ["Given", "Model", "Parameters", "Place", "likeliest", "models_meant", "place_of"]

Parameters: TypeAlias = "torch.nn.Module | str | Sequence[str] | tuple[str, torch.nn.Module | Sequence[str]]"
"""How a user names parameters: the model, the names in the optimizer's own order, the component of the source's model
that has them, or that component and one of the others."""

Named = TypeVar("Named")

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


class Given(NamedTuple):
    """What a user says of the parameters of an optimizer: the component of their model, empty where it is not said, and
    the live model or the names; None where these are not said."""

    component: str = ""
    names: torch.nn.Module | tuple[str, ...] | None = None

    @classmethod
    def of(cls, parameters: Any) -> Given:
        """Return what a value of `parameters=` says; an error for one that names no parameters."""
        if isinstance(parameters, str):
            return cls(parameters)
        is_pair = isinstance(parameters, tuple) and len(parameters) == 2 and not isinstance(parameters[1], str)
        component, names = parameters if is_pair else ("", parameters)
        is_names = isinstance(names, Sequence) and not isinstance(names, str)
        if is_names and isinstance(component, str) and all(isinstance(name, str) for name in names):
            return cls(component, tuple(names))
        if isinstance(names, torch.nn.Module) and isinstance(component, str):
            return cls(component, names)
        raise UsageError(
            f"parameters= has {parameters!r:.100}",
            advice="give a module, the names in the order of the optimizer, the component of the model, or a pair of "
            "the component and one of these",
        )


class Place(NamedTuple):
    """Where an error is: the optimizer's component and the source."""

    component: str
    file: str


def place_of(entry: TensorEntry) -> object | None:
    """Return where a tensor lies in its source: two that lie in one place are one tensor. None for an empty one."""
    if not entry.chunks or 0 in entry.shape:
        return None
    chunks = tuple((chunk.file.name, chunk.start, chunk.box, chunk.strides) for chunk in entry.chunks)
    return entry.dtype, entry.shape, chunks


def models_meant(models: Sequence[Model], given: Given, place: Place) -> Sequence[Model]:
    """Return the models that may have the parameters: all, or the one that the user names."""
    if not given.component:
        return models
    meant = [model for model in models if model.component == given.component]
    if not meant:
        raise UsageError(
            f"parameters= names '{given.component}', which is no model of the source",
            advice=f"there are: {', '.join(model.component for model in models) or 'none'}",
            **place._asdict(),
        )
    return meant


def likeliest(found: Sequence[tuple[Model, Named]], what: str, place: Place) -> tuple[Model, Named] | None:
    """Return the only model that fits, or the only certain one of several; None where none does. Several are an error:
    nothing but the user knows whose parameters an optimizer has if the models are alike."""
    certain = [one for one in found if one[0].is_certain]
    if len(found) > 1 and len(certain) != 1:
        components = [model.component for model, _ in found]
        raise UsageError(
            f"the parameters of {' and '.join(map(repr, components))} have the same {what}, and the source does not "
            "say whose the optimizer has",
            advice=f"say it by the component of the model: parameters={{'{place.component}': '{components[0]}'}}, or "
            f"('{components[0]}', NAMES) where the names are in doubt, too",
            **place._asdict(),
        )
    return (certain if len(found) > 1 else found)[0] if found else None
