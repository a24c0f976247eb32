"""Carry one call of `decode` and check stored forms. Knows JSON and no tags."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from holdfast.errors import UnsupportedFormatError
from holdfast.ondisk.codec.forms import MAX_DEPTH, Subclass
from holdfast.ondisk.codec.places import ROOT, Place, corrupt, location, type_name

_T = TypeVar("_T")
TagDecoder: TypeAlias = "Callable[[Decoder, Any, Place, object], Any]"
_MAX_DIMENSIONS = 64
_JSON_NAMES = {dict: "an object", list: "an array", str: "a text", int: "an integer", float: "a number with a fraction"}


class Decoder:
    """One call of `decode`: the decoders by tag, and the sources of its tensors."""

    __slots__ = ("_decoders", "subclass", "tensor")

    def __init__(
        self,
        decoders: Mapping[str, TagDecoder],
        tensor: Callable[[str], Any] | None,
        subclass: Callable[[str, Subclass], Any] | None = None,
    ) -> None:
        self._decoders = decoders
        self.tensor = tensor
        self.subclass = subclass

    def for_keys(self) -> Decoder:
        """Return a decoder for keys and elements of sets, in which no tensor can be."""
        return Decoder(self._decoders, None)

    def decode(self, value: Any, parent: Place, key: object) -> Any:
        cls = type(value)
        if cls is str or cls is bool or value is None:
            return value
        if cls is float and math.isfinite(value):
            return value
        if cls is int and -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
            return value
        if cls is dict:
            # A reference to a tensor: nearly all that there is in a state of very many of them.
            reference = value.get("$tensor") if len(value) == 1 else None
            if type(reference) is str and self.tensor is not None:
                return self.tensor(reference)
            return self.mapping(value, parent, key)
        if cls is list:
            return self.items(value, self.enter(parent, key))
        raise corrupt(f"a number or value that is never stored so: {shown(value)}", parent, key)

    def mapping(self, value: dict[Any, Any], parent: Place, key: object) -> Any:
        tag = next(iter(value), None)
        if len(value) == 1 and type(tag) is str and tag[:1] == "$":
            decoder = self._decoders.get(tag)
            if decoder is None:
                raise UnsupportedFormatError(
                    f"a value has the tag {shown(tag)}, which this version does not know",
                    advice="read the checkpoint with the newer version of Holdfast that wrote it",
                    **location(parent, key),
                )
            return decoder(self, value[tag], parent, key)
        here, decode = self.enter(parent, key), self.decode
        for name in value:
            if type(name) is not str or name[:1] == "$":
                raise corrupt(f"an object has the key {shown(name)} beside others", parent, key)
        return {name: decode(item, here, name) for name, item in value.items()}

    def enter(self, parent: Place, key: object) -> Place:
        """Return the place inside a container; an error when it is nested too deep."""
        depth = parent[2] + 1
        if depth > MAX_DEPTH:
            raise corrupt(f"values are nested more than {MAX_DEPTH} levels deep", parent, key)
        return parent, key, depth

    def items(self, value: list[Any], here: Place) -> list[Any]:
        decode = self.decode
        return [decode(item, here, index) for index, item in enumerate(value)]

    def pairs(self, value: Any, here: Place) -> list[tuple[Any, Any]]:
        above, name, _ = here
        keys = self.for_keys()
        result = []
        for index, pair in enumerate(expect(value, list, above or ROOT, name)):
            if type(pair) is not list or len(pair) != 2:
                raise corrupt("an entry of a dict is not a pair of key and value", here, index)
            key = keys.decode(pair[0], here, index)
            result.append((key, self.decode(pair[1], here, key)))
        return result


def expect(value: Any, cls: type[_T], parent: Place, key: object) -> _T:
    """Return the value if it has exactly this type; an error otherwise."""
    if type(value) is not cls:
        raise corrupt(f"expected {_JSON_NAMES[cls]}, found {shown(value)}", parent, key)
    return value


def expect_keys(value: Any, needed: set[str], parent: Place, key: object, optional: str = "") -> dict[str, Any]:
    record = expect(value, dict, parent, key)
    if record.keys() - {optional} != needed:
        raise corrupt(f"expected an object with {', '.join(sorted(needed))}, found {shown(value)}", parent, key)
    return record


def expect_text(value: Any, form: re.Pattern[str], parent: Place, key: object) -> str:
    text = expect(value, str, parent, key)
    if form.fullmatch(text) is None:
        raise corrupt(f"malformed text: {shown(text)}", parent, key)
    return text


def shown(value: object) -> str:
    """Return the start of a value that may be huge or deep, for a message."""
    if isinstance(value, list | dict):
        return f"{_JSON_NAMES[type(value)]} with {len(value)} entries"
    if type(value) not in (str, int, float, bool, type(None)) or (type(value) is int and value.bit_length() > 200):
        return f"a value of type '{type_name(type(value))}'"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) < 80 else f"{text[:80]}..."


def expect_shape(value: Any, parent: Place, key: object) -> list[int]:
    shape = expect(value, list, parent, key)
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and 0 <= length <= sys.maxsize for length in shape):
        raise corrupt("malformed shape", parent, key)
    return shape
