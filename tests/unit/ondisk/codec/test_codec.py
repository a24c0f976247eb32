"""The codec stores what it can give back exactly, and refuses everything else where it stands."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import io
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import (
    CorruptCheckpointError,
    HoldfastError,
    StateMismatchError,
    UnsupportedFormatError,
    UsageError,
)
from holdfast.ondisk import codec
from holdfast.ondisk.codec.decoding import DECODERS
from holdfast.ondisk.codec.display import _SHOWN

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


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


VALUES: dict[str, object] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**53 + 1],
    "large ints": [2**63, -(2**63) - 1, 2**4000, -(10**5000)],
    "floats": [1.0, -0.0, 0.1, 1e16, 1e22, 1e300, 5e-324, 1.7976931348623157e308, 2**53 + 0.0],
    "floats that JSON has not": [float("nan"), float("inf"), -float("inf"), QUIET_NAN, NEGATIVE_NAN, SIGNALLING_NAN],
    "texts": ["", "ascii", "größe", "\N{GRINNING FACE}", "a\0b", "$tag", "\x7f\u2028"],
    "lone surrogates": ["\ud800", "a\udfffb", "\udcff"],
    "lists": [[], [1, [2, [3]]]],
    "dict in order": {"b": 1, "a": {"": 2, "c.d": 3}},
    "dict with surrogate keys": {"\ud800": 1, "a": 2},
    "dict with tag-like keys": {"$tensor": "x", "a": 1},
    "dict with one tag-like key": {"$tuple": [1]},
    "dict with other keys": {1: "a", "1": "b", None: 2, True + 1: 3, 2.5: 4, b"k": 5, (1, (2, "x")): 6, Color.RED: 7},
    "dict with odd keys": {2**70: 1, float("inf"): 2, frozenset([1]): 3, Key("a"): 4, np.int64(7): 5, torch.int8: 6},
    "dict with a bool key": {True: 1, False: 0},
    "dict with a nan key": {float("nan"): 1},
    "OrderedDict": OrderedDict([("b", 1), ("a", 2), (3, 4)]),
    "OrderedDict of torch": ordered_with_metadata(),
    "Counter": Counter({4: 2, 2: 1, "x": -3}),
    "defaultdicts": [defaultdict(factory, {1: [2]}) for factory in (int, float, str, list, dict, set, bool, None)],
    "deques": [deque([1, (2,)]), deque([1, 2], maxlen=2), deque(maxlen=0)],
    "tuples": [(), (1,), (1, (2, [3])), ((),)],
    "sets": [set(), {1, 2, "a", None, (1, 2)}, {1.5, b"x"}],
    "frozensets": [frozenset(), frozenset({frozenset({1}), 2})],
    "bytes": [b"", b"\0\xff", bytes(range(256))],
    "bytearrays": [bytearray(), bytearray(b"\0\xff")],
    "streams": [io.BytesIO(), standing_at(io.BytesIO(b"abc"), 2), {"behind its end": standing_at(io.BytesIO(b"a"), 9)}],
    "complex": [1j, complex(-0.0, 0.0), complex(float("nan"), float("-inf"))],
    "ranges": [range(3), range(5, -5, -2), range(0), range(2**70, 2**71)],
    "slices": [slice(None), slice(1, None, -2), slice(2**70)],
    "datetimes": [
        datetime.datetime(2024, 12, 31, 23, 59, 59, 1),
        datetime.datetime(1, 1, 1),
        datetime.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(-datetime.timedelta(hours=3, microseconds=7))),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")),
    ],
    "times": [datetime.time(1, 2, 3), datetime.time(1, 2, 3, 4, tzinfo=datetime.UTC, fold=1)],
    "dates": [datetime.date.min, datetime.date.max],
    "timedeltas": [datetime.timedelta(-1, 2, 3), datetime.timedelta.max, datetime.timedelta.min],
    "decimals": [Decimal(text) for text in ("0", "-0", "1.50", "1E+7", "-1E-999999", "NaN123", "sNaN", "-Infinity")],
    "uuid": uuid.UUID(int=5),
    "paths": [pathlib.Path("/a/b"), pathlib.Path(""), pathlib.PurePosixPath("a/../b"), pathlib.Path("\udcff")],
    "torch values": [torch.bfloat16, torch.float8_e4m3fn, torch.Size([]), torch.Size([2, 0]), torch.device("cuda:3")],
    "torch devices": [torch.device("cpu"), torch.device("meta")],
    "tensors": {"a": torch.arange(3), "b": [torch.tensor(1.5, dtype=torch.bfloat16)]},
    "numpy scalars": [
        np.float64(0.1),
        np.float32("nan"),
        np.float16(1),
        np.int8(-1),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1j),
        np.datetime64("2024-01-01T00:00:00.5"),
        np.datetime64("NaT"),
        np.timedelta64(5, "D"),
    ],
    "numpy texts": [np.str_("aä\ud800"), np.str_(""), np.bytes_(b"x\0")],
    "numpy enums first": [np.float64(1.0), 1.0],
    "enums": [Color.RED, Color.GREEN, Level.LOW, Word.YES],
    "flags": [Access.READ, Access.BOTH, Access(0), Access.READ | Access.WRITE, Bits.ONE | Bits.FOUR],
    "NamedTuple": Rate(1.5),
    "dataclasses": [Cursor(1, {"x": (1,)}), Key("k", 2)],
}

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    **{f"small {code}": np.array([0, 1, 1], dtype=code) for code in "?bhilqBHILQefdFD"},
    **{f"large {code}": np.arange(3000).astype(code).reshape(30, 100) for code in "?bhilqBHILQefdFD"},
    "zero-dimensional": np.array(5),
    "empty": np.zeros((0, 3), dtype=np.float32),
    "empty text": np.array([], dtype=str),
    "small big-endian": np.arange(3, dtype=">i4"),
    "large big-endian": np.arange(3000, dtype=">f8"),
    "bytes of fixed width": np.array([b"a", b"bcd"]),
    "texts of fixed width": np.array(["a", "größe", "\U0010ffff"]),
    "big-endian texts": np.array(["a", "größe"]).astype(">U5"),
    "many texts": np.array(["abc"] * 2000),
    "datetimes": np.array(["2024-01-01", "NaT"], dtype="M8[ns]"),
    "datetimes in a multiple": np.array([1, 2], dtype="<M8[25us]"),
    "datetimes without a unit": np.array(["NaT"], dtype="M8"),
    "many timedeltas": np.arange(3000).astype("m8[s]"),
    "small Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "large Fortran": np.asfortranarray(np.arange(6000).reshape(60, 100)),
    "large reversed": np.arange(6000)[::-2],
    "large broadcast": np.broadcast_to(np.arange(100), (50, 100)),
    "large read-only": np.frombuffer(bytes(4000), dtype=np.int32),
    "nan bits": np.array([QUIET_NAN, NEGATIVE_NAN]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_type_and_its_bits(name: str) -> None:
    assert same(round_trip(VALUES[name]), VALUES[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_with_its_dtype_and_its_bits(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about arrays that cannot be written to
        result = round_trip(ARRAYS[name])
    assert same(result, ARRAYS[name])
    assert result.flags.writeable


def test_the_stored_form_is_the_documented_one() -> None:
    def stored(value: object) -> Any:
        return codec.encode(value, path="root", on_tensor=lambda name, tensor: f"<{name}>")

    assert stored({"a": [1, 2.0, None, "x"]}) == {"a": [1, 2.0, None, "x"]}
    assert stored(2**64) == {"$int": "0x10000000000000000"}
    assert stored(float("nan")) == {"$float": "7ff8000000000000"}
    assert stored({1: 2}) == {"$dict": [[1, 2]]}
    assert stored((1,)) == {"$tuple": [1]}
    assert stored({"b", "a"}) == {"$set": ["a", "b"]}
    assert stored(b"ab") == {"$bytes": "YWI="}
    assert stored(np.float32(1)) == {"$scalar": {"dtype": "<f4", "data": "AACAPw=="}}
    assert stored(np.array([1], dtype=np.int8)) == {"$ndarray": {"dtype": "|i1", "shape": [1], "data": "AQ=="}}
    assert stored({"x": np.zeros(129)}) == {"x": {"$ndarray": {"dtype": "<f8", "tensor": "<root.x>"}}}
    assert stored({"x": np.zeros(128)})["x"]["$ndarray"]["shape"] == [128]
    assert stored(Rate(1.0)) == {"$type": {"name": f"{__name__}.Rate", "fields": {"value": 1.0, "unit": "Hz"}}}
    assert stored(Color.CRIMSON) == {"$type": {"name": f"{__name__}.Color", "value": "RED"}}
    assert stored(Access(0)) == {"$type": {"name": f"{__name__}.Access", "value": []}}


def test_every_tag_is_in_the_table_of_the_package() -> None:
    assert all(f'{{"{tag}":' in (codec.__doc__ or "") for tag in DECODERS)
    assert DECODERS.keys() == _SHOWN.keys()


def test_a_set_is_stored_alike_in_processes_that_hash_differently() -> None:
    script = (
        "from holdfast.ondisk.codec import encode;"
        "print(encode({'a','b','c',('x','y'),b'z',None}, path='s', on_tensor=None))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_neither_importing_nor_plain_values_import_torch_or_numpy() -> None:
    script = (
        "import sys; from holdfast.ondisk import codec;"
        "stored = codec.encode({'a': (1, {2})}, path='x', on_tensor=None); codec.decode(stored, path='x', tensor=None);"
        "codec.plain({'$scalar': {'dtype': '<f8', 'data': 'AAAAAAAA8D8='}});"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_tensors_are_handed_over_by_their_dotted_name() -> None:
    names: list[str] = []
    tensor = torch.zeros(1)
    parameter = torch.nn.Parameter(tensor)
    value = {"sampler": {"order": [0, 0, 0, tensor]}, "state": {0: {"exp_avg": parameter}, (1, "x"): tensor}}

    def on_tensor(name: str, found: Any) -> str:
        assert found is tensor or found is parameter
        names.append(name)
        return f"leaf-{len(names)}"

    stored = codec.encode(value, path="loader", on_tensor=on_tensor)
    assert names == ["loader.sampler.order.3", "loader.state.0.exp_avg", "loader.state.(1, 'x')"]
    assert codec.decode(stored, path="loader", tensor=lambda name: name)["sampler"]["order"][3] == "leaf-1"  # type: ignore[index]


def test_the_caller_s_values_are_not_changed() -> None:
    value = {"a": [1, {2: 3}], "x": np.arange(1000)}
    before = {"a": [1, {2: 3}], "x": np.arange(1000)}
    round_trip(value)
    assert same(value, before)


@dataclasses.dataclass
class Refused:
    value: Any
    type_name: str


def closed_stream() -> io.BytesIO:
    stream = io.BytesIO(b"abc")
    stream.close()
    return stream


def generator() -> Any:
    yield 1


REFUSED = {
    "lambda": Refused(lambda: 1, "function"),
    "builtin function": Refused(len, "builtin_function_or_method"),
    "generator": Refused(generator(), "generator"),
    "closed stream": Refused(closed_stream(), "_io.BytesIO"),
    "module": Refused(json, "module"),
    "class": Refused(int, "type"),
    "lock": Refused(threading.Lock(), "_thread.lock"),
    "object": Refused(object(), "object"),
    "ellipsis": Refused(..., "ellipsis"),
    "partial": Refused(functools.partial(int), "functools.partial"),
    "torch module": Refused(torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    "torch generator": Refused(torch.Generator(), "torch._C.Generator"),
    "subclass of int": Refused(MyInt(1), f"{__name__}.MyInt"),
    "subclass of dict": Refused(MyDict(), f"{__name__}.MyDict"),
    "subclass of a numpy scalar": Refused(MyFloat(1), f"{__name__}.MyFloat"),
    "unregistered enum": Refused(UnregisteredEnum.ONE, f"{__name__}.UnregisteredEnum"),
    "unregistered dataclass": Refused(UnregisteredDataclass(), f"{__name__}.UnregisteredDataclass"),
    "defaultdict of a lambda": Refused(defaultdict(lambda: 1), "collections.defaultdict"),
    "slice of texts": Refused(slice("a", "b"), "slice"),
    "object array": Refused(np.array([object()]), "numpy.ndarray"),
    "structured array": Refused(np.zeros(1, dtype=[("a", "i4")]), "numpy.ndarray"),
    "structured scalar": Refused(np.zeros(1, dtype=[("a", "i4")])[0], "numpy.void"),
    "long double": Refused(np.zeros(1, dtype=np.longdouble), "numpy.ndarray"),
    "masked array": Refused(np.ma.array([1]), "numpy.ma.MaskedArray"),
    "flag without a name": Refused(Bits(3), f"{__name__}.Bits"),
    "memoryview": Refused(memoryview(b""), "memoryview"),
    "too large an int": Refused(1 << 300_000, "int"),
    "exception": Refused(ValueError("x"), "ValueError"),
    "Windows path": Refused(pathlib.PureWindowsPath("a"), "pathlib.PureWindowsPath"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["list", "tuple", "dict", "other dict", "dataclass"])
def test_what_cannot_be_stored_is_refused_by_type_and_place(name: str, where: str) -> None:
    value, type_name = REFUSED[name].value, REFUSED[name].type_name
    inside = {"list": [0, value], "tuple": (0, value), "dict": {"1": value}, "other dict": {1: value}}
    holder, leaf = (Cursor(1, value), "loader.it.inner") if where == "dataclass" else (inside[where], "loader.it.1")
    with pytest.raises(UsageError, match=r"leave it out of the state dict") as caught:
        codec.encode({"it": holder}, path="loader", on_tensor=Tensors().put)
    assert caught.value.problem.startswith(f"a value of type '{type_name}' cannot be stored")
    assert (caught.value.component, caught.value.leaf) == ("loader", leaf)


BOTTOMLESS: Any = "x"
for _ in range(codec.MAX_DEPTH + 1):
    BOTTOMLESS = [BOTTOMLESS]


@pytest.mark.parametrize(
    ("value", "in_a_state", "passed"),
    [
        (
            object(),
            "put plain values in its place, or leave it out of the state dict",
            "pass plain values in its place, or leave it out",
        ),
        (
            torch.nn.Linear(1, 1),
            "put its state_dict() in its place, or leave it out of the state dict",
            "pass plain values in its place, or leave it out",
        ),
        (
            UnregisteredEnum.ONE,
            "register its class with holdfast.register_type, put plain values in its place, or leave it out of the "
            "state dict",
            "register its class with holdfast.register_type, pass plain values in its place, or leave it out",
        ),
        (
            Bits(3),
            "put plain values in its place, or leave it out of the state dict",
            "pass plain values in its place, or leave it out",
        ),
        (
            {torch.zeros(1): 1},
            "use .item() or .tolist(), or leave it out of the state dict",
            "use .item() or .tolist(), or leave it out",
        ),
        (
            {object(): 1},
            "put plain values in its place, or leave it out of the state dict",
            "pass plain values in its place, or leave it out",
        ),
        (BOTTOMLESS, "make it flatter, or leave it out of the state dict", "make it flatter, or leave it out"),
    ],
    ids=["object", "module", "enum", "registered", "tensor as a key", "object as a key", "too deep"],
)
def test_the_advice_is_for_where_the_value_stands(value: object, in_a_state: str, passed: str) -> None:
    for on_tensor, advice in ((Tensors().put, in_a_state), (None, passed)):
        with pytest.raises(UsageError) as caught:
            codec.encode({"a": value}, path="x", on_tensor=on_tensor)
        assert caught.value.advice == advice


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [
        (None, "declare the same fields"),
        (Tensors().get, "declare the same fields, or leave its component out with LoadStrategy(skip=...)"),
    ],
)
def test_only_state_can_be_left_out_when_it_is_read(tensor: Any, advice: str) -> None:
    stored = codec.encode(Cursor(1, 2), path="x", on_tensor=None)
    stored["$type"]["fields"].pop("inner")  # type: ignore[index, call-overload, union-attr]
    with pytest.raises(StateMismatchError) as caught:
        codec.decode(stored, path="x", tensor=tensor)
    assert caught.value.advice == advice


def test_a_tensor_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be stored here") as caught:
        codec.encode({"loss": torch.zeros(())}, path="metrics", on_tensor=None)
    assert caught.value.leaf == "metrics.loss"
    assert codec.encode(np.zeros(1000), path="x", on_tensor=None)["$ndarray"]["shape"] == [1000]  # type: ignore[index, call-overload]


@pytest.mark.parametrize("value", [{torch.zeros(1): 1}, {torch.zeros(1)}, {(1, torch.zeros(1)): 1}])
def test_a_tensor_cannot_be_a_key(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be stored here"):
        codec.encode(value, path="x", on_tensor=Tensors().put)


def test_attributes_that_would_be_lost_are_refused() -> None:
    ordered: Any = OrderedDict(a=1)
    ordered.note = 1
    counter: Any = Counter("a")
    counter.note = 1
    cursor: Any = Cursor(1)
    cursor.note = 1
    for value in (ordered, counter, cursor):
        with pytest.raises(UsageError, match="attribute 'note'"):
            codec.encode(value, path="x", on_tensor=None)
    del cursor.note, cursor.shard
    with pytest.raises(UsageError, match="field 'shard' is not set"):
        codec.encode(cursor, path="x", on_tensor=None)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}, Cursor, Rate])
def test_what_nests_100_deep_comes_back_and_deeper_is_refused_both_ways(wrap: Any) -> None:
    value: Any = 1 if wrap is not Cursor else Cursor(1)
    for _ in range(100 if wrap is not Cursor else 99):
        value = wrap(value)
    assert round_trip(value) == value
    with pytest.raises(UsageError, match="may contain itself"):
        codec.encode(wrap(value), path="x", on_tensor=None)
    stored = codec.encode(value, path="x", on_tensor=None)
    with pytest.raises(CorruptCheckpointError, match="100 levels"):
        codec.decode([stored], path="x", tensor=None)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["me"] = [value, value]
    with pytest.raises(UsageError, match="may contain itself"):
        codec.encode(value, path="x", on_tensor=None)


def test_registered_objects_come_back_without_running_their_code() -> None:
    cursor = Cursor(1)
    cursor.ran = False
    assert round_trip(cursor).ran is False


def test_a_cached_property_is_left_behind() -> None:
    @dataclasses.dataclass
    class Cached:
        x: int

        @functools.cached_property
        def double(self) -> int:
            return 2 * self.x

    codec.register_type(Cached)
    value = Cached(2)
    assert value.double == 4
    assert vars(round_trip(value)) == {"x": 2}


def test_fields_or_members_that_changed_are_a_mismatch() -> None:
    def stored(**record: Any) -> Any:
        return {"$type": record}

    with pytest.raises(StateMismatchError) as caught:
        codec.decode(stored(name=f"{__name__}.Key", fields={"name": "a", "old": 1}), path="x.y", tensor=None)
    assert (caught.value.missing, caught.value.unexpected) == (("x.y.number",), ("x.y.old",))  # type: ignore[attr-defined]
    for record in (
        {"name": f"{__name__}.Color", "value": "BLUE"},
        {"name": f"{__name__}.Access", "value": ["READ", "RUN"]},
        {"name": "os.system", "value": "RED"},
    ):
        with pytest.raises(StateMismatchError):
            codec.decode(stored(**record), path="x", tensor=None)


def test_a_name_belongs_to_one_class() -> None:
    first = dataclasses.make_dataclass("First", ["x"])
    second = dataclasses.make_dataclass("Second", ["x"])
    assert codec.register_type(first, "test.first") is first
    assert codec.register_type(first, "test.first") is first
    with pytest.raises(UsageError, match=r"test\.first"):
        codec.register_type(second, "test.first")
    codec.register_type(first, "test.first.old")
    assert codec.encode(first(1), path="x", on_tensor=None)["$type"]["name"] == "test.first"  # type: ignore[index, call-overload]
    old: Any = {"$type": {"name": "test.first.old", "fields": {"x": 1}}}
    assert codec.decode(old, path="x", tensor=None) == first(1)


@pytest.mark.parametrize(
    "cls", [int, MyDict, dataclasses.make_dataclass("Mixed", ["x"], bases=(dict,)), Refused(1, ""), torch.Size]
)
def test_only_enums_dataclasses_and_named_tuples_can_be_registered(cls: Any) -> None:
    with pytest.raises(UsageError, match="is not an enum"):
        codec.register_type(cls, "test.refused")


CORRUPT = [
    {"$tuple": 1},
    {"$tuple": [1], "a": 2},
    {"a": 1, "$tuple": []},
    {"$int": "12"},
    {"$int": "0x"},
    {"$int": "0x" + "f" * 70_000},
    {"$int": "0x1_0"},
    {"$float": "7ff800000000000"},
    {"$float": 1.0},
    {"$str": "?"},
    {"$str": "/w=="},
    {"$bytes": "YWI"},
    {"$bytes": "YW\nI="},
    {"$bytes": "ä"},
    {"$bytes": None},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[1, 2], [1.0, 3]]},
    {"$dict": [[[], 1]]},
    {"$dict": [[1]]},
    {"$dict": {"a": 1}},
    {"$dict": [[{"$tensor": "a"}, 1]]},
    {"$set": [[1]]},
    {"$set": [1, 1]},
    {"$set": [{"$tensor": "a"}]},
    {"$defaultdict": {"factory": "eval", "items": []}},
    {"$defaultdict": {"factory": [], "items": []}},
    {"$ordereddict": {"items": [], "keys": 1}},
    {"$deque": {"items": [1, 2], "maxlen": 1}},
    {"$deque": {"items": [], "maxlen": -1}},
    {"$deque": {"items": [], "maxlen": True}},
    {"$deque": {"items": [], "maxlen": 2**63}},
    {"$bytesio": "AA=="},
    {"$bytesio": {"data": "AA=="}},
    {"$bytesio": {"data": "AA=", "position": 0}},
    {"$bytesio": {"data": "AA==", "position": -1}},
    {"$bytesio": {"data": "AA==", "position": True}},
    {"$bytesio": {"data": "AA==", "position": 2**63}},
    {"$range": [0, 1, 0]},
    {"$range": [0, 1.0, 1]},
    {"$slice": ["a", None, None]},
    {"$complex": [1, 2.0]},
    {"$datetime": {"iso": "2024-13-01T00:00:00", "tz": None, "fold": 0}},
    {"$datetime": {"iso": "2024-W01", "tz": None, "fold": 0}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": None, "fold": 2}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": {"zone": "../../etc/passwd"}, "fold": 0}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": {"zone": "/etc/passwd"}, "fold": 0}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": {"zone": "Mars/Olympus"}, "fold": 0}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": {"zone": "America"}, "fold": 0}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": {"zone": 5}, "fold": 0}},
    {"$datetime": {"iso": "2024-01-01T00:00:00", "tz": {"offset_microseconds": 2**62}, "fold": 0}},
    {"$time": {"iso": "25:00:00", "tz": None, "fold": 0}},
    {"$date": "2024-02-30"},
    {"$date": "٢٠٢٤-01-01"},
    {"$timedelta": [10**10, 0, 0]},
    {"$timedelta": [{"$int": "0x" + "f" * 5000}, 0, 0]},
    {"$decimal": "1e5"},
    {"$decimal": "1E+99999999999999999999"},
    {"$decimal": "1" * 70_000},
    {"$decimal": "os.system"},
    {"$uuid": "{00000000-0000-0000-0000-000000000005}"},
    {"$path": ["a"]},
    {"$dtype": "__class__"},
    {"$device": "cuda:0; rm"},
    {"$size": [-1]},
    {"$size": [1] * 65},
    {"$size": [2**70]},
    {"$tensor": 1},
    {"$scalar": {"dtype": "<f8", "data": "AAAA"}},
    {"$scalar": {"dtype": "|b1", "data": "Ag=="}},
    {"$scalar": {"dtype": ["<f8"], "data": "AAAAAAAA8D8="}},
    {"$ndarray": {"dtype": "|O", "shape": [], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "|V8", "shape": [], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "i4,i4", "shape": [], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f8\n", "shape": [], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f16", "shape": [], "data": "AAAAAAAAAAAAAAAAAAAAAA=="}},
    {"$ndarray": {"dtype": "<f8", "shape": [10**12], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f8", "shape": [-1], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f8", "shape": [-1, -1], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f8", "shape": [True], "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f8", "shape": [1] * 65, "data": "AAAAAAAAAAA="}},
    {"$ndarray": {"dtype": "<f8", "shape": [0, 10**18, 10**18], "data": ""}},
    {"$ndarray": {"dtype": "|S0", "shape": [10**15], "data": ""}},
    {"$ndarray": {"dtype": "<U999999999", "shape": [0], "data": ""}},
    {"$ndarray": {"dtype": "<U1", "shape": [1], "data": "/////w=="}},
    {"$ndarray": {"dtype": "|b1", "shape": [1], "data": "Ag=="}},
    {"$ndarray": {"dtype": "<f8", "tensor": "a"}},
    {"$type": {"name": f"{__name__}.Color", "fields": {}}},
    {"$type": {"name": f"{__name__}.Color", "value": ["RED"]}},
    {"$type": {"name": f"{__name__}.Key", "value": "x"}},
    {"$type": {"name": 1, "value": "x"}},
    {"$type": "x"},
    {"$dict": [[{"$type": {"name": f"{__name__}.Key", "fields": {"name": [], "number": 1}}}, 1]]},
    {1: 2},
    2**63,
    float("nan"),
    (1, 2),
    {"$dict": [[{"$int": "0x" + "f" * 10_000}, 2**64]]},
]


@pytest.mark.parametrize("value", CORRUPT, ids=lambda value: repr(value)[:50])
def test_a_malformed_value_is_corrupt_and_named(value: Any) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        codec.decode({"at": [0, value]}, path="loader", tensor=lambda name: torch.zeros(1, dtype=torch.int8))
    assert caught.value.component == "loader"
    assert (caught.value.leaf or "").startswith("loader.at.1")
    assert len(str(caught.value)) < 1_000
    codec.plain(value) if isinstance(value, dict) else None


def test_a_decimal_is_never_rounded_by_the_program_s_context() -> None:
    with decimal.localcontext(decimal.Context(prec=3, traps=[])):
        assert str(round_trip(Decimal("1.23456789"))) == "1.23456789"
        with pytest.raises(CorruptCheckpointError):
            codec.decode({"$decimal": "1E+99999999999999999999"}, path="x", tensor=None)


def test_a_tag_of_a_newer_version_is_unsupported() -> None:
    for value in ({"$foo": 1}, {"$": 1}, {"$dtype": "float3"}, {"$dtype": "onnx"}, {"$device": "abacus"}):
        with pytest.raises(UnsupportedFormatError):
            codec.decode(value, path="x", tensor=None)  # type: ignore[arg-type]


def test_a_tensor_reference_where_none_can_be_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpointError, match="where none can be stored"):
        codec.decode({"$tensor": "a"}, path="x", tensor=None)


def test_reading_takes_no_more_memory_than_the_input_justifies() -> None:
    hostile: list[Any] = [value for value in CORRUPT if isinstance(value, dict) and "$ndarray" in value]
    hostile += [{"$range": [0, 2**62, 1]}, {"$deque": {"items": [], "maxlen": 2**62}}, {"$size": [2**62]}]
    hostile += [{"$ndarray": {"dtype": "|S999999999", "shape": [0], "data": ""}}]
    tracemalloc.start()
    try:
        for value in hostile:
            try:
                codec.decode(value, path="x", tensor=None)
            except HoldfastError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_plain_reads_well_without_types() -> None:
    def shown(value: object) -> Any:
        return codec.plain(codec.encode(value, path="root", on_tensor=lambda name, tensor: name))

    assert shown({"a": (1, 2.0, {3})}) == {"a": [1, 2.0, [3]]}
    assert shown({1: "x", (2, 3): "y"}) == {"1": "x", "[2, 3]": "y"}
    assert shown({1: "x", "1": "y"}) == [[1, "x"], ["1", "y"]]
    assert shown([torch.zeros(1), float("nan"), -float("inf")]) == ["<tensor root.0>", "nan", "-inf"]
    assert shown([np.float32(0.5), np.float64("nan"), np.int64(-3), np.str_("x")]) == [0.5, "nan", -3, "x"]
    assert shown([np.zeros((2, 3)), b"abc", 2**70]) == ["<array <f8 (2, 3)>", "<3 bytes>", str(2**70)]
    assert shown([Color.RED, Rate(1.0)]) == [f"{__name__}.Color.RED", {"value": 1.0, "unit": "Hz"}]
    assert shown([torch.bfloat16, torch.Size([2])]) == ["bfloat16", [2]]
    assert shown(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)) == "2024-01-01T00:00:00Z"
    assert codec.plain({"$foo": 1}) == {"$foo": 1}
    assert codec.plain({"$tuple": 1}) == "<malformed $tuple>"


def test_typed_says_what_plain_leaves_out() -> None:
    def shown(value: object) -> Any:
        return codec.typed(codec.encode(value, path="root", on_tensor=lambda name, tensor: name))

    assert shown((1, [2, "2"])) == "tuple([1, [2, '2']])"
    assert shown({"a": {3}, "b": None}) == "{'a': set([3]), 'b': None}"
    assert shown({1: "x"}) == "dict([[1, 'x']])"
    assert shown([np.float32(0.5), 0.5, Decimal("0.5")]) == "[numpy <f4 0.5, 0.5, decimal('0.5')]"
    assert codec.typed({"$foo": 1}) == "{'$foo': 1}"
    assert codec.typed({"$scalar": 1}) == "scalar(1)"
    assert codec.typed(BOTTOMLESS).count("[") == codec.MAX_DEPTH + 1


# --- properties -------------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(exclude_categories=()))
    | st.text("$ab", max_size=3)
    | st.binary(max_size=20)
    | st.complex_numbers()
    | st.decimals(allow_nan=False)  # a signalling nan cannot be hashed
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC) | st.just(ZoneInfo("Asia/Tokyo")))
    | st.timedeltas()
    | st.uuids()
    | st.sampled_from([Color.RED, Level.LOW, Access.BOTH, torch.float16, Key("x"), np.float32(2), np.datetime64("NaT")])
)
keys = scalars | st.tuples(scalars, scalars) | st.frozensets(scalars, max_size=3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda items: defaultdict(list, items))
        | st.sets(keys, max_size=4)
        | st.builds(Cursor, st.integers(), inner)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(scalars, containers, max_leaves=12))
def test_any_tree_of_known_values_comes_back(value: Any) -> None:
    assert same(round_trip(value), value)


json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["<f8", "|S5", "<U1", "AAAA", "", "0x10", "UTC", "int", "2024-01-01", "1E+5", f"{__name__}.Key", "RED", "cpu"]
    )
)
record_keys = st.sampled_from(
    ["name", "value", "fields", "dtype", "shape", "data", "tensor", "items", "maxlen", "factory", "iso", "tz", "fold"]
)
tags = st.sampled_from([*DECODERS, "$foo"])


def json_containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(st.tuples(inner, inner).map(list), max_size=3)
        | st.dictionaries(st.text(max_size=3) | record_keys, inner, max_size=4)
        | st.dictionaries(tags, inner, min_size=1, max_size=1)
        | st.dictionaries(tags | record_keys, inner, max_size=2)
        | st.builds(
            lambda tag, *parts: {tag: dict(zip(("dtype", "shape", "data"), parts, strict=True))}, tags, *[inner] * 3
        )
        | st.builds(
            lambda name, value: {"$type": {"name": f"{__name__}.{name}", "value": value}},
            st.sampled_from(["Color", "Access"]),
            inner,
        )
        | st.builds(
            lambda a, b: {"$type": {"name": f"{__name__}.Key", "fields": {"name": a, "number": b}}}, inner, inner
        )
    )


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(json_scalars, json_containers, max_leaves=10))
def test_decoding_anything_gives_a_value_or_a_holdfast_error(value: Any) -> None:
    codec.plain(value)
    codec.typed(value)
    try:
        result = codec.decode(value, path="x", tensor=lambda name: torch.zeros(2))
    except HoldfastError as error:
        str(error)
        return
    assert same(round_trip(result), result)  # whatever can be read can be stored


# --- what people store ------------------------------------------------------------------------------------------------


def schedulers() -> dict[str, Any]:
    from torch.optim import lr_scheduler as lr

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)

    def sequential() -> Any:
        shared = optimizer()
        return lr.SequentialLR(shared, [lr.ConstantLR(shared), lr.MultiStepLR(shared, [2, 4])], milestones=[2])

    def chained() -> Any:
        shared = optimizer()
        return lr.ChainedScheduler([lr.LinearLR(shared), lr.ExponentialLR(shared, 0.9)], optimizer=shared)

    return {
        "LambdaLR": lr.LambdaLR(optimizer(), lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lr.MultiplicativeLR(optimizer(), lambda epoch: 0.9),
        "StepLR": lr.StepLR(optimizer(), 2),
        "MultiStepLR": lr.MultiStepLR(optimizer(), [2, 4, 4]),
        "ConstantLR": lr.ConstantLR(optimizer()),
        "LinearLR": lr.LinearLR(optimizer()),
        "ExponentialLR": lr.ExponentialLR(optimizer(), 0.9),
        "SequentialLR": sequential(),
        "ChainedScheduler": chained(),
        "PolynomialLR": lr.PolynomialLR(optimizer()),
        "CosineAnnealingLR": lr.CosineAnnealingLR(optimizer(), 5),
        "CosineAnnealingWarmRestarts": lr.CosineAnnealingWarmRestarts(optimizer(), 5),
        "CyclicLR": lr.CyclicLR(optimizer(), 0.1, 1.0),
        "OneCycleLR": lr.OneCycleLR(optimizer(), 1.0, total_steps=10),
        "ReduceLROnPlateau": lr.ReduceLROnPlateau(optimizer()),
    }


@pytest.mark.filterwarnings("ignore")
def test_every_scheduler_s_state_comes_back() -> None:
    for name, scheduler in schedulers().items():
        for loss in (1.0, 0.9, 0.8):
            scheduler.step(*((loss,) if name == "ReduceLROnPlateau" else ()))
        state = scheduler.state_dict()
        assert same(round_trip(state), state), name
        scheduler.load_state_dict(round_trip(state))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LBFGS"])
def test_every_optimizer_s_state_comes_back(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, name)(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())


def test_a_stateful_data_loader_goes_on_where_it_was() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(list(range(40)), batch_size=2, shuffle=True, num_workers=0)

    first = loader()
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    restored = round_trip(state)
    assert same(restored, state)
    rest = [batch.tolist() for batch in batches]
    second = loader()
    second.load_state_dict(restored)
    assert [batch.tolist() for batch in second] == rest


def test_random_states_of_python_and_numpy_come_back() -> None:
    import random

    for state in (
        random.getstate(),
        np.random.default_rng(1).bit_generator.state,
        np.random.RandomState(1).get_state(),
    ):
        assert same(round_trip(state), state)


def test_twenty_thousand_tensors_are_encoded_in_little_time() -> None:
    tensor = torch.zeros(())
    state = {index: {"step": tensor, "exp_avg": tensor, "exp_avg_sq": tensor, "max": tensor} for index in range(5_000)}
    seconds = []
    for _ in range(5):
        start = time.process_time()
        codec.encode({"state": state}, path="optimizer", on_tensor=lambda name, found: name)
        seconds.append(time.process_time() - start)
    # 30 ms where it was written. The bound is for a slow machine: it finds a change of kind, not of degree.
    assert min(seconds) < 0.3
