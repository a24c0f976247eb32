"""Merge encoded values of several ranks, and find the tensors that values name. Knows the codec's form alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.ondisk.codec import Json

__all__ = ["references", "union_of"]

_PAIRS = ("$dict", "$counter")
_ITEMS = ("$ordereddict", "$defaultdict")


def union_of(first: Json, second: Json) -> Json:
    """Return what either of two values has: the keys of both mappings, the places of both lists that hold tensors or
    mappings, at every depth. Of what both have, the first counts."""
    if isinstance(first, list) and isinstance(second, list):
        if not (_is_nested(first) and _is_nested(second)):
            return first
        both = [union_of(one, other) for one, other in zip(first, second, strict=False)]
        return both + first[len(both) :] + second[len(both) :]
    known, more = _pairs_of(first), _pairs_of(second)
    if known is None or more is None:
        return first
    found = {msgspec.json.encode(key): [key, value] for key, value in known}
    for key, value in more:
        own = found.setdefault(msgspec.json.encode(key), [key, value])
        if own[1] is not value:
            own[1] = union_of(own[1], value)
    return _mapping_like(first, second, list(found.values()))


def references(values: Json) -> Iterator[str]:
    """Yield the tensors that values name."""
    if isinstance(values, dict):
        for key, value in values.items():
            named = value.get("tensor") if key == "$ndarray" and isinstance(value, dict) else value
            if key in ("$tensor", "$ndarray"):
                yield from [named] if isinstance(named, str) else []
            else:
                yield from references(value)
    elif isinstance(values, list):
        for value in values:
            yield from references(value)


def _is_nested(values: list[Json]) -> bool:
    """Return whether PyTorch's flattening goes into a list; any other is one value."""
    return any(
        _pairs_of(value) is not None
        or (isinstance(value, dict) and "$tensor" in value)
        or (isinstance(value, list) and _is_nested(value))
        for value in values
    )


def _pairs_of(value: Json) -> list[Any] | None:
    """Return the keys and values of an encoded mapping; None for everything else."""
    if not isinstance(value, dict):
        return None
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return [[key, inner] for key, inner in value.items()]
    content: Any = value[tag]
    return content if tag in _PAIRS else content["items"] if tag in _ITEMS else None


def _mapping_like(first: Any, second: Any, pairs: list[Any]) -> Json:
    """Return the pairs as a mapping of the first one's type. A plain dict takes only plain names as keys."""
    form = first if next(iter(first), "").startswith("$") else second
    tag = next(iter(form), "")
    if form is second and tag in (*_PAIRS, *_ITEMS):
        tag = "" if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs) else "$dict"
    if not tag.startswith("$"):
        return dict(pairs)
    return {tag: pairs if tag in _PAIRS else {**form[tag], "items": pairs}}
