"""Encode and decode references to tensors, and torch's own small types. Imports torch only when a value needs it."""

from __future__ import annotations

import re
from typing import Any

from holdfast.errors import HoldfastError, UnsupportedFormatError, UsageError
from holdfast.ondisk.codec.decoder import Decoder, TagDecoder, expect, expect_keys, expect_shape, expect_text, shown
from holdfast.ondisk.codec.encoder import Encoder
from holdfast.ondisk.codec.forms import MAX_DEPTH, Flattened, Json, Subclass
from holdfast.ondisk.codec.places import ROOT, Place, corrupt, dotted_name, location, type_name
from holdfast.ondisk.codec.registry import class_name

_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,63}(?::[0-9]{1,4})?")


def subclass_of(value: Json) -> Subclass | None:
    """Return the stored form of a tensor of a wrapper subclass; None for any other value."""
    if not isinstance(value, dict) or value.keys() != {"$subclass"}:
        return None
    return _subclass(value["$subclass"], ROOT, "")


def encode_tensor(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    if encoder.on_tensor is None:
        raise UsageError(
            f"a tensor ('{type_name(type(value))}') cannot be stored here",
            advice=f"use .item() or .tolist(), or leave it out{' of the state dict' if encoder.in_state else ''}",
            **location(parent, key),
        )
    flat = encoder.flatten(value) if encoder.flatten is not None else None
    if flat is not None:
        return _encode_subclass(encoder, value, flat, parent, key)
    return {"$tensor": encoder.on_tensor(dotted_name(parent, key), value)}


def _encode_subclass(encoder: Encoder, value: Any, flat: Flattened, parent: Place, key: object) -> Json:
    here = encoder.enter(parent, key)
    context = encoder.for_context()
    return {
        "$subclass": {
            "name": class_name(flat.kind),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [int(length) for length in value.shape],
            "stride": [int(step) for step in value.stride()],
            "shards": flat.shards,
            "context": context.handlers[type(flat.context)](context, flat.context, here, "context"),
            "tensors": {name: encode_tensor(encoder, inner, here, name) for name, inner in flat.tensors.items()},
        }
    }


def encode_device_type(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    return {"$device": value.type}


def encode_dtype(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    return {"$dtype": str(value).removeprefix("torch.")}


def encode_size(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    return {"$size": [int(length) for length in value]}


def encode_device(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    return {"$device": str(value)}


def decode_tensor(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    name = expect(value, str, parent, key)
    if decoder.tensor is None:
        raise corrupt(f"the tensor {shown(name)} stands where none can be stored", parent, key)
    return decoder.tensor(name)


def _decode_subclass(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    record = _subclass(value, parent, key)
    if decoder.subclass is None:
        raise corrupt(f"a tensor of type {shown(record.name)} stands where none can be stored", parent, key)
    return decoder.subclass(dotted_name(parent, key), record)


def _subclass(value: Any, parent: Place, key: object) -> Subclass:
    record = expect_keys(value, {"name", "dtype", "shape", "stride", "shards", "context", "tensors"}, parent, key)
    if _is_too_deep(record):
        raise corrupt(f"values are nested more than {MAX_DEPTH} levels deep", parent, key)
    shape, stride = expect_shape(record["shape"], parent, key), expect_shape(record["stride"], parent, key)
    tensors = expect(record["tensors"], dict, parent, key)
    forms = [list(form) for form in tensors.values() if type(form) is dict]
    if (
        len(shape) != len(stride)
        or len(forms) != len(tensors)
        or not all(f in (["$tensor"], ["$subclass"]) for f in forms)
    ):
        raise corrupt("malformed tensor of a subclass", parent, key)
    name, dtype = expect(record["name"], str, parent, key), expect_text(record["dtype"], _WORD, parent, key)
    shards = expect(record["shards"], int, parent, key)
    return Subclass(name, dtype, tuple(shape), tuple(stride), shards, record["context"], tensors)


def _is_too_deep(value: Any) -> bool:
    """Return whether a JSON value nests deeper than any that is stored; found without recursion, which could fail."""
    level, depth = [value], 0
    while level and depth <= 4 * MAX_DEPTH:  # one stored level of a subclass or a tag is up to four of JSON
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer if type(outer) is list else ())
        ]
        depth += 1
    return bool(level)


def _decode_dtype(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    name = expect_text(value, _WORD, parent, key)
    import torch

    # Not getattr: torch imports more modules when it is asked for certain names.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise _unknown_to_torch("dtype", name, parent, key)
    return dtype


def _decode_size(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    lengths = expect_shape(value, parent, key)
    import torch

    return torch.Size(lengths)


def _decode_device(decoder: Decoder, value: Any, parent: Place, key: object) -> Any:
    name = expect_text(value, _DEVICE, parent, key)
    import torch

    try:
        return torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise _unknown_to_torch("device", name, parent, key) from error


def _unknown_to_torch(what: str, name: str, parent: Place, key: object) -> HoldfastError:
    advice = "read it with the torch version and backends that wrote it"
    return UnsupportedFormatError(f"this torch has no {what} {shown(name)}", advice=advice, **location(parent, key))


DECODERS: dict[str, TagDecoder] = {
    "$tensor": decode_tensor,
    "$subclass": _decode_subclass,
    "$dtype": _decode_dtype,
    "$size": _decode_size,
    "$device": _decode_device,
}
