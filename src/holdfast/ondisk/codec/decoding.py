"""Turn a stored form into its value. JSON and a source of tensors enter; the value leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.ondisk.codec import arrays, classes, containers, scalars, tensors, times
from holdfast.ondisk.codec.decoder import Decoder, TagDecoder
from holdfast.ondisk.codec.forms import Json, Subclass
from holdfast.ondisk.codec.places import ROOT


def decode(
    value: Json,
    *,
    path: str,
    tensor: Callable[[str], Any] | None,
    subclass: Callable[[str, Subclass], Any] | None = None,
) -> object:
    """Return the value that was stored as `value`. `tensor` returns the tensor of a leaf name, `subclass` that of a
    wrapper subclass by the dotted name of its place."""
    return Decoder(DECODERS, tensor, subclass).decode(value, ROOT, path)


DECODERS: dict[str, TagDecoder] = {
    **scalars.DECODERS,
    **containers.DECODERS,
    **times.DECODERS,
    **tensors.DECODERS,
    **arrays.DECODERS,
    **classes.DECODERS,
}
