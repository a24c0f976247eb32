"""Write the images of an arena out while they are still being staged, and make them durable. A receipt leaves.

Threads follow the trainer's copy: one writes large aligned pieces, the others digest. Knows no torch and no ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from holdfast.ondisk import paths
from holdfast.ondisk.manifest import ChunkRecord, FileRecord, digest_of, tensor_file_digest
from holdfast.saving.messages import Receipt
from holdfast.saving.staging.arena import Arena
from holdfast.saving.write import identities
from holdfast.saving.writer.messages import Image, Place, PlainImage
from holdfast.state.budget import own_processors
from holdfast.storage.base import WRITE_PIECE_BYTES, Sink, Storage

_PAUSE_SECONDS = 0.001
# A fast disk gets more at once: 1.5 GB in pieces of 8 MiB take it 3 % longer than in pieces of 32. A slow one does not,
# because its progress is noted once per piece, and none within the time limit ends a save.
_FAST_BYTES_PER_SECOND = 512 << 20
_LARGE_PIECE_BYTES = 4 * WRITE_PIECE_BYTES
_MAX_DIGESTERS = 4


@dataclass(frozen=True)
class Digesters:
    """How the images are digested.

    processors: how many this rank has, for the number of threads; None finds it out
    patient_bytes: a save of more is digested by more than one thread, and not before it is staged
    blocks_at_once: how many blocks a thread takes before it asks for more
    digest: what digests a block. start: what starts a thread.
    """

    processors: int | None = None
    patient_bytes: int = 256 << 20
    blocks_at_once: int = 16
    digest: Callable[[memoryview], str] = digest_of
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def count(self, size_bytes: int) -> int:
        """Return the number of digesting threads. One keeps up with one disk; a faster one needs more."""
        processors = self.processors if self.processors is not None else own_processors()
        return max(1, min(_MAX_DIGESTERS, processors // 4, size_bytes // self.patient_bytes))


_DIGESTERS = Digesters()


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
    digesters: Digesters = _DIGESTERS,
) -> Receipt:
    """Write everything, and return when bytes and names are durable.

    Bytes are written as soon as they are staged. `eager` also digests them then. Else a processor is making the copy,
    of which there may be no other one to digest: that begins when a large state is staged.

    `check_source` raises when staging will never finish; it is called while there is nothing to do. `on_created` is
    called with the name of every file that this call created: only those may be removed.
    """
    digesting = _Digesting(images, arena, digesters, patient=not eager)
    digesting.start()
    try:
        for image in images:
            with storage.create(paths.key(folder, image.name), image.size_bytes) as sink:
                on_created(image.name)
                _write_image(image, arena, sink, check_source)
        files = []
        for one in plain:
            with storage.create(paths.key(folder, one.name), one.size_bytes) as sink:
                on_created(one.name)
                files.append(_write_plain(one, arena, sink))
    except BaseException:
        digesting.stop()
        raise
    tensor_files, chunks = digesting.result()
    written = (*tensor_files, *files)
    # The names go down before the receipt does: a manifest may only ever name what a power cut cannot take away.
    for place in sorted({paths.key(folder, file.name).rpartition("/")[0] for file in written}, reverse=True):
        storage.sync(place)
    return Receipt(written, tuple(chunks), identities(folder, written, storage))


def _write_image(image: Image, arena: Arena, sink: Sink, check_source: Callable[[], None]) -> None:
    start, piece_bytes = image.start, WRITE_PIECE_BYTES
    while start < image.end:
        end = min(start + piece_bytes, image.end)
        while arena.staged < end:
            check_source()
            time.sleep(_PAUSE_SECONDS)
        begin = time.monotonic()
        sink.write(arena.memory[start:end])
        is_fast = end - start >= _FAST_BYTES_PER_SECOND * (time.monotonic() - begin)
        piece_bytes = _LARGE_PIECE_BYTES if is_fast else WRITE_PIECE_BYTES
        arena.written = start = end


def _write_plain(file: PlainImage, arena: Arena, sink: Sink) -> FileRecord:
    memory = arena.memory[file.start : file.start + file.size_bytes]
    sink.write(memory)
    return FileRecord(name=file.name, size_bytes=file.size_bytes, digest=digest_of(memory))


class _Digesting:
    """Threads that digest the images block by block, as far as they are staged; the first puts the records together.
    `patient` waits until everything is staged: a digest takes a processor, of which a trainer's copy can use
    all, and the disk is slower than either."""

    def __init__(self, images: Sequence[Image], arena: Arena, digesters: Digesters, *, patient: bool) -> None:
        self._images = images
        self._arena = arena
        self._digesters = digesters
        self._patient = patient
        # One list for all chunks of an image: there may be very many of them, of one block each.
        self._digests = [[""] * sum(_blocks_in(chunk, image) for chunk in image.chunks) for image in images]
        self._blocks = _each_block(images, self._digests)
        self._taking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="holdfast-digest", daemon=True)
        self._files: list[FileRecord] = []
        self._chunks: list[tuple[str, ChunkRecord]] = []
        self._errors: list[BaseException] = []
        self._stopped = False

    def start(self) -> None:
        with _ignoring_thread_limits():
            self._digesters.start(self._thread)

    def stop(self) -> None:
        self._stopped = True
        self._join()

    def result(self) -> tuple[list[FileRecord], list[tuple[str, ChunkRecord]]]:
        if self._thread.ident is None:
            self._run()
        self._join()
        for error in self._errors:
            raise error
        return self._files, self._chunks

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        end = self._images[-1].end if self._images else 0
        with self._noted():
            if self._patient and end > self._digesters.patient_bytes:
                self._wait_until_staged(end)
            with self._helpers(self._digesters.count(end) - 1):
                self._work()
            if not self._stopped:
                self._put_together()

    @contextmanager
    def _helpers(self, count: int) -> Iterator[None]:
        helpers = [
            threading.Thread(target=self._work, name=f"holdfast-digest-{number}", daemon=True)
            for number in range(count)
        ]
        try:
            with _ignoring_thread_limits():
                for helper in helpers:
                    self._digesters.start(helper)
            yield
        finally:
            for helper in helpers:
                if helper.ident is not None:
                    helper.join()

    def _work(self) -> None:
        memory, staged = self._arena.memory, 0
        with self._noted():
            while not self._stopped:
                with self._taking:
                    blocks = list(islice(self._blocks, self._digesters.blocks_at_once))
                if not blocks:
                    return
                for digests, index, start, stop in blocks:
                    if staged < stop:
                        staged = self._wait_until_staged(stop)
                    digests[index] = self._digesters.digest(memory[start:stop])

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an exception of a thread for `result`, and end all threads."""
        try:
            yield
        except BaseException as error:
            self._errors.append(error)
            self._stopped = True

    def _put_together(self) -> None:
        for image, of_image in zip(self._images, self._digests, strict=True):
            first = 0
            for chunk in image.chunks:
                end = first + _blocks_in(chunk, image)
                record = ChunkRecord(
                    file=image.name,
                    start=chunk.start,
                    offsets=chunk.offsets,
                    sizes=chunk.sizes,
                    digests=tuple(of_image[first:end]),
                )
                self._chunks.append((chunk.leaf, record))
                first = end
            header = bytes(self._arena.memory[image.start : image.start + image.header_bytes])
            self._files.append(
                FileRecord(
                    name=image.name,
                    size_bytes=image.size_bytes,
                    digest=tensor_file_digest(header, of_image),
                    header_bytes=image.header_bytes,
                )
            )

    def _wait_until_staged(self, position: int) -> int:
        """Wait for that many staged bytes, and return how many are staged then."""
        while (staged := self._arena.staged) < position and not self._stopped:
            time.sleep(_PAUSE_SECONDS)
        return staged


def _blocks_in(chunk: Place, image: Image) -> int:
    return -(-chunk.size_bytes // image.block_bytes)


def _each_block(
    images: Sequence[Image], digests_of_images: Sequence[list[str]]
) -> Iterator[tuple[list[str], int, int, int]]:
    """Yield the place of the digest of each block, and where its bytes are.

    No method: an unfinished generator that holds its object is a cycle, and a writer collects no garbage.
    """
    for image, digests in zip(images, digests_of_images, strict=True):
        index, block_bytes = 0, image.block_bytes
        for chunk in image.chunks:
            first = image.start + chunk.start
            end = first + chunk.size_bytes
            for start in range(first, end, block_bytes):
                yield digests, index, start, min(start + block_bytes, end)
                index += 1


@contextmanager
def _ignoring_thread_limits() -> Iterator[None]:
    """Suppress the failure to start a thread, as at the end of a process: the caller then does the work itself."""
    with contextlib.suppress(RuntimeError):
        yield
