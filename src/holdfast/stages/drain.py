"""Write the images of an arena out while they are still being staged, and make them durable. A receipt leaves.

Two threads follow the trainer's copy: one writes large aligned pieces, one digests. Knows no torch and no ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from blake3 import blake3

from holdfast.arena import Arena
from holdfast.records import layout
from holdfast.records.images import Image, Place, PlainImage
from holdfast.records.manifest import BLOCK_BYTES, ChunkRecord, FileRecord, tensor_file_digest
from holdfast.records.state import Receipt
from holdfast.storage.base import Sink, Storage

PIECE_BYTES = 8 << 20
_PAUSE_SECONDS = 0.001
_PATIENCE_SECONDS = 0.25
_PATIENT_BYTES = 256 << 20


def drain(
    folder: str,
    images: Sequence[Image],
    plain: Sequence[PlainImage],
    arena: Arena,
    storage: Storage,
    *,
    eager: bool,
    check_source: Callable[[], None],
    on_created: Callable[[str], None],
) -> Receipt:
    """Write everything, and return when bytes and names are durable.

    `eager` begins at once. Else a processor is making the copy: it is left alone for a moment, in which most copies are
    done, because both would use the same memory and the disk is the slower one.

    `check_source` raises when whoever stages will never finish; it is asked while there is nothing to do. `on_created`
    hears of every file that came to be here: those, and no others, are ours to remove.
    """
    digesting = _Digesting(images, arena)
    digesting.start()
    try:
        if images and not eager:
            _be_patient(arena, images[-1].end, check_source)
        for image in images:
            with storage.create(layout.key(folder, image.name), image.size_bytes) as sink:
                on_created(image.name)
                _write_image(image, arena, sink, check_source)
        files = []
        for one in plain:
            with storage.create(layout.key(folder, one.name), one.size_bytes) as sink:
                on_created(one.name)
                files.append(_write_plain(one, arena, sink))
    except BaseException:
        digesting.stop()
        raise
    tensor_files, chunks = digesting.result()
    names = [*(file.name for file in tensor_files), *(file.name for file in files)]
    # The names go down before the receipt does: a manifest may only ever name what a power cut cannot take away.
    for place in sorted({layout.key(folder, name).rpartition("/")[0] for name in names}, reverse=True):
        storage.sync(place)
    return Receipt((*tensor_files, *files), tuple(chunks))


def _be_patient(arena: Arena, end: int, check_source: Callable[[], None]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while arena.staged < end and time.monotonic() < deadline:
        check_source()
        time.sleep(_PAUSE_SECONDS)


def _write_image(image: Image, arena: Arena, sink: Sink, check_source: Callable[[], None]) -> None:
    for start in range(image.start, image.end, PIECE_BYTES):
        end = min(start + PIECE_BYTES, image.end)
        while arena.staged < end:
            check_source()
            time.sleep(_PAUSE_SECONDS)
        sink.write(arena.memory[start:end])
        arena.written = end


def _write_plain(file: PlainImage, arena: Arena, sink: Sink) -> FileRecord:
    memory = arena.memory[file.start : file.start + file.size_bytes]
    sink.write(memory)
    return FileRecord(name=file.name, size_bytes=file.size_bytes, digest=blake3(memory).hexdigest())


class _Digesting:
    """A thread that digests the images block by block, as far as they are staged."""

    def __init__(self, images: Sequence[Image], arena: Arena) -> None:
        self._images = images
        self._arena = arena
        self._thread = threading.Thread(target=self._run, name="holdfast-digest", daemon=True)
        self._files: list[FileRecord] = []
        self._chunks: list[tuple[str, ChunkRecord]] = []
        self._error: BaseException | None = None
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def result(self) -> tuple[list[FileRecord], list[tuple[str, ChunkRecord]]]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._files, self._chunks

    def _run(self) -> None:
        try:
            if self._images and self._images[-1].end > _PATIENT_BYTES:
                # A digest takes a processor, of which the trainer's copy can use all; the disk is slower than either.
                self._wait_until_staged(self._images[-1].end)
            for image in self._images:
                self._digest(image)
        except BaseException as error:
            self._error = error

    def _digest(self, image: Image) -> None:
        digests: list[str] = []
        for chunk in image.chunks:
            if self._stopped:
                return
            own = self._digest_chunk(image, chunk)
            digests += own
            record = ChunkRecord(
                file=image.name, start=chunk.start, offsets=chunk.offsets, sizes=chunk.sizes, digests=tuple(own)
            )
            self._chunks.append((chunk.leaf, record))
        header = bytes(self._arena.memory[image.start : image.start + image.header_bytes])
        self._files.append(
            FileRecord(
                name=image.name,
                size_bytes=image.size_bytes,
                digest=tensor_file_digest(header, digests),
                header_bytes=image.header_bytes,
            )
        )

    def _digest_chunk(self, image: Image, chunk: Place) -> list[str]:
        memory = self._arena.memory
        first = image.start + chunk.start
        end = first + chunk.size_bytes
        digests = []
        for start in range(first, end, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, end)
            if self._arena.staged < stop:
                self._wait_until_staged(stop)
            digests.append(blake3(memory[start:stop]).hexdigest())
        return digests

    def _wait_until_staged(self, position: int) -> None:
        while self._arena.staged < position and not self._stopped:
            time.sleep(_PAUSE_SECONDS)
