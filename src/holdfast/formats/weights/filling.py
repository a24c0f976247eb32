"""Bring the entries of a source into a model's tensors. Fitted names enter; filled tensors and extra states leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.formats.source import Fill, Source, TensorEntry
from holdfast.formats.weights.fitting import FittedWeights
from holdfast.ondisk.regions import Box, Cut, boxes_within, whole
from holdfast.state.names import cut_at
from holdfast.state.tensors import held_piece, torch_dtype

__all__ = ["fill_tensors"]

# Of a tensor that is converted, this much is in memory in the source's type at a time.
_CAST_BYTES = 64 << 20


def fill_tensors(
    state: Mapping[str, Any],
    fitted: FittedWeights,
    source: Source,
    cuts: Mapping[str, Cut],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Fill the tensors of this rank in place, and return the extra states that the module's own hooks take up."""
    straight: list[Fill] = []
    converted: list[Fill] = []
    for name, entry in fitted.entries.items():
        box, local = held_piece(state[name], leaf=name, cut=cut_at(cuts, name, state[name]))
        if box.volume:
            same = local.dtype == torch_dtype(entry.dtype)
            (straight if same else converted).append(Fill(entry, box, local))
    if straight:
        source.read(straight, on_bytes)
    for fill in converted:
        _fill_converted(fill, source, on_bytes)
    return {name: _extra_state(value, source) for name, value in fitted.extras.items()}


def _fill_converted(fill: Fill, source: Source, on_bytes: Callable[[int], None]) -> None:
    """Read a box some rows at a time in the source's type, and convert them into the target."""
    dtype = torch_dtype(fill.entry.dtype)
    for box in boxes_within(fill.box, fill.entry.item_bytes, _CAST_BYTES):
        buffer = torch.empty(box.sizes, dtype=dtype)
        source.read([Fill(fill.entry, box, buffer)], on_bytes)
        _part(fill.target, box.relative_to(fill.box)).copy_(buffer)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def _extra_state(value: Any, source: Source) -> Any:
    """Return an extra state with its tensors read into new memory."""
    if isinstance(value, TensorEntry):
        tensor = torch.empty(value.shape, dtype=torch_dtype(value.dtype))
        if tensor.numel():
            source.read([Fill(value, whole(value.shape), tensor)])
        return tensor
    if isinstance(value, Mapping):
        return {key: _extra_state(inner, source) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_extra_state(inner, source) for inner in value)
    return value
