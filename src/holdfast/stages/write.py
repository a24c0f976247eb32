"""Write one rank's files and make them durable. Framed chunks and texts enter, a receipt leaves. Knows no torch.

Bytes are digested on the way, block by block, in the one pass in which they are handed to the storage.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from holdfast.records import layout
from holdfast.records.files import Pieces, PlainFile, TensorFile
from holdfast.records.manifest import BLOCK_BYTES, ChunkRecord, FileRecord, digest_of, tensor_file_digest
from holdfast.records.state import Receipt
from holdfast.storage.base import Bytes, Sink, Storage

_SMALL_BYTES = 64 << 10


def write(folder: str, tensors: Iterable[TensorFile], plain: Iterable[PlainFile], storage: Storage) -> Receipt:
    """Write everything that this rank writes, and return when bytes and names are durable."""
    files: list[FileRecord] = []
    chunks: list[tuple[str, ChunkRecord]] = []
    for tensor_file in tensors:
        file, written = _write_tensor_file(folder, tensor_file, storage)
        files.append(file)
        chunks += written
    for plain_file in plain:
        files.append(_write_plain_file(folder, plain_file, storage))
    # The names go down before the receipt does: a manifest may only ever name what a power cut cannot take away.
    for place in sorted({layout.key(folder, file.name).rpartition("/")[0] for file in files}, reverse=True):
        storage.sync(place)
    return Receipt(tuple(files), tuple(chunks))


def _write_tensor_file(
    folder: str, file: TensorFile, storage: Storage
) -> tuple[FileRecord, list[tuple[str, ChunkRecord]]]:
    frame = file.frame
    chunks: list[tuple[str, ChunkRecord]] = []
    with storage.create(layout.key(folder, file.name), frame.size_bytes) as sink:
        tray = _Tray(sink)
        tray.write(frame.header)
        for chunk, start, source in zip(frame.chunks, frame.starts, file.sources, strict=True):
            digests = _write_chunk(tray, source)
            record = ChunkRecord(
                file=file.name, start=start, offsets=chunk.box.offsets, sizes=chunk.box.sizes, digests=digests
            )
            chunks.append((chunk.leaf, record))
        tray.flush()
    every_digest = (digest for _, chunk in chunks for digest in chunk.digests)
    digest = tensor_file_digest(frame.header, every_digest)
    return FileRecord(
        name=file.name, size_bytes=frame.size_bytes, digest=digest, header_bytes=len(frame.header)
    ), chunks


def _write_chunk(tray: _Tray, source: Pieces) -> tuple[str, ...]:
    digests: list[str] = []
    for piece in source():
        if not piece:
            continue
        if len(piece) <= BLOCK_BYTES:
            digests.append(digest_of(piece))
            tray.write(piece)
            continue
        for start in range(0, len(piece), BLOCK_BYTES):
            block = piece[start : start + BLOCK_BYTES]
            digests.append(digest_of(block))
            tray.write(block)
    return tuple(digests)


class _Tray:
    """Carries small pieces to a sink together: a call of the sink costs more than the copy of a few kilobytes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._memory = bytearray(BLOCK_BYTES)
        self._view = memoryview(self._memory)
        self._used = 0

    def write(self, piece: Bytes) -> None:
        size = len(piece)
        if self._used + size > BLOCK_BYTES:
            self.flush()
        if size > _SMALL_BYTES:
            self.flush()
            self._sink.write(piece)
            return
        self._view[self._used : self._used + size] = piece
        self._used += size

    def flush(self) -> None:
        if self._used:
            self._sink.write(self._view[: self._used])
            self._used = 0


def _write_plain_file(folder: str, file: PlainFile, storage: Storage) -> FileRecord:
    state = blake3()
    with storage.create(layout.key(folder, file.name), file.size_bytes) as sink:
        for piece in file.pieces():
            state.update(piece)
            sink.write(piece)
    return FileRecord(name=file.name, size_bytes=file.size_bytes, digest=state.hexdigest())
