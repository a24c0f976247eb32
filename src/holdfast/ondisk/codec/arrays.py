"""Encode and decode numpy's scalars and arrays. Imports numpy and torch only when a value needs them."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

from holdfast.ondisk.codec.decoder import Decoder, TagDecoder, expect_keys, expect_shape, expect_text
from holdfast.ondisk.codec.encoder import Encoder, to_base64, unstorable
from holdfast.ondisk.codec.forms import Json
from holdfast.ondisk.codec.places import Place, corrupt, dotted_name
from holdfast.ondisk.codec.scalars import decode_bytes, decode_utf8
from holdfast.ondisk.codec.tensors import decode_tensor

MAX_INLINE_ARRAY_BYTES = 1_024
# The closed set of numpy dtypes. Nothing else is ever handed to numpy's own parser, which accepts a whole language.
_NUMPY_DTYPE = re.compile(
    r"\|(?:b1|[iu]1|S[1-9][0-9]{0,8})"
    r"|[<>](?:[iu][248]|f[248]|c8|c16|U[1-9][0-9]{0,8})"
    r"|[<>][mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_TORCH_KINDS = frozenset("biufc")


def encode_scalar(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    kind, dtype = value.dtype.kind, value.dtype.str
    if type(value) is not value.dtype.type:
        raise unstorable(encoder, value, parent, key)
    # The text itself: numpy's own bytes of a str_ lose the zeros at its end.
    if kind == "U":
        return {"$scalar": {"dtype": "U", "data": to_base64(str(value).encode("utf-8", "surrogatepass"))}}
    if kind == "S":
        return {"$scalar": {"dtype": "S", "data": to_base64(bytes(value))}}
    if not _is_portable(value.dtype):
        raise unstorable(encoder, value, parent, key)
    return {"$scalar": {"dtype": dtype, "data": to_base64(value.tobytes())}}


def encode_array(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    dtype = value.dtype.str
    if not _is_portable(value.dtype):
        raise unstorable(encoder, value, parent, key, f" with the dtype {value.dtype}")
    inline = value.nbytes <= MAX_INLINE_ARRAY_BYTES or value.dtype.kind not in _TORCH_KINDS
    if inline or encoder.on_tensor is None or not encoder.in_state:
        return {"$ndarray": {"dtype": dtype, "shape": list(value.shape), "data": to_base64(value.tobytes())}}
    return {"$ndarray": {"dtype": dtype, "tensor": encoder.on_tensor(dotted_name(parent, key), _torch_tensor(value))}}


def _is_portable(dtype: Any) -> bool:
    """Return whether the dtype means the same on every machine: no objects, no structures, no long double."""
    return _NUMPY_DTYPE.fullmatch(dtype.str) is not None and sys.modules["numpy"].dtype(dtype.str) == dtype


def _torch_tensor(array: Any) -> Any:
    """Return the array as a tensor, over the same memory where torch can use it."""
    import torch

    native = sys.modules["numpy"].dtype(array.dtype.str).newbyteorder("=")
    # The view: numpy has two names for some types, `unsigned long long` beside uint64, and torch knows one of them.
    array = array.astype(native, order="C", copy=False).view(native)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _decode_scalar(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    record = expect_keys(value, {"dtype", "data"}, parent, key)
    data = decode_bytes(decoder, record["data"], parent, key)
    import numpy

    if record["dtype"] == "U":
        return numpy.str_(decode_utf8(data, parent, key))
    if record["dtype"] == "S":
        return numpy.bytes_(data)
    return _array(record["dtype"], [], data, parent, key)[()]


def _decode_array(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    if type(value) is dict and "tensor" in value:
        return _array_of_tensor(decoder, value, parent, key)
    record = expect_keys(value, {"dtype", "shape", "data"}, parent, key)
    shape = expect_shape(record["shape"], parent, key)
    return _array(record["dtype"], shape, decode_bytes(decoder, record["data"], parent, key), parent, key)


def _array_of_tensor(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    record = expect_keys(value, {"dtype", "tensor"}, parent, key)
    dtype = _numpy_dtype(record["dtype"], parent, key)
    tensor = decode_tensor(decoder, record["tensor"], parent, key)
    try:
        array = tensor.detach().cpu().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise corrupt(f"a tensor stands for an array of {dtype}, which it cannot be", parent, key) from error
    if array.dtype != dtype.newbyteorder("="):
        raise corrupt(f"an array of {dtype} was stored as a tensor of {array.dtype}", parent, key)
    return array.astype(dtype, copy=False)


def _numpy_dtype(value: Any, parent: Place, key: object) -> Any:
    text = expect_text(value, _NUMPY_DTYPE, parent, key)
    import numpy

    try:
        return numpy.dtype(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise corrupt(f"no such dtype: {text}", parent, key) from error


def _array(dtype_text: Any, shape: list[int], data: bytes, parent: Place, key: object) -> Any:
    dtype = _numpy_dtype(dtype_text, parent, key)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise corrupt(f"an array of {dtype} and shape {shape} has {len(data)} bytes", parent, key)
    import numpy

    if dtype.kind == "b" and data.translate(None, b"\0\1"):
        raise corrupt("an array of bool has bytes other than 0 and 1", parent, key)
    if dtype.kind == "U" and (numpy.frombuffer(data, f"{dtype.str[0]}u4") > sys.maxunicode).any():
        raise corrupt("an array of text has characters that do not exist", parent, key)
    try:
        # Copied, so that the array owns its memory and can be written to.
        return numpy.ndarray(tuple(shape), dtype, data).copy()
    except ValueError as error:
        raise corrupt(f"no array can have the shape {shape}", parent, key) from error


DECODERS: dict[str, TagDecoder] = {
    "$scalar": _decode_scalar,
    "$ndarray": _decode_array,
}
