"""Find parts of a training by the names that a recipe gives them.

An entry such as `{name: adamw, lr: 0.01}` enters; what was registered as `adamw` is called with the rest of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["build", "register"]

Builder = TypeVar("Builder", bound=Callable[..., Any])
_builders: dict[str, dict[str, Callable[..., Any]]] = {}


def register(kind: str, name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a class or a function as a part of this kind."""

    def note(builder: Builder) -> Builder:
        known = _builders.setdefault(kind, {})
        if name in known:
            raise ValueError(f"{kind} '{name}' is registered twice")
        known[name] = builder
        return builder

    return note


def build(kind: str, entry: Mapping[str, Any], *arguments: Any) -> Any:
    """Build the part that an entry of the recipe names; `arguments` are what the program itself gives it."""
    options = {key: value for key, value in entry.items() if key != "name"}
    known = _builders.get(kind, {})
    if entry.get("name") not in known:
        raise SystemExit(f"{kind}: there is no '{entry.get('name')}'; there are {', '.join(sorted(known))}")
    builder = known[entry["name"]]
    try:
        inspect.signature(builder).bind(*arguments, **options)
    except TypeError as error:
        raise SystemExit(f"{kind} '{entry['name']}': {error}") from None
    return builder(*arguments, **options)
