"""Check what is read from text of a stranger before it goes on: names that can be written, nesting that ends."""

from __future__ import annotations

from typing import Any

from holdfast.errors import CorruptCheckpointError, UnsafeContentError

__all__ = ["require_name", "require_plain_text"]

_MAX_DEPTH = 100


def require_name(name: str) -> str:
    """Return a name if UTF-8 has a form for it. Half of a surrogate pair has none, and no format could hold it."""
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CorruptCheckpointError(
                f"the text {ascii(name)[:200]} has half of a surrogate pair, which is no character"
            ) from None
    return name


def require_plain_text(values: Any) -> None:
    """Raise for values of JSON or YAML that nest more deeply than others can write, or with text that is none."""
    level = [values]
    depth = 0
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                require_name(value)
            elif isinstance(value, dict):
                inner += (*value.keys(), *value.values())
            elif isinstance(value, list | tuple | set | frozenset):
                inner += value
        level = inner
        depth += 1
        if depth > _MAX_DEPTH + 1:
            raise UnsafeContentError(f"the values are nested more than {_MAX_DEPTH} levels deep")
