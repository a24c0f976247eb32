"""Carry one call of `encode`: the handler of each type, the nesting, the errors. Knows no types."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from holdfast.errors import UsageError
from holdfast.ondisk.codec.forms import MAX_DEPTH, Flattened, Json
from holdfast.ondisk.codec.places import Place, location, type_name
from holdfast.ondisk.codec.registry import kind_of, registered_classes

Handler: TypeAlias = "Callable[[Encoder, Any, Place, object], Json]"


def unstorable(encoder: Encoder, value: object, parent: Place, key: object, reason: str = "") -> UsageError:
    """Return the error for a value that cannot be stored, with what can be done about it."""
    cls = type(value)
    register = "register its class with holdfast.register_type, " if _could_be_registered(cls) else ""
    return UsageError(
        f"a value of type '{type_name(cls)}' cannot be stored{reason}",
        advice=f"{register}{_instead(cls, in_state=encoder.in_state)}",
        **location(parent, key),
    )


def _could_be_registered(cls: type) -> bool:
    return cls not in registered_classes and kind_of(cls) is not None


def _instead(cls: type, *, in_state: bool) -> str:
    """Return what to store instead: in a state dict, which an object returned, or among what a caller passed."""
    if not in_state:
        return "pass plain values in its place, or leave it out"
    stateful = callable(getattr(cls, "state_dict", None))
    return f"put {'its state_dict()' if stateful else 'plain values'} in its place, or leave it out of the state dict"


class Rules(NamedTuple):
    """How values are encoded: `known` has a handler by exact type, `find` looks one up for any other type, and
    `find_in_context` does so for what a wrapper subclass has beside its tensors."""

    known: Mapping[type, Handler]
    find: Callable[[type], Handler]
    find_in_context: Callable[[type], Handler]


class _Handlers(dict[type, Handler]):
    """The handler of each exact type. A type that is met for the first time in a call is looked up once."""

    def __init__(self, known: Mapping[type, Handler], find: Callable[[type], Handler]) -> None:
        super().__init__(known)
        self._find = find

    def __missing__(self, cls: type) -> Handler:
        handler = self[cls] = self._find(cls)
        return handler


class Encoder:
    """One call of `encode`: the handlers of its types, and the callbacks for its tensors."""

    __slots__ = ("_rules", "flatten", "handlers", "in_state", "on_tensor")

    def __init__(
        self,
        rules: Rules,
        on_tensor: Callable[[str, Any], str] | None,
        *,
        in_state: bool,
        flatten: Callable[[Any], Flattened | None] | None = None,
        in_context: bool = False,
    ) -> None:
        self._rules = rules
        self.on_tensor = on_tensor
        self.flatten = flatten
        self.in_state = in_state
        self.handlers = _Handlers(rules.known, rules.find_in_context if in_context else rules.find)

    def for_keys(self) -> Encoder:
        """Return an encoder for keys, which refuses tensors: they hash by identity, so one that is read back is never
        found again."""
        return Encoder(self._rules, None, in_state=self.in_state)

    def for_context(self) -> Encoder:
        """Return an encoder for what a wrapper subclass has beside its tensors."""
        return Encoder(self._rules, None, in_state=True, in_context=True)

    def enter(self, parent: Place, key: object) -> Place:
        """Return the place inside a container; an error when it is nested too deep."""
        depth = parent[2] + 1
        if depth > MAX_DEPTH:
            raise UsageError(
                f"values are nested more than {MAX_DEPTH} levels deep; the outermost may contain itself",
                advice=f"make it flatter, or leave it out{' of the state dict' if self.in_state else ''}",
                **location(parent, key),
            )
        return parent, key, depth

    def items(self, values: Iterable[Any], here: Place) -> list[Json]:
        handlers = self.handlers
        return [handlers[type(item)](self, item, here, index) for index, item in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], here: Place) -> list[Json]:
        handlers, keys = self.handlers, self.for_keys()
        key_handlers = keys.handlers
        return [
            [key_handlers[type(key)](keys, key, here, key), handlers[type(item)](self, item, here, key)]
            for key, item in value.items()
        ]

    def elements(self, value: Iterable[Any], here: Place) -> list[Json]:
        keys = self.for_keys()
        # Sorted, so that equal sets are stored as equal bytes: the order of iteration differs between processes.
        return sorted((keys.handlers[type(item)](keys, item, here, item) for item in value), key=json.dumps)


def to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")
