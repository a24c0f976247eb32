"""Images are written and digested while they are being staged, by however many threads."""

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from holdfast.ondisk.manifest import BLOCK_BYTES, tensor_file_digest
from holdfast.saving.messages import Receipt
from holdfast.saving.staging import budget
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer import drain as module
from holdfast.saving.writer.drain import drain
from holdfast.saving.writer.messages import Image, Place, PlainImage
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


def make_images() -> list[Image]:
    images, start = [], 0
    for number in range(2):
        places, position = [], HEADER_BYTES
        for index, size in enumerate(SIZES):
            places.append(Place(f"leaf-{number}-{index}", position, size, (0,), (size,)))
            position += size
        images.append(Image(f"tensors-{number}.safetensors", start, position, HEADER_BYTES, tuple(places)))
        start += -(-position // 4096) * 4096
    return images


def drained(images: list[Image], arena: Arena, storage: LocalStorage, *, eager: bool = True) -> Receipt:
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
    )


def have_digesters(count: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Which threads digest from now on, besides this one. No block is digested before so many are at work."""
    monkeypatch.setattr(module, "_PATIENT_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(module, "own_processors", lambda: 4 * count)
    here, seen, all_at_work = threading.get_ident(), set[int](), threading.Barrier(count)

    def noting(data: memoryview) -> object:
        if threading.get_ident() not in {here, *seen}:
            seen.add(threading.get_ident())
            all_at_work.wait(60)
        return blake3(data)

    monkeypatch.setattr(module, "blake3", noting)
    return seen


def require_right(receipt: Receipt, images: list[Image], arena: Arena, folder: Path) -> None:
    memory = bytes(arena.memory)
    assert [file.name for file in receipt.files] == [*(image.name for image in images), "values.json"]
    expected = [(place.leaf, image, place) for image in images for place in image.chunks]
    assert [leaf for leaf, _ in receipt.chunks] == [leaf for leaf, _, _ in expected]
    digests: dict[str, list[str]] = {}
    for (_, record), (_, image, place) in zip(receipt.chunks, expected, strict=True):
        data = memory[image.start + place.start : image.start + place.start + place.size_bytes]
        blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
        assert record.digests == tuple(blake3(block).hexdigest() for block in blocks)
        digests.setdefault(image.name, []).extend(record.digests)
    for file, image in zip(receipt.files, images, strict=False):
        header = memory[image.start : image.start + HEADER_BYTES]
        assert file.digest == tensor_file_digest(header, digests[image.name])
        assert (folder / image.name).read_bytes() == memory[image.start : image.end]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_what_is_staged_bit_by_bit_is_written_and_digested_whole(
    count: int, eager: bool, arena: Arena, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = have_digesters(count, monkeypatch)
    images = make_images()
    final = bytes(arena.memory)
    arena.memory[: images[-1].end] = bytes(images[-1].end)

    def stage() -> None:
        for end in range(0, images[-1].end + 300_000, 300_000):
            arena.memory[max(0, end - 300_000) : end] = final[max(0, end - 300_000) : end]
            arena.staged = min(end, images[-1].end)
            time.sleep(0.001)

    staging = threading.Thread(target=stage)
    staging.start()
    receipt = drained(images, arena, storage, eager=eager)
    staging.join()
    require_right(receipt, images, arena, tmp_path / FOLDER)
    assert len(seen) == count


@pytest.mark.parametrize("count", [1, 4])
def test_a_digest_that_fails_fails_the_save(
    count: int, arena: Arena, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_digesters(count, monkeypatch)
    calls = iter(range(100))

    def failing(data: memoryview) -> object:
        if next(calls) == 9:
            raise MemoryError("no room")
        return blake3(data)

    monkeypatch.setattr(module, "blake3", failing)
    images = make_images()
    arena.staged = images[-1].end
    with pytest.raises(MemoryError, match="no room"):
        drained(images, arena, storage)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-digest")]


class Unreadable:
    """An arena of which nobody can say how far it is."""

    def __init__(self, arena: Arena) -> None:
        self.memory = arena.memory

    @property
    def staged(self) -> int:
        raise MemoryError("no room")


def test_a_failure_before_the_first_digest_fails_the_save(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    have_digesters(1, monkeypatch)
    digesting = module._Digesting(make_images(), Unreadable(arena), patient=True)  # type: ignore[arg-type]
    digesting.start()
    with pytest.raises(MemoryError, match="no room"):
        digesting.result()


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_where_no_more_threads_can_be_started_those_that_run_do_it_all(
    allowed: int, arena: Arena, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_digesters(4, monkeypatch)
    monkeypatch.setattr(module, "blake3", blake3)
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("holdfast-digest"):
            if len(started) == allowed:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    images = make_images()
    arena.staged = images[-1].end
    require_right(drained(images, arena, storage), images, arena, tmp_path / FOLDER)
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


@pytest.mark.parametrize(
    ("processors", "ranks", "wanted"),
    [(1, "", 1), (7, "", 1), (16, "", 4), (16, "2", 2), (16, "x", 4), (16, "-3", 4), (64, " 8", 2)],
)
def test_a_rank_digests_with_a_part_of_its_own_processors(
    processors: int, ranks: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    # Ranks that were simulated in this process have counted themselves.
    monkeypatch.setattr(budget, "_counted", 1)
    assert module._digesters(100 << 30) == wanted
    assert module._digesters(1 << 20) == 1
