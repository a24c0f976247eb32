"""Turn a value into its stored form. A value and a callback for its tensors enter; JSON leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast.ondisk.codec import containers, scalars, times
from holdfast.ondisk.codec.arrays import encode_array, encode_scalar
from holdfast.ondisk.codec.classes import encode_enum, encode_fields, encode_flag
from holdfast.ondisk.codec.encoder import Encoder, Handler, Rules, unstorable
from holdfast.ondisk.codec.forms import Flattened, Json
from holdfast.ondisk.codec.places import ROOT, Place
from holdfast.ondisk.codec.registry import Kind, kind_of, registered_classes
from holdfast.ondisk.codec.tensors import encode_device, encode_device_type, encode_dtype, encode_size, encode_tensor


def encode(
    value: object,
    *,
    path: str,
    on_tensor: Callable[[str, Any], str] | None,
    flatten: Callable[[Any], Flattened | None] | None = None,
    in_state: bool | None = None,
) -> Json:
    """Return the stored form of `value`, whose dotted name is `path`.

    `on_tensor` is called with the dotted name of every tensor that is found, and the tensor, and returns the leaf name
    to store. Two tensors can have the same dotted name, `{"a.b": x, "a": {"b": y}}`: it is the callback that tells them
    apart. Without a callback a tensor is a UsageError, and a numpy array is stored in place whatever its size: that is
    meant for what a caller passes beside the state, such as a config. `flatten` takes a tensor of a wrapper subclass
    apart, and returns None for one that is stored as it is. `in_state` is False for values beside the state that may
    hold tensors.
    """
    encoder = Encoder(
        _RULES, on_tensor, in_state=on_tensor is not None if in_state is None else in_state, flatten=flatten
    )
    return encoder.handlers[type(value)](encoder, value, ROOT, path)


def _find_handler(cls: type) -> Handler:
    """Return the handler of a type that has none by its exact class."""
    registered = registered_classes.get(cls)
    if registered is not None:
        return _REGISTERED_HANDLERS[registered.kind]
    torch = sys.modules.get("torch")
    if torch is not None:
        if issubclass(cls, torch.Tensor):
            return encode_tensor
        if cls in (torch.dtype, torch.Size, torch.device):
            return {torch.dtype: encode_dtype, torch.Size: encode_size, torch.device: encode_device}[cls]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if cls is numpy.ndarray:
            return encode_array
        if issubclass(cls, numpy.generic):
            return encode_scalar
    return _encode_refuse


def _encode_refuse(encoder: Encoder, value: Any, parent: Place, key: object) -> Json:
    raise unstorable(encoder, value, parent, key)


def _find_handler_in_context(cls: type) -> Handler:
    """Return the handler of a type in the context of a wrapper subclass, where classes need not be registered."""
    torch, kind = sys.modules.get("torch"), kind_of(cls)
    if torch is not None and cls is torch.device:
        # Without its index: the ranks of one machine are on different devices, and their states are one.
        return encode_device_type
    if kind is Kind.ENUM:
        return encode_enum
    if kind in (Kind.DATACLASS, Kind.NAMED_TUPLE):
        return encode_fields
    return _find_handler(cls)


_REGISTERED_HANDLERS: dict[Kind, Handler] = {
    Kind.ENUM: encode_enum,
    Kind.FLAG: encode_flag,
    Kind.TENSOR: encode_tensor,
    Kind.DATACLASS: encode_fields,
    Kind.NAMED_TUPLE: encode_fields,
}
_RULES = Rules({**scalars.ENCODERS, **containers.ENCODERS, **times.ENCODERS}, _find_handler, _find_handler_in_context)
