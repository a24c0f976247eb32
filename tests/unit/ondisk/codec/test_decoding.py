"""Whatever is decoded gives a value or an error of ours, never more memory than the input justifies."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from holdfast.errors import CorruptCheckpointError, HoldfastError, StateMismatchError, UnsupportedFormatError
from holdfast.ondisk import codec
from holdfast.ondisk.codec.decoding import DECODERS
from tests.unit.ondisk.codec import values
from tests.unit.ondisk.codec.values import Cursor, Tensors, round_trip, same

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


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


def test_fields_or_members_that_changed_are_a_mismatch() -> None:
    def stored(**record: Any) -> Any:
        return {"$type": record}

    with pytest.raises(StateMismatchError) as caught:
        codec.decode(stored(name=f"{values.__name__}.Key", fields={"name": "a", "old": 1}), path="x.y", tensor=None)
    assert (caught.value.missing, caught.value.unexpected) == (("x.y.number",), ("x.y.old",))  # type: ignore[attr-defined]
    for record in (
        {"name": f"{values.__name__}.Color", "value": "BLUE"},
        {"name": f"{values.__name__}.Access", "value": ["READ", "RUN"]},
        {"name": "os.system", "value": "RED"},
    ):
        with pytest.raises(StateMismatchError):
            codec.decode(stored(**record), path="x", tensor=None)


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
    {"$type": {"name": f"{values.__name__}.Color", "fields": {}}},
    {"$type": {"name": f"{values.__name__}.Color", "value": ["RED"]}},
    {"$type": {"name": f"{values.__name__}.Key", "value": "x"}},
    {"$type": {"name": 1, "value": "x"}},
    {"$type": "x"},
    {"$dict": [[{"$type": {"name": f"{values.__name__}.Key", "fields": {"name": [], "number": 1}}}, 1]]},
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


json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "<f8",
            "|S5",
            "<U1",
            "AAAA",
            "",
            "0x10",
            "UTC",
            "int",
            "2024-01-01",
            "1E+5",
            f"{values.__name__}.Key",
            "RED",
            "cpu",
        ]
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
            lambda name, value: {"$type": {"name": f"{values.__name__}.{name}", "value": value}},
            st.sampled_from(["Color", "Access"]),
            inner,
        )
        | st.builds(
            lambda a, b: {"$type": {"name": f"{values.__name__}.Key", "fields": {"name": a, "number": b}}}, inner, inner
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
