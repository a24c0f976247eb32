"""Write one rank's files and make them durable. Framed chunks and texts enter, a receipt leaves. Knows no torch.

Bytes are digested on the way, block by block, in the one pass in which they are handed to the storage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator

from blake3 import blake3

from holdfast.ondisk import paths
from holdfast.ondisk.files import HostMemory, Pieces, PlainFile, TensorFile
from holdfast.ondisk.manifest import BLOCK_BYTES, ChunkRecord, FileRecord, digest_of, tensor_file_digest
from holdfast.saving.messages import Receipt
from holdfast.storage.base import Sink, Storage

_SMALL_BYTES = 64 << 10


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
    return Receipt(tuple(files), tuple(chunks))


def _write_tensor_file(
    folder: str,
    file: TensorFile,
    storage: Storage,
    on_bytes: Callable[[int], None],
    on_created: Callable[[str], None],
) -> tuple[FileRecord, list[tuple[str, ChunkRecord]]]:
    frame = file.frame
    chunks: list[tuple[str, ChunkRecord]] = []
    with storage.create(paths.key(folder, file.name), frame.size_bytes) as sink:
        on_created(file.name)
        buffer = _SmallChunks(sink, on_bytes)
        sink.write(frame.header)
        for chunk, start, source in zip(frame.chunks, frame.starts, file.sources, strict=True):
            digests = _write_chunk(buffer, source)
            record = ChunkRecord(
                file=file.name, start=start, offsets=chunk.box.offsets, sizes=chunk.box.sizes, digests=digests
            )
            chunks.append((chunk.leaf, record))
        buffer.flush()
    every_digest = (digest for _, chunk in chunks for digest in chunk.digests)
    digest = tensor_file_digest(frame.header, every_digest)
    return FileRecord(
        name=file.name, size_bytes=frame.size_bytes, digest=digest, header_bytes=len(frame.header)
    ), chunks


def _write_chunk(buffer: _SmallChunks, source: HostMemory | Pieces) -> tuple[str, ...]:
    """Write one chunk, and return the digest of each of its blocks."""
    if isinstance(source, HostMemory):
        if source.size_bytes <= _SMALL_BYTES:
            return (buffer.copy(source),) if source.size_bytes else ()
        memory = (ctypes.c_ubyte * source.size_bytes).from_address(source.address)
        return tuple(buffer.pass_on(memoryview(memory).cast("B")))
    return tuple(digest for piece in source() for digest in buffer.pass_on(piece))


class _SmallChunks:
    """Writes small chunks to a sink together: a call of the sink costs more than the copy of a few kilobytes."""

    def __init__(self, sink: Sink, on_bytes: Callable[[int], None]) -> None:
        self._sink = sink
        self._on_bytes = on_bytes
        self._memory = (ctypes.c_ubyte * BLOCK_BYTES)()
        self._address = ctypes.addressof(self._memory)
        self._view = memoryview(self._memory).cast("B")
        self._used = 0

    def copy(self, source: HostMemory) -> str:
        """Add a small chunk, and return its digest."""
        start, end = self._used, self._used + source.size_bytes
        if end > BLOCK_BYTES:
            self.flush()
            start, end = 0, source.size_bytes
        ctypes.memmove(self._address + start, source.address, source.size_bytes)
        self._used = end
        return blake3(self._view[start:end]).hexdigest()

    def pass_on(self, piece: memoryview) -> Iterator[str]:
        """Write a piece at once, block by block, and yield the digest of each block."""
        self.flush()
        for start in range(0, len(piece), BLOCK_BYTES):
            block = piece[start : start + BLOCK_BYTES]
            yield digest_of(block)
            self._sink.write(block)
            self._on_bytes(len(block))

    def flush(self) -> None:
        if self._used:
            self._sink.write(self._view[: self._used])
            self._on_bytes(self._used)
            self._used = 0


def _write_plain_file(folder: str, file: PlainFile, storage: Storage, on_created: Callable[[str], None]) -> FileRecord:
    state = blake3()
    with storage.create(paths.key(folder, file.name), file.size_bytes) as sink:
        on_created(file.name)
        for piece in file.pieces():
            state.update(piece)
            sink.write(piece)
    return FileRecord(name=file.name, size_bytes=file.size_bytes, digest=state.hexdigest())
