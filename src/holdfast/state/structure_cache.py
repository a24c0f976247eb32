"""Recognise a state whose structure is known, so that its tensors can be taken without walking through it anew.

A component's fresh state and what is remembered of the last one enter; the tensors in their known order and the values
leave, or None when anything about the structure is new. To walk and name 20,000 tensors takes longer than to copy them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import msgspec
import torch

from holdfast.ondisk.codec import Json, encode
from holdfast.state.tensors import any_sharded, is_sharded
from holdfast.state.trees import CapturedTree

__all__ = ["Remembered", "remember"]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A dict of nothing but tensors."""

    keys: tuple[str, ...]
    text: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Dict:
    """A dict of dicts of tensors and of other things."""

    keys: tuple[str, ...]
    children: tuple[_Tensors | _Dict | _Other, ...]
    text: msgspec.Raw | None


@dataclass(frozen=True, slots=True)
class _Other:
    """Anything else that holds no tensor: encoded anew each time."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The structure of one tree, and the tree itself with its tensors left out."""

    tree: CapturedTree
    structure: _Tensors | _Dict
    specs: list[Any]
    sharing: tuple[list[int], list[Any]]
    paths: tuple[str, ...]
    picks: tuple[int, ...]

    def recognise(self, state: Any) -> CapturedTree | None:
        """Return the tree of a state with the same structure; None for any other."""
        found: list[torch.Tensor] = []
        values = _match(self.structure, state, self.tree, found)
        if values is _UNKNOWN or len(found) != len(self.sharing[0]):
            return None
        if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, found))):
            return None
        if _specs(found) != self.specs or _sharing(found) != self.sharing:
            return None
        tensors = dict(zip(self.paths, [found[index] for index in self.picks], strict=True))
        tree = self.tree
        return replace(tree, values=values, tensors=tensors)


_UNKNOWN: Any = object()
_COLUMNS = (type, *map(attrgetter, ("dtype", "shape", "device", "layout")), torch.Tensor.is_contiguous)


def remember(tree: CapturedTree, state: Any) -> Remembered | None:
    """Return what is needed to recognise the next state like this one; None for a state that is not of plain dicts."""
    found: list[torch.Tensor] = []
    structure = _structure(state, tree.values, found)
    if not isinstance(structure, _Tensors | _Dict):
        return None
    first: dict[int, int] = {}
    for index, tensor in enumerate(found):
        first.setdefault(id(tensor), index)
    picks = [first.get(id(tensor)) for tensor in tree.tensors.values()]
    if any(index is None for index in picks):
        return None  # tensors in a list or an object of its own: rare, and walked through each time
    bare = replace(tree, values=None, tensors={})
    return Remembered(
        bare,
        structure,
        _specs(found),
        _sharing(found),
        tuple(tree.tensors),
        tuple(index for index in picks if index is not None),
    )


def _structure(state: Any, values: Json, found: list[torch.Tensor]) -> _Tensors | _Dict | _Other | None:
    """Return the structure of a state, next to its encoded form; None where a tensor hides in something else."""
    if not _is_plain(state) or not isinstance(values, dict) or tuple(values) != tuple(state):
        return _Other() if not any(True for _ in _tensors_in(values)) else None
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        found.extend(state.values())
        return _Tensors(tuple(state), msgspec.Raw(msgspec.json.encode(values)))
    children = []
    for key, value in state.items():
        child = None if isinstance(value, torch.Tensor) else _structure(value, values[key], found)
        if isinstance(value, torch.Tensor):
            found.append(value)
            child = _Tensors((), msgspec.Raw(msgspec.json.encode(values[key])))
        if child is None:
            return None
        children.append(child)
    fixed = bool(children) and not any(
        isinstance(child, _Other) or (isinstance(child, _Dict) and child.text is None) for child in children
    )
    return _Dict(tuple(state), tuple(children), msgspec.Raw(msgspec.json.encode(values)) if fixed else None)


def _match(node: Any, state: Any, tree: CapturedTree, found: list[torch.Tensor], path: tuple[str, ...] = ()) -> Any:
    """Return the values of a state that fits the structure, with ready-made text where nothing can have changed."""
    if isinstance(node, _Other):
        return _encoded(state, tree, path)
    if isinstance(node, _Tensors) and not node.keys:
        if not isinstance(state, torch.Tensor):
            return _UNKNOWN
        found.append(state)
        return node.text
    if type(state) is not dict or tuple(state) != node.keys:
        return _UNKNOWN
    if isinstance(node, _Tensors):
        found.extend(state.values())
        return node.text
    parts = {}
    for key, child in zip(node.keys, node.children, strict=True):
        part = _match(child, state[key], tree, found, (*path, key))
        if part is _UNKNOWN:
            return _UNKNOWN
        parts[key] = part
    return node.text if node.text is not None else parts


def _encoded(state: Any, tree: CapturedTree, path: tuple[str, ...]) -> Any:
    """Return a value that is no tensor, by the codec. One that has tensors in it by now is not what is remembered."""
    seen: list[str] = []

    def note(name: str, tensor: Any) -> str:
        seen.append(name)
        return name

    values = encode(state, path=".".join((tree.component, *path)), on_tensor=note)
    return _UNKNOWN if seen else values


def _specs(tensors: list[torch.Tensor]) -> list[Any]:
    """Return all that must be the same about each tensor, in columns: there may be very many."""
    plain = _locals(tensors)
    placed = [one._spec for one in tensors if is_sharded(one)] if any_sharded(tensors) else []
    columns = [list(map(column, plain)) for column in _COLUMNS]
    strides = [one.stride() for one in compress(plain, map(not_, columns[-1]))]
    return [*columns, strides, list(map(type, tensors)), placed]


def _sharing(tensors: list[torch.Tensor]) -> tuple[list[int], list[Any]]:
    """Return which tensors begin at the same place in memory: for each, the first that does; and their views of it:
    they are one tensor only if the views are equal."""
    plain = _locals(tensors)
    # One without memory shares with none, so it gets its own place.
    places = [one.data_ptr() or -index - 1 for index, one in enumerate(plain)]
    first: dict[int, int] = {}
    firsts = [first.setdefault(place, index) for index, place in enumerate(places)]
    if len(first) == len(places):
        return firsts, []
    shared = {places[index] for index, earlier in enumerate(firsts) if earlier != index}
    views = [
        (one.stride(), one.is_conj(), one.is_neg()) for one, place in zip(plain, places, strict=True) if place in shared
    ]
    return firsts, views


def _locals(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not any_sharded(tensors):
        return tensors
    return [one._local_tensor if is_sharded(one) else one for one in tensors]


def _is_plain(state: Any) -> bool:
    return type(state) is dict and all(type(key) is str and not key.startswith("$") for key in state)


def _tensors_in(values: Json) -> Iterator[str]:
    if isinstance(values, Mapping):
        if "$tensor" in values or "$ndarray" in values:
            yield "here"
        for value in values.values():
            yield from _tensors_in(value)
    elif isinstance(values, list):
        for value in values:
            yield from _tensors_in(value)
