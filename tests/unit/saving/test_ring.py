"""The slots between tensors and files: that every byte passes them in its place, and none before it is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.errors import HoldfastError
from holdfast.ondisk.manifest import BLOCK_BYTES
from holdfast.ondisk.regions import whole
from holdfast.ondisk.safetensors import Frame, FramedChunk, frame
from holdfast.saving.ring import Ring
from holdfast.state.devices import Accelerators
from holdfast.state.tensors import dtype_name, flat_bytes, memory_of
from tests.unit.state.devices.fake import FakeAccelerator, FakeStream

NewThreads = Callable[[], list[str]]

SLOT_BYTES = 64 << 10
HOST = Accelerators([])


def states() -> dict[str, torch.Tensor]:
    """Tensors of all kinds: dense or not, empty, without dimensions, larger than all slots together."""
    torch.manual_seed(7)
    return {
        "large": torch.randn(150_001),
        "transposed": torch.randn(300, 200).T,
        "every-other": torch.randn(5_000)[::2],
        "conjugate": torch.randn(1_000, dtype=torch.complex64).conj(),
        "negative": torch.randn(1_000, dtype=torch.complex64).conj().imag,
        "flags": torch.rand(70_001) > 0.5,
        "halves": torch.randn(12_345).bfloat16(),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        **{f"small.{number}": torch.randn(number) for number in range(200)},
    }


def laid_out(tensors: dict[str, torch.Tensor]) -> tuple[Frame, list[torch.Tensor]]:
    framed = frame(
        [FramedChunk.of(name, dtype_name(one), whole(tuple(one.shape))) for name, one in tensors.items()], BLOCK_BYTES
    )
    return framed, [tensors[chunk.leaf] for chunk in framed.chunks]


def expected(framed: Frame, tensors: Sequence[torch.Tensor]) -> bytes:
    parts = [bytes(memory_of(flat)) for flat in map(flat_bytes, tensors)]
    return framed.header + b"".join(parts)


def look_away(piece: memoryview) -> None:
    """Take a piece, and do nothing."""


def read(
    ring: Ring, framed: Frame, tensors: Sequence[torch.Tensor], see: Callable[[memoryview], None] = look_away
) -> list[bytes]:
    return [bytes(piece) for piece in ring.pieces(framed, tensors, see)]


@pytest.mark.parametrize("accelerators", [HOST, Accelerators([FakeAccelerator()])], ids=["host", "device"])
@pytest.mark.parametrize("slot_bytes", [4096, SLOT_BYTES, 1 << 20, 8 << 20])
def test_every_byte_of_a_file_passes_in_its_place(
    accelerators: Accelerators, slot_bytes: int, new_threads: NewThreads
) -> None:
    framed, tensors = laid_out(states())
    ring = Ring(accelerators, slot_bytes=slot_bytes)
    for _ in range(2):
        pieces = read(ring, framed, tensors)
        assert b"".join(pieces) == expected(framed, tensors)
        assert max(map(len, pieces)) <= slot_bytes
        assert all(len(piece) % 4096 == 0 for piece in pieces[:-1]), "a disk takes whole pages"
    assert new_threads() == []


def test_what_is_seen_is_what_is_written_even_if_the_tensor_changes_meanwhile() -> None:
    framed, tensors = laid_out({"weight": torch.zeros(100_000)})
    seen: list[bytes] = []

    def see(piece: memoryview) -> None:
        seen.append(bytes(piece))
        tensors[0].add_(1)

    written = read(Ring(HOST, slot_bytes=SLOT_BYTES), framed, tensors, see)
    assert written == seen
    assert len(written) > 5


def test_a_piece_is_handed_out_while_it_is_seen() -> None:
    framed, tensors = laid_out({"weight": torch.randn(100_000)})
    handed_out = threading.Event()

    def see(piece: memoryview) -> None:
        assert handed_out.wait(60), "the disk would wait for the digest"

    for _ in Ring(HOST, slot_bytes=SLOT_BYTES).pieces(framed, tensors, see):
        handed_out.set()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_slot_is_filled_again_when_it_was_seen_and_everything_is_seen_at_the_end(slots: int) -> None:
    framed, tensors = laid_out({"weight": torch.randn(100_000)})
    seen: list[bytes] = []

    def see(piece: memoryview) -> None:
        time.sleep(0.01)
        seen.append(bytes(piece))

    written = read(Ring(HOST, slots=slots, slot_bytes=SLOT_BYTES), framed, tensors, see)
    assert b"".join(written) == b"".join(seen) == expected(framed, tensors)


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, 8 << 20])
def test_copies_of_a_device_come_after_what_the_training_has_enqueued(slot_bytes: int) -> None:
    device = FakeAccelerator()
    device.training_stream = FakeStream()
    framed, tensors = laid_out({"weight": torch.zeros(500_000)})
    device.training_stream.add(lambda: tensors[0].fill_(1))
    written = read(Ring(Accelerators([device]), slot_bytes=slot_bytes), framed, tensors)
    assert bool((tensors[0] == 1).all())
    assert b"".join(written) == expected(framed, tensors)


def test_small_tensors_of_a_device_are_copied_together() -> None:
    device = FakeAccelerator()
    framed, tensors = laid_out({f"bias.{number:04}": torch.randn(64) for number in range(2_000)})
    ring = Ring(Accelerators([device]), slot_bytes=SLOT_BYTES)
    pieces = read(ring, framed, tensors)
    assert b"".join(pieces) == expected(framed, tensors)
    (stream,) = device.streams
    assert len(stream.work) <= len(pieces) + 1, "one copy for each slot, and the wait for the training"


def test_slots_are_page_locked_once_and_released_at_the_end() -> None:
    device = FakeAccelerator()
    framed, tensors = laid_out(states())
    ring = Ring(Accelerators([device]), slots=3, slot_bytes=SLOT_BYTES)
    for _ in range(3):
        read(ring, framed, tensors)
    ((_, (address, size_bytes)),) = [call for call in device.calls if call[0] == "page_lock"]
    assert size_bytes == 3 * SLOT_BYTES
    assert address % 4096 == 0
    assert [name for name, _ in device.calls if name == "undo_page_lock"] == []
    ring.close()
    ring.close()
    assert [call for call in device.calls if call[0] == "undo_page_lock"] == [("undo_page_lock", address)]
    assert b"".join(read(ring, framed, tensors)) == expected(framed, tensors), "and it can be used again"


def test_slots_of_a_ring_that_is_dropped_are_released() -> None:
    device = FakeAccelerator()
    framed, tensors = laid_out(states())
    read(Ring(Accelerators([device]), slot_bytes=SLOT_BYTES), framed, tensors)
    assert [name for name, _ in device.calls if name.endswith("page_lock")] == ["page_lock", "undo_page_lock"]


def test_a_file_that_fits_into_one_slot_is_copied_without_threads_and_page_locks(new_threads: NewThreads) -> None:
    device = FakeAccelerator()
    framed, tensors = laid_out({"weight": torch.randn(100)})
    threads: list[list[str]] = []
    ring = Ring(Accelerators([device]))
    pieces = read(ring, framed, tensors, lambda piece: threads.append(new_threads()))
    assert pieces == [expected(framed, tensors)]
    assert threads == [[]]
    assert [name for name, _ in device.calls if name == "page_lock"] == []


def test_a_system_that_page_locks_nothing_gets_the_same_bytes_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    framed, tensors = laid_out(states())
    ring = Ring(Accelerators([FakeAccelerator(refuses=True)]), slot_bytes=SLOT_BYTES)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for _ in range(2):
            assert b"".join(read(ring, framed, tensors)) == expected(framed, tensors)
    (record,) = caplog.records
    assert "could not be page-locked (error 2 of this device)" in record.getMessage()


class FailingAccelerator(FakeAccelerator):
    """Refuses the copies of one slot."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.left = failing

    def use_stream(self, stream: FakeStream) -> TorchDispatchMode:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("an illegal memory access was encountered")
        return super().use_stream(stream)


def test_a_copy_that_fails_is_raised_and_leaves_nothing_under_way(new_threads: NewThreads) -> None:
    device = FailingAccelerator(failing=4)
    framed, tensors = laid_out({"weight": torch.randn(200_000)})
    ring = Ring(Accelerators([device]), slot_bytes=SLOT_BYTES)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        read(ring, framed, tensors)
    assert new_threads() == []
    assert all(stream.done == len(stream.work) for stream in device.streams), "no copy goes on into a free slot"
    assert b"".join(read(ring, framed, tensors)) == expected(framed, tensors), "the slots are free again"


def test_an_error_of_what_sees_the_bytes_is_raised_and_leaves_nothing_under_way(new_threads: NewThreads) -> None:
    device = FakeAccelerator()
    framed, tensors = laid_out({"weight": torch.randn(200_000)})

    def see(piece: memoryview) -> Any:
        raise MemoryError("no memory for a digest")

    with pytest.raises(MemoryError, match="no memory for a digest"):
        read(Ring(Accelerators([device]), slot_bytes=SLOT_BYTES), framed, tensors, see)
    assert new_threads() == []
    assert all(stream.done == len(stream.work) for stream in device.streams), "no copy goes on into a free slot"


def test_an_error_of_what_sees_the_last_bytes_is_raised() -> None:
    framed, tensors = laid_out({"weight": torch.randn(100_000)})
    left = framed.size_bytes

    def see(piece: memoryview) -> None:
        nonlocal left
        left -= len(piece)
        if left == 0:
            time.sleep(0.05)
            raise MemoryError("no memory for the last digest")

    with pytest.raises(MemoryError, match="the last digest"):
        read(Ring(HOST, slot_bytes=SLOT_BYTES), framed, tensors, see)


@pytest.mark.parametrize("interrupted", ["holdfast-digest", "holdfast-copy"])
@pytest.mark.parametrize("is_started", [False, True])
def test_an_interrupt_at_the_start_of_a_thread_leaves_none_and_the_next_file_is_right(
    interrupted: str, is_started: bool, monkeypatch: pytest.MonkeyPatch, new_threads: NewThreads
) -> None:
    framed, tensors = laid_out({"weight": torch.randn(200_000)})
    ring = Ring(HOST, slot_bytes=SLOT_BYTES)
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        if thread.name != interrupted or is_started:
            start(thread)
        if thread.name == interrupted:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            read(ring, framed, tensors)
    assert b"".join(read(ring, framed, tensors)) == expected(framed, tensors)
    deadline = time.monotonic() + 60
    while new_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert new_threads() == []


@pytest.mark.parametrize("refused", ["holdfast-digest", "holdfast-copy"])
def test_a_thread_that_cannot_be_started_is_done_without(
    refused: str, monkeypatch: pytest.MonkeyPatch, new_threads: NewThreads
) -> None:
    framed, tensors = laid_out(states())
    seen: list[bytes] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    written = read(Ring(HOST, slot_bytes=SLOT_BYTES), framed, tensors, lambda piece: seen.append(bytes(piece)))
    assert b"".join(written) == b"".join(seen) == expected(framed, tensors)
    assert new_threads() == []


@pytest.mark.parametrize("pieces_before", [0, 1, 5])
def test_a_reader_that_stops_in_the_middle_leaves_nothing_under_way(
    pieces_before: int, new_threads: NewThreads
) -> None:
    device = FakeAccelerator()
    framed, tensors = laid_out({"weight": torch.randn(500_000)})
    ring = Ring(Accelerators([device]), slot_bytes=SLOT_BYTES)
    pieces = ring.pieces(framed, tensors, look_away)
    for _ in range(pieces_before):
        next(pieces)
    pieces.close()
    assert new_threads() == []
    assert all(stream.done == len(stream.work) for stream in device.streams)
    assert b"".join(read(ring, framed, tensors)) == expected(framed, tensors)


def test_a_tensor_that_has_another_size_by_now_is_refused() -> None:
    framed, _ = laid_out({"weight": torch.randn(100)})
    with pytest.raises(HoldfastError, match="has 396 bytes now, and the file was laid out for 400"):
        read(Ring(HOST), framed, [torch.randn(99)])


def test_a_forked_child_has_no_part_in_the_slots() -> None:
    framed, tensors = laid_out(states())
    ring = Ring(HOST, slot_bytes=SLOT_BYTES)
    read(ring, framed, tensors)
    slots: Any = ring._slots
    assert "dc" in _flags_of_mapping(slots.tensors[0].data_ptr()), "the system does not copy it on fork"


def _flags_of_mapping(address: int) -> list[str]:
    """Return the flags that the kernel has for the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        start, dash, end = first.partition("-")
        if dash and not first.endswith(":"):
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "VmFlags:":
            return rest.split()
    return []
