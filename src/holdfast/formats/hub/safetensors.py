"""Read and write safetensors files. A path enters; names, types, shapes and places leave. Tensors enter; files leave.

Several files have an index beside them, `model.safetensors.index.json`, which names the file of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from holdfast.errors import CorruptCheckpointError, HoldfastError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.binary import BinaryFile
from holdfast.formats.exporting.export import ExportItem, ExportJob, Pieces
from holdfast.formats.exporting.publishing import create_file, put_file
from holdfast.formats.hub.header_keys import require_sound_keys
from holdfast.formats.source import Source, StoredChunk, TensorEntry
from holdfast.ondisk.dtypes import ELEMENT_TYPES, element_type
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import encode_header, header_length, parse_header

__all__ = ["INDEX_FILE", "SafetensorsFormat", "SafetensorsSource", "read_entries", "require_storable", "write_shards"]

INDEX_FILE = "model.safetensors.index.json"
_SUFFIX = ".safetensors"

# The element type that a code names by itself. Types that are stored as another one, with a dimension more, cannot be
# distinguished from that one.
_TYPES = {kind.code: name for name, kind in ELEMENT_TYPES.items() if not kind.extra}


class SafetensorsSource(Source):
    """The tensors of one safetensors file."""

    format: ClassVar[str] = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._file = BinaryFile.open(path)
        try:
            self._tree = read_entries(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    def close(self) -> None:
        self._file.close()


def read_entries(file: BinaryFile) -> dict[str, TensorEntry]:
    """Return the tensors that the header of a file lists, each checked to lie in it, none over another."""
    try:
        header = file.read(0, header_length(file.read(0, min(8, file.size_bytes)), file.size_bytes))
        require_sound_keys(header[8:])
        entries = parse_header(header, file.size_bytes)
    except HoldfastError as error:
        raise error.at(file=file.name) from None
    found = {}
    for name, entry in entries.items():
        chunk = StoredChunk(file, entry.start, whole(entry.shape))
        if entry.code not in _TYPES:
            raise CorruptCheckpointError(f"the element type {entry.code!r} is unknown", leaf=name, file=file.name)
        found[name] = TensorEntry(name, _TYPES[entry.code], entry.shape, (chunk,)).checked()
    _refuse_overlaps(file, len(header), sorted((entry.start, entry.end, name) for name, entry in entries.items()))
    return found


def _refuse_overlaps(file: BinaryFile, header_bytes: int, ranges: list[tuple[int, int, str]]) -> None:
    """Refuse tensors that share bytes, holes between them and bytes after the last: what safetensors itself refuses."""
    position = header_bytes
    for start, end, name in ranges:
        if start != position:
            raise CorruptCheckpointError("the tensors do not lie back to back", leaf=name, file=file.name)
        position = end
    if position != file.size_bytes:
        raise CorruptCheckpointError(
            f"the tensors end at byte {position}, the file at {file.size_bytes}", file=file.name
        )


class SafetensorsFormat(Format):
    """One file, or several with an index, of the safetensors format."""

    name: ClassVar[str] = "safetensors"
    weights_only: ClassVar[bool] = True

    def detects(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with BinaryFile.open(path) as file:
                # Also with a length that is too large: to open a file that was cut off says that it was.
                return file.size_bytes > 8 and file.read(8, min(2, file.size_bytes - 8)) in (b'{"', b"{}", b"{ ", b"{")
        except HoldfastError:
            return False

    def open(self, path: Path) -> Source:
        return SafetensorsSource(path)

    def prepare(self, job: ExportJob) -> ExportJob:
        if job.max_shard_bytes is not None and job.name.endswith(_SUFFIX):
            raise UsageError(
                f"the target '{job.name}' is one file, and max_shard_bytes writes several",
                advice=f"give a target without {_SUFFIX}, which becomes a folder, or leave max_shard_bytes out",
            )
        return require_storable(job)

    def write(self, job: ExportJob, target: Path) -> None:
        """Write one file to a target that ends with `.safetensors`, and a folder of files to any other."""
        if job.name.endswith(_SUFFIX):
            with job.reading_ahead(_ordered(job.items)) as pieces:
                _write_file(target, job.items, pieces)
            return
        target.mkdir()
        write_shards(job, target, job.max_shard_bytes)


def require_storable(job: ExportJob) -> ExportJob:
    """Return a job of tensors that safetensors has types for, or raise for the first one that it has none for."""
    for item in job.items:
        if element_type(item.dtype).extra:
            raise UsageError(
                f"safetensors has no type for {item.dtype}",
                leaf=item.name,
                advice="convert it with dtype=, leave the tensor out with rename=, or use the format 'torch'",
            )
        if item.name == "__metadata__":
            raise UsageError("safetensors keeps this name for itself", leaf=item.name, advice="use rename=")
    return job


def write_shards(job: ExportJob, folder: Path, max_shard_bytes: int | None, stem: str = "model") -> None:
    """Write the tensors of a job to a folder: to one file, or to several, and the index of them, where they have more
    bytes than one may have. A tensor that is larger has a file of its own."""
    shards = _shards(job.items, max_shard_bytes)
    names = [f"{stem}-{number:05}-of-{len(shards):05}{_SUFFIX}" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}{_SUFFIX}"]
    with job.reading_ahead([item for shard in shards for item in _ordered(shard)]) as pieces:
        for name, shard in zip(names, shards, strict=True):
            _write_file(folder / name, shard, pieces)
    if len(shards) > 1:
        places = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
        total = {"total_size": sum(item.size_bytes for item in job.items)}
        index = json.dumps({"metadata": total, "weight_map": places}, indent=2, sort_keys=True)
        put_file(folder / INDEX_FILE, f"{index}\n".encode())


def _shards(items: Sequence[ExportItem], limit_bytes: int | None) -> list[list[ExportItem]]:
    """Return the tensors, in their order, in groups of no more bytes than the limit."""
    shards: list[list[ExportItem]] = [[]]
    size = 0
    for item in items:
        if limit_bytes is not None and shards[-1] and size + item.size_bytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.size_bytes
    return shards


def _ordered(items: Sequence[ExportItem]) -> list[ExportItem]:
    """Return the tensors in the order of a file: larger elements first, so that each starts at a multiple of its
    element's size, which readers that map the file need."""
    return sorted(items, key=lambda item: -element_type(item.dtype).item_bytes)


def _write_file(path: Path, items: Sequence[ExportItem], pieces: Pieces) -> None:
    ordered = _ordered(items)
    header, size_bytes = encode_header(
        [(item.name, element_type(item.dtype), item.shape) for item in ordered], {"format": "pt"}
    )
    with create_file(path, size_bytes) as sink:
        sink.write(header)
        for item in ordered:
            for piece in pieces(item):
                sink.write(piece)
