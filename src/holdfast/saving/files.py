"""Lay this rank's part of a save out as files. An inventory and an assignment enter; framed files leave, whose bytes
are copied from the tensors while they are written (holdfast.saving.ring), or to an arena (holdfast.saving.stage)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import SaveFailedError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json
from holdfast.ondisk.files import OnPiece, Pieces, PlainFile, TensorFile
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import Frame, FramedChunk, frame
from holdfast.saving.capture import Capture
from holdfast.saving.messages import Inventory, TreeEntry, WriteAssignment
from holdfast.saving.plan import TreePlan
from holdfast.saving.ring import Ring

MAX_FILE_BYTES = 4 << 30
# A header may have 100 MB, by safetensors' own rule; names of leaves have at most 1024 characters and are stored twice.
MAX_FILE_CHUNKS = 40_000
_ASSET_READ_BYTES = 32 << 20
# Nearly every training has these, with a few kilobytes each: a file more for them would slow every save down.
_BESIDE_WEIGHTS = frozenset({"RNGState", "StatefulDataLoader"})


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A tensor file of this rank: its frame, and for each chunk of it, in order, the part of the inventory."""

    name: str
    frame: Frame
    parts: tuple[int, ...]


def lay_out(inventory: Inventory, assignment: WriteAssignment, *, rank: int, first_part: int = 0) -> list[FileLayout]:
    """Return the tensor files that this rank writes. They are the same as long as the structure of the state is.

    Tensors of components with values of their own, such as the state of an evaluation, are in a file of their own: a
    later checkpoint that stores such a component anew can then take the file of the weights over as it is.
    """
    names = [
        paths.tree_name(tree.component, scope) for tree, scope in zip(inventory.trees, assignment.scopes, strict=True)
    ]
    weights: list[FramedChunk] = []
    others: list[FramedChunk] = []
    parts: dict[str, int] = {}
    for index in assignment.parts:
        part = inventory.parts[index]
        leaf = paths.leaf_name(names[part.tree], part.path)
        box = whole(part.shape) if 0 in part.shape else part.box
        chunks = others if _has_own_file(inventory.trees[part.tree]) else weights
        chunks.append(FramedChunk.of(leaf, part.dtype, box))
        parts[leaf] = index
    files = []
    for number, group in enumerate(chain(split(weights), split(others)), first_part):
        framed = frame(group, assignment.block_bytes)
        files.append(FileLayout(paths.tensor_file(rank, number), framed, tuple(parts[c.leaf] for c in framed.chunks)))
    return files


def _has_own_file(tree: TreeEntry) -> bool:
    return tree.kind == "values" and tree.type not in _BESIDE_WEIGHTS


def with_sources(files: Sequence[FileLayout], memory: Sequence[Any], ring: Ring) -> list[TensorFile]:
    """Return the files with the source of their bytes: the memory of each part of the inventory, through the ring."""
    return [
        TensorFile(file.name, file.frame, partial(ring.pieces, file.frame, [memory[part] for part in file.parts]))
        for file in files
    ]


def streamed_files(
    sources: Mapping[FramedChunk, Pieces], *, rank: int, block_bytes: int, first_part: int = 0
) -> list[TensorFile]:
    """Return the tensor files of chunks whose bytes come in pieces, in this order as far as one file cannot hold
    all."""
    files = []
    for number, group in enumerate(split(list(sources)), first_part):
        framed = frame(group, block_bytes)
        pieces = partial(_joined, framed.header, [sources[chunk] for chunk in framed.chunks])
        files.append(TensorFile(paths.tensor_file(rank, number), framed, pieces))
    return files


def _joined(header: bytes, sources: Sequence[Pieces], on_piece: OnPiece) -> Generator[memoryview]:
    first: Pieces = partial(_pieces_of_bytes, header)
    for source in (first, *sources):
        for piece in source():
            on_piece(piece)
            yield piece


def split(chunks: Sequence[FramedChunk]) -> Iterator[list[FramedChunk]]:
    """Yield groups of chunks that make one file each: none over the limit, and no leaf twice in one file."""
    group: list[FramedChunk] = []
    names: set[str] = set()
    size = 0
    for chunk in chunks:
        full = size + chunk.size_bytes > MAX_FILE_BYTES or len(group) == MAX_FILE_CHUNKS
        if group and (full or chunk.leaf in names):
            yield group
            group, names, size = [], set(), 0
        group.append(chunk)
        names.add(chunk.leaf)
        size += chunk.size_bytes
    if group:
        yield group


def plain_files(
    captured: Capture,
    assignment: WriteAssignment,
    rank: int,
    trees: Sequence[TreePlan],
    assets: Mapping[str, Path | bytes],
    *,
    first_part: int = 0,
) -> list[PlainFile]:
    """Return this rank's files that are no tensor files: values, and on the leader merged values and assets."""
    own: dict[str, dict[str, Any]] = {}
    for index in assignment.trees:
        tree, scope = captured.trees[index], assignment.scopes[index]
        is_shared = scope == "" and rank == 0
        file = paths.shared_values(first_part) if is_shared else paths.values_file(rank, first_part)
        own.setdefault(file, {})[paths.tree_name(tree.component, scope)] = msgspec.Raw(captured.texts[index])
    for merged in trees if rank == 0 else ():
        if merged.merged is not None:
            own.setdefault(merged.file_in(first_part), {})[merged.name] = merged.merged
    files = [values_file(name, values) for name, values in own.items()]
    return files + asset_files(assets) if rank == 0 else files


def values_file(name: str, trees: Mapping[str, Json | msgspec.Raw]) -> PlainFile:
    """Return the file of the values that are no tensors."""
    data = msgspec.json.encode({"trees": trees})
    return PlainFile(name, len(data), lambda: iter((memoryview(data),)))


def asset_files(assets: Mapping[str, Path | bytes]) -> list[PlainFile]:
    """Return every asset as a file under its name; of a folder, every file in it, under the name of the folder."""
    found = []
    for name, content in assets.items():
        if isinstance(content, bytes):
            found.append(_asset_file(name, len(content), partial(_pieces_of_bytes, content)))
            continue
        if not content.exists():
            raise UsageError(f"the asset {content} is not there any more")
        for path in sorted(content.rglob("*")) if content.is_dir() else [content]:
            inner = f"{name}/{path.relative_to(content).as_posix()}" if path != content else name
            if path.is_file():
                found.append(_file_at(inner, path))
            elif path.is_symlink() or not path.is_dir():
                raise UsageError(
                    f"the asset '{inner}' is no file: {_kind_at(path)}",
                    advice="remove it from the folder, or give the files that are meant one by one",
                )
    return found


def _kind_at(path: Path) -> str:
    if not path.is_symlink():
        return "a device, a socket or a pipe"
    return "a link to another folder" if path.exists() else "a link that leads nowhere"


def _file_at(name: str, path: Path) -> PlainFile:
    size_bytes = path.stat().st_size
    if not size_bytes:
        # A file of the kernel's, as under /proc, has no size and may have content.
        content = path.read_bytes()
        return _asset_file(name, len(content), partial(_pieces_of_bytes, content))
    return _asset_file(name, size_bytes, partial(_pieces_of_file, path, size_bytes))


def _asset_file(name: str, size_bytes: int, pieces: Pieces) -> PlainFile:
    return PlainFile(paths.safe_relative(f"{paths.ASSETS}/{name}"), size_bytes, pieces)


def _pieces_of_bytes(content: bytes) -> Iterator[memoryview]:
    yield memoryview(content)


def _pieces_of_file(path: Path, size_bytes: int) -> Iterator[memoryview]:
    """Yield as many bytes as the file had when it was listed: a log that grows meanwhile is stored up to there."""
    left = size_bytes
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, _ASSET_READ_BYTES))):
            left -= len(piece)
            yield memoryview(piece)
    if left:
        raise SaveFailedError(
            f"the asset {path} became {left} bytes shorter while it was read",
            advice="save when nothing writes to the file any more",
        )
