"""A checkpoint of any format, opened: what it holds is listed, and any part of a tensor is read when it is asked for.

Every format that Holdfast reads is a `Source`. What uses sources (`load_weights`, `build_model`, `export`,
`import_checkpoint`) knows no format.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.binary import BinaryFile
from holdfast.ondisk.dtypes import MAX_TENSOR_BYTES, element_type
from holdfast.ondisk.regions import MAX_DIMENSIONS, Box, boxes_within, cover_exactly, whole
from holdfast.runs.assets import Asset

if TYPE_CHECKING:
    import torch

__all__ = ["Asset", "Fill", "Source", "StoredChunk", "TensorEntry", "tensors_of"]

PIECE_BYTES = 16 << 20
"""The most bytes of a tensor that are held at a time when it is streamed."""


class StoredChunk(NamedTuple):
    """A box of a tensor as a file holds it: from byte `start` on, row by row, or, with `strides`, as a tensor whose
    element strides these are."""

    file: BinaryFile
    start: int
    box: Box
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """One tensor of a source. `dtype` is the name of the element type as torch spells it, such as `bfloat16`.

    `chunks` make up the tensor where the source is made of plain files. `handle` is whatever another source needs to
    find it again.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...] = ()
    handle: Any = field(default=None, repr=False)

    @property
    def item_bytes(self) -> int:
        return element_type(self.dtype).item_bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    def boxes(self, limit_bytes: int) -> Iterator[Box]:
        """Yield boxes that make up the tensor, in the order of its elements, none larger than the limit."""
        return boxes_within(whole(self.shape), self.item_bytes, limit_bytes)

    def checked(self) -> Self:
        """Return this entry if its chunks are exactly all of it and lie in their files, or raise the damage."""
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise CorruptCheckpointError(f"no tensor has the shape {list(self.shape)[:8]}", leaf=self.name)
        if math.prod(max(size, 1) for size in self.shape) * self.item_bytes > MAX_TENSOR_BYTES:
            raise CorruptCheckpointError(f"no tensor has the shape {list(self.shape)}", leaf=self.name)
        boxes = [chunk.box for chunk in self.chunks]
        wrong = cover_exactly(boxes, self.shape) if boxes else "none of its bytes are there"
        if wrong is not None:
            raise CorruptCheckpointError(wrong, leaf=self.name)
        for chunk in self.chunks:
            if chunk.start < 0 or chunk.start + _extent_bytes(chunk, self.item_bytes) > chunk.file.size_bytes:
                raise CorruptCheckpointError(
                    "the tensor lies outside of its file", leaf=self.name, file=chunk.file.name
                )
        return self


def _extent_bytes(chunk: StoredChunk, item_bytes: int) -> int:
    """Return how many bytes a chunk takes in its file, from its first element to its last."""
    if chunk.box.volume == 0:
        return 0
    if chunk.strides is None:
        return chunk.box.volume * item_bytes
    if len(chunk.strides) != len(chunk.box.sizes) or any(stride < 0 for stride in chunk.strides):
        raise CorruptCheckpointError(f"strides {list(chunk.strides)[:8]} do not fit", file=chunk.file.name)
    last = sum((size - 1) * stride for size, stride in zip(chunk.box.sizes, chunk.strides, strict=True))
    return (last + 1) * item_bytes


class Fill(NamedTuple):
    """Fill a tensor of the same element type, on any device, with a box of an entry."""

    entry: TensorEntry
    box: Box
    target: torch.Tensor


class Source(ABC):
    """A checkpoint of one format, opened. Close it, or use it in a `with` block.

    location: what the user named, for messages. Subclasses set `format` to the name of their format.
    """

    format: ClassVar[str]

    def __init__(self, location: str) -> None:
        self.location = location

    @property
    @abstractmethod
    def tree(self) -> Mapping[str, Any]:
        """Return everything that is stored, as nested dicts, lists and plain values, with a `TensorEntry` in the
        place of each tensor. No tensor is read."""

    @property
    def identity(self) -> str:
        """Return what must be the same on all ranks that read one checkpoint together."""
        return self.location

    @property
    def config(self) -> Any:
        """Return the configuration that is stored with the weights, as plain values; None where there is none."""
        return None

    @property
    def assets(self) -> Mapping[str, Asset]:
        """Return the files beside the weights, by their relative path."""
        return {}

    def weights_trees(self) -> Sequence[str]:
        """Return the names in `tree` that are known to be models, where the format says it."""
        return ()

    def read(self, fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """Fill all targets. Damage that the format can find is a CorruptCheckpointError; the targets must not be used
        then. `on_bytes` gets the number of further bytes that are there, from any thread."""
        from holdfast.formats.reading import fill_all

        fill_all(fills, on_bytes)

    def pieces(self, entry: TensorEntry, *, limit_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, row by row. Each piece is valid until the next one is asked for."""
        from holdfast.formats.reading import pieces_of

        return pieces_of(entry, limit_bytes)

    def close(self) -> None:  # noqa: B027
        """Close the files of this source."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tensors_of(tree: Any) -> dict[str, TensorEntry]:
    """Return the tensors of a tree, or of a part of one, by their dotted paths in it."""
    found: dict[str, TensorEntry] = {}
    _collect(tree, "", found)
    return found


def _collect(value: Any, path: str, found: dict[str, TensorEntry]) -> None:
    if isinstance(value, TensorEntry):
        if path in found:
            raise CorruptCheckpointError("two tensors have the same name", leaf=path)
        found[path] = value
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            _collect(inner, f"{path}.{key}" if path else str(key), found)
