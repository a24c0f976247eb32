"""Write one rank's files and make them durable. Framed chunks and texts enter, a receipt leaves. Knows no torch.

Bytes are digested on the way, block by block, in the one pass in which they are handed to the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain

from blake3 import blake3

from holdfast.errors import KeyMissingError
from holdfast.ondisk import paths
from holdfast.ondisk.files import PlainFile, TensorFile
from holdfast.ondisk.manifest import ChunkRecord, FileRecord, tensor_file_digest
from holdfast.ondisk.safetensors import Frame
from holdfast.saving.messages import Receipt
from holdfast.storage.base import Storage, features_of


def write(
    folder: str,
    tensors: Iterable[TensorFile],
    plain: Iterable[PlainFile],
    storage: Storage,
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_created: Callable[[str], None] = lambda name: None,
) -> Receipt:
    """Write everything that this rank writes, and return when bytes and names are durable. `on_bytes` gets the
    number of bytes handed on, `on_created` the name of every file that this call created: only those may be removed."""
    files: list[FileRecord] = []
    chunks: list[tuple[str, ChunkRecord]] = []
    for tensor_file in tensors:
        file, written = _write_tensor_file(folder, tensor_file, storage, on_bytes, on_created)
        files.append(file)
        chunks += written
    for plain_file in plain:
        files.append(_write_plain_file(folder, plain_file, storage, on_created))
    # The names go down before the receipt does: a manifest may only ever name what a power cut cannot take away.
    for place in sorted({paths.key(folder, file.name).rpartition("/")[0] for file in files}, reverse=True):
        storage.sync(place)
    return Receipt(tuple(files), tuple(chunks), identities(folder, files, storage))


def identities(folder: str, files: Iterable[FileRecord], storage: Storage) -> tuple[str, ...]:
    """Return by what the storage tells each of these files, just written, from another one under the same name."""
    stamp = features_of(storage).stamp
    found = []
    for file in files:
        identity = ""
        # One that is gone already is an error of the commit, on all ranks.
        with suppress(KeyMissingError):
            identity = stamp(paths.key(folder, file.name))[1] if stamp is not None else ""
        found.append(identity)
    return tuple(found)


def _write_tensor_file(
    folder: str,
    file: TensorFile,
    storage: Storage,
    on_bytes: Callable[[int], None],
    on_created: Callable[[str], None],
) -> tuple[FileRecord, list[tuple[str, ChunkRecord]]]:
    frame = file.frame
    digests = _BlockDigests(frame)
    with storage.create(paths.key(folder, file.name), frame.size_bytes) as sink:
        on_created(file.name)
        with closing(file.pieces(digests.add)) as pieces:
            for piece in pieces:
                sink.write(piece)
                on_bytes(len(piece))
    chunks = [
        (
            chunk.leaf,
            ChunkRecord(
                file=file.name, start=start, offsets=chunk.box.offsets, sizes=chunk.box.sizes, digests=tuple(found)
            ),
        )
        for chunk, start, found in zip(frame.chunks, frame.starts, digests.found, strict=True)
    ]
    every_digest = chain.from_iterable(digests.found)
    digest = tensor_file_digest(frame.header, every_digest)
    return FileRecord(
        name=file.name, size_bytes=frame.size_bytes, digest=digest, header_bytes=len(frame.header)
    ), chunks


class _BlockDigests:
    """The digests of each chunk's blocks, from the bytes of a file in pieces of any length."""

    def __init__(self, frame: Frame) -> None:
        self.found: list[list[str]] = [[] for _ in frame.chunks]
        self._header_left = len(frame.header)
        self._blocks = _blocks_of(frame, self.found)
        self._block: tuple[list[str], int] | None = None
        self._begun: blake3 | None = None

    def add(self, piece: memoryview) -> None:
        """Digest the next bytes of the file. The header has no blocks."""
        start = min(self._header_left, len(piece))
        self._header_left -= start
        while start < len(piece):
            block = self._block or next(self._blocks, None)
            if block is None:
                return  # more than the file holds, which the sink refuses
            found, size_bytes = block
            part = piece[start : start + size_bytes]
            start += len(part)
            self._block = self._digest(part, found, size_bytes)

    def _digest(self, part: memoryview, found: list[str], size_bytes: int) -> tuple[list[str], int] | None:
        """Digest what a piece has of a block; return the block with the bytes that are missing, if any are."""
        state, self._begun = self._begun, None
        if state is None:
            state = blake3(part)
        else:
            state.update(part)
        if len(part) == size_bytes:
            found.append(state.hexdigest())
            return None
        self._begun = state
        return found, size_bytes - len(part)


def _blocks_of(frame: Frame, found: Sequence[list[str]]) -> Iterator[tuple[list[str], int]]:
    """Yield, for each block, the list that its digest is added to, and its size."""
    for chunk, digests in zip(frame.chunks, found, strict=True):
        for start in range(0, chunk.size_bytes, frame.block_bytes):
            yield digests, min(frame.block_bytes, chunk.size_bytes - start)


def _write_plain_file(folder: str, file: PlainFile, storage: Storage, on_created: Callable[[str], None]) -> FileRecord:
    state = blake3()
    with storage.create(paths.key(folder, file.name), file.size_bytes) as sink:
        on_created(file.name)
        for piece in file.pieces():
            state.update(piece)
            sink.write(piece)
    return FileRecord(name=file.name, size_bytes=file.size_bytes, digest=state.hexdigest())
