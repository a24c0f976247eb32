"""Turn values that are no tensors into plain JSON and back, by the table of the package."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import io
import json
import math
import pathlib
import re
import struct
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from holdfast.errors import (
    CorruptCheckpointError,
    HoldfastError,
    StateMismatchError,
    UnsupportedFormatError,
    UsageError,
)

__all__ = [
    "Flattened",
    "Json",
    "Subclass",
    "decode",
    "encode",
    "plain",
    "register_type",
    "registered_tensor",
    "subclass_of",
    "typed",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 100
MAX_DIGITS = 65_536
MAX_INLINE_ARRAY_BYTES = 1_024

# Where a value stands: the place around it, its key there, the depth. A linked tuple costs nothing to extend; the
# dotted name is only joined for a tensor or an error, which matters with tens of thousands of nodes.
_Place: TypeAlias = "tuple[_Place | None, object, int]"
_ROOT: _Place = (None, None, 0)
_Class = TypeVar("_Class", bound=type)


class Flattened(NamedTuple):
    """A tensor of a wrapper subclass taken apart: its class, its inner tensors by attribute, the rest as its context.

    `shards` is the number of pieces that the tensor is cut into; the inner ones are cut in the same way.
    """

    kind: type
    tensors: Mapping[str, Any]
    context: object
    shards: int = 1


class Subclass(NamedTuple):
    """The stored form of such a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shards: int
    context: Json
    tensors: Mapping[str, Json]


def encode(
    value: object,
    *,
    path: str,
    on_tensor: Callable[[str, Any], str] | None,
    flatten: Callable[[Any], Flattened | None] | None = None,
    in_state: bool | None = None,
) -> Json:
    """The stored form of `value`, which stands at the dotted name `path`.

    `on_tensor` is called with the dotted name of every tensor that is found, and the tensor, and gives the leaf name to
    store. Two tensors can have the same dotted name, `{"a.b": x, "a": {"b": y}}`: it is the callback that tells them
    apart. Without a callback a tensor is a UsageError, and a numpy array is stored in place whatever its size: so it
    is for what a caller passes beside the state, such as a config. `flatten` takes a tensor of a wrapper subclass
    apart, and gives None for one that is stored as it is. `in_state` is False for values beside the state that may hold
    tensors all the same.
    """
    encoder = _Encoder(on_tensor, in_state=on_tensor is not None if in_state is None else in_state, flatten=flatten)
    return encoder.handlers[type(value)](encoder, value, _ROOT, path)


def decode(
    value: Json,
    *,
    path: str,
    tensor: Callable[[str], Any] | None,
    subclass: Callable[[str, Subclass], Any] | None = None,
) -> object:
    """The value that was stored as `value`; `tensor` gives the tensor of a leaf name, `subclass` that of a wrapper
    subclass, by the dotted name of its place."""
    return _Decoder(tensor, subclass).decode(value, _ROOT, path)


def class_name(cls: type) -> str:
    """The name of a class in a checkpoint."""
    return _registered[cls].name if cls in _registered else _type_name(cls)


def subclass_of(value: Json) -> Subclass | None:
    """The stored form of a tensor of a wrapper subclass; None for any other value."""
    if not isinstance(value, dict) or value.keys() != {"$subclass"}:
        return None
    return _subclass(value["$subclass"], _ROOT, "")


def is_registered(kind: type) -> bool:
    """Return whether a class was registered with `register_type`."""
    return kind in _registered


def plain(value: Json) -> Json:
    """The stored form made readable for people, without torch or numpy. Never fails on malformed input."""
    return _plain(value, 0)


def typed(value: Json) -> str:
    """The same as a text that also says the types, which `plain` leaves out: `tuple([1, 2])`. Never fails either."""
    return _typed(value, 0)


def register_type(cls: _Class, name: str | None = None) -> _Class:
    """Let the codec store instances of an enum, a dataclass or a NamedTuple. Usable as a decorator.

    A subclass of torch.Tensor with `__tensor_flatten__` and `__tensor_unflatten__` can be registered, too. It is stored
    without that; registered, it is also made anew where a restore finds no live tensor to fill, as in an optimizer that
    has not stepped yet.

    The name stands in the checkpoint and finds the class again; it is "module.qualname" unless given. A class that was
    renamed can be registered again under its old name: it is written under the first name and read under all of them.

    A dataclass and a NamedTuple come back with exactly the fields that they declare, set directly: neither `__init__`
    nor `__post_init__` runs.
    """
    kind = _kind_of(cls)
    if kind is None:
        raise UsageError(
            f"{cls!r} is not an enum, nor a dataclass, NamedTuple or tensor that can be rebuilt from its fields",
            advice="give it state_dict() and load_state_dict() instead",
        )
    name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    taken = _class_of_name.setdefault(name, cls)
    if taken is not cls:
        raise UsageError(f"the name {name!r} is taken by {taken!r}", advice="register this class under another name")
    _registered.setdefault(cls, _Registered(name, kind))
    return cls


def registered_tensor(name: str) -> type | None:
    """The tensor class that the running program registered under a name."""
    cls = _class_of_name.get(name)
    return cls if cls is not None and _registered[cls].kind is _Kind.TENSOR else None


class _Kind(enum.Enum):
    ENUM = enum.auto()
    FLAG = enum.auto()
    TENSOR = enum.auto()
    DATACLASS = enum.auto()
    NAMED_TUPLE = enum.auto()


class _Registered(NamedTuple):
    name: str
    kind: _Kind


_registered: dict[type, _Registered] = {}
_class_of_name: dict[str, type] = {}


def _kind_of(cls: object) -> _Kind | None:
    if not isinstance(cls, type):
        return None
    if issubclass(cls, enum.Flag):
        return _Kind.FLAG
    if issubclass(cls, enum.Enum):
        return _Kind.ENUM
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        both = hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
        return _Kind.TENSOR if both else None
    if issubclass(cls, tuple):
        return _Kind.NAMED_TUPLE if hasattr(cls, "_fields") and hasattr(cls, "_make") else None
    if dataclasses.is_dataclass(cls):
        try:
            # Fails for one that is also a dict or an exception: its content would not be in its fields.
            object.__new__(cls)
        except TypeError:
            return None
        return _Kind.DATACLASS
    return None


def _field_names(cls: type, kind: _Kind) -> tuple[str, ...]:
    if kind is _Kind.DATACLASS:
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "_fields", ()))


# --- places and errors ------------------------------------------------------------------------------------------------


def _dotted(parent: _Place, key: object) -> str:
    segments = [key if type(key) is str else _segment(key)]
    above, name, _ = parent
    while above is not None:
        segments.append(name if type(name) is str else _segment(name))
        above, name, _ = above
    segments.reverse()
    path = ".".join(segments)
    return path if _is_unicode(path) else path.encode("ascii", "backslashreplace").decode("ascii")


def _segment(key: object) -> str:
    try:
        return repr(key)
    except Exception:  # an int of more digits than Python writes, or a class with a __repr__ that fails
        return f"<{_type_name(type(key))}>"


def _at(parent: _Place, key: object) -> dict[str, Any]:
    path = _dotted(parent, key)
    return {"component": path.partition(".")[0], "leaf": path}


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _unstorable(encoder: _Encoder, value: object, parent: _Place, key: object, reason: str = "") -> UsageError:
    cls = type(value)
    register = "register its class with holdfast.register_type, " if _could_be_registered(cls) else ""
    return UsageError(
        f"a value of type '{_type_name(cls)}' cannot be stored{reason}",
        advice=f"{register}{_instead(cls, in_state=encoder.in_state)}",
        **_at(parent, key),
    )


def _could_be_registered(cls: type) -> bool:
    return cls not in _registered and _kind_of(cls) is not None


def _instead(cls: type, *, in_state: bool) -> str:
    """What can be done about it: a state dict is what some object gives, everything else is what a caller passes."""
    if not in_state:
        return "pass plain values in its place, or leave it out"
    stateful = callable(getattr(cls, "state_dict", None))
    return f"put {'its state_dict()' if stateful else 'plain values'} in its place, or leave it out of the state dict"


def _corrupt(problem: str, parent: _Place, key: object, advice: str = "") -> CorruptCheckpointError:
    return CorruptCheckpointError(problem, advice=advice, **_at(parent, key))


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- encoding ---------------------------------------------------------------------------------------------------------

_Handler: TypeAlias = "Callable[[_Encoder, Any, _Place, object], Json]"


class _Handlers(dict[type, _Handler]):
    """How each exact type is encoded. A type that is met for the first time in a call is looked up once."""

    def __missing__(self, cls: type) -> _Handler:
        handler = self[cls] = _find_handler(cls)
        return handler


def _find_handler(cls: type) -> _Handler:
    registered = _registered.get(cls)
    if registered is not None:
        return _REGISTERED_HANDLERS[registered.kind]
    torch = sys.modules.get("torch")
    if torch is not None:
        if issubclass(cls, torch.Tensor):
            return _encode_tensor
        if cls in (torch.dtype, torch.Size, torch.device):
            return {torch.dtype: _encode_dtype, torch.Size: _encode_size, torch.device: _encode_device}[cls]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if cls is numpy.ndarray:
            return _encode_array
        if issubclass(cls, numpy.generic):
            return _encode_scalar
    return _encode_refuse


class _Encoder:
    """One call of `encode`: how each type is encoded in it, and who takes the tensors."""

    __slots__ = ("flatten", "handlers", "in_state", "on_tensor")

    def __init__(
        self,
        on_tensor: Callable[[str, Any], str] | None,
        *,
        in_state: bool,
        flatten: Callable[[Any], Flattened | None] | None = None,
    ) -> None:
        self.on_tensor = on_tensor
        self.flatten = flatten
        self.in_state = in_state
        self.handlers = _Handlers(_HANDLERS)

    def enter(self, parent: _Place, key: object) -> _Place:
        depth = parent[2] + 1
        if depth > MAX_DEPTH:
            raise UsageError(
                f"values are nested more than {MAX_DEPTH} levels deep; the outermost may contain itself",
                advice=f"make it flatter, or leave it out{' of the state dict' if self.in_state else ''}",
                **_at(parent, key),
            )
        return parent, key, depth

    def items(self, values: Iterable[Any], here: _Place) -> list[Json]:
        handlers = self.handlers
        return [handlers[type(item)](self, item, here, index) for index, item in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], here: _Place) -> list[Json]:
        # A key is encoded without on_tensor: tensors hash by identity, so one that is read back is never found again.
        handlers, keys = self.handlers, _Encoder(None, in_state=self.in_state)
        key_handlers = keys.handlers
        return [
            [key_handlers[type(key)](keys, key, here, key), handlers[type(item)](self, item, here, key)]
            for key, item in value.items()
        ]

    def elements(self, value: Iterable[Any], here: _Place) -> list[Json]:
        keys = _Encoder(None, in_state=self.in_state)
        # Sorted, so that equal sets are stored as equal bytes: the order of iteration differs between processes.
        return sorted((keys.handlers[type(item)](keys, item, here, item) for item in value), key=json.dumps)


def _encode_refuse(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    raise _unstorable(encoder, value, parent, key)


def _encode_native(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    return value  # type: ignore[no-any-return]


def _encode_int(encoder: _Encoder, value: int, parent: _Place, key: object) -> Json:
    if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
        return value
    if value.bit_length() > 4 * MAX_DIGITS:
        raise _unstorable(encoder, value, parent, key, f": it has more than {MAX_DIGITS} hex digits")
    return {"$int": hex(value)}


def _encode_float(encoder: _Encoder, value: float, parent: _Place, key: object) -> Json:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_str(encoder: _Encoder, value: str, parent: _Place, key: object) -> Json:
    if _is_unicode(value):
        return value
    return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}


def _encode_list(encoder: _Encoder, value: list[Any], parent: _Place, key: object) -> Json:
    return encoder.items(value, encoder.enter(parent, key))


def _encode_dict(encoder: _Encoder, value: dict[Any, Any], parent: _Place, key: object) -> Json:
    here = encoder.enter(parent, key)
    for name in value:
        if type(name) is not str or name[:1] == "$" or not (name.isascii() or _is_unicode(name)):
            return {"$dict": encoder.pairs(value, here)}
    handlers = encoder.handlers
    return {name: handlers[type(item)](encoder, item, here, name) for name, item in value.items()}


def _encode_ordered_dict(encoder: _Encoder, value: OrderedDict[Any, Any], parent: _Place, key: object) -> Json:
    here = encoder.enter(parent, key)
    stored: dict[str, Json] = {"items": encoder.pairs(value, here)}
    for name, attribute in vars(value).items():
        if name != "_metadata":
            raise _unstorable(encoder, value, parent, key, f" with its attribute {name!r}")
        # torch's state dicts carry the versions of their modules here, and load_state_dict asks for them.
        stored["metadata"] = encoder.handlers[type(attribute)](encoder, attribute, here, name)
    return {"$ordereddict": stored}


def _encode_counter(encoder: _Encoder, value: Counter[Any], parent: _Place, key: object) -> Json:
    for name in vars(value):
        raise _unstorable(encoder, value, parent, key, f" with its attribute {name!r}")
    return {"$counter": encoder.pairs(value, encoder.enter(parent, key))}


def _encode_default_dict(encoder: _Encoder, value: defaultdict[Any, Any], parent: _Place, key: object) -> Json:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        reason = f" with the factory {factory!r} (possible are {', '.join(_FACTORIES)})"
        raise _unstorable(encoder, value, parent, key, reason)
    return {"$defaultdict": {"factory": name, "items": encoder.pairs(value, encoder.enter(parent, key))}}


def _encode_deque(encoder: _Encoder, value: deque[Any], parent: _Place, key: object) -> Json:
    return {"$deque": {"items": encoder.items(value, encoder.enter(parent, key)), "maxlen": value.maxlen}}


def _encode_tuple(encoder: _Encoder, value: tuple[Any, ...], parent: _Place, key: object) -> Json:
    return {"$tuple": encoder.items(value, encoder.enter(parent, key))}


def _encode_set(encoder: _Encoder, value: set[Any], parent: _Place, key: object) -> Json:
    return {"$set": encoder.elements(value, encoder.enter(parent, key))}


def _encode_frozenset(encoder: _Encoder, value: frozenset[Any], parent: _Place, key: object) -> Json:
    return {"$frozenset": encoder.elements(value, encoder.enter(parent, key))}


def _encode_bytes(encoder: _Encoder, value: bytes, parent: _Place, key: object) -> Json:
    return {"$bytes": _base64(value)}


def _encode_bytearray(encoder: _Encoder, value: bytearray, parent: _Place, key: object) -> Json:
    return {"$bytearray": _base64(value)}


def _encode_bytes_io(encoder: _Encoder, value: io.BytesIO, parent: _Place, key: object) -> Json:
    if value.closed:
        raise _unstorable(encoder, value, parent, key, ": the stream is closed")
    return {"$bytesio": {"data": _base64(value.getvalue()), "position": value.tell()}}


def _encode_complex(encoder: _Encoder, value: complex, parent: _Place, key: object) -> Json:
    return {
        "$complex": [_encode_float(encoder, value.real, parent, key), _encode_float(encoder, value.imag, parent, key)]
    }


def _encode_range(encoder: _Encoder, value: range, parent: _Place, key: object) -> Json:
    return {"$range": [_encode_int(encoder, number, parent, key) for number in (value.start, value.stop, value.step)]}


def _encode_slice(encoder: _Encoder, value: slice, parent: _Place, key: object) -> Json:
    numbers = (value.start, value.stop, value.step)
    if any(number is not None and type(number) is not int for number in numbers):
        raise _unstorable(encoder, value, parent, key, " with bounds that are not int or None")
    return {"$slice": [None if number is None else _encode_int(encoder, number, parent, key) for number in numbers]}


def _encode_datetime(encoder: _Encoder, value: datetime.datetime, parent: _Place, key: object) -> Json:
    iso, zone = value.replace(tzinfo=None).isoformat(), _encode_zone(encoder, value, parent, key)
    return {"$datetime": {"iso": iso, "tz": zone, "fold": value.fold}}


def _encode_time(encoder: _Encoder, value: datetime.time, parent: _Place, key: object) -> Json:
    iso, zone = value.replace(tzinfo=None).isoformat(), _encode_zone(encoder, value, parent, key)
    return {"$time": {"iso": iso, "tz": zone, "fold": value.fold}}


def _encode_zone(encoder: _Encoder, value: datetime.datetime | datetime.time, parent: _Place, key: object) -> Json:
    zone: Any = value.tzinfo
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        stored: dict[str, Json] = {"offset_microseconds": zone.utcoffset(None) // datetime.timedelta(microseconds=1)}
        unnamed = datetime.timezone(zone.utcoffset(None))
        if zone.tzname(None) != unnamed.tzname(None):
            stored["name"] = _encode_str(encoder, zone.tzname(None), parent, key)
        return stored
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo and _ZONE.fullmatch(zone.key or ""):
        return {"zone": zone.key}
    raise _unstorable(encoder, value, parent, key, f" with the time zone {zone!r}")


def _encode_date(encoder: _Encoder, value: datetime.date, parent: _Place, key: object) -> Json:
    return {"$date": value.isoformat()}


def _encode_timedelta(encoder: _Encoder, value: datetime.timedelta, parent: _Place, key: object) -> Json:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _encode_decimal(encoder: _Encoder, value: decimal.Decimal, parent: _Place, key: object) -> Json:
    text = str(value)
    if len(text) > MAX_DIGITS:
        raise _unstorable(encoder, value, parent, key, f": it has more than {MAX_DIGITS} characters")
    return {"$decimal": text}


def _encode_uuid(encoder: _Encoder, value: uuid.UUID, parent: _Place, key: object) -> Json:
    return {"$uuid": str(value)}


def _encode_path(encoder: _Encoder, value: pathlib.PurePath, parent: _Place, key: object) -> Json:
    return {"$path": _encode_str(encoder, str(value), parent, key)}


def _encode_pure_path(encoder: _Encoder, value: pathlib.PurePath, parent: _Place, key: object) -> Json:
    return {"$purepath": _encode_str(encoder, str(value), parent, key)}


def _encode_tensor(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    if encoder.on_tensor is None:
        raise UsageError(
            f"a tensor ('{_type_name(type(value))}') cannot be stored here",
            advice=f"use .item() or .tolist(), or leave it out{' of the state dict' if encoder.in_state else ''}",
            **_at(parent, key),
        )
    flat = encoder.flatten(value) if encoder.flatten is not None else None
    if flat is not None:
        return _encode_subclass(encoder, value, flat, parent, key)
    return {"$tensor": encoder.on_tensor(_dotted(parent, key), value)}


def _encode_subclass(encoder: _Encoder, value: Any, flat: Flattened, parent: _Place, key: object) -> Json:
    here = encoder.enter(parent, key)
    context = _ContextEncoder()
    return {
        "$subclass": {
            "name": class_name(flat.kind),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [int(length) for length in value.shape],
            "stride": [int(step) for step in value.stride()],
            "shards": flat.shards,
            "context": context.handlers[type(flat.context)](context, flat.context, here, "context"),
            "tensors": {name: _encode_tensor(encoder, inner, here, name) for name, inner in flat.tensors.items()},
        }
    }


class _ContextEncoder(_Encoder):
    """Encodes what a wrapper subclass has beside its tensors: any dataclass, NamedTuple or enum by its name."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, in_state=True)
        self.handlers = _ContextHandlers(_HANDLERS)


class _ContextHandlers(_Handlers):
    def __missing__(self, cls: type) -> _Handler:
        torch, kind = sys.modules.get("torch"), _kind_of(cls)
        if torch is not None and cls is torch.device:
            # Without its index: the ranks of one machine are on different devices, and their states are one.
            handler: _Handler = _encode_device_type
        elif kind is _Kind.ENUM:
            handler = _encode_enum
        elif kind in (_Kind.DATACLASS, _Kind.NAMED_TUPLE):
            handler = _encode_fields
        else:
            handler = _find_handler(cls)
        self[cls] = handler
        return handler


def _encode_device_type(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    return {"$device": value.type}


def _encode_dtype(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    return {"$dtype": str(value).removeprefix("torch.")}


def _encode_size(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    return {"$size": [int(length) for length in value]}


def _encode_device(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    return {"$device": str(value)}


def _encode_scalar(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    kind, dtype = value.dtype.kind, value.dtype.str
    if type(value) is not value.dtype.type:
        raise _unstorable(encoder, value, parent, key)
    # The text itself: numpy's own bytes of a str_ lose the zeros at its end.
    if kind == "U":
        return {"$scalar": {"dtype": "U", "data": _base64(str(value).encode("utf-8", "surrogatepass"))}}
    if kind == "S":
        return {"$scalar": {"dtype": "S", "data": _base64(bytes(value))}}
    if not _is_portable(value.dtype):
        raise _unstorable(encoder, value, parent, key)
    return {"$scalar": {"dtype": dtype, "data": _base64(value.tobytes())}}


def _encode_array(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    dtype = value.dtype.str
    if not _is_portable(value.dtype):
        raise _unstorable(encoder, value, parent, key, f" with the dtype {value.dtype}")
    inline = value.nbytes <= MAX_INLINE_ARRAY_BYTES or value.dtype.kind not in _TORCH_KINDS
    if inline or encoder.on_tensor is None or not encoder.in_state:
        return {"$ndarray": {"dtype": dtype, "shape": list(value.shape), "data": _base64(value.tobytes())}}
    return {"$ndarray": {"dtype": dtype, "tensor": encoder.on_tensor(_dotted(parent, key), _torch_tensor(value))}}


def _encode_enum(encoder: _Encoder, value: enum.Enum, parent: _Place, key: object) -> Json:
    return {"$type": {"name": class_name(type(value)), "value": value._name_}}


def _encode_flag(encoder: _Encoder, value: enum.Flag, parent: _Place, key: object) -> Json:
    cls, bits = type(value), value._value_
    names = [str(member._name_) for member in cls if member._value_ & bits]
    if value._name_ in cls.__members__:
        names = [str(value._name_)]
    if _flag_bits(cls, names) != bits:
        raise _unstorable(encoder, value, parent, key, f" with bits that no member has: {bits:#x}")
    return {"$type": {"name": _registered[cls].name, "value": list[Json](names)}}


def _encode_fields(encoder: _Encoder, value: Any, parent: _Place, key: object) -> Json:
    cls = type(value)
    name, kind = class_name(cls), _kind_of(cls) or _Kind.DATACLASS
    here, names = encoder.enter(parent, key), _field_names(cls, kind)
    for attribute in getattr(value, "__dict__", ()):
        cached = isinstance(inspect.getattr_static(cls, attribute, None), functools.cached_property)
        if attribute not in names and not cached:
            raise _unstorable(
                encoder, value, parent, key, f" with its attribute {attribute!r}, which is no declared field"
            )
    stored: dict[str, Json] = {}
    for field in names:
        try:
            item = getattr(value, field)
        except AttributeError as error:
            raise _unstorable(encoder, value, parent, key, f": its field {field!r} is not set") from error
        stored[field] = encoder.handlers[type(item)](encoder, item, here, field)
    return {"$type": {"name": name, "fields": stored}}


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _flag_bits(cls: type[enum.Flag], names: Iterable[str]) -> int:
    return functools.reduce(lambda bits, name: bits | cls.__members__[name]._value_, names, 0)


def _is_portable(dtype: Any) -> bool:
    """Whether the dtype means the same on every machine: no objects, no structures, no long double."""
    return _NUMPY_DTYPE.fullmatch(dtype.str) is not None and sys.modules["numpy"].dtype(dtype.str) == dtype


def _torch_tensor(array: Any) -> Any:
    """The array as a tensor, over the same memory where torch can have it so."""
    import torch

    native = sys.modules["numpy"].dtype(array.dtype.str).newbyteorder("=")
    # The view: numpy has two names for some types, `unsigned long long` beside uint64, and torch knows one of them.
    array = array.astype(native, order="C", copy=False).view(native)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


# The closed set of numpy dtypes. Nothing else is ever handed to numpy's own parser, which knows a language of its own.
_NUMPY_DTYPE = re.compile(
    r"\|(?:b1|[iu]1|S[1-9][0-9]{0,8})"
    r"|[<>](?:[iu][248]|f[248]|c8|c16|U[1-9][0-9]{0,8})"
    r"|[<>][mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_TORCH_KINDS = frozenset("biufc")
_FACTORIES: dict[str, type] = {cls.__name__: cls for cls in (bool, dict, float, int, list, set, str)}
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,64}(?:/[A-Za-z0-9_+-]{1,64}){0,4}")

_HANDLERS: dict[type, _Handler] = {
    type(None): _encode_native,
    bool: _encode_native,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    list: _encode_list,
    dict: _encode_dict,
    OrderedDict: _encode_ordered_dict,
    Counter: _encode_counter,
    defaultdict: _encode_default_dict,
    deque: _encode_deque,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_frozenset,
    bytes: _encode_bytes,
    bytearray: _encode_bytearray,
    io.BytesIO: _encode_bytes_io,
    complex: _encode_complex,
    range: _encode_range,
    slice: _encode_slice,
    datetime.datetime: _encode_datetime,
    datetime.time: _encode_time,
    datetime.date: _encode_date,
    datetime.timedelta: _encode_timedelta,
    decimal.Decimal: _encode_decimal,
    uuid.UUID: _encode_uuid,
    pathlib.PosixPath: _encode_path,
    pathlib.PurePosixPath: _encode_pure_path,
}
_REGISTERED_HANDLERS: dict[_Kind, _Handler] = {
    _Kind.ENUM: _encode_enum,
    _Kind.FLAG: _encode_flag,
    _Kind.TENSOR: _encode_tensor,
    _Kind.DATACLASS: _encode_fields,
    _Kind.NAMED_TUPLE: _encode_fields,
}


# --- decoding ---------------------------------------------------------------------------------------------------------


class _Decoder:
    """One call of `decode`: who gives the tensors."""

    __slots__ = ("subclass", "tensor")

    def __init__(
        self, tensor: Callable[[str], Any] | None, subclass: Callable[[str, Subclass], Any] | None = None
    ) -> None:
        self.tensor = tensor
        self.subclass = subclass

    def decode(self, value: Any, parent: _Place, key: object) -> Any:
        cls = type(value)
        if cls is str or cls is bool or value is None:
            return value
        if cls is float and math.isfinite(value):
            return value
        if cls is int and -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
            return value
        if cls is dict:
            return self.mapping(value, parent, key)
        if cls is list:
            return self.items(value, self.enter(parent, key))
        raise _corrupt(f"a number or value that is never stored so: {_shown(value)}", parent, key)

    def mapping(self, value: dict[Any, Any], parent: _Place, key: object) -> Any:
        tag = next(iter(value), None)
        if len(value) == 1 and type(tag) is str and tag[:1] == "$":
            decoder = _DECODERS.get(tag)
            if decoder is None:
                raise UnsupportedFormatError(
                    f"a value has the tag {_shown(tag)}, which this version does not know",
                    advice="it was written by a newer version of holdfast: read it with that one",
                    **_at(parent, key),
                )
            return decoder(self, value[tag], parent, key)
        here, decode = self.enter(parent, key), self.decode
        for name in value:
            if type(name) is not str or name[:1] == "$":
                raise _corrupt(f"an object has the key {_shown(name)} beside others", parent, key)
        return {name: decode(item, here, name) for name, item in value.items()}

    def enter(self, parent: _Place, key: object) -> _Place:
        depth = parent[2] + 1
        if depth > MAX_DEPTH:
            raise _corrupt(f"values are nested more than {MAX_DEPTH} levels deep", parent, key)
        return parent, key, depth

    def items(self, value: list[Any], here: _Place) -> list[Any]:
        decode = self.decode
        return [decode(item, here, index) for index, item in enumerate(value)]

    def pairs(self, value: Any, here: _Place) -> list[tuple[Any, Any]]:
        above, name, _ = here
        keys = _Decoder(None)
        result = []
        for index, pair in enumerate(_expect(value, list, above or _ROOT, name)):
            if type(pair) is not list or len(pair) != 2:
                raise _corrupt("an entry of a dict is not a pair of key and value", here, index)
            key = keys.decode(pair[0], here, index)
            result.append((key, self.decode(pair[1], here, key)))
        return result


def _expect(value: Any, cls: type[_T], parent: _Place, key: object) -> _T:
    if type(value) is not cls:
        raise _corrupt(f"expected {_JSON_NAMES[cls]}, found {_shown(value)}", parent, key)
    return value


def _expect_keys(value: Any, needed: set[str], parent: _Place, key: object, optional: str = "") -> dict[str, Any]:
    record = _expect(value, dict, parent, key)
    if record.keys() - {optional} != needed:
        raise _corrupt(f"expected an object with {', '.join(sorted(needed))}, found {_shown(value)}", parent, key)
    return record


def _expect_text(value: Any, form: re.Pattern[str], parent: _Place, key: object) -> str:
    text = _expect(value, str, parent, key)
    if form.fullmatch(text) is None:
        raise _corrupt(f"malformed text: {_shown(text)}", parent, key)
    return text


def _expect_integers(value: Any, count: int, parent: _Place, key: object) -> list[int]:
    numbers = _expect(value, list, parent, key)
    if len(numbers) != count:
        raise _corrupt(f"expected {count} integers, found {_shown(value)}", parent, key)
    return [_integer(number, parent, key) for number in numbers]


def _integer(value: Any, parent: _Place, key: object) -> int:
    if type(value) is dict and value.keys() == {"$int"}:
        return _decode_int(None, value["$int"], parent, key)
    return _expect(value, int, parent, key)


def _string(value: Any, parent: _Place, key: object) -> str:
    if type(value) is dict and value.keys() == {"$str"}:
        return _decode_str(None, value["$str"], parent, key)
    return _expect(value, str, parent, key)


def _float(value: Any, parent: _Place, key: object) -> float:
    if type(value) is dict and value.keys() == {"$float"}:
        return _decode_float(None, value["$float"], parent, key)
    return _expect(value, float, parent, key)


def _shown(value: object) -> str:
    """The start of a value that may be huge or deep, for a message."""
    if isinstance(value, list | dict):
        return f"{_JSON_NAMES[type(value)]} with {len(value)} entries"
    if type(value) not in (str, int, float, bool, type(None)) or (type(value) is int and value.bit_length() > 200):
        return f"a value of type '{_type_name(type(value))}'"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) < 80 else f"{text[:80]}..."


def _unhashable(error: Exception, parent: _Place, key: object) -> CorruptCheckpointError:
    return _corrupt(f"a key or an element cannot be hashed ({type(error).__name__})", parent, key)


def _mapping(pairs: list[tuple[Any, Any]], parent: _Place, key: object) -> dict[Any, Any]:
    try:
        result = dict(pairs)
    except Exception as error:  # a registered class can have a __hash__ or __eq__ of its own
        raise _unhashable(error, parent, key) from error
    if len(result) != len(pairs):
        raise _corrupt("a dict has the same key twice", parent, key)
    return result


def _decode_bytes(decoder: object, value: Any, parent: _Place, key: object) -> bytes:
    text = _expect(value, str, parent, key)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _corrupt(f"malformed base64: {_shown(text)}", parent, key) from error


def _decode_bytearray(decoder: object, value: Any, parent: _Place, key: object) -> bytearray:
    return bytearray(_decode_bytes(decoder, value, parent, key))


def _decode_bytes_io(decoder: object, value: Any, parent: _Place, key: object) -> io.BytesIO:
    record = _expect_keys(value, {"data", "position"}, parent, key)
    stream = io.BytesIO(_decode_bytes(decoder, record["data"], parent, key))
    # A stream may stand behind its end, where Python can count to.
    if not 0 <= _expect(record["position"], int, parent, key) <= sys.maxsize:
        raise _corrupt(f"a stream stands at {_shown(record['position'])}", parent, key)
    stream.seek(record["position"])
    return stream


def _decode_int(decoder: object, value: Any, parent: _Place, key: object) -> int:
    return int(_expect_text(value, _INT, parent, key), 16)


def _decode_float(decoder: object, value: Any, parent: _Place, key: object) -> float:
    (number,) = struct.unpack(">d", bytes.fromhex(_expect_text(value, _FLOAT, parent, key)))
    return float(number)


def _decode_str(decoder: object, value: Any, parent: _Place, key: object) -> str:
    return _decode_utf8(_decode_bytes(decoder, value, parent, key), parent, key)


def _decode_utf8(data: bytes, parent: _Place, key: object) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _corrupt("text is not UTF-8", parent, key) from error


def _decode_dict(decoder: _Decoder, value: Any, parent: _Place, key: object) -> dict[Any, Any]:
    return _mapping(decoder.pairs(value, decoder.enter(parent, key)), parent, key)


def _decode_ordered_dict(decoder: _Decoder, value: Any, parent: _Place, key: object) -> OrderedDict[Any, Any]:
    record = _expect_keys(value, {"items"}, parent, key, optional="metadata")
    here = decoder.enter(parent, key)
    result = OrderedDict(_mapping(decoder.pairs(record["items"], here), parent, key))
    if "metadata" in record:
        vars(result)["_metadata"] = decoder.decode(record["metadata"], here, "_metadata")
    return result


def _decode_counter(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Counter[Any]:
    return Counter(_decode_dict(decoder, value, parent, key))


def _decode_default_dict(decoder: _Decoder, value: Any, parent: _Place, key: object) -> defaultdict[Any, Any]:
    record = _expect_keys(value, {"factory", "items"}, parent, key)
    name = record["factory"]
    if name is not None and _expect(name, str, parent, key) not in _FACTORIES:
        raise _corrupt(f"a defaultdict has the unknown factory {_shown(name)}", parent, key)
    factory = None if name is None else _FACTORIES[name]
    return defaultdict(factory, _decode_dict(decoder, record["items"], parent, key))


def _decode_deque(decoder: _Decoder, value: Any, parent: _Place, key: object) -> deque[Any]:
    record = _expect_keys(value, {"items", "maxlen"}, parent, key)
    items, maxlen = _expect(record["items"], list, parent, key), record["maxlen"]
    if maxlen is not None and not len(items) <= _expect(maxlen, int, parent, key) <= sys.maxsize:
        raise _corrupt(f"a deque of at most {_shown(maxlen)} entries has {len(items)}", parent, key)
    return deque(decoder.items(items, decoder.enter(parent, key)), maxlen)


def _decode_tuple(decoder: _Decoder, value: Any, parent: _Place, key: object) -> tuple[Any, ...]:
    return tuple(decoder.items(_expect(value, list, parent, key), decoder.enter(parent, key)))


def _decode_set(decoder: _Decoder, value: Any, parent: _Place, key: object) -> set[Any]:
    here, items = decoder.enter(parent, key), _expect(value, list, parent, key)
    elements = _Decoder(None).items(items, here)
    try:
        result = set(elements)
    except Exception as error:  # as for the keys of a dict
        raise _unhashable(error, parent, key) from error
    if len(result) != len(elements):
        raise _corrupt("a set has the same element twice", parent, key)
    return result


def _decode_frozenset(decoder: _Decoder, value: Any, parent: _Place, key: object) -> frozenset[Any]:
    return frozenset(_decode_set(decoder, value, parent, key))


def _decode_complex(decoder: _Decoder, value: Any, parent: _Place, key: object) -> complex:
    parts = _expect(value, list, parent, key)
    if len(parts) != 2:
        raise _corrupt(f"a complex number has {len(parts)} parts", parent, key)
    return complex(_float(parts[0], parent, key), _float(parts[1], parent, key))


def _decode_range(decoder: _Decoder, value: Any, parent: _Place, key: object) -> range:
    start, stop, step = _expect_integers(value, 3, parent, key)
    if step == 0:
        raise _corrupt("a range has the step 0", parent, key)
    return range(start, stop, step)


def _decode_slice(decoder: _Decoder, value: Any, parent: _Place, key: object) -> slice:
    bounds = _expect(value, list, parent, key)
    if len(bounds) != 3:
        raise _corrupt(f"a slice has {len(bounds)} bounds", parent, key)
    return slice(*(None if bound is None else _integer(bound, parent, key) for bound in bounds))


def _decode_datetime(decoder: _Decoder, value: Any, parent: _Place, key: object) -> datetime.datetime:
    record, zone, fold = _clock(value, _DATETIME, parent, key)
    try:
        return datetime.datetime.fromisoformat(record).replace(tzinfo=zone, fold=fold)
    except ValueError as error:
        raise _corrupt(f"no such date and time: {record}", parent, key) from error


def _decode_time(decoder: _Decoder, value: Any, parent: _Place, key: object) -> datetime.time:
    record, zone, fold = _clock(value, _TIME, parent, key)
    try:
        return datetime.time.fromisoformat(record).replace(tzinfo=zone, fold=fold)
    except ValueError as error:
        raise _corrupt(f"no such time: {record}", parent, key) from error


def _clock(value: Any, form: re.Pattern[str], parent: _Place, key: object) -> tuple[str, datetime.tzinfo | None, int]:
    record = _expect_keys(value, {"iso", "tz", "fold"}, parent, key)
    fold = _expect(record["fold"], int, parent, key)
    if fold not in (0, 1):
        raise _corrupt(f"a time has the fold {_shown(fold)}", parent, key)
    return _expect_text(record["iso"], form, parent, key), _zone(record["tz"], parent, key), fold


def _zone(value: Any, parent: _Place, key: object) -> datetime.tzinfo | None:
    if value is None:
        return None
    if type(value) is dict and value.keys() == {"zone"}:
        return _named_zone(_expect_text(value["zone"], _ZONE, parent, key), parent, key)
    record = _expect_keys(value, {"offset_microseconds"}, parent, key, optional="name")
    name = (_string(record["name"], parent, key),) if "name" in record else ()
    try:
        offset = datetime.timedelta(microseconds=_expect(record["offset_microseconds"], int, parent, key))
        return datetime.timezone(offset, *name)
    except (ValueError, OverflowError) as error:
        raise _corrupt(f"no such time zone offset: {_shown(record['offset_microseconds'])}", parent, key) from error


def _named_zone(name: str, parent: _Place, key: object) -> datetime.tzinfo:
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(name)
    except (LookupError, ValueError, OSError, ImportError) as error:
        advice = "if it is a real one, this machine's time zone data lacks it: install tzdata"
        raise _corrupt(f"no such time zone: {name}", parent, key, advice) from error


def _decode_date(decoder: _Decoder, value: Any, parent: _Place, key: object) -> datetime.date:
    text = _expect_text(value, _DATE, parent, key)
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise _corrupt(f"no such date: {text}", parent, key) from error


def _decode_timedelta(decoder: _Decoder, value: Any, parent: _Place, key: object) -> datetime.timedelta:
    days, seconds, microseconds = _expect_integers(value, 3, parent, key)
    try:
        return datetime.timedelta(days, seconds, microseconds)
    except OverflowError as error:
        raise _corrupt("a timedelta is out of range", parent, key) from error


def _decode_decimal(decoder: _Decoder, value: Any, parent: _Place, key: object) -> decimal.Decimal:
    text = _expect_text(value, _DECIMAL, parent, key)
    try:
        number = decimal.Decimal(text)
    except ArithmeticError as error:
        raise _corrupt(f"no such decimal: {_shown(text)}", parent, key) from error
    # Out of range it can be rounded or become nan, as the program's decimal context says; that is not what was stored.
    if str(number) != text:
        raise _corrupt(f"no such decimal: {_shown(text)}", parent, key)
    return number


def _decode_uuid(decoder: _Decoder, value: Any, parent: _Place, key: object) -> uuid.UUID:
    return uuid.UUID(_expect_text(value, _UUID, parent, key))


def _decode_path(decoder: _Decoder, value: Any, parent: _Place, key: object) -> pathlib.Path:
    return pathlib.Path(_string(value, parent, key))


def _decode_pure_path(decoder: _Decoder, value: Any, parent: _Place, key: object) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(_string(value, parent, key))


def _decode_tensor(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    name = _expect(value, str, parent, key)
    if decoder.tensor is None:
        raise _corrupt(f"the tensor {_shown(name)} stands where none can be stored", parent, key)
    return decoder.tensor(name)


def _decode_subclass(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    record = _subclass(value, parent, key)
    if decoder.subclass is None:
        raise _corrupt(f"a tensor of type {_shown(record.name)} stands where none can be stored", parent, key)
    return decoder.subclass(_dotted(parent, key), record)


def _subclass(value: Any, parent: _Place, key: object) -> Subclass:
    record = _expect_keys(value, {"name", "dtype", "shape", "stride", "shards", "context", "tensors"}, parent, key)
    if _is_too_deep(record):
        raise _corrupt(f"values are nested more than {MAX_DEPTH} levels deep", parent, key)
    shape, stride = _shape(record["shape"], parent, key), _shape(record["stride"], parent, key)
    tensors = _expect(record["tensors"], dict, parent, key)
    forms = [list(form) for form in tensors.values() if type(form) is dict]
    if (
        len(shape) != len(stride)
        or len(forms) != len(tensors)
        or not all(f in (["$tensor"], ["$subclass"]) for f in forms)
    ):
        raise _corrupt("malformed tensor of a subclass", parent, key)
    name, dtype = _expect(record["name"], str, parent, key), _expect_text(record["dtype"], _WORD, parent, key)
    shards = _expect(record["shards"], int, parent, key)
    return Subclass(name, dtype, tuple(shape), tuple(stride), shards, record["context"], tensors)


def _is_too_deep(value: Any) -> bool:
    """Whether a JSON value nests deeper than any that is stored; found without recursion, which could fail."""
    level, depth = [value], 0
    while level and depth <= 4 * MAX_DEPTH:  # one stored level of a subclass or a tag is up to four of JSON
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer if type(outer) is list else ())
        ]
        depth += 1
    return bool(level)


def _decode_dtype(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    name = _expect_text(value, _WORD, parent, key)
    import torch

    # Not getattr: torch imports modules of its own when it is asked for certain names.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise _unknown_to_torch("dtype", name, parent, key)
    return dtype


def _decode_size(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    lengths = _shape(value, parent, key)
    import torch

    return torch.Size(lengths)


def _decode_device(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    name = _expect_text(value, _DEVICE, parent, key)
    import torch

    try:
        return torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise _unknown_to_torch("device", name, parent, key) from error


def _unknown_to_torch(what: str, name: str, parent: _Place, key: object) -> HoldfastError:
    advice = "read it with the torch version and backends that wrote it"
    return UnsupportedFormatError(f"this torch has no {what} {_shown(name)}", advice=advice, **_at(parent, key))


def _decode_scalar(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    record = _expect_keys(value, {"dtype", "data"}, parent, key)
    data = _decode_bytes(decoder, record["data"], parent, key)
    import numpy

    if record["dtype"] == "U":
        return numpy.str_(_decode_utf8(data, parent, key))
    if record["dtype"] == "S":
        return numpy.bytes_(data)
    return _array(record["dtype"], [], data, parent, key)[()]


def _decode_array(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    if type(value) is dict and "tensor" in value:
        return _array_of_tensor(decoder, value, parent, key)
    record = _expect_keys(value, {"dtype", "shape", "data"}, parent, key)
    shape = _shape(record["shape"], parent, key)
    return _array(record["dtype"], shape, _decode_bytes(decoder, record["data"], parent, key), parent, key)


def _array_of_tensor(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    record = _expect_keys(value, {"dtype", "tensor"}, parent, key)
    dtype = _numpy_dtype(record["dtype"], parent, key)
    tensor = _decode_tensor(decoder, record["tensor"], parent, key)
    try:
        array = tensor.detach().cpu().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise _corrupt(f"a tensor stands for an array of {dtype}, which it cannot be", parent, key) from error
    if array.dtype != dtype.newbyteorder("="):
        raise _corrupt(f"an array of {dtype} was stored as a tensor of {array.dtype}", parent, key)
    return array.astype(dtype, copy=False)


def _shape(value: Any, parent: _Place, key: object) -> list[int]:
    shape = _expect(value, list, parent, key)
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and 0 <= length <= sys.maxsize for length in shape):
        raise _corrupt("malformed shape", parent, key)
    return shape


def _numpy_dtype(value: Any, parent: _Place, key: object) -> Any:
    text = _expect_text(value, _NUMPY_DTYPE, parent, key)
    import numpy

    try:
        return numpy.dtype(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise _corrupt(f"no such dtype: {text}", parent, key) from error


def _array(dtype_text: Any, shape: list[int], data: bytes, parent: _Place, key: object) -> Any:
    dtype = _numpy_dtype(dtype_text, parent, key)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise _corrupt(f"an array of {dtype} and shape {shape} has {len(data)} bytes", parent, key)
    import numpy

    if dtype.kind == "b" and data.translate(None, b"\0\1"):
        raise _corrupt("an array of bool has bytes other than 0 and 1", parent, key)
    if dtype.kind == "U" and (numpy.frombuffer(data, f"{dtype.str[0]}u4") > sys.maxunicode).any():
        raise _corrupt("an array of text has characters that do not exist", parent, key)
    try:
        # Copied, so that the array owns its memory and can be written to.
        return numpy.ndarray(tuple(shape), dtype, data).copy()
    except ValueError as error:
        raise _corrupt(f"no array can have the shape {shape}", parent, key) from error


def _decode_type(decoder: _Decoder, value: Any, parent: _Place, key: object) -> Any:
    record = _expect(value, dict, parent, key)
    name = _expect(record.get("name"), str, parent, key)
    cls = _class_of_name.get(name)
    if cls is None:
        raise StateMismatchError(
            f"a value has the type {_shown(name)}, which is not registered",
            advice="register it with holdfast.register_type before restoring",
            **_at(parent, key),
        )
    kind = _registered[cls].kind
    if kind is _Kind.TENSOR:
        raise _corrupt(f"the tensor type {_shown(name)} stands where a value does", parent, key)
    if kind in (_Kind.ENUM, _Kind.FLAG):
        stored = _expect_keys(record, {"name", "value"}, parent, key)["value"]
        return _flag(cls, stored, parent, key) if kind is _Kind.FLAG else _member(cls, stored, parent, key)
    fields = _expect_keys(record, {"name", "fields"}, parent, key)["fields"]
    return _with_fields(decoder, cls, _expect(fields, dict, parent, key), parent, key)


def _member(cls: Any, value: Any, parent: _Place, key: object) -> enum.Enum:
    name = _expect(value, str, parent, key)
    if name not in cls.__members__:
        problem = f"the enum '{_type_name(cls)}' has no member {_shown(name)}"
        raise StateMismatchError(problem, advice="add it, as it was when this was saved", **_at(parent, key))
    member: enum.Enum = cls.__members__[name]
    return member


def _flag(cls: Any, value: Any, parent: _Place, key: object) -> enum.Flag:
    names = [str(_member(cls, name, parent, key)._name_) for name in _expect(value, list, parent, key)]
    flag: enum.Flag = cls(_flag_bits(cls, names))
    return flag


def _with_fields(decoder: _Decoder, cls: type, stored: dict[str, Any], parent: _Place, key: object) -> Any:
    kind, here = _registered[cls].kind, decoder.enter(parent, key)
    names = _field_names(cls, kind)
    if stored.keys() != set(names):
        skip = "" if decoder.tensor is None else ", or leave its component out with LoadStrategy(skip=...)"
        raise StateMismatchError(
            f"the fields of '{_type_name(cls)}' are not those that were saved",
            advice=f"declare the same fields{skip}",
            missing=[_dotted(here, name) for name in names if name not in stored],
            unexpected=[_dotted(here, name) for name in stored if name not in names],
            **_at(parent, key),
        )
    values = [decoder.decode(stored[name], here, name) for name in names]
    if kind is _Kind.NAMED_TUPLE:
        return tuple.__new__(cls, values)
    result: Any = object.__new__(cls)
    for name, item in zip(names, values, strict=True):
        object.__setattr__(result, name, item)
    return result


_T = TypeVar("_T")
_MAX_DIMENSIONS = 64
_JSON_NAMES = {dict: "an object", list: "an array", str: "a text", int: "an integer", float: "a number with a fraction"}
_INT = re.compile(rf"-?0x[0-9a-f]{{1,{MAX_DIGITS}}}")
_FLOAT = re.compile(r"[0-9a-f]{16}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{6})?")
_DATETIME = re.compile(rf"{_DATE.pattern}T{_TIME.pattern}")
_DECIMAL = re.compile(
    rf"(?=.{{1,{MAX_DIGITS}}}\Z)-?(?:[0-9]+(?:\.[0-9]+)?(?:E[+-][0-9]{{1,20}})?|Infinity|s?NaN[0-9]*)"
)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,63}(?::[0-9]{1,4})?")

_DECODERS: dict[str, Callable[[_Decoder, Any, _Place, object], Any]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$str": _decode_str,
    "$dict": _decode_dict,
    "$ordereddict": _decode_ordered_dict,
    "$counter": _decode_counter,
    "$defaultdict": _decode_default_dict,
    "$deque": _decode_deque,
    "$tuple": _decode_tuple,
    "$set": _decode_set,
    "$frozenset": _decode_frozenset,
    "$bytes": _decode_bytes,
    "$bytearray": _decode_bytearray,
    "$bytesio": _decode_bytes_io,
    "$complex": _decode_complex,
    "$range": _decode_range,
    "$slice": _decode_slice,
    "$datetime": _decode_datetime,
    "$time": _decode_time,
    "$date": _decode_date,
    "$timedelta": _decode_timedelta,
    "$decimal": _decode_decimal,
    "$uuid": _decode_uuid,
    "$path": _decode_path,
    "$purepath": _decode_pure_path,
    "$tensor": _decode_tensor,
    "$subclass": _decode_subclass,
    "$dtype": _decode_dtype,
    "$size": _decode_size,
    "$device": _decode_device,
    "$scalar": _decode_scalar,
    "$ndarray": _decode_array,
    "$type": _decode_type,
}


# --- showing ----------------------------------------------------------------------------------------------------------


def _plain(value: Any, depth: int) -> Json:
    if depth > MAX_DEPTH:
        return "<nested too deep>"
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return _plain_number(value) if isinstance(value, float) else value
    tag = next(iter(value), None)
    shown = _SHOWN.get(tag) if len(value) == 1 else None
    if shown is None:
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    try:
        return shown(value[tag], depth)
    except (ArithmeticError, AttributeError, HoldfastError, LookupError, TypeError, ValueError, struct.error):
        return f"<malformed {tag}>"


def _typed(value: Any, depth: int) -> str:
    if depth > MAX_DEPTH:
        return "<nested too deep>"
    if isinstance(value, list):
        return f"[{', '.join(_typed(item, depth + 1) for item in value)}]"
    if not isinstance(value, dict):
        return repr(value)
    tag: Any = next(iter(value), None)
    if len(value) != 1 or tag not in _SHOWN:
        return f"{{{', '.join(f'{name!r}: {_typed(item, depth + 1)}' for name, item in value.items())}}}"
    inner = value[tag]
    if tag == "$scalar" and isinstance(inner, dict):
        return f"numpy {inner.get('dtype')} {_plain(value, depth)}"
    return f"{tag[1:]}({_typed(inner, depth + 1)})"


def _plain_number(value: float) -> Json:
    return value if math.isfinite(value) else str(value)


def _plain_int(value: Any, depth: int) -> Json:
    # Above a size people want the hex text, and Python refuses to make a decimal one.
    return str(_decode_int(None, value, _ROOT, "")) if len(value) < 1_000 else str(value)


def _plain_items(value: Any, depth: int) -> Json:
    return [_plain(item, depth + 1) for item in _expect(value, list, _ROOT, "")]


def _plain_pairs(value: Any, depth: int) -> Json:
    pairs = [(_plain(key, depth + 1), _plain(item, depth + 1)) for key, item in value]
    named = {key if isinstance(key, str) else str(key): item for key, item in pairs}
    # 1 and "1" are two keys: where their texts are one, nothing may be hidden.
    return named if len(named) == len(pairs) else [[key, item] for key, item in pairs]


def _plain_ordered_dict(value: Any, depth: int) -> Json:
    return _plain_pairs(value["items"], depth)


def _plain_deque(value: Any, depth: int) -> Json:
    return _plain_items(value["items"], depth)


def _plain_text(value: Any, depth: int) -> Json:
    # Escaped where it has lone surrogates: they can be neither printed nor sent.
    return _string(value, _ROOT, "").encode("utf-8", "backslashreplace").decode()


def _plain_string(value: Any, depth: int) -> Json:
    return _plain_text({"$str": value}, depth)


def _plain_bytes(value: Any, depth: int) -> Json:
    return f"<{len(_decode_bytes(None, value, _ROOT, ''))} bytes>"


def _plain_bytes_io(value: Any, depth: int) -> Json:
    return _plain_bytes(value["data"], depth)


def _plain_float(value: Any, depth: int) -> Json:
    return _plain_number(_decode_float(None, value, _ROOT, ""))


def _plain_complex(value: Any, depth: int) -> Json:
    return str(complex(*(_float(part, _ROOT, "") for part in value)))


def _plain_range(value: Any, depth: int) -> Json:
    return f"range({', '.join(str(_plain(number, depth + 1)) for number in value)})"


def _plain_slice(value: Any, depth: int) -> Json:
    return f"slice({', '.join(str(_plain(number, depth + 1)) for number in value)})"


def _plain_clock(value: Any, depth: int) -> Json:
    zone = value["tz"]
    if zone is None:
        return str(value["iso"])
    if "zone" in zone:
        return f"{value['iso']}[{zone['zone']}]"
    offset = datetime.timezone(datetime.timedelta(microseconds=zone["offset_microseconds"]))
    return f"{value['iso']}{offset.tzname(None).removeprefix('UTC') or 'Z'}"


def _plain_timedelta(value: Any, depth: int) -> Json:
    return str(datetime.timedelta(*_expect_integers(value, 3, _ROOT, "")))


def _plain_tensor(value: Any, depth: int) -> Json:
    name = _string(value, _ROOT, "")
    # A tensor that stands in place: its type and shape, not its bytes.
    return f"<tensor {name.rpartition(':')[0] if name.startswith('data:') else name}>"


def _plain_subclass(value: Any, depth: int) -> Json:
    return f"<{_string(value['name'], _ROOT, '')} of {', '.join(map(str, value['tensors']))}>"


def _plain_scalar(value: Any, depth: int) -> Json:
    dtype, data = value["dtype"], _decode_bytes(None, value["data"], _ROOT, "")
    if dtype == "U":
        return data.decode("utf-8", "backslashreplace")
    if dtype == "S":
        return f"<{len(data)} bytes>"
    if dtype[1:] not in _STRUCT_FORMATS:
        return f"<numpy {dtype}>"
    numbers = struct.unpack(dtype[0].replace("|", "<") + _STRUCT_FORMATS[dtype[1:]], data)
    if len(numbers) == 2:
        return str(complex(*numbers))
    return _plain_number(numbers[0]) if isinstance(numbers[0], float) else numbers[0]


def _plain_array(value: Any, depth: int) -> Json:
    if "tensor" in value:
        return f"<array {value['dtype']} in tensor {value['tensor']}>"
    return f"<array {value['dtype']} {tuple(_shape(value['shape'], _ROOT, ''))}>"


def _plain_type(value: Any, depth: int) -> Json:
    if "fields" in value:
        return {str(name): _plain(item, depth + 1) for name, item in value["fields"].items()}
    member = value["value"]
    return f"{value['name']}.{'|'.join(member) if isinstance(member, list) else member}"


_STRUCT_FORMATS = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip

_SHOWN: dict[Any, Callable[[Any, int], Json]] = {
    "$int": _plain_int,
    "$float": _plain_float,
    "$str": _plain_string,
    "$dict": _plain_pairs,
    "$ordereddict": _plain_ordered_dict,
    "$counter": _plain_pairs,
    "$defaultdict": _plain_ordered_dict,
    "$deque": _plain_deque,
    "$tuple": _plain_items,
    "$set": _plain_items,
    "$frozenset": _plain_items,
    "$bytes": _plain_bytes,
    "$bytearray": _plain_bytes,
    "$bytesio": _plain_bytes_io,
    "$complex": _plain_complex,
    "$range": _plain_range,
    "$slice": _plain_slice,
    "$datetime": _plain_clock,
    "$time": _plain_clock,
    "$date": _plain_text,
    "$timedelta": _plain_timedelta,
    "$decimal": _plain_text,
    "$uuid": _plain_text,
    "$path": _plain_text,
    "$purepath": _plain_text,
    "$tensor": _plain_tensor,
    "$subclass": _plain_subclass,
    "$dtype": _plain_text,
    "$size": _plain_items,
    "$device": _plain_text,
    "$scalar": _plain_scalar,
    "$ndarray": _plain_array,
    "$type": _plain_type,
}
