"""An arena that was reserved before the first save is used if it is large enough, and never takes more than it must."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import StorageError
from holdfast.ondisk.files import PlainFile
from holdfast.ondisk.manifest import BLOCK_BYTES
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import FramedChunk, frame
from holdfast.saving.files import FileLayout
from holdfast.saving.stage import Stager
from holdfast.saving.staging.chunks import Sources
from holdfast.state.devices import Accelerators
from holdfast.state.tensors import host_address
from tests.unit.state.devices.fake import FakeAccelerator

MIB = 1 << 20
DEVICE = torch.device("cpu")


def sources_of(tensors: Sequence[torch.Tensor]) -> Sources:
    return Sources(tensors, list(map(host_address, tensors)), {tensor.device for tensor in tensors})


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager()
    yield stager
    stager.close()


def files_of(*sizes: int) -> list[FileLayout]:
    chunks = [FramedChunk.of(f"model.layer-{index}", "float32", whole((size,))) for index, size in enumerate(sizes)]
    framed = frame(chunks, BLOCK_BYTES)
    order = [chunks.index(chunk) for chunk in framed.chunks]
    return [FileLayout("rank-00000.safetensors", framed, tuple(order))]


def tensors_of(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size) for size in sizes]


def plain_file(size_bytes: int) -> PlainFile:
    data = random.Random(1).randbytes(size_bytes)
    return PlainFile("values.json", size_bytes, lambda: iter([memoryview(data)]))


def take_all(stager: Stager) -> None:
    while stager.take_more():
        pass


def taken_bytes(arena: Any) -> int:
    return os.fstat(arena.handle).st_blocks * 512


def arenas() -> int:
    return sum("holdfast-arena" in os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir())


def staged_bytes(stager: Stager, files: list[FileLayout], tensors: list[torch.Tensor]) -> tuple[bytes, bytes]:
    """Return what a save stages, and what it should."""
    arena, (image,) = stager.arrange(files, [])
    arena.begin()
    stager.stage(sources_of(tensors), "async", []).finish()
    assert arena.staged >= image.size_bytes
    ordered = [tensors[part].numpy().tobytes() for part in files[0].parts]
    return bytes(arena.memory[: image.size_bytes]), files[0].frame.header + b"".join(ordered)


def test_a_reserved_arena_that_is_large_enough_is_the_one_that_a_save_gets(stager: Stager) -> None:
    sizes = [5 * MIB, 3, 1000, MIB]
    size_bytes = 4 * sum(sizes)
    assert stager.is_short_of(size_bytes, 4)
    assert stager.reserve(size_bytes, 4, limit_bytes=1 << 40)
    assert not stager.is_short_of(size_bytes, 4)
    assert stager.held_bytes == 0, "a place in the address space is no memory"
    assert stager.missing_bytes >= size_bytes
    take_all(stager)
    reserved, held = stager._arena, stager.held_bytes
    assert held >= size_bytes
    assert stager.missing_bytes == 0
    tensors = tensors_of(*sizes)
    found, expected = staged_bytes(stager, files_of(*sizes), tensors)
    assert stager._arena is reserved
    assert found == expected


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_save_takes_the_pages_that_are_missing_and_they_count_from_then_on(stager: Stager, pieces: int) -> None:
    sizes = [90 * MIB]
    stager.reserve(4 * sum(sizes), 1, limit_bytes=1 << 40)
    for _ in range(pieces):
        assert stager.take_more()
    assert (stager.held_bytes > 0) == (pieces > 0)
    assert stager.held_bytes < 4 * sum(sizes)
    arena, _ = stager.arrange(files_of(*sizes), [])
    assert stager.held_bytes == taken_bytes(arena) >= 4 * sum(sizes)


def test_an_arena_that_is_too_large_is_trimmed_before_it_is_used(stager: Stager) -> None:
    sizes = [20 * MIB, 7]
    stager.reserve(3 * 4 * sum(sizes), 2, limit_bytes=1 << 40)
    take_all(stager)
    address = stager._arena.address if stager._arena is not None else 0
    tensors, files = tensors_of(*sizes), files_of(*sizes)
    found, expected = staged_bytes(stager, files, tensors)
    assert found == expected
    arena, (image,) = stager.arrange(files, [])
    assert arena.address == address, "it is not made anew"
    assert arena.size_bytes <= 1.01 * image.size_bytes + MIB
    assert taken_bytes(arena) <= 1.01 * image.size_bytes + 4 * MIB
    assert stager.held_bytes == taken_bytes(arena)


def test_an_arena_that_is_a_little_too_large_stays_as_it_is(stager: Stager) -> None:
    sizes = [400 * MIB // 4]
    stager.reserve(4 * sum(sizes), 1, limit_bytes=1 << 40)
    reserved = stager.missing_bytes
    arena, (image,) = stager.arrange(files_of(*sizes), [])
    assert stager.held_bytes == reserved
    assert arena.size_bytes <= 1.01 * image.size_bytes


def test_an_arena_that_is_too_small_is_replaced_and_leaves_nothing(stager: Stager) -> None:
    before = arenas()
    stager.reserve(MIB, 1, limit_bytes=1 << 40)
    take_all(stager)
    small = stager._arena
    sizes = [20 * MIB]
    found, expected = staged_bytes(stager, files_of(*sizes), tensors_of(*sizes))
    assert len(found) == len(expected)
    assert stager._arena is not small
    assert arenas() == before + 1
    assert not stager.is_short_of(4 * sum(sizes), 1)


def test_a_later_reservation_takes_the_place_of_the_first(stager: Stager) -> None:
    before = arenas()
    stager.reserve(MIB, 1, limit_bytes=1 << 40)
    take_all(stager)
    assert stager.is_short_of(50 * MIB, 1)
    stager.reserve(50 * MIB, 1, limit_bytes=1 << 40)
    assert stager.held_bytes == 0
    assert arenas() == before + 1


def test_an_arena_over_the_limit_is_not_reserved_and_the_smaller_one_before_is_given_back(stager: Stager) -> None:
    assert not stager.reserve(10 * MIB, 1, limit_bytes=10 * MIB)
    assert stager._arena is None
    assert stager.reserve(MIB, 1, limit_bytes=4 * MIB)
    take_all(stager)
    assert stager.held_bytes > 0
    assert not stager.reserve(10 * MIB, 1, limit_bytes=10 * MIB)
    assert stager._arena is None


def test_the_page_lock_of_an_arena_that_is_trimmed_is_undone_first_and_made_again() -> None:
    accelerator = FakeAccelerator()
    stager = Stager(Accelerators([accelerator]))
    sizes = [MIB, 7]
    stager.reserve(10 * 4 * sum(sizes), 2, limit_bytes=1 << 40)
    take_all(stager)
    arena = stager._arena
    assert arena is not None
    reserved_bytes = arena.size_bytes
    stager.page_lock([DEVICE])
    found, expected = staged_bytes(stager, files_of(*sizes), tensors_of(*sizes))
    assert len(found) == len(expected)
    assert arena.size_bytes < reserved_bytes
    # As the copies from a device do.
    stager.page_lock([DEVICE])
    assert [call for call in accelerator.calls if call[0] != "set_device"] == [
        ("page_lock", (arena.address, reserved_bytes)),
        ("undo_page_lock", arena.address),
        ("page_lock", (arena.address, arena.size_bytes)),
    ]
    accelerator.calls.clear()
    stager.close_in_own_thread()
    assert accelerator.calls == [("set_device", DEVICE), ("undo_page_lock", arena.address)]


def test_an_arena_of_the_right_size_is_page_locked_once_by_a_thread_at_its_device() -> None:
    """A thread that begins at the first device would take memory of that on every rank."""
    accelerator = FakeAccelerator()
    stager = Stager(Accelerators([accelerator]))
    sizes = [60 * MIB]
    stager.reserve(4 * sum(sizes), 1, limit_bytes=1 << 40)
    take_all(stager)
    stager.page_lock([torch.device("meta")])
    assert accelerator.calls == [], "there is no such accelerator"
    stager.page_lock([DEVICE])
    stager.page_lock([DEVICE])
    stager.arrange(files_of(*sizes), [])
    stager.stage(sources_of([torch.zeros(*sizes)]), "async_pinned", []).finish()
    assert [name for name, _ in accelerator.calls if name == "page_lock"] == ["page_lock"]
    assert accelerator.calls[0] == ("set_device", DEVICE)
    stager.close()


@pytest.mark.parametrize("first_in_inference_mode", [True, False])
@pytest.mark.parametrize("mode", ["async_pinned", "async_device"])
def test_a_save_in_inference_mode_is_finished_outside_of_it(mode: Any, first_in_inference_mode: bool) -> None:
    stager = Stager(Accelerators([FakeAccelerator()]))
    sizes, files = [5 * MIB, 100, 100], files_of(5 * MIB, 100, 100)
    for inference in (first_in_inference_mode, not first_in_inference_mode):
        tensors = [torch.full((size,), 1.0 + inference) for size in sizes]
        with torch.inference_mode(inference):
            stager.arrange(files, [])
            staging = stager.stage(sources_of(tensors), mode, [])
        stager.finish_in_own_thread(staging)
        assert stager._placement is not None
        assert [view.unique().tolist() for view in stager._placement.views] == [[1.0 + inference]] * 3
    stager.close()


def test_plain_files_have_their_place_in_an_arena_that_was_reserved(stager: Stager) -> None:
    sizes = [10 * MIB]
    stager.reserve(4 * sum(sizes), 1, limit_bytes=1 << 40)
    reserved, plain = stager._arena, [plain_file(300_000)]
    arena, _ = stager.arrange(files_of(*sizes), plain)
    (image,) = stager.stage_plain(plain)
    assert arena is reserved
    assert bytes(arena.memory[image.start : image.start + image.size_bytes]) == b"".join(plain[0].pieces())


def test_what_cannot_be_taken_is_an_error_and_no_later_save_finds_an_arena_without_pages(stager: Stager) -> None:
    before = arenas()
    sizes = [400 * MIB // 4]
    stager.reserve(4 * sum(sizes), 1, limit_bytes=1 << 40)
    arena = stager._arena
    assert arena is not None
    # As if there were no memory: pages behind the end of the file cannot be had either.
    os.ftruncate(arena.handle, 4096)
    with pytest.raises(StorageError, match="of memory for staging"):
        stager.arrange(files_of(*sizes), [])
    assert arenas() == before
    assert stager.held_bytes == 0
    found, expected = staged_bytes(stager, files_of(MIB), tensors_of(MIB))
    assert len(found) == len(expected)


def test_a_reserved_arena_is_dropped_and_one_that_a_save_has_used_is_not(stager: Stager) -> None:
    before = arenas()
    stager.reserve(MIB, 1, limit_bytes=1 << 40)
    take_all(stager)
    stager.drop_reserved()
    assert (stager.held_bytes, arenas()) == (0, before)
    stager.drop_reserved()
    stager.arrange(files_of(MIB), [])
    held = stager.held_bytes
    stager.drop_reserved()
    assert stager.held_bytes == held > 0


@pytest.mark.guarantee("G2")
def test_what_does_not_lie_in_memory_as_in_a_file_is_copied_by_torch_beside_what_does(stager: Stager) -> None:
    numbers = torch.randn(4, MIB, dtype=torch.complex64)
    tensors = [
        torch.randn(3),
        torch.randn(2, 3).t(),
        numbers[0].conj().imag,
        torch._neg_view(torch.randn(5)),
        torch.randn(MIB),
        torch.nn.Parameter(torch.randn(7)),
        torch.randn(2, MIB).t(),
        torch.randn(1).expand(9),
    ]
    chunks = [FramedChunk.of(f"m.{index}", "float32", whole(tuple(one.shape))) for index, one in enumerate(tensors)]
    framed = frame(chunks, BLOCK_BYTES)
    files = [FileLayout("rank-00000.safetensors", framed, tuple(map(chunks.index, framed.chunks)))]
    arena, (image,) = stager.arrange(files, [])
    for _ in range(2):
        arena.begin()
        stager.stage(sources_of(tensors), "async", []).finish()
        expected = [tensors[part].detach().resolve_neg().contiguous().numpy().tobytes() for part in files[0].parts]
        assert bytes(arena.memory[: image.size_bytes]) == framed.header + b"".join(expected)
        with torch.no_grad():
            tensors[0].add_(1)
            tensors[4].add_(1)
