"""Images are written and digested while they are being staged, by however many threads."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from holdfast.ondisk.manifest import BLOCK_BYTES, digest_of, tensor_file_digest
from holdfast.saving.messages import Receipt
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.drain import Digesters, _Digesting, drain
from holdfast.saving.writer.messages import Image, Place, PlainImage
from holdfast.storage.base import WRITE_PIECE_BYTES
from holdfast.storage.local.local import LocalStorage

HEADER_BYTES = 4096
SIZES = [1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 17]
FOLDER = "step-000000001"


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.make(32 << 20)
    made.memory[:] = random.Random(0).randbytes(32 << 20)
    made.begin()
    yield made
    made.close()


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def make_images(block_bytes: int = BLOCK_BYTES) -> list[Image]:
    images, start = [], 0
    for number in range(2):
        places, position = [], HEADER_BYTES
        for index, size in enumerate(SIZES):
            places.append(Place(f"leaf-{number}-{index}", position, size, (0,), (size,)))
            position += size
        images.append(Image(f"tensors-{number}.safetensors", start, position, HEADER_BYTES, tuple(places), block_bytes))
        start += -(-position // 4096) * 4096
    return images


def drained(
    images: list[Image], arena: Arena, storage: LocalStorage, digesters: Digesters, *, eager: bool = True
) -> Receipt:
    plain = [PlainImage("values.json", images[-1].end, 100)]
    return drain(
        FOLDER,
        images,
        plain,
        arena,
        storage,
        eager=eager,
        check_source=lambda: None,
        on_created=lambda name: None,
        digesters=digesters,
    )


class Noting:
    """Digests blocks, and notes which threads do, besides the one that made it. None of them finishes its first block
    before `count` are at work."""

    def __init__(self, count: int) -> None:
        self.seen: set[int] = set()
        self._here = threading.get_ident()
        self._all_at_work = threading.Barrier(count)

    def __call__(self, data: memoryview) -> str:
        if threading.get_ident() not in {self._here, *self.seen}:
            self.seen.add(threading.get_ident())
            self._all_at_work.wait(300)
        return digest_of(data)


def digesters(count: int, **options: Any) -> Digesters:
    return Digesters(processors=4 * count, patient_bytes=1 << 20, blocks_at_once=1, **options)


def require_right(receipt: Receipt, images: list[Image], arena: Arena, folder: Path) -> None:
    memory = bytes(arena.memory)
    assert [file.name for file in receipt.files] == [*(image.name for image in images), "values.json"]
    expected = [(place.leaf, image, place) for image in images for place in image.chunks]
    assert [leaf for leaf, _ in receipt.chunks] == [leaf for leaf, _, _ in expected]
    digests: dict[str, list[str]] = {}
    for (_, record), (_, image, place) in zip(receipt.chunks, expected, strict=True):
        data = memory[image.start + place.start : image.start + place.start + place.size_bytes]
        blocks = [data[start : start + image.block_bytes] for start in range(0, len(data), image.block_bytes)]
        assert record.digests == tuple(blake3(block).hexdigest() for block in blocks)
        digests.setdefault(image.name, []).extend(record.digests)
    for file, image in zip(receipt.files, images, strict=False):
        header = memory[image.start : image.start + HEADER_BYTES]
        assert file.digest == tensor_file_digest(header, digests[image.name])
        assert (folder / image.name).read_bytes() == memory[image.start : image.end]


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 64 << 10])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_what_is_staged_bit_by_bit_is_written_and_digested_whole(
    count: int, eager: bool, block_bytes: int, arena: Arena, storage: LocalStorage, tmp_path: Path
) -> None:
    noting = Noting(count)
    images = make_images(block_bytes)
    final = bytes(arena.memory)
    arena.memory[: images[-1].end] = bytes(images[-1].end)

    def stage() -> None:
        for end in range(0, images[-1].end + 300_000, 300_000):
            arena.memory[max(0, end - 300_000) : end] = final[max(0, end - 300_000) : end]
            arena.staged = min(end, images[-1].end)
            time.sleep(0.001)

    staging = threading.Thread(target=stage)
    staging.start()
    receipt = drained(images, arena, storage, digesters(count, digest=noting), eager=eager)
    staging.join()
    require_right(receipt, images, arena, tmp_path / FOLDER)
    assert len(noting.seen) == count


@pytest.mark.parametrize("count", [1, 4])
def test_a_digest_that_fails_fails_the_save(
    count: int, arena: Arena, storage: LocalStorage, new_threads: Callable[[], list[str]]
) -> None:
    calls = iter(range(100))

    def failing(data: memoryview) -> str:
        if next(calls) == 9:
            raise MemoryError("no room")
        return digest_of(data)

    images = make_images()
    arena.staged = images[-1].end
    with pytest.raises(MemoryError, match="no room"):
        drained(images, arena, storage, digesters(count, digest=failing))
    assert new_threads() == []


class Unreadable:
    """An arena of which nobody can say how far it is."""

    def __init__(self, arena: Arena) -> None:
        self.memory = arena.memory

    @property
    def staged(self) -> int:
        raise MemoryError("no room")


def test_a_failure_before_the_first_digest_fails_the_save(arena: Arena) -> None:
    digesting = _Digesting(make_images(), Unreadable(arena), digesters(1), patient=True)  # type: ignore[arg-type]
    digesting.start()
    with pytest.raises(MemoryError, match="no room"):
        digesting.result()


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_where_no_more_threads_can_be_started_those_that_run_do_it_all(
    allowed: int, arena: Arena, storage: LocalStorage, tmp_path: Path
) -> None:
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        thread.start()

    images = make_images()
    arena.staged = images[-1].end
    receipt = drained(images, arena, storage, digesters(4, start=limited))
    require_right(receipt, images, arena, tmp_path / FOLDER)
    assert len(started) == allowed
    assert not any(thread.is_alive() for thread in started)


def test_a_save_that_failed_does_not_keep_the_arena(storage: LocalStorage) -> None:
    made = Arena.make(32 << 20)
    made.begin()
    images, kept = make_images(), weakref.ref(made)

    def gone() -> None:
        raise RuntimeError("the training is gone")

    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="gone"):
            drain(FOLDER, images, [], made, storage, eager=True, check_source=gone, on_created=lambda name: None)
        made.close()
        del made
        assert kept() is None, "a writer collects no garbage, so nothing may refer to itself"
    finally:
        gc.enable()


@pytest.mark.parametrize(("processors", "wanted"), [(1, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_a_rank_digests_with_a_part_of_its_own_processors(processors: int, wanted: int) -> None:
    assert Digesters(processors=processors).count(100 << 30) == wanted
    assert Digesters(processors=processors).count(1 << 20) == 1, "a small save is digested by one thread"


class NotingStorage(LocalStorage):
    """A storage that notes how many bytes each write has, and takes longer for it by a pause."""

    def __init__(self, root: Path, pause_seconds: float) -> None:
        super().__init__(root)
        self.sizes: list[int] = []
        self._pause_seconds = pause_seconds

    def create(self, key: str, size_bytes: int) -> Any:
        sink = super().create(key, size_bytes)
        write = sink.write

        def noting_write(data: Any) -> None:
            self.sizes.append(len(data))
            if self._pause_seconds:
                time.sleep(self._pause_seconds)
                write(data)

        sink.write = noting_write  # type: ignore[method-assign]
        if not self._pause_seconds:
            # As fast as a disk can be: nothing is written.
            sink.close = sink.abort  # type: ignore[method-assign]
        return sink


def sizes_of_writes(root: Path, pause_seconds: float) -> list[int]:
    """Return how many bytes each write of a file of five small pieces and a page has."""
    size_bytes = 5 * WRITE_PIECE_BYTES + 4096
    made = Arena.make(size_bytes)
    made.begin()
    made.staged = size_bytes
    image = Image(
        "tensors.safetensors", 0, size_bytes, 4096, (Place("leaf", 4096, size_bytes - 4096, (0,), (1,)),), BLOCK_BYTES
    )
    storage = NotingStorage(root, pause_seconds)
    drain(FOLDER, [image], [], made, storage, eager=True, check_source=lambda: None, on_created=lambda name: None)
    made.close()
    assert sum(storage.sizes) == size_bytes
    return storage.sizes


def test_the_progress_of_a_slow_disk_is_noted_after_every_small_piece(tmp_path: Path) -> None:
    assert max(sizes_of_writes(tmp_path, 0.06)) == WRITE_PIECE_BYTES


def test_a_fast_disk_gets_larger_pieces_after_the_first(tmp_path: Path) -> None:
    first, *others = sizes_of_writes(tmp_path, 0)
    assert first == WRITE_PIECE_BYTES
    # One of them: a busy machine may let another process run in the middle of a write.
    assert WRITE_PIECE_BYTES < max(others) <= 4 * WRITE_PIECE_BYTES
