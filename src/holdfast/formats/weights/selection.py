"""Find the weights in a source: which part of its tree is the model. A tree enters; tensors by name leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.formats.source import Source, TensorEntry, tensors_of

__all__ = [
    "MODEL_NAMES",
    "find_extra_states",
    "find_model",
    "find_weights",
    "is_state_dict",
    "part_of",
    "united",
]

# What trainings call the model in the dict that they give to torch.save, in the order in which they are looked for.
MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "network", "net", "weights")


def find_weights(source: Source, component: str | None = None) -> dict[str, TensorEntry]:
    """Return the tensors of the model by their names in it.

    `component` is the path of the model in the source's tree, such as `model` or `state.model`. Without it the model is
    what the format knows to be one, the whole source when that is nothing but tensors, or what has a usual name. More
    than one of these is a UsageError that lists them: nothing is guessed. The stages of a pipeline are put together.
    """
    found = tensors_of(_model_in(source, component))
    if not found:
        where = f"'{component}' has" if component else "the source has"
        raise UsageError(f"{where} no tensors", file=source.location, advice="name the part with the model")
    return found


def find_extra_states(source: Source, component: str | None = None) -> dict[str, Any]:
    """Return the extra states of the model that are no tensors, by their names."""
    part = _model_in(source, component)
    if not isinstance(part, Mapping):
        return {}
    return {
        str(name): value
        for name, value in part.items()
        if str(name).rpartition(".")[2] == "_extra_state" and not isinstance(value, TensorEntry)
    }


def find_model(source: Source) -> dict[str, Any]:
    """Return all of the model by its names in it: tensors, and values that are no tensors, in the order of the source.

    Where tensors are nested, the names are dotted paths. A part without tensors is one value.
    """
    part = _model_in(source, None)
    found: dict[str, Any] = {}
    if isinstance(part, Mapping):
        _flatten(part, "", found)
    return found


def _flatten(part: Any, path: str, found: dict[str, Any]) -> None:
    for key, value in part.items() if isinstance(part, Mapping) else enumerate(part):
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping | list | tuple) and tensors_of(value):
            _flatten(value, name, found)
        elif name in found:
            raise CorruptCheckpointError("two values have the same name", leaf=name)
        else:
            found[name] = value


def _model_in(source: Source, component: str | None) -> Any:
    scopes = _scopes_of(source, component)
    if scopes:
        return united(source, scopes)
    return part_of(source.tree, _place_of_weights(source, component), source.location)


def _scopes_of(source: Source, component: str | None) -> list[str]:
    """Return the trees of a model that is stored in several scopes, such as the stages of a pipeline; none for a model
    that is stored as one."""
    known = source.weights_trees()
    components = dict.fromkeys(tree.partition("@")[0] for tree in known)
    if component is None and ("model" in components or len(components) == 1):
        component = "model" if "model" in components else next(iter(components))
    return [] if component in known else [tree for tree in known if tree.partition("@")[0] == component]


def united(source: Source, trees: Sequence[str]) -> dict[str, Any]:
    """Return the trees of several scopes of a component as one. A name that two of them have is an error."""
    found: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for tree in trees:
        part = source.tree[tree]
        for key, value in part.items() if isinstance(part, Mapping) else [("", part)]:
            if key in found:
                raise UsageError(
                    f"'{key}' is in both '{owner[key]}' and '{tree}'",
                    component=tree.partition("@")[0],
                    file=source.location,
                    advice=f"name one of them, as '{tree}'",
                )
            found[key], owner[key] = value, tree
    return found


def _place_of_weights(source: Source, component: str | None) -> str:
    """Return the path of the model in the source's tree."""
    if component is not None:
        return component
    known = source.weights_trees()
    if known:
        if "model" in known or len(known) == 1:
            return "model" if "model" in known else known[0]
        raise _ambiguous(source, known)
    if is_state_dict(source.tree):
        return ""
    usual = [name for name in MODEL_NAMES if tensors_of(source.tree.get(name))]
    candidates = usual or [str(name) for name, value in source.tree.items() if tensors_of(value)]
    if len(candidates) == 1 or candidates[:1] == ["model"]:
        return _innermost(source, candidates[0])
    raise _ambiguous(source, candidates)


def part_of(tree: Any, path: str, location: str = "") -> Any:
    """Return the part of a tree at a dotted path. Keys may have dots themselves."""
    if not path:
        return tree
    if isinstance(tree, Mapping):
        for key in tree:
            name = str(key)
            if path == name:
                return tree[key]
            if path.startswith(f"{name}."):
                return part_of(tree[key], path[len(name) + 1 :], location)
    if isinstance(tree, list | tuple):
        head, _, rest = path.partition(".")
        if head.isdigit() and int(head) < len(tree):
            return part_of(tree[int(head)], rest, location)
    known = ", ".join(str(key) for key in list(tree)[:20]) if isinstance(tree, Mapping) else "no names"
    raise UsageError(f"the source has nothing at '{path}'", file=location or None, advice=f"there: {known}")


def _innermost(source: Source, name: str) -> str:
    """Return the path of a part, or of what has a usual name in it, as in `{"state": {"model": ...}}`."""
    part = source.tree[name]
    if not is_state_dict(part) and isinstance(part, Mapping):
        inner = [usual for usual in MODEL_NAMES if tensors_of(part.get(usual))]
        if len(inner) == 1:
            return f"{name}.{inner[0]}"
    return name


def is_state_dict(tree: Any) -> bool:
    """Return whether a dict is the state dict of a model: tensors by dotted names, and extra states among them."""
    if not isinstance(tree, Mapping) or not tree:
        return False
    return all(
        isinstance(value, TensorEntry) or str(name).rpartition(".")[2] == "_extra_state" for name, value in tree.items()
    )


def _ambiguous(source: Source, candidates: Sequence[str]) -> UsageError:
    listed = ", ".join(candidates[:20]) or "none with tensors"
    return UsageError(
        "the source does not say which part of it is the model",
        file=source.location,
        advice=f"name it with component=; there are: {listed}",
    )
