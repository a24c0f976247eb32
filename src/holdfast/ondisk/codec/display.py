"""Turn a stored form into readable text, without torch or numpy. Never fails on malformed input."""

from __future__ import annotations

import datetime
import math
import struct
from collections.abc import Callable
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.ondisk.codec.decoder import expect, expect_shape
from holdfast.ondisk.codec.forms import MAX_DEPTH, Json
from holdfast.ondisk.codec.places import ROOT
from holdfast.ondisk.codec.scalars import (
    decode_bytes,
    decode_float,
    decode_int,
    expect_float,
    expect_integers,
    expect_string,
)

_STRUCT_FORMATS = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip


def plain(value: Json) -> Json:
    """Return a stored form as plain values that people can read. Never fails on malformed input."""
    return _plain(value, 0)


def typed(value: Json) -> str:
    """Return a stored form as text with the types, which `plain` leaves out: `tuple([1, 2])`. Never fails either."""
    return _typed(value, 0)


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
    return str(decode_int(None, value, ROOT, "")) if len(value) < 1_000 else str(value)


def _plain_items(value: Any, depth: int) -> Json:
    return [_plain(item, depth + 1) for item in expect(value, list, ROOT, "")]


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
    return expect_string(value, ROOT, "").encode("utf-8", "backslashreplace").decode()


def _plain_string(value: Any, depth: int) -> Json:
    return _plain_text({"$str": value}, depth)


def _plain_bytes(value: Any, depth: int) -> Json:
    return f"<{len(decode_bytes(None, value, ROOT, ''))} bytes>"


def _plain_bytes_io(value: Any, depth: int) -> Json:
    return _plain_bytes(value["data"], depth)


def _plain_float(value: Any, depth: int) -> Json:
    return _plain_number(decode_float(None, value, ROOT, ""))


def _plain_complex(value: Any, depth: int) -> Json:
    return str(complex(*(expect_float(part, ROOT, "") for part in value)))


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
    return str(datetime.timedelta(*expect_integers(value, 3, ROOT, "")))


def _plain_tensor(value: Any, depth: int) -> Json:
    name = expect_string(value, ROOT, "")
    # A tensor that stands in place: its type and shape, not its bytes.
    return f"<tensor {name.rpartition(':')[0] if name.startswith('data:') else name}>"


def _plain_subclass(value: Any, depth: int) -> Json:
    return f"<{expect_string(value['name'], ROOT, '')} of {', '.join(map(str, value['tensors']))}>"


def _plain_scalar(value: Any, depth: int) -> Json:
    dtype, data = value["dtype"], decode_bytes(None, value["data"], ROOT, "")
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
    return f"<array {value['dtype']} {tuple(expect_shape(value['shape'], ROOT, ''))}>"


def _plain_type(value: Any, depth: int) -> Json:
    if "fields" in value:
        return {str(name): _plain(item, depth + 1) for name, item in value["fields"].items()}
    member = value["value"]
    return f"{value['name']}.{'|'.join(member) if isinstance(member, list) else member}"


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
