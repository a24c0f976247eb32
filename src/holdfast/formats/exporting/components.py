"""Find the components of a source that an export asks for. A source and names enter; trees of tensors and values leave.

A component that a checkpoint has in several scopes, such as the stages of a pipeline, is put together where no name is
in two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import UsageError
from holdfast.formats.own import OwnSource
from holdfast.formats.source import Source, TensorEntry
from holdfast.formats.weights.selection import MODEL_NAMES, find_model, is_state_dict, part_of, united
from holdfast.ondisk.codec import Subclass

__all__ = ["component_names", "component_of", "frozen_bases", "models_among", "refuse_subclasses", "values_of"]

_USUAL_MODEL = "model"


def component_names(only: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of components that `only` has, which is one name or several."""
    names = (
        (only,) if isinstance(only, str) else tuple(only) if isinstance(only, list | tuple | set | frozenset) else ()
    )
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"only={only!r:.100}", advice="give the name of a component, or a list of names")
    if len(set(names)) != len(names):
        raise UsageError(f"only={only!r:.100} has a name twice")
    return names


def component_of(source: Source, name: str) -> Mapping[str, Any]:
    """Return the tree of one component, with its own names: those of the model for a model."""
    if isinstance(source, OwnSource):
        found = _own_component(source, name)
    elif name == _USUAL_MODEL:
        # What a file of another format has no name for is the model.
        found = find_model(source)
    else:
        found = part_of(source.tree, name, source.location)
    if not isinstance(found, Mapping) or not found:
        raise UsageError(f"'{name}' has no tensors by name", component=name, file=source.location)
    return found


def _own_component(source: OwnSource, name: str) -> Any:
    trees = [tree.name for tree in source.reader.trees if name in (tree.component, tree.name)]
    if not trees:
        known = dict.fromkeys(tree.component for tree in source.reader.trees)
        raise UsageError(
            f"the checkpoint has no component '{name}'",
            file=source.location,
            advice=f"export one of: {', '.join(known)}",
        )
    return source.tree[trees[0]] if len(trees) == 1 else united(source, trees)


def models_among(source: Source, parts: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the components that are models, which alone are converted to another element type: a step
    counter or a moment of an optimizer must not be rounded. None among them is an error.

    A model is what the checkpoint knows as one and what has a usual name of one. A component that is asked for alone is
    a model as well if it has nothing but tensors by name, such as the averaged weights of a model, and is no optimizer.
    """
    models = frozenset(name for name in parts if _is_model(source, name))
    if not models and len(parts) == 1:
        models = frozenset(
            name for name, part in parts.items() if is_state_dict(part) and not _is_optimizer(source, name)
        )
    if not models:
        raise UsageError(
            f"dtype= converts the weights of models, and none of these is a model: {', '.join(parts)}",
            file=source.location,
            advice="leave dtype= out, or export a model",
        )
    return models


def _is_model(source: Source, name: str) -> bool:
    if isinstance(source, OwnSource):
        kinds = _kinds(source, name)
        return kinds == {"module"} or (name.partition("@")[0] == _USUAL_MODEL and "optimizer" not in kinds)
    return name.rpartition(".")[2] in MODEL_NAMES


def _is_optimizer(source: Source, name: str) -> bool:
    return isinstance(source, OwnSource) and "optimizer" in _kinds(source, name)


def _kinds(source: OwnSource, name: str) -> set[str]:
    return {tree.kind for tree in source.reader.trees if name in (tree.component, tree.name)}


def frozen_bases(source: Source) -> frozenset[str]:
    """Return the components of which the checkpoint lacks the frozen part, as a `Trainable` model stores it."""
    if not isinstance(source, OwnSource):
        return frozenset()
    guards = source.checkpoint.manifest.guards
    return frozenset(name.removeprefix("frozen:") for name in guards if name.startswith("frozen:"))


def refuse_subclasses(tree: Any, component: str) -> None:
    """Raise for a tensor that is stored as the parts of a tensor subclass, which other formats have no form for."""
    for path, value in _leaves(tree, ""):
        if isinstance(value, Subclass):
            raise UsageError(
                f"this is a tensor of class '{value.name}', which is stored in parts; other formats cannot hold it",
                component=component,
                leaf=path,
                advice="restore the checkpoint into a model, convert the tensor to a plain one, and save that",
            )


def values_of(tree: Any) -> list[str]:
    """Return the paths of the values that are no tensors."""
    return [path for path, value in _leaves(tree, "") if not isinstance(value, TensorEntry)]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple) and not isinstance(value, Subclass):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
