"""Remember the classes that a program registered, by their stored names. Knows no stored forms."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import NamedTuple, TypeVar

from holdfast.errors import UsageError
from holdfast.ondisk.codec.places import type_name

_Class = TypeVar("_Class", bound=type)
registered_classes: dict[type, _Registered] = {}
"""The stored name and the kind of each class that was registered."""
class_of_name: dict[str, type] = {}
"""The class of each stored name; a class may have several."""


def class_name(cls: type) -> str:
    """Return the name of a class in a checkpoint."""
    return registered_classes[cls].name if cls in registered_classes else type_name(cls)


def is_registered(kind: type) -> bool:
    """Return whether a class was registered with `register_type`."""
    return kind in registered_classes


def register_type(cls: _Class, name: str | None = None) -> _Class:
    """Let the codec store instances of an enum, a dataclass or a NamedTuple. Usable as a decorator.

    A subclass of torch.Tensor with `__tensor_flatten__` and `__tensor_unflatten__` can be registered, too. It is stored
    without that; registered, it is also created where a restore finds no live tensor to fill, as in an optimizer that
    has not stepped yet.

    The name stands in the checkpoint and finds the class again; it is "module.qualname" unless given. A class that was
    renamed can be registered again under its old name: it is written under the first name and read under all of them.

    A dataclass and a NamedTuple come back with exactly the fields that they declare, set directly: neither `__init__`
    nor `__post_init__` runs.
    """
    kind = kind_of(cls)
    if kind is None:
        raise UsageError(
            f"{cls!r} is not an enum, nor a dataclass, NamedTuple or tensor that can be rebuilt from its fields",
            advice="give it state_dict() and load_state_dict() instead",
        )
    name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    taken = class_of_name.setdefault(name, cls)
    if taken is not cls:
        raise UsageError(f"the name {name!r} is taken by {taken!r}", advice="register this class under another name")
    registered_classes.setdefault(cls, _Registered(name, kind))
    return cls


def registered_tensor(name: str) -> type | None:
    """Return the tensor class that the running program registered under a name."""
    cls = class_of_name.get(name)
    return cls if cls is not None and registered_classes[cls].kind is Kind.TENSOR else None


class Kind(enum.Enum):
    """How instances of a registered class are stored."""

    ENUM = enum.auto()
    FLAG = enum.auto()
    TENSOR = enum.auto()
    DATACLASS = enum.auto()
    NAMED_TUPLE = enum.auto()


class _Registered(NamedTuple):
    name: str
    kind: Kind


def kind_of(cls: object) -> Kind | None:
    """Return how instances of a class are stored; None for a class that cannot be registered."""
    if not isinstance(cls, type):
        return None
    if issubclass(cls, enum.Flag):
        return Kind.FLAG
    if issubclass(cls, enum.Enum):
        return Kind.ENUM
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        both = hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
        return Kind.TENSOR if both else None
    if issubclass(cls, tuple):
        return Kind.NAMED_TUPLE if hasattr(cls, "_fields") and hasattr(cls, "_make") else None
    if dataclasses.is_dataclass(cls):
        try:
            # Fails for one that is also a dict or an exception: its content would not be in its fields.
            object.__new__(cls)
        except TypeError:
            return None
        return Kind.DATACLASS
    return None


def field_names(cls: type, kind: Kind) -> tuple[str, ...]:
    """Return the declared fields of a dataclass or a NamedTuple."""
    if kind is Kind.DATACLASS:
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "_fields", ()))
