"""Name the place of a value inside a state, for errors and for tensors. Knows nothing of types."""

from __future__ import annotations

from typing import Any, TypeAlias

from holdfast.errors import CorruptCheckpointError

# Where a value stands: the place around it, its key there, the depth. A linked tuple costs nothing to extend; the
# dotted name is only joined for a tensor or an error, which matters with tens of thousands of nodes.
Place: TypeAlias = "tuple[Place | None, object, int]"
ROOT: Place = (None, None, 0)


def dotted_name(parent: Place, key: object) -> str:
    """Return the dotted name of the value under `key` at a place, such as `optimizer.state.0.step`."""
    segments = [key if type(key) is str else _segment(key)]
    above, name, _ = parent
    while above is not None:
        segments.append(name if type(name) is str else _segment(name))
        above, name, _ = above
    segments.reverse()
    path = ".".join(segments)
    return path if is_unicode(path) else path.encode("ascii", "backslashreplace").decode("ascii")


def _segment(key: object) -> str:
    try:
        return repr(key)
    except Exception:  # an int of more digits than Python writes, or a class with a __repr__ that fails
        return f"<{type_name(type(key))}>"


def location(parent: Place, key: object) -> dict[str, Any]:
    """Return the fields that name a place in an error."""
    path = dotted_name(parent, key)
    return {"component": path.partition(".")[0], "leaf": path}


def type_name(cls: type) -> str:
    """Return the qualified name of a class, without the module of a builtin."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def corrupt(problem: str, parent: Place, key: object, advice: str = "") -> CorruptCheckpointError:
    """Return the error for a stored form that the table does not allow."""
    return CorruptCheckpointError(problem, advice=advice, **location(parent, key))


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: whether it has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
