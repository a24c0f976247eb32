"""Bring the files that a save takes over from its parent into its folder: as clones, or as copies where the storage has
no clones. A rank's share of the inheritance enters; a receipt leaves. Knows no torch.

A clone costs no bytes and is checked by its size. What is copied passes through this process, and is checked by the
digests of the parent's manifest. Nothing here makes names durable: the caller syncs the folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.errors import CorruptCheckpointError, HoldfastError, KeyDamagedError, KeyMissingError
from holdfast.ondisk import paths
from holdfast.ondisk.files import Pieces, PlainFile, TensorFile
from holdfast.ondisk.manifest import ChunkRecord, FileRecord, TensorRecord
from holdfast.ondisk.safetensors import FramedChunk
from holdfast.runs.checkpoint import Checkpoint
from holdfast.saving.files import streamed_files
from holdfast.saving.inheritance import Inheritance
from holdfast.saving.messages import Receipt
from holdfast.storage.base import WRITE_PIECE_BYTES, features_of

__all__ = ["Copies", "clone_files", "copies_of", "require_equal"]

_ADVICE = "check the run with `holdfast verify`; save(step, resave=True) without components= writes the whole state"


@dataclass(frozen=True, slots=True)
class Copies:
    """Files to write with bytes of the parent, and what they must turn out to be: its chunks and its plain files."""

    tensor_files: list[TensorFile]
    plain_files: list[PlainFile]
    chunks: list[tuple[TensorRecord, ChunkRecord]]
    files: list[FileRecord]


def clone_files(
    parent: Checkpoint, files: Sequence[FileRecord], folder: str, on_created: Callable[[str], None]
) -> list[FileRecord]:
    """Clone files of the parent into a folder, and return those that are there now. The storage may refuse any."""
    clone = features_of(parent.storage).clone
    cloned: list[FileRecord] = []
    if clone is None:
        return cloned
    for file in files:
        key = paths.key(folder, file.name)
        try:
            if not clone(parent.key(file.name), key):
                continue
            on_created(file.name)
            with parent.storage.open(key) as source:
                size_bytes = source.size_bytes
        except (KeyMissingError, KeyDamagedError) as error:
            raise _damage(parent, file.name, error.problem) from None
        if size_bytes != file.size_bytes:
            raise _damage(parent, file.name, f"the file has {size_bytes} bytes and {file.size_bytes} were written")
        cloned.append(file)
    return cloned


def copies_of(
    parent: Checkpoint, share: Inheritance, cloned: Sequence[FileRecord], *, rank: int, first_part: int
) -> Copies:
    """Return what is to be copied: all of the share that was not cloned. Tensors get files with new names."""
    left = [file for file in (*share.files, *share.mixed) if file not in cloned]
    chunks = share.chunks_in(left)
    sources: dict[FramedChunk, Pieces] = {}
    sizes = {file.name: file.size_bytes for file in left}
    for tensor, chunk in chunks:
        framed = FramedChunk.of(tensor.name, tensor.dtype, chunk.box)
        size_bytes = sizes[chunk.file]
        sources[framed] = partial(_pieces, parent, chunk.file, size_bytes, chunk.start, framed.size_bytes)
    plain = [file for file in left if not file.header_bytes]
    return Copies(
        streamed_files(sources, rank=rank, first_part=first_part, block_bytes=parent.manifest.block_bytes),
        [
            PlainFile(
                file.name, file.size_bytes, partial(_pieces, parent, file.name, file.size_bytes, 0, file.size_bytes)
            )
            for file in plain
        ],
        chunks,
        plain,
    )


def require_equal(copies: Copies, receipt: Receipt, parent: Checkpoint) -> None:
    """Raise unless what was written has the digests that the parent's manifest states."""
    written = {(leaf, chunk.box): chunk.digests for leaf, chunk in receipt.chunks}
    for tensor, chunk in copies.chunks:
        if written.get((tensor.name, chunk.box)) != chunk.digests:
            raise _damage(parent, chunk.file, "the bytes do not have their digest", leaf=tensor.name)
    digests = {file.name: file.digest for file in receipt.files}
    for file in copies.files:
        if digests.get(file.name) != file.digest:
            raise _damage(parent, file.name, "the bytes do not have their digest")


def _pieces(parent: Checkpoint, name: str, file_bytes: int, start: int, size_bytes: int) -> Iterator[memoryview]:
    """Yield a range of a file of the parent."""
    try:
        with parent.storage.open(parent.key(name)) as source:
            if source.size_bytes != file_bytes:
                raise _damage(parent, name, f"the file has {source.size_bytes} bytes and {file_bytes} were written")
            buffer = memoryview(bytearray(min(size_bytes, WRITE_PIECE_BYTES)))
            for done in range(0, size_bytes, WRITE_PIECE_BYTES):
                piece = buffer[: min(WRITE_PIECE_BYTES, size_bytes - done)]
                source.read_into(start + done, piece)
                yield piece
    except (KeyMissingError, KeyDamagedError) as error:
        raise _damage(parent, name, error.problem) from None


def _damage(parent: Checkpoint, name: str, problem: str, *, leaf: str | None = None) -> HoldfastError:
    return CorruptCheckpointError(
        f"the checkpoint that this save continues is damaged: {problem}",
        run=parent.storage.url,
        file=parent.key(name),
        leaf=leaf,
        advice=_ADVICE,
    )
