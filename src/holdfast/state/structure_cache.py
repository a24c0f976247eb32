"""Recognise a state whose structure is known, so that its tensors can be taken without walking through it anew.

A component's fresh state and what is remembered of the last one enter; the tensors in their known order and the values
leave, or None when anything about the structure is new. To walk and name 20,000 tensors takes longer than to copy them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
import numpy
import torch

from holdfast.ondisk.codec import Json, encode
from holdfast.state.signatures import Signature
from holdfast.state.trees import CapturedTree

__all__ = ["Recognised", "Remembered", "remember"]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor."""

    text: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of numpy that is stored as a tensor."""

    dtype: str
    text: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A dict of nothing but tensors."""

    keys: tuple[str, ...]
    text: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Texts:
    """A list of nothing but texts, such as the names of an optimizer's parameters."""

    texts: list[str]
    text: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Dict:
    """A dict of any of these. `others` are the keys of what holds no tensor. `text` is there if all of it is fixed."""

    keys: tuple[str, ...]
    children: tuple[_Node, ...]
    others: tuple[str, ...]
    text: msgspec.Raw | None


@dataclass(frozen=True, slots=True)
class _List:
    """A list of any of these, not only of others."""

    children: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Other:
    """Anything else that holds no tensor: encoded anew each time."""


_Node: TypeAlias = _Tensor | _Array | _Tensors | _Texts | _Dict | _List | _Other


@dataclass(frozen=True, slots=True)
class Recognised:
    """A tree of known structure, and where the bytes of each of its tensors lie, as `Signature.addresses_of` has it."""

    tree: CapturedTree
    addresses: list[int]


@dataclass(frozen=True, slots=True)
class Remembered:
    """The structure of one tree, and the tree itself with its tensors left out. `picks` are the tensors of the tree
    among all that the structure has, None if it is all of them in this order."""

    tree: CapturedTree
    structure: _Node
    signature: Signature
    paths: tuple[str, ...]
    picks: tuple[int, ...] | None

    def recognise(self, state: Any, keep: list[Any] | None = None) -> Recognised | None:
        """Return the tree of a state with the same structure; None for any other. `keep`: as of the signature."""
        found: list[torch.Tensor] = []
        values = _match(self.structure, state, self.tree, found)
        addresses = self.signature.addresses_of(found, keep) if values is not _UNKNOWN else None
        if addresses is None:
            return None
        if self.picks is not None:
            found, addresses = [found[index] for index in self.picks], [addresses[index] for index in self.picks]
        tensors = dict(zip(self.paths, found, strict=True))
        return Recognised(replace(self.tree, values=values, tensors=tensors), addresses)


_UNKNOWN: Any = object()
_TEXT = frozenset({str})
_CONTAINERS = (torch.Tensor, numpy.ndarray, dict, list)


def remember(tree: CapturedTree, state: Any) -> Remembered | None:
    """Return what is needed to recognise the next state like this one; None for a state that is not of plain dicts."""
    found: list[torch.Tensor] = []
    structure = _structure(state, tree.values, tree, found)
    if not isinstance(structure, _Tensors | _Dict):
        return None
    first: dict[int, int] = {}
    for index, tensor in enumerate(found):
        first.setdefault(id(tensor), index)
    picks = tuple(first.get(id(tensor), -1) for tensor in tree.tensors.values())
    if -1 in picks:
        return None  # tensors in a tuple or an object of its own: rare, and walked through each time
    bare = replace(tree, values=None, tensors={})
    in_order = picks == tuple(range(len(found)))
    return Remembered(bare, structure, Signature(found), tuple(tree.tensors), None if in_order else picks)


def _structure(state: Any, values: Json, tree: CapturedTree, found: list[torch.Tensor]) -> _Node | None:
    """Return the structure of a state, next to its encoded form; None where a tensor hides in something else."""
    if isinstance(state, torch.Tensor):
        if not isinstance(values, dict) or values.keys() != {"$tensor"}:
            return None  # of a wrapper subclass: its context and the tensors in it are no part of a signature
        found.append(state)
        return _Tensor(_raw(values))
    if isinstance(values, dict) and _is_plain(state) and tuple(values) == tuple(state):
        return _dict_structure(state, values, tree, found)
    if type(state) is list and isinstance(values, list):
        if state and all(type(one) is str for one in state):
            return _Texts(list(state), _raw(values))
        if any(isinstance(one, _CONTAINERS) for one in state):
            children = [_structure(one, part, tree, found) for one, part in zip(state, values, strict=True)]
            return None if None in children else _List(tuple(one for one in children if one is not None))
    stored: Any = values.get("$ndarray") if type(state) is numpy.ndarray and isinstance(values, dict) else None
    if isinstance(stored, dict) and "tensor" in stored:
        found.append(tree.tensors[stored["tensor"]])
        return _Array(stored["dtype"], _raw(values))
    return None if any(True for _ in _tensors_in(values)) else _Other()


def _dict_structure(
    state: dict[str, Any], values: dict[str, Json], tree: CapturedTree, found: list[torch.Tensor]
) -> _Node | None:
    children = [_structure(value, values[key], tree, found) for key, value in state.items()]
    if children and all(type(child) is _Tensor for child in children):
        return _Tensors(tuple(state), _raw(values))
    if None in children:
        return None
    others = tuple(key for key, child in zip(state, children, strict=True) if type(child) is _Other)
    # Texts are not: a list of other ones has the same structure.
    is_fixed = bool(children) and all(
        isinstance(child, _Tensor | _Array | _Tensors) or (isinstance(child, _Dict) and child.text is not None)
        for child in children
    )
    known = tuple(child for child in children if child is not None)
    return _Dict(tuple(state), known, others, _raw(values) if is_fixed else None)


def _raw(values: Json) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(values))


def _match(node: Any, state: Any, tree: CapturedTree, found: list[torch.Tensor], path: tuple[str, ...] = ()) -> Any:
    """Return the values of a state that fits the structure, with ready-made text where nothing can have changed."""
    # By the exact type, and the most frequent first: there may be very many.
    kind = type(node)
    if kind is _Tensors:
        if not _has_keys(state, node.keys):
            return _UNKNOWN
        found.extend(state.values())
        return node.text
    if kind is _Tensor:
        found.append(state)
        return node.text
    if kind is _Dict:
        return _match_dict(node, state, tree, found, path)
    if kind is _List:
        return _match_list(node, state, tree, found, path)
    if kind is _Texts:
        is_same = type(state) is list and state == node.texts and _TEXT.issuperset(map(type, state))
        return node.text if is_same else _encoded(state, tree, path)
    if kind is _Array:
        return _match_array(node, state, tree, found, path)
    return _encoded(state, tree, path)


def _has_keys(state: Any, keys: tuple[str, ...]) -> bool:
    """Return whether a state is a plain dict with these keys: one of a class of its own may equal a text."""
    return type(state) is dict and tuple(state) == keys and _TEXT.issuperset(map(type, state))


def _match_dict(node: Any, state: Any, tree: CapturedTree, found: list[torch.Tensor], path: tuple[str, ...]) -> Any:
    if not _has_keys(state, node.keys):
        return _UNKNOWN
    # All at once: a call of the encoder costs more than a value does.
    parts = _encoded({key: state[key] for key in node.others}, tree, path) if node.others else {}
    if parts is _UNKNOWN:
        return _UNKNOWN
    for key, child in zip(node.keys, node.children, strict=True):
        if type(child) is not _Other:
            part = parts[key] = _match(child, state[key], tree, found, (*path, key))
            if part is _UNKNOWN:
                return _UNKNOWN
    if node.text is not None:
        return node.text
    return {key: parts[key] for key in node.keys}


def _match_list(node: Any, state: Any, tree: CapturedTree, found: list[torch.Tensor], path: tuple[str, ...]) -> Any:
    if type(state) is not list or len(state) != len(node.children):
        return _UNKNOWN
    parts = [
        _match(child, one, tree, found, (*path, str(index)))
        for index, (child, one) in enumerate(zip(node.children, state, strict=True))
    ]
    return _UNKNOWN if any(part is _UNKNOWN for part in parts) else parts


def _match_array(node: Any, state: Any, tree: CapturedTree, found: list[torch.Tensor], path: tuple[str, ...]) -> Any:
    tensors: list[torch.Tensor] = []

    def note(name: str, tensor: torch.Tensor) -> str:
        tensors.append(tensor)
        return name

    values: Any = encode(state, path=".".join((tree.component, *path)), on_tensor=note)
    if type(state) is not numpy.ndarray or len(tensors) != 1 or values["$ndarray"]["dtype"] != node.dtype:
        return _UNKNOWN
    found += tensors
    return node.text


def _encoded(state: Any, tree: CapturedTree, path: tuple[str, ...]) -> Any:
    """Return a value that is no tensor, by the codec. One that has tensors in it by now is not what is remembered."""
    seen: list[str] = []

    def note(name: str, tensor: Any) -> str:
        seen.append(name)
        return name

    values = encode(state, path=".".join((tree.component, *path)), on_tensor=note)
    return _UNKNOWN if seen else values


def _is_plain(state: Any) -> bool:
    return type(state) is dict and all(type(key) is str and not key.startswith("$") for key in state)


def _tensors_in(values: Json) -> Iterator[str]:
    if isinstance(values, Mapping):
        if "$tensor" in values or "$ndarray" in values:
            yield "here"
        for value in values.values():
            if isinstance(value, Mapping | list):
                yield from _tensors_in(value)
    elif isinstance(values, list):
        # Such as the hundreds of numbers of a random state, at each save.
        for value in values:
            if type(value) is dict or type(value) is list:
                yield from _tensors_in(value)
