"""Folders of torch.distributed.checkpoint as sources, and how they are written. No process group is needed for either.

A folder has a `.metadata`, which says what is stored where, and `.distcp` files, in which each piece of a tensor and
each value is a file of `torch.save`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.base import Format
from holdfast.formats.binary import BinaryFile
from holdfast.formats.dcp_folders.dcp_metadata import FolderMetadata, StoredItem, TensorLayout, parse_metadata
from holdfast.formats.reading import read_range
from holdfast.formats.source import Source, StoredChunk, TensorEntry
from holdfast.formats.torch_files.pickles import MAX_PICKLE_BYTES
from holdfast.formats.torch_files.torch_file import read_torch
from holdfast.ondisk.paths import safe_relative
from holdfast.ondisk.regions import whole

if TYPE_CHECKING:
    from holdfast.formats.exporting.export import ExportJob

__all__ = ["DCPFormat", "DCPSource", "is_dcp", "open_dcp"]

_METADATA = ".metadata"
_MAX_OPEN_FILES = 64
_METADATA_CLASS = b"torch.distributed.checkpoint.metadata"


def open_dcp(files: Mapping[str, BinaryFile], location: str) -> Source:
    """Open a DCP folder whose files are given by their relative names, such as members of an archive."""
    return DCPSource(files, location)


def is_dcp(files: Mapping[str, BinaryFile]) -> bool:
    """Return whether files are those of a DCP folder, from the start of its metadata; where that is damaged, from the
    files beside it."""
    if _METADATA not in files:
        return any(name.endswith(_METADATA) and name.startswith("__") for name in files)
    head = files[_METADATA]
    start = head.read(0, min(head.size_bytes, 256))
    if start.startswith(b"\x80") and _METADATA_CLASS in start:
        return True
    return any(name.endswith(".distcp") for name in files)


class DCPSource(Source):
    """What `dcp.save` stored, nested as it was saved. Nothing but the metadata is read on opening; the values of a
    part, when it is asked for."""

    format: ClassVar[str] = "dcp"

    def __init__(self, files: Mapping[str, BinaryFile], location: str) -> None:
        super().__init__(location)
        self._files = files
        self._metadata = self._read_metadata()
        self._entries = {name: self._entry(name, layout) for name, layout in self._metadata.tensors.items()}

    def _read_metadata(self) -> FolderMetadata:
        if _METADATA not in self._files:
            raise UnsupportedFormatError(
                "every rank has written metadata of its own",
                file=self.location,
                advice="save with dcp.save over all ranks (no_dist=False), which writes one .metadata",
            )
        file = self._files[_METADATA]
        if file.size_bytes > MAX_PICKLE_BYTES:
            raise CorruptCheckpointError(f"metadata of {file.size_bytes} bytes is none", file=file.name)
        return parse_metadata(file.read(0, file.size_bytes), file.name)

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        values = {name: _Value(name, item) for name, item in self._metadata.values.items()}
        leaves: dict[str, Any] = {**self._entries, **values}
        names = self._metadata.tensors.keys() | self._metadata.values.keys()
        # In the order in which they were planned, which is that of the state.
        ordered = [name for name in self._metadata.paths if name in names] or list(leaves)
        ordered += [name for name in leaves if name not in self._metadata.paths and self._metadata.paths]
        paths = {self._metadata.paths.get(name, (name,)): leaves[name] for name in ordered}
        return _Parts(_nested(paths, self.location), self._read_value)

    def _read_value(self, value: _Value) -> Any:
        return _within(read_torch(self._part(value.item, value.name)), value.name)

    def _entry(self, name: str, layout: TensorLayout) -> TensorEntry:
        """Return where the pieces of a tensor are. Their own headers are read when their bytes are."""
        chunks = []
        for box, item in layout.chunks:
            if box.volume or not all(layout.shape):
                self._part(item, name)
                piece = _Piece(self._files, item, TensorEntry(name, layout.dtype, box.sizes))
                chunks.append(StoredChunk(piece, 0, box))
        if not all(layout.shape):
            # Ranks without a part of an empty tensor have stored that, too.
            chunks = [chunk._replace(box=whole(layout.shape)) for chunk in chunks[:1]]
        try:
            return TensorEntry(name, layout.dtype, layout.shape, tuple(chunks)).checked()
        except HoldfastError as error:
            raise error.at(file=self.location) from None

    def _part(self, item: StoredItem, name: str) -> BinaryFile:
        file = self._files.get(item.file)
        if file is None:
            raise CorruptCheckpointError(f"the file '{item.file}' is missing", leaf=name, file=self.location)
        return file.part(item.start, item.size_bytes, name)

    def close(self) -> None:
        if isinstance(self._files, _FolderFiles):
            self._files.close()


class _Place(NamedTuple):
    """Where the elements of a piece are in a file of the folder: row by row, or with strides."""

    start: int
    strides: tuple[int, ...] | None


class _Piece(BinaryFile):
    """The elements of a piece of a tensor, row by row, in a file of `torch.save`. That is opened on the first read:
    a folder of many ranks has tens of thousands of them, in more files than a process may have open."""

    def __init__(self, files: Mapping[str, BinaryFile], item: StoredItem, expected: TensorEntry) -> None:
        self._files = files
        self._item = item
        self._expected = expected
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self.size_bytes = expected.size_bytes
        self.name = f"{files[item.file].name}:{expected.name}"

    def read_into(self, start: int, target: memoryview) -> None:
        self._require(start, len(target))
        with self._lock:
            if self._place is None:
                self._place = self._locate()
            place = self._place
        file, expected = self._files[self._item.file], self._expected
        if place.strides is None:
            file.read_into(place.start + start, target)
            return
        # Not kept in the order of its rows: a tensor may be far larger than the storage that it is expanded from.
        chunk = StoredChunk(file, place.start, whole(expected.shape), place.strides)
        read_range(replace(expected, chunks=(chunk,)), start, target)

    def _locate(self) -> _Place:
        expected = self._expected
        file = self._files[self._item.file]
        tensor = read_torch(file.part(self._item.start, self._item.size_bytes, expected.name))
        if not isinstance(tensor, TensorEntry):
            raise CorruptCheckpointError("no tensor is stored where one should be", leaf=expected.name, file=self.name)
        if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            raise CorruptCheckpointError(
                f"{tensor.dtype}{list(tensor.shape)} is stored, not {expected.dtype}{list(expected.shape)}",
                leaf=expected.name,
                file=self.name,
            )
        chunk = tensor.chunks[0]
        return _Place(chunk.file.place_in(file) + chunk.start, chunk.strides)


class _Value(NamedTuple):
    """A value of the folder that was not read yet."""

    name: str
    item: StoredItem


class _Parts(Mapping[str, Any]):
    """The parts of what was saved by name. The values in one are read when it is first asked for: those of parts that
    nobody wants may be large, or of classes that are refused."""

    def __init__(self, parts: Mapping[str, Any], read: Callable[[_Value], Any]) -> None:
        self._parts = parts
        self._read = read
        self._done: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._done:
            self._done[name] = self._with_values(self._parts[name])
        return self._done[name]

    def _with_values(self, node: Any) -> Any:
        if isinstance(node, _Value):
            return self._read(node)
        if type(node) is list:
            return [self._with_values(inner) for inner in node]
        if type(node) is dict:
            return {key: self._with_values(inner) for key, inner in node.items()}
        return node

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _within(value: Any, name: str) -> Any:
    """Return a value of the folder with the entries in it named by their place in the whole."""
    if isinstance(value, TensorEntry):
        return TensorEntry(f"{name}.{value.name}" if value.name else name, value.dtype, value.shape, value.chunks)
    if type(value) in (list, tuple):
        return type(value)(_within(inner, name) for inner in value)
    if type(value) is dict:
        return {key: _within(inner, name) for key, inner in value.items()}
    return value


def _nested(leaves: Mapping[tuple[str | int, ...], Any], location: str) -> dict[str, Any]:
    """Return leaves by path as nested dicts and lists. Numbers in paths are places in lists, all of which are there."""
    root: dict[Any, Any] = {}
    inner: set[int] = {id(root)}
    for path, leaf in leaves.items():
        node = root
        for part in path[:-1]:
            if part not in node:
                node[part] = {}
                inner.add(id(node[part]))
            node = node[part]
            if id(node) not in inner:
                raise CorruptCheckpointError(f"a value is at a part of {list(path)[:20]}", file=location)
        if path[-1] in node:
            raise CorruptCheckpointError(f"two values are at {list(path)[:20]}", file=location)
        node[path[-1]] = leaf
    return {str(key): _with_lists(value, inner, location) for key, value in root.items()}


def _with_lists(node: Any, inner: set[int], location: str) -> Any:
    if id(node) not in inner:
        return node
    made = {key: _with_lists(value, inner, location) for key, value in node.items()}
    if made and all(type(key) is int for key in made):
        if sorted(made) != list(range(len(made))):
            raise CorruptCheckpointError("a list of the folder has holes", file=location)
        return [made[place] for place in range(len(made))]
    return made


class _FolderFiles(Mapping[str, BinaryFile]):
    """The files of a folder, of which the last that were asked for are open. A link that leads out of the folder is
    refused. A file that is in use stays open when it is forgotten here: its descriptor is closed with its last user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._open: OrderedDict[str, BinaryFile] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> BinaryFile:
        with self._lock:
            if name not in self._open:
                path = self._folder / safe_relative(name)
                if not path.exists():
                    raise KeyError(name)
                if not path.resolve().is_relative_to(self._folder):
                    raise UnsafeContentError("a link leads out of the folder", file=str(path))
                self._open[name] = BinaryFile.open(path)
            self._open.move_to_end(name)
            if len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
            return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self._folder.iterdir() if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


class DCPFormat(Format):
    """A folder of `dcp.save`. What is written is read by stock `dcp.load` on any number of ranks."""

    name: ClassVar[str] = "dcp"
    is_folder: ClassVar[bool] = True

    def detects(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        files = _FolderFiles(path)
        try:
            return is_dcp(files)
        except (HoldfastError, OSError):
            return False
        finally:
            files.close()

    def open(self, path: Path) -> Source:
        files = _FolderFiles(path)
        try:
            return DCPSource(files, str(path))
        except BaseException:
            files.close()
            raise

    def write(self, job: ExportJob, target: Path) -> None:
        from holdfast.formats.dcp_folders.dcp_writing import write_folder

        write_folder(job, target)
