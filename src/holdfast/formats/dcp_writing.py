"""Write a folder that stock `dcp.load` reads. A job enters; the folder leaves. No process group is needed.

torch's own FileSystemWriter is not used: it keeps every tensor of a file in memory until the file is written.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.formats.export import ExportItem, ExportJob
from holdfast.formats.torch_writing import write_torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["write_folder"]

_DEFAULT_SHARD_BYTES = 5 << 30
_Path = tuple[str | int, ...]


def write_folder(job: ExportJob, target: Path) -> None:
    """Write the tree of a job as `dcp.save` would: each tensor and each value by its path, joined with dots."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

    leaves = dict(_leaves(job.tree, ()))
    names = _flat_names(leaves)
    target.mkdir()
    listed: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for number, shard in enumerate(_shards(names, job.max_shard_bytes or _DEFAULT_SHARD_BYTES)):
        file = f"__0_{number}.distcp"
        with (target / file).open("xb") as stream:
            for name, leaf in shard:
                start = stream.tell()
                write_torch(stream, leaf, job.pieces)
                listed[name] = _storage_metadata(leaf)
                index = MetadataIndex(name, (0,) * len(leaf.shape)) if isinstance(leaf, ExportItem) else None
                place = _StorageInfo(file, start, stream.tell() - start)
                places[index or MetadataIndex(name)] = place
    metadata = Metadata(listed, {name: path for path, name in zip(leaves, names, strict=True)}, places, StorageMeta())
    if hasattr(metadata, "version"):
        metadata.version = CURRENT_DCP_VERSION
    _write_metadata(metadata, target)


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield what is stored by itself, as dcp.save does: values in dicts, and in lists that hold tensors or dicts."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and not _is_plain(value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, (*path, place))
    else:
        yield path, value


def _is_plain(value: list[Any]) -> bool:
    return not any(
        isinstance(inner, Mapping | ExportItem) or (isinstance(inner, list) and not _is_plain(inner)) for inner in value
    )


def _flat_names(leaves: Mapping[_Path, Any]) -> dict[str, Any]:
    """Return the leaves by their paths joined with dots."""
    names: dict[str, Any] = {}
    for path, leaf in leaves.items():
        name = ".".join(map(str, path))
        if name in names:
            raise UsageError("two values have the same name in a DCP folder", leaf=name, advice="rename one of them")
        names[name] = leaf
    return names


def _shards(names: Mapping[str, Any], limit_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Yield the leaves in groups of at most so many bytes of tensors, or of one tensor that is larger."""
    shard: list[tuple[str, Any]] = []
    size = 0
    for name, leaf in names.items():
        leaf_bytes = leaf.size_bytes if isinstance(leaf, ExportItem) else 0
        if shard and size + leaf_bytes > limit_bytes:
            yield shard
            shard, size = [], 0
        shard.append((name, leaf))
        size += leaf_bytes
    if shard:
        yield shard


def _storage_metadata(leaf: Any) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    if not isinstance(leaf, ExportItem):
        return BytesStorageMetadata()
    shape = torch.Size(leaf.shape)
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, leaf.dtype)), shape, [chunk])


def _write_metadata(metadata: Metadata, target: Path) -> None:
    with (target / ".metadata").open("xb") as stream:
        pickle.dump(metadata, stream, protocol=4)
