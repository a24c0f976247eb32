"""Look a checkpoint up by PyTorch's keys. A reader enters; what each key is, and where it stands, leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from holdfast.errors import UsageError
from holdfast.formats.dcp.layout import NOTE, Path, flattened, read_note
from holdfast.loading.files import reference_of
from holdfast.loading.reader import CheckpointReader, Leaf
from holdfast.loading.requests import Request
from holdfast.ondisk.codec import Json
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.regions import Box
from holdfast.state.tensors import torch_dtype

__all__ = ["Contents"]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that is no tensor, still encoded, and the tree that it is part of."""

    tree: TreeRecord
    stored: Json


class _Listing(dict[str, Any]):
    """What a checkpoint has by key. Also knows the second spelling of an optimizer's options, without listing it: a
    load of all that is listed should not load them twice."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        super().__init__()
        self.aliases = aliases

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.aliases

    def __missing__(self, key: str) -> Any:
        return self[self.aliases[key]]


@dataclass(slots=True)
class Contents:
    """One checkpoint by PyTorch's keys: what each key is, and where in the state dict it stands."""

    reader: CheckpointReader
    entries: dict[str, Leaf | _Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    decoded: dict[str, Any] = field(default_factory=dict)
    save_id: str = ""

    def __post_init__(self) -> None:
        checkpoint = self.reader.checkpoint
        note = read_note(checkpoint.manifest.extra.get(NOTE))
        self.save_id = note.save_id or checkpoint.digest
        for tree in self.reader.trees:
            stored = self.reader.stored_values(tree.name)
            for path, value in flattened(stored, tree, note):
                self._add(path, value, tree)
            self._add_aliases(stored, tree)

    def metadata(self) -> Metadata:
        """Return the metadata for PyTorch's planner: the keys, what each is, and where it is stored."""
        listing = _Listing(self.aliases)
        places: dict[MetadataIndex, _StorageInfo] = {}
        for key, entry in self.entries.items():
            if isinstance(entry, _Value):
                listing[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = _StorageInfo(entry.tree.file, 0, 0)
                continue
            listing[key] = _tensor_metadata(entry.record)
            for index, chunk in enumerate(entry.record.chunks):
                place = _StorageInfo(chunk.file, chunk.start, chunk.box.volume * entry.record.item_bytes)
                places[MetadataIndex(key, chunk.offsets, index)] = place
        return Metadata(listing, dict(self.paths), places, version=CURRENT_DCP_VERSION)

    def request(self, item: ReadItem, target: Any) -> Request:
        """Return the request for the box of a leaf that an item asks for."""
        leaf = self._entry(item.storage_index.fqn)
        if not isinstance(leaf, Leaf):
            raise UsageError(
                "the plan asks for a tensor that the checkpoint does not have", leaf=item.storage_index.fqn
            )
        start = item.storage_index.offset or (0,) * len(leaf.shape)
        offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
        return self.reader.request(leaf, Box(offsets, tuple(item.lengths)), target)

    def value(self, key: str) -> Any:
        """Return a value that is no tensor, decoded once. Tensors inside of it, as in a tuple, are read with it."""
        entry = self._entry(key)
        if not isinstance(entry, _Value):
            raise UsageError("the plan asks for a value where the checkpoint has a tensor, or nothing", leaf=key)
        if key not in self.decoded:
            self.decoded[key] = self.reader.decoded(entry.tree, entry.stored, key)
        return self.decoded[key]

    def _entry(self, key: str) -> Leaf | _Value | None:
        return self.entries.get(key) or self.entries.get(self.aliases.get(key, key))

    def _add(self, path: Path, value: Json, tree: TreeRecord) -> None:
        key = ".".join(map(str, path))
        # Two values whose keys spell the same dotted name: PyTorch can ask for neither, so the first may have it.
        if key in self.entries:
            return
        reference = reference_of(value)
        self.entries[key] = _Value(tree, value) if reference is None else self.reader.leaf_of(tree, reference)
        self.paths[key] = path

    def _add_aliases(self, stored: Json, tree: TreeRecord) -> None:
        """Note an optimizer's options by parameter, as `flatten_optimizer_state_dict` spells them."""
        groups = stored.get("param_groups") if tree.kind == "optimizer" and isinstance(stored, dict) else None
        for index, group in enumerate(groups if isinstance(groups, list) else ()):
            options = group if isinstance(group, dict) else {}
            names = options.get("params")
            for name in names if isinstance(names, list) else ():
                for option in options:
                    key = f"{tree.name}.param_groups.{index}.{option}"
                    if key in self.entries:
                        self.aliases[f"{tree.name}.param_groups.{name}.{option}"] = key


def _tensor_metadata(leaf: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(leaf.dtype)),
        size=torch.Size(leaf.shape),
        chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in leaf.chunks],
    )
