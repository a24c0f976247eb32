"""What the codec stores it gives back exactly, in type, bits and order."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import io
import pathlib
import subprocess
import sys
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.ondisk import codec
from tests.unit.ondisk.codec.values import (
    NEGATIVE_NAN,
    QUIET_NAN,
    SIGNALLING_NAN,
    Access,
    Bits,
    Color,
    Cursor,
    Key,
    Level,
    Rate,
    Word,
    ordered_with_metadata,
    round_trip,
    same,
    standing_at,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

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


def test_neither_importing_nor_plain_values_import_torch_or_numpy() -> None:
    script = (
        "import sys; from holdfast.ondisk import codec;"
        "stored = codec.encode({'a': (1, {2})}, path='x', on_tensor=None); codec.decode(stored, path='x', tensor=None);"
        "codec.plain({'$scalar': {'dtype': '<f8', 'data': 'AAAAAAAA8D8='}});"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


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


def test_a_decimal_is_never_rounded_by_the_program_s_context() -> None:
    with decimal.localcontext(decimal.Context(prec=3, traps=[])):
        assert str(round_trip(Decimal("1.23456789"))) == "1.23456789"
        with pytest.raises(CorruptCheckpointError):
            codec.decode({"$decimal": "1E+99999999999999999999"}, path="x", tensor=None)


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
