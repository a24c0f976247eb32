"""The `.metadata` of a folder of torch.distributed.checkpoint. Its pickle enters; what is stored where leaves, checked.

No class of torch is made from it: each is a record of what the pickle says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsupportedFormatError
from holdfast.formats.plain_text import require_name
from holdfast.formats.torch_files.pickle_machine import Record
from holdfast.formats.torch_files.pickles import MAX_DEPTH, load_plain
from holdfast.formats.torch_files.stand_ins import plain_globals
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.paths import safe_relative
from holdfast.ondisk.regions import MAX_DIMENSIONS, Box

__all__ = ["FolderMetadata", "StoredItem", "TensorLayout", "parse_metadata"]

Path = tuple[str | int, ...]
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_MAX_SIZE = 2**63 - 1


class StoredItem(NamedTuple):
    """Where one item lies: a file of the folder and a range of it."""

    file: str
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor: its type and shape, and where each of its boxes lies."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, StoredItem], ...]


@dataclass(frozen=True, slots=True)
class FolderMetadata:
    """What a folder holds by flat name, and the path of each name in the nested state where the folder says it."""

    tensors: Mapping[str, TensorLayout]
    values: Mapping[str, StoredItem]
    paths: Mapping[str, Path]


def parse_metadata(data: bytes, name: str) -> FolderMetadata:
    """Return what a `.metadata` says. Code in it is an UnsafeContentError; a path that leaves the folder, too."""
    found = load_plain(data, allowed=_globals(), persistent=None, name=name)
    try:
        return _folder(found)
    except HoldfastError as error:
        raise error.at(file=name) from None


@lru_cache(maxsize=1)
def _globals() -> Mapping[tuple[str, str], Any]:
    made = dict(plain_globals())
    for kind in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ):
        made[_METADATA, kind] = Record.named(kind)
    for module in (_FILES, "torch.distributed.checkpoint._fsspec_filesystem"):
        for kind in ("_StorageInfo", "_StoragePrefix"):
            made[module, kind] = Record.named(kind)
    # Where torch had these classes before 2.1.
    made["torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"] = Record.named("TensorProperties")
    made["torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"] = Record.named("encoding")
    return made


def _folder(found: Any) -> FolderMetadata:
    metadata = _fields(found, "Metadata")
    stored = _stored_items(metadata.get("storage_data"))
    tensors, values = {}, {}
    listed = metadata.get("state_dict_metadata")
    if not isinstance(listed, dict) or not all(type(name) is str for name in listed):
        raise CorruptCheckpointError("the metadata has no list of what is stored")
    for name, entry in listed.items():
        require_name(name)
        try:
            if isinstance(entry, Record) and entry.kind == "BytesStorageMetadata":
                values[name] = _item(stored, name, None)
            else:
                tensors[name] = _layout(_fields(entry, "TensorStorageMetadata"), stored, name)
        except HoldfastError as error:
            raise error.at(leaf=name) from None
    _require_apart(tensors, values)
    return FolderMetadata(tensors, values, _paths(metadata.get("planner_data"), {*tensors, *values}))


def _require_apart(tensors: Mapping[str, TensorLayout], values: Mapping[str, StoredItem]) -> None:
    """Raise where two items share bytes of a file. A small file could otherwise be read as any number of values."""
    placed = [(item, name) for name, item in values.items()]
    placed += [(item, name) for name, layout in tensors.items() for _, item in layout.chunks]
    for (before, other), (item, name) in pairwise(sorted(one for one in placed if one[0].size_bytes)):
        if item.file == before.file and item.start < before.start + before.size_bytes:
            raise CorruptCheckpointError(
                f"two items overlap in '{item.file}' at byte {item.start}: '{other[:100]}' and '{name[:100]}'"
            )


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    if not isinstance(record, Record) or record.kind != kind or type(record.state) is not dict or record.arguments:
        raise CorruptCheckpointError(f"the metadata has no {kind} where one should be")
    return record.state


def _stored_items(storage: Any) -> dict[tuple[str, tuple[int, ...] | None], StoredItem]:
    """Return where each item lies, by its name and its offsets in the tensor, of which values have none."""
    if type(storage) is not dict:
        raise CorruptCheckpointError("the metadata does not say where anything is stored")
    found: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
    for index, info in storage.items():
        key, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, offset = key.get("fqn"), key.get("offset")
        if type(name) is not str:
            raise CorruptCheckpointError("an item of the metadata has no name")
        if place.get("transform_descriptors"):
            raise UnsupportedFormatError(
                f"the items are stored in a way of their own: {str(place['transform_descriptors'])[:100]}",
                leaf=name,
                advice="save without extensions of the writer",
            )
        file: Any = place.get("relative_path")
        start: Any = place.get("offset")
        size: Any = place.get("length")
        if type(file) is not str or not _is_size(start) or not _is_size(size):
            raise CorruptCheckpointError("the place of an item is not made of a name and numbers", leaf=name)
        at = None if offset is None else _sizes(offset)
        if (name, at) in found:
            raise CorruptCheckpointError(f"the metadata has two places for the item at {at}", leaf=name)
        found[name, at] = StoredItem(safe_relative(file), start, size)
    return found


def _layout(
    fields: dict[str, Any], stored: dict[tuple[str, tuple[int, ...] | None], StoredItem], name: str
) -> TensorLayout:
    shape = _sizes(fields.get("size"))
    dtype = _dtype(fields.get("properties"))
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise CorruptCheckpointError("the metadata of a tensor has no list of its pieces")
    found = []
    for chunk in chunks:
        piece = _fields(chunk, "ChunkStorageMetadata")
        box = Box(_sizes(piece.get("offsets")), _sizes(piece.get("sizes")))
        found.append((box, _item(stored, name, box.offsets)))
    return TensorLayout(dtype, shape, tuple(found))


def _dtype(properties: Any) -> str:
    """Return the element type: the first part of the state of the properties."""
    import torch

    state = properties.state if isinstance(properties, Record) and properties.kind == "TensorProperties" else None
    dtype = state.get("dtype") if type(state) is dict else state[0] if type(state) is tuple and state else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError("the metadata of a tensor has no element type")
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_TYPES:
        raise UnsupportedFormatError(f"tensors of type '{name}' are not known to this version")
    return name


def _item(
    stored: dict[tuple[str, tuple[int, ...] | None], StoredItem], name: str, offsets: tuple[int, ...] | None
) -> StoredItem:
    if (name, offsets) not in stored:
        raise CorruptCheckpointError(f"the metadata does not say where the piece at {offsets} is stored")
    return stored[name, offsets]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS or not all(map(_is_size, value)):
        raise CorruptCheckpointError("the metadata of a tensor is not made of numbers")
    return tuple(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _paths(planned: Any, names: set[str]) -> dict[str, Path]:
    """Return the path of each name in the nested state, in its order, where there is one."""
    if planned is None:
        return {}
    if type(planned) is not dict:
        raise CorruptCheckpointError("the paths of the metadata are no dict")
    paths: dict[str, Path] = {}
    for name, path in planned.items():
        if name not in names:
            continue
        if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
            raise CorruptCheckpointError("a path of the metadata is not made of names and numbers", leaf=name)
        if len(path) > MAX_DEPTH:
            raise CorruptCheckpointError(f"a path of the metadata has more than {MAX_DEPTH} parts", leaf=name)
        for part in path:
            require_name(str(part))
        paths[name] = path
    return paths
