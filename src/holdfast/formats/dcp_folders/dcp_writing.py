"""Write a folder that stock `dcp.load` reads. A job enters; the folder leaves. No process group is needed.

torch's own FileSystemWriter is not used: it keeps every tensor of a file in memory until the file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.torch_files.pickle_writing import Call, Instance, Pairs, Pickler
from holdfast.formats.torch_files.torch_writing import write_torch

__all__ = ["write_folder"]

_DEFAULT_SHARD_BYTES = 5 << 30
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
_Path = tuple[str | int, ...]


def write_folder(job: ExportJob, target: Path) -> None:
    """Write the tree of a job as `dcp.save` would: each tensor and each value by its path, joined with dots."""
    leaves = dict(_leaves(job.tree, ()))
    names = _flat_names(leaves)
    target.mkdir()
    places: dict[str, Instance] = {}
    for number, shard in enumerate(_shards(names, job.max_shard_bytes or _DEFAULT_SHARD_BYTES)):
        file = f"__0_{number}.distcp"
        with (target / file).open("xb") as stream:
            for name, leaf in shard:
                start = stream.tell()
                write_torch(stream, leaf, job.pieces)
                place = {"relative_path": file, "offset": start, "length": stream.tell() - start}
                places[name] = Instance(_FILES, "_StorageInfo", place)
    metadata = {
        "state_dict_metadata": {name: _storage_metadata(leaf) for name, leaf in names.items()},
        "planner_data": {name: path for path, name in zip(leaves, names, strict=True)},
        "storage_data": Pairs((_index(name, names[name]), place) for name, place in places.items()),
        "storage_meta": Instance(_METADATA, "StorageMeta", {"modules": []}),
        "version": _VERSION,
    }
    (target / ".metadata").write_bytes(Pickler().dump(Instance(_METADATA, "Metadata", metadata)))


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


def _index(name: str, leaf: Any) -> Instance:
    """Return the key of an item: its name and, for a tensor, its offsets in the whole, of which it is all."""
    state: dict[str, Any] = {"fqn": name, "index": None}
    if isinstance(leaf, ExportItem):
        state |= {"index": 0, "offset": _size((0,) * len(leaf.shape))}
    return Instance(_METADATA, "MetadataIndex", state)


def _storage_metadata(leaf: Any) -> Instance:
    import torch

    if not isinstance(leaf, ExportItem):
        return Instance(_METADATA, "BytesStorageMetadata", {})
    layout = Call("torch.serialization", "_get_layout", ("torch.strided",))
    encoding = Call(_METADATA, "_MEM_FORMAT_ENCODING", (0,))
    properties = (getattr(torch, leaf.dtype), layout, False, encoding, False)
    chunk = {"offsets": _size((0,) * len(leaf.shape)), "sizes": _size(leaf.shape)}
    tensor = {
        "properties": Instance(_METADATA, "TensorProperties", properties),
        "size": _size(leaf.shape),
        "chunks": [Instance(_METADATA, "ChunkStorageMetadata", chunk)],
    }
    return Instance(_METADATA, "TensorStorageMetadata", tensor)


def _size(shape: tuple[int, ...]) -> Call:
    return Call("torch", "Size", (shape,))
