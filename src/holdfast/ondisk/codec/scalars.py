"""Encode and decode numbers, texts, bytes and paths. Knows no containers."""

from __future__ import annotations

import base64
import binascii
import decimal
import io
import math
import pathlib
import re
import struct
import sys
import uuid
from typing import Any

from holdfast.ondisk.codec.decoder import Decoder, TagDecoder, expect, expect_keys, expect_text, shown
from holdfast.ondisk.codec.encoder import Encoder, Handler, to_base64, unstorable
from holdfast.ondisk.codec.forms import MAX_DIGITS, Json
from holdfast.ondisk.codec.places import Place, corrupt, is_unicode

_INT = re.compile(rf"-?0x[0-9a-f]{{1,{MAX_DIGITS}}}")
_FLOAT = re.compile(r"[0-9a-f]{16}")
_DECIMAL = re.compile(
    rf"(?=.{{1,{MAX_DIGITS}}}\Z)-?(?:[0-9]+(?:\.[0-9]+)?(?:E[+-][0-9]{{1,20}})?|Infinity|s?NaN[0-9]*)"
)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _encode_native(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    return value  # type: ignore[no-any-return]


def _encode_int(encoder: Encoder, value: int, parent: Place, key: object) -> Json:
    if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
        return value
    if value.bit_length() > 4 * MAX_DIGITS:
        raise unstorable(encoder, value, parent, key, f": it has more than {MAX_DIGITS} hex digits")
    return {"$int": hex(value)}


def _encode_float(encoder: Encoder, value: float, parent: Place, key: object) -> Json:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def encode_str(encoder: Encoder, value: str, parent: Place, key: object) -> Json:
    if is_unicode(value):
        return value
    return {"$str": to_base64(value.encode("utf-8", "surrogatepass"))}


def _encode_bytes(encoder: Encoder, value: bytes, parent: Place, key: object) -> Json:
    return {"$bytes": to_base64(value)}


def _encode_bytearray(encoder: Encoder, value: bytearray, parent: Place, key: object) -> Json:
    return {"$bytearray": to_base64(value)}


def _encode_bytes_io(encoder: Encoder, value: io.BytesIO, parent: Place, key: object) -> Json:
    if value.closed:
        raise unstorable(encoder, value, parent, key, ": the stream is closed")
    return {"$bytesio": {"data": to_base64(value.getvalue()), "position": value.tell()}}


def _encode_complex(encoder: Encoder, value: complex, parent: Place, key: object) -> Json:
    return {
        "$complex": [_encode_float(encoder, value.real, parent, key), _encode_float(encoder, value.imag, parent, key)]
    }


def _encode_range(encoder: Encoder, value: range, parent: Place, key: object) -> Json:
    return {"$range": [_encode_int(encoder, number, parent, key) for number in (value.start, value.stop, value.step)]}


def _encode_slice(encoder: Encoder, value: slice, parent: Place, key: object) -> Json:
    numbers = (value.start, value.stop, value.step)
    if any(number is not None and type(number) is not int for number in numbers):
        raise unstorable(encoder, value, parent, key, " with bounds that are not int or None")
    return {"$slice": [None if number is None else _encode_int(encoder, number, parent, key) for number in numbers]}


def _encode_decimal(encoder: Encoder, value: decimal.Decimal, parent: Place, key: object) -> Json:
    text = str(value)
    if len(text) > MAX_DIGITS:
        raise unstorable(encoder, value, parent, key, f": it has more than {MAX_DIGITS} characters")
    return {"$decimal": text}


def _encode_uuid(encoder: Encoder, value: uuid.UUID, parent: Place, key: object) -> Json:
    return {"$uuid": str(value)}


def _encode_path(encoder: Encoder, value: pathlib.PurePath, parent: Place, key: object) -> Json:
    return {"$path": encode_str(encoder, str(value), parent, key)}


def _encode_pure_path(encoder: Encoder, value: pathlib.PurePath, parent: Place, key: object) -> Json:
    return {"$purepath": encode_str(encoder, str(value), parent, key)}


def expect_integers(value: Any, count: int, parent: Place, key: object) -> list[int]:
    numbers = expect(value, list, parent, key)
    if len(numbers) != count:
        raise corrupt(f"expected {count} integers, found {shown(value)}", parent, key)
    return [expect_integer(number, parent, key) for number in numbers]


def expect_integer(value: Any, parent: Place, key: object) -> int:
    if type(value) is dict and value.keys() == {"$int"}:
        return decode_int(None, value["$int"], parent, key)
    return expect(value, int, parent, key)


def expect_string(value: Any, parent: Place, key: object) -> str:
    if type(value) is dict and value.keys() == {"$str"}:
        return _decode_str(None, value["$str"], parent, key)
    return expect(value, str, parent, key)


def expect_float(value: Any, parent: Place, key: object) -> float:
    if type(value) is dict and value.keys() == {"$float"}:
        return decode_float(None, value["$float"], parent, key)
    return expect(value, float, parent, key)


def decode_bytes(decoder: object, value: Any, parent: Place, key: object) -> bytes:
    text = expect(value, str, parent, key)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise corrupt(f"malformed base64: {shown(text)}", parent, key) from error


def _decode_bytearray(decoder: object, value: Any, parent: Place, key: object) -> bytearray:
    return bytearray(decode_bytes(decoder, value, parent, key))


def _decode_bytes_io(decoder: object, value: Any, parent: Place, key: object) -> io.BytesIO:
    record = expect_keys(value, {"data", "position"}, parent, key)
    stream = io.BytesIO(decode_bytes(decoder, record["data"], parent, key))
    # A stream may stand behind its end, where Python can count to.
    if not 0 <= expect(record["position"], int, parent, key) <= sys.maxsize:
        raise corrupt(f"a stream stands at {shown(record['position'])}", parent, key)
    stream.seek(record["position"])
    return stream


def decode_int(decoder: object, value: Any, parent: Place, key: object) -> int:
    return int(expect_text(value, _INT, parent, key), 16)


def decode_float(decoder: object, value: Any, parent: Place, key: object) -> float:
    (number,) = struct.unpack(">d", bytes.fromhex(expect_text(value, _FLOAT, parent, key)))
    return float(number)


def _decode_str(decoder: object, value: Any, parent: Place, key: object) -> str:
    return decode_utf8(decode_bytes(decoder, value, parent, key), parent, key)


def decode_utf8(data: bytes, parent: Place, key: object) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise corrupt("text is not UTF-8", parent, key) from error


def _decode_complex(decoder: Decoder, value: Any, parent: Place, key: object) -> complex:
    parts = expect(value, list, parent, key)
    if len(parts) != 2:
        raise corrupt(f"a complex number has {len(parts)} parts", parent, key)
    return complex(expect_float(parts[0], parent, key), expect_float(parts[1], parent, key))


def _decode_range(decoder: Decoder, value: Any, parent: Place, key: object) -> range:
    start, stop, step = expect_integers(value, 3, parent, key)
    if step == 0:
        raise corrupt("a range has the step 0", parent, key)
    return range(start, stop, step)


def _decode_slice(decoder: Decoder, value: Any, parent: Place, key: object) -> slice:
    bounds = expect(value, list, parent, key)
    if len(bounds) != 3:
        raise corrupt(f"a slice has {len(bounds)} bounds", parent, key)
    return slice(*(None if bound is None else expect_integer(bound, parent, key) for bound in bounds))


def _decode_decimal(decoder: Decoder, value: Any, parent: Place, key: object) -> decimal.Decimal:
    text = expect_text(value, _DECIMAL, parent, key)
    try:
        number = decimal.Decimal(text)
    except ArithmeticError as error:
        raise corrupt(f"no such decimal: {shown(text)}", parent, key) from error
    # Out of range it can be rounded or become nan, as the program's decimal context says; that is not what was stored.
    if str(number) != text:
        raise corrupt(f"no such decimal: {shown(text)}", parent, key)
    return number


def _decode_uuid(decoder: Decoder, value: Any, parent: Place, key: object) -> uuid.UUID:
    return uuid.UUID(expect_text(value, _UUID, parent, key))


def _decode_path(decoder: Decoder, value: Any, parent: Place, key: object) -> pathlib.Path:
    return pathlib.Path(expect_string(value, parent, key))


def _decode_pure_path(decoder: Decoder, value: Any, parent: Place, key: object) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(expect_string(value, parent, key))


ENCODERS: dict[type, Handler] = {
    type(None): _encode_native,
    bool: _encode_native,
    int: _encode_int,
    float: _encode_float,
    str: encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytearray,
    io.BytesIO: _encode_bytes_io,
    complex: _encode_complex,
    range: _encode_range,
    slice: _encode_slice,
    decimal.Decimal: _encode_decimal,
    uuid.UUID: _encode_uuid,
    pathlib.PosixPath: _encode_path,
    pathlib.PurePosixPath: _encode_pure_path,
}
DECODERS: dict[str, TagDecoder] = {
    "$int": decode_int,
    "$float": decode_float,
    "$str": _decode_str,
    "$bytes": decode_bytes,
    "$bytearray": _decode_bytearray,
    "$bytesio": _decode_bytes_io,
    "$complex": _decode_complex,
    "$range": _decode_range,
    "$slice": _decode_slice,
    "$decimal": _decode_decimal,
    "$uuid": _decode_uuid,
    "$path": _decode_path,
    "$purepath": _decode_pure_path,
}
