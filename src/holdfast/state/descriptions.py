"""Describe live objects and the form of values, so that saved ones can be compared with them. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["description_of", "differing_values", "is_described"]


def description_of(inner: Any) -> str:
    """Return the name of an object's class; of a scheduler around others, with their descriptions in parentheses."""
    parts = _inner_schedulers(inner)
    return type(inner).__name__ + (f"({','.join(map(description_of, parts))})" if parts else "")


def is_described(inner: Any, description: str) -> bool:
    """Return whether the description is of the object's class or one that it derives from, and so for the schedulers
    inside of it, if it names them."""
    outer, opened, rest = description.partition("(")
    if outer not in ("", *(base.__name__ for base in type(inner).__mro__)):
        return False
    if not opened:
        return True
    parts, named = _inner_schedulers(inner), _split(rest.removesuffix(")"))
    return bool(parts) and len(parts) == len(named) and all(map(is_described, parts, named))


def _split(descriptions: str) -> list[str]:
    """Return what the commas outside of all parentheses separate."""
    found, depth = [""], 0
    for character in descriptions:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _inner_schedulers(inner: Any) -> list[Any]:
    parts = getattr(inner, "_schedulers", None) if isinstance(inner, LRScheduler) else None
    return list(parts) if isinstance(parts, list | tuple) else []


def differing_values(live: Any, saved: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the path of each value that has another form than the saved one, with the saved form and the live one.

    Tensors and arrays have their type and shape; a dict, a list and a plain value are three other forms. None stands
    for what is not there yet and fits any. Dicts are compared in the keys that both have, lists of one length item by
    item.
    """
    if live is None or saved is None:
        return
    before, now = _form_of(saved), _form_of(live)
    if before != now:
        yield path, before, now
    elif isinstance(live, Mapping):
        for key in live:
            if key in saved:
                yield from differing_values(live[key], saved[key], f"{path}.{key}")
    elif isinstance(live, list | tuple) and len(live) == len(saved):
        for index, (one, other) in enumerate(zip(live, saved, strict=True)):
            yield from differing_values(one, other, f"{path}.{index}")


def _form_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, numpy.ndarray):
        return f"array {value.dtype.name} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict"
    return "a list" if isinstance(value, list | tuple) else "a plain value"
