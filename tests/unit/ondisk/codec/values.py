"""Values for the tests of the codec, and what compares them."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import json
import struct
from collections import OrderedDict, deque
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.ondisk import codec


class Tensors:
    """Both callbacks over one dict, as the tensor files are in a checkpoint."""

    def __init__(self) -> None:
        self.stored: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> str:
        self.stored[name] = tensor
        return name

    def get(self, name: str) -> torch.Tensor:
        return self.stored[name]


def round_trip(value: object) -> Any:
    tensors = Tensors()
    stored = codec.encode(value, path="root", on_tensor=tensors.put)
    text = msgspec.json.encode(stored)
    assert json.loads(text) == stored  # any JSON parser reads the same
    assert text == msgspec.json.encode(codec.encode(value, path="root", on_tensor=tensors.put))
    codec.plain(stored)
    return codec.decode(msgspec.json.decode(text), path="root", tensor=tensors.get)


def same(left: Any, right: Any) -> bool:
    """Equal in type, bits and order, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, enum.Enum):
        return left is right
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        if getattr(left, "default_factory", None) is not getattr(right, "default_factory", None):
            return False
        return same(list(left.items()), list(right.items())) and same(
            getattr(left, "__dict__", None), getattr(right, "__dict__", None)
        )
    if isinstance(left, (list, tuple, deque)):
        if getattr(left, "maxlen", None) != getattr(right, "maxlen", None) or len(left) != len(right):
            return False
        return all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (set, frozenset)):
        stored = [codec.encode(value, path="", on_tensor=None) for value in (left, right)]
        return stored[0] == stored[1]
    if isinstance(left, (datetime.datetime, datetime.time)):
        zones = [(repr(value.tzinfo), value.fold, value.replace(tzinfo=None)) for value in (left, right)]
        return zones[0] == zones[1]
    if isinstance(left, Decimal):
        return str(left) == str(right)
    if isinstance(left, io.BytesIO):
        return (left.getvalue(), left.tell()) == (right.getvalue(), right.tell())
    if dataclasses.is_dataclass(left):
        return same(vars(left), vars(right)) if hasattr(left, "__dict__") else left == right
    return bool(left == right)


def standing_at(stream: io.BytesIO, position: int) -> io.BytesIO:
    stream.seek(position)
    return stream


@codec.register_type
class Color(enum.Enum):
    RED = "r"
    GREEN = object()
    CRIMSON = "r"


@codec.register_type
class Level(enum.IntEnum):
    LOW = 1


@codec.register_type
class Word(enum.StrEnum):
    YES = "yes"


@codec.register_type
class Access(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


@codec.register_type
class Bits(enum.IntFlag):
    ONE = 1
    FOUR = 4


@codec.register_type
class Rate(NamedTuple):
    value: float
    unit: str = "Hz"


@codec.register_type
@dataclasses.dataclass
class Cursor:
    shard: int
    inner: Any = None
    ran: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        self.ran = True


@codec.register_type
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    name: str
    number: int = 0


class UnregisteredEnum(enum.IntEnum):
    ONE = 1


class MyInt(int):
    pass


class MyDict(dict):
    pass


class MyFloat(np.float64):
    pass


@dataclasses.dataclass
class UnregisteredDataclass:
    x: int = 1


QUIET_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]


NEGATIVE_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000000"))[0]


SIGNALLING_NAN = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]


def ordered_with_metadata() -> OrderedDict[str, int]:
    value = OrderedDict(b=1, a=2)
    value._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return value


BOTTOMLESS: Any = "x"


for _ in range(codec.MAX_DEPTH + 1):
    BOTTOMLESS = [BOTTOMLESS]
