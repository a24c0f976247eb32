"""Lay the parts of a foreign checkpoint out as trees and leaves. Parts enter; encoded values, records and the pieces of
every tensor leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.errors import HoldfastError, UsageError
from holdfast.formats.importing.models import place_of
from holdfast.formats.importing.records import Part
from holdfast.formats.source import Source, TensorEntry
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, encode
from holdfast.ondisk.files import Pieces
from holdfast.ondisk.manifest import BLOCK_BYTES, TensorRecord, TreeRecord
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import FramedChunk
from holdfast.state.tensors import dtype_name, host_pieces

__all__ = ["Stored", "in_blocks", "stored_parts"]

_PIECE_BYTES = 16 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Stored:
    """All trees of a checkpoint: their records, their values by name, and each leaf with where its bytes come from."""

    trees: tuple[TreeRecord, ...]
    values: Mapping[str, Json]
    leaves: tuple[TensorRecord, ...]
    sources: Mapping[FramedChunk, Pieces]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.sources)


def stored_parts(parts: Sequence[Part]) -> Stored:
    """Return what is stored of all parts. A value that no checkpoint can hold is an error that names its place."""
    trees: list[TreeRecord] = []
    values: dict[str, Json] = {}
    leaves: list[TensorRecord] = []
    sources: dict[FramedChunk, Pieces] = {}
    for part in parts:
        tree = TreeRecord(
            component=part.component, kind=part.kind, file=paths.SHARED_VALUES, scope=part.scope, model=part.model
        )
        collector = _Collector(tree, part.source)
        try:
            stand_ins = _with_stand_ins(part.value)
            values[tree.name] = encode(stand_ins, path=part.component, on_tensor=collector.note)
        except HoldfastError as error:
            advice = f"leave it out with skip=('{part.origin}',)"
            raise type(error)(**{**error.fields, "file": part.source.location, "advice": advice}) from error
        trees.append(tree)
        leaves += collector.leaves
        sources.update(collector.sources)
    return Stored(tuple(trees), values, tuple(leaves), sources)


def in_blocks(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of whole blocks, but for the last: a digest is over one block of a chunk."""
    memory = bytearray(_PIECE_BYTES)
    used = 0
    with memoryview(memory) as view:
        for piece in pieces:
            start = 0
            while start < len(piece):
                count = min(len(piece) - start, _PIECE_BYTES - used)
                view[used : used + count] = piece[start : start + count]
                start, used = start + count, used + count
                if used == _PIECE_BYTES:
                    yield view
                    used = 0
        if used:
            yield view[:used]


class _Collector:
    """Notes the tensors of one tree under their paths in it, as a capture of live objects does."""

    def __init__(self, tree: TreeRecord, source: Source) -> None:
        self.leaves: list[TensorRecord] = []
        self.sources: dict[FramedChunk, Pieces] = {}
        self._tree = tree
        self._source = source
        self._taken: set[str] = set()
        self._places: dict[Any, str] = {}

    def note(self, full_path: str, tensor: torch.Tensor) -> str:
        """Return the path under which a tensor is stored: its own, or for another name of a tied weight, the first."""
        path = full_path[len(self._tree.component) + 1 :]
        if len(full_path) + len("@stage-00000") > paths.MAX_NAME_CHARACTERS:
            raise UsageError(f"a leaf's name has {len(full_path)} characters", leaf=full_path[:80])
        entry: TensorEntry | None = getattr(tensor, "entry", None)
        place = place_of(entry) if entry is not None and self._tree.kind == "module" else None
        if place is not None and place in self._places:
            return self._places[place]
        path = self._unused(path)
        self._places[place] = path
        leaf = paths.leaf_name(self._tree.name, path)
        if entry is not None:
            self._add(leaf, entry.dtype, entry.shape, partial(_pieces_of_entry, self._source, entry))
        else:
            # An array that the codec stores as a tensor: its bytes are in memory.
            self._add(leaf, dtype_name(tensor), tuple(tensor.shape), partial(host_pieces, tensor))
        return path

    def _add(self, leaf: str, dtype: str, shape: tuple[int, ...], pieces: Callable[[], Iterator[memoryview]]) -> None:
        self.leaves.append(TensorRecord(name=leaf, dtype=dtype, shape=shape, chunks=()))
        self.sources[FramedChunk.of(leaf, dtype, whole(shape))] = pieces

    def _unused(self, path: str) -> str:
        """Return the path, with a number added for the second of two tensors whose keys spell the same one."""
        free, number = path, 1
        while free in self._taken:
            number += 1
            free = f"{path}~{number}"
        self._taken.add(free)
        return free


def _pieces_of_entry(source: Source, entry: TensorEntry) -> Iterator[memoryview]:
    return in_blocks(source.pieces(entry))


def _with_stand_ins(value: Any) -> Any:
    """Return the values with a tensor that has no memory in the place of each entry: what the codec takes for one."""
    if isinstance(value, TensorEntry):
        stand_in = torch.empty(0, device="meta")
        stand_in.entry = value
        return stand_in
    if isinstance(value, Mapping):
        return {key: _with_stand_ins(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_stand_ins, value))
    return value
