"""Encode and decode instances of registered enums, dataclasses and NamedTuples."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from holdfast.errors import StateMismatchError
from holdfast.ondisk.codec.decoder import Decoder, TagDecoder, expect, expect_keys, shown
from holdfast.ondisk.codec.encoder import Encoder, unstorable
from holdfast.ondisk.codec.forms import Json
from holdfast.ondisk.codec.places import Place, corrupt, dotted_name, location, type_name
from holdfast.ondisk.codec.registry import Kind, class_name, class_of_name, field_names, kind_of, registered_classes


def encode_enum(encoder: Encoder, value: enum.Enum, parent: Place, key: object) -> Json:
    return {"$type": {"name": class_name(type(value)), "value": value._name_}}


def encode_flag(encoder: Encoder, value: enum.Flag, parent: Place, key: object) -> Json:
    cls, bits = type(value), value._value_
    names = [str(member._name_) for member in cls if member._value_ & bits]
    if value._name_ in cls.__members__:
        names = [str(value._name_)]
    if _flag_bits(cls, names) != bits:
        raise unstorable(encoder, value, parent, key, f" with bits that no member has: {bits:#x}")
    return {"$type": {"name": registered_classes[cls].name, "value": list[Json](names)}}


def encode_fields(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    cls = type(value)
    name, kind = class_name(cls), kind_of(cls) or Kind.DATACLASS
    here, names = encoder.enter(parent, key), field_names(cls, kind)
    for attribute in getattr(value, "__dict__", ()):
        cached = isinstance(inspect.getattr_static(cls, attribute, None), functools.cached_property)
        if attribute not in names and not cached:
            raise unstorable(
                encoder, value, parent, key, f" with its attribute {attribute!r}, which is no declared field"
            )
    stored: dict[str, Json] = {}
    for field in names:
        try:
            item = getattr(value, field)
        except AttributeError as error:
            raise unstorable(encoder, value, parent, key, f": its field {field!r} is not set") from error
        stored[field] = encoder.handlers[type(item)](encoder, item, here, field)
    return {"$type": {"name": name, "fields": stored}}


def _flag_bits(cls: type[enum.Flag], names: Iterable[str]) -> int:
    return functools.reduce(lambda bits, name: bits | cls.__members__[name]._value_, names, 0)


def _decode_type(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    record = expect(value, dict, parent, key)
    name = expect(record.get("name"), str, parent, key)
    cls = class_of_name.get(name)
    if cls is None:
        raise StateMismatchError(
            f"a value has the type {shown(name)}, which is not registered",
            advice="register it with holdfast.register_type before restoring",
            **location(parent, key),
        )
    kind = registered_classes[cls].kind
    if kind is Kind.TENSOR:
        raise corrupt(f"the tensor type {shown(name)} stands where a value does", parent, key)
    if kind in (Kind.ENUM, Kind.FLAG):
        stored = expect_keys(record, {"name", "value"}, parent, key)["value"]
        return _flag(cls, stored, parent, key) if kind is Kind.FLAG else _member(cls, stored, parent, key)
    fields = expect_keys(record, {"name", "fields"}, parent, key)["fields"]
    return _with_fields(decoder, cls, expect(fields, dict, parent, key), parent, key)


def _member(cls: Any, value: Any, parent: Place, key: object) -> enum.Enum:
    name = expect(value, str, parent, key)
    if name not in cls.__members__:
        problem = f"the enum '{type_name(cls)}' has no member {shown(name)}"
        raise StateMismatchError(problem, advice="add it, as it was when this was saved", **location(parent, key))
    member: enum.Enum = cls.__members__[name]
    return member


def _flag(cls: Any, value: Any, parent: Place, key: object) -> enum.Flag:
    names = [str(_member(cls, name, parent, key)._name_) for name in expect(value, list, parent, key)]
    flag: enum.Flag = cls(_flag_bits(cls, names))
    return flag


def _with_fields(decoder: Decoder, cls: type, stored: dict[str, Any], parent: Place, key: object) -> Any:
    kind, here = registered_classes[cls].kind, decoder.enter(parent, key)
    names = field_names(cls, kind)
    if stored.keys() != set(names):
        skip = "" if decoder.tensor is None else ", or leave its component out with LoadStrategy(skip=...)"
        raise StateMismatchError(
            f"the fields of '{type_name(cls)}' are not those that were saved",
            advice=f"declare the same fields{skip}",
            missing=[dotted_name(here, name) for name in names if name not in stored],
            unexpected=[dotted_name(here, name) for name in stored if name not in names],
            **location(parent, key),
        )
    values = [decoder.decode(stored[name], here, name) for name in names]
    if kind is Kind.NAMED_TUPLE:
        return tuple.__new__(cls, values)
    result: Any = object.__new__(cls)
    for name, item in zip(names, values, strict=True):
        object.__setattr__(result, name, item)
    return result


DECODERS: dict[str, TagDecoder] = {
    "$type": _decode_type,
}
