"""Files and their receipt: each chunk has the digests of its blocks, however the bytes came."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.ondisk.files import OnPiece, TensorFile
from holdfast.ondisk.manifest import BLOCK_BYTES, digest_of, tensor_file_digest
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import Frame, FramedChunk, frame
from holdfast.saving.write import write
from holdfast.storage.local.local import LocalStorage

SIZES = [1, 0, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 17]


def contents(block_bytes: int = BLOCK_BYTES) -> tuple[Frame, list[bytes]]:
    framed = frame([FramedChunk.of(f"leaf.{size}", "uint8", whole((size,))) for size in SIZES], block_bytes)
    return framed, [
        bytes((index + position) % 251 for position in range(chunk.size_bytes))
        for index, chunk in enumerate(framed.chunks)
    ]


def cut(data: bytes, piece_bytes: int, see: OnPiece) -> Generator[memoryview]:
    for start in range(0, len(data), piece_bytes):
        piece = memoryview(data)[start : start + piece_bytes]
        see(piece)
        yield piece


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 64 << 10])
@pytest.mark.parametrize("piece_bytes", [999, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5, 64 << 20])
def test_each_chunk_has_the_digests_of_its_blocks_however_the_bytes_came(
    tmp_path: Path, piece_bytes: int, block_bytes: int
) -> None:
    framed, chunks = contents(block_bytes)
    data = framed.header + b"".join(chunks)
    counted: list[int] = []
    file = TensorFile("tensors.safetensors", framed, partial(cut, data, piece_bytes))
    receipt = write("step", [file], [], LocalStorage(tmp_path), on_bytes=counted.append)
    assert (tmp_path / "step" / "tensors.safetensors").read_bytes() == data
    assert sum(counted) == len(data)
    expected = [
        tuple(digest_of(chunk[start : start + block_bytes]) for start in range(0, len(chunk), block_bytes))
        for chunk in chunks
    ]
    assert [record.digests for _, record in receipt.chunks] == expected
    (record,) = receipt.files
    assert record.digest == tensor_file_digest(framed.header, [one for digests in expected for one in digests])


def test_the_source_is_closed_before_the_error_of_the_sink_is_raised(tmp_path: Path) -> None:
    framed, chunks = contents()
    data = framed.header + b"".join(chunks)
    closed: list[str] = []

    def too_long(see: OnPiece) -> Generator[memoryview]:
        try:
            yield from _then(cut(data, BLOCK_BYTES, see), OSError("no more bytes from here"))
        finally:
            closed.append("closed")

    file = TensorFile("tensors.safetensors", framed, too_long)
    with pytest.raises(OSError, match="no more bytes from here"):
        write("step", [file], [], LocalStorage(tmp_path))
    assert closed == ["closed"]
    assert not (tmp_path / "step" / "tensors.safetensors").exists()


def _then(pieces: Iterator[memoryview], error: Exception) -> Iterator[memoryview]:
    yield next(pieces)
    raise error
