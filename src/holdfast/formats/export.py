"""Write weights of any source in another format. A source, a target and a format enter; the finished target leaves.

Tensors are streamed: no more than a few pieces of one are in memory at a time. The target is written beside its name,
made durable, and moved there when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.formats.source import Source, TensorEntry
from holdfast.ondisk.dtypes import element_type
from holdfast.runs.assets import Asset

__all__ = ["ExportItem", "ExportJob"]


@dataclass(frozen=True, slots=True)
class ExportItem:
    """One tensor to write: its name and element type in the target, and where it comes from."""

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def size_bytes(self) -> int:
        size = element_type(self.dtype).item_bytes
        return self.entry.size_bytes // self.entry.item_bytes * size


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What a format writes.

    items: the tensors, in the order in which they should be written. tree: the same tensors, and values that are no
    tensors, nested as the source has them, with an `ExportItem` in the place of each tensor; flat names of the model
    when one component is exported. config, assets: what the source has beside the weights. max_shard_bytes: the most
    bytes of tensors in one file; None for the format's own rule.
    """

    source: Source
    items: tuple[ExportItem, ...]
    tree: Mapping[str, Any]
    config: Any = None
    assets: Mapping[str, Asset] = field(default_factory=dict)
    max_shard_bytes: int | None = None
    on_bytes: Callable[[int], None] = lambda count: None

    def pieces(self, item: ExportItem) -> Iterator[memoryview]:
        """Yield the bytes of a tensor as the target wants them, verified where the source can be. Each piece is valid
        until the next one is asked for."""
        for piece in self.source.pieces(item.entry):
            yield piece
            self.on_bytes(len(piece))
