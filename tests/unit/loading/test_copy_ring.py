"""The slots between files and tensors: that none is filled again before the copies from it are done."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from holdfast.loading.copy_ring import (
    DeviceCarrier,
    HostCarrier,
    Ring,
    Rings,
    _lost,
    carriers_after_this_thread,
    piece_bytes,
)
from holdfast.loading.requests import READ_PIECE_BYTES
from holdfast.state.devices import Accelerators
from holdfast.state.memory import PAGE_BYTES
from tests.unit.state.devices.fake import FakeAccelerator, FakeStream


class LateCarrier(HostCarrier):
    """A device that copies as late as it may: when it is waited for. What was overwritten until then is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[int] = []
        self._pending: list[Callable[[], None]] = []

    def memory(self, size_bytes: int) -> torch.Tensor:
        self.allocated.append(size_bytes)
        return super().memory(size_bytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._pending.append(lambda: HostCarrier.copy(self, target, source))

    def drain(self) -> None:
        for copy in self._pending:
            copy()
        self._pending.clear()


def fill(ring: Ring, targets: list[torch.Tensor]) -> None:
    for number, target in enumerate(targets):
        with ring.slot(target.numel()) as slot:
            slot.fill_(number + 1)
            ring.carrier.copy(target, slot)


def test_memory_is_not_given_out_again_before_the_copies_from_it_are_done() -> None:
    carrier = LateCarrier()
    ring = Ring(carrier, size_bytes=3 * PAGE_BYTES)
    targets = [torch.zeros(PAGE_BYTES - 5, dtype=torch.uint8) for _ in range(10)]
    fill(ring, targets)
    assert targets[9].sum() == 0, "the last one is still under way"
    carrier.drain()
    assert [int(target[0]) for target in targets] == list(range(1, 11))
    assert carrier.allocated == [3 * PAGE_BYTES], "the same memory does for all"


def test_slots_follow_each_other_through_the_whole_ring_and_each_begins_at_a_page() -> None:
    ring = Ring(HostCarrier(), size_bytes=4 * PAGE_BYTES + 100)
    places = []
    for size in (1, PAGE_BYTES, PAGE_BYTES + 1, 100, 101, 4 * PAGE_BYTES + 100, 1):
        with ring.slot(size) as slot:
            assert slot.nbytes == size
            places.append(slot.data_ptr())
    assert [(place - places[0]) // PAGE_BYTES for place in places] == [0, 1, 2, 4, 0, 0, 0]
    assert all(place % PAGE_BYTES == 0 for place in places)


def test_copies_are_waited_for_also_when_filling_failed() -> None:
    carrier = LateCarrier()
    ring = Ring(carrier, size_bytes=8)
    target = torch.zeros(8, dtype=torch.uint8)

    def fail_half_way() -> None:
        with ring.slot(8) as slot:
            slot.fill_(7)
            carrier.copy(target, slot)
            raise OSError("half way")

    with pytest.raises(OSError, match="half way"):
        fail_half_way()
    fill(ring, [torch.zeros(8, dtype=torch.uint8) for _ in range(3)])
    assert target.tolist() == [7] * 8


def test_what_is_larger_than_a_slot_gets_memory_of_its_own() -> None:
    carrier = LateCarrier()
    ring = Ring(carrier, size_bytes=8)
    target = torch.zeros(50, dtype=torch.uint8)
    fill(ring, [target])
    assert target.tolist() == [1] * 50, "it is done at once, for the memory goes"


def test_host_slots_begin_at_a_page() -> None:
    for size in (1, 4096, 1 << 20, (8 << 20) + 5):
        memory = HostCarrier().memory(size)
        assert memory.data_ptr() % PAGE_BYTES == 0
        assert memory.numel() == size


def test_each_thread_has_a_ring_of_its_own_and_all_are_drained_at_the_end() -> None:
    carriers: list[LateCarrier] = []

    def carrier(device: torch.device) -> LateCarrier:
        carriers.append(LateCarrier())
        return carriers[-1]

    targets = [torch.zeros(10, dtype=torch.uint8) for _ in range(4)]
    device = torch.device("cpu")
    with Rings(carrier) as rings:
        threads = [threading.Thread(target=lambda t=target: fill(rings.of(device), [t])) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rings.of(device) is rings.of(device)
        assert all(target.sum() == 0 for target in targets)
    assert all(target.sum() == 10 for target in targets)
    assert len(carriers) == 5


def test_bytes_that_landed_can_be_seen_as_any_type() -> None:
    memory = HostCarrier().memory(100)
    odd = memory[3:83]
    odd.copy_(torch.arange(10, dtype=torch.int64).view(torch.uint8))
    assert HostCarrier().landed(odd).view(torch.int64).tolist() == list(range(10))


def test_copies_to_a_device_come_after_what_its_current_stream_had_to_do() -> None:
    accelerator, target, device = FakeAccelerator(), torch.zeros(10, dtype=torch.uint8), torch.device("cpu")
    accelerator.training_stream = FakeStream()
    accelerator.training_stream.add(lambda: target.fill_(99))
    with Rings(carriers_after_this_thread(Accelerators([accelerator]))) as rings:
        fill(rings.of(device), [target])
        assert target.tolist() == [0] * 10, "both are still to be done"
    accelerator.training_stream.run(1)
    assert target.tolist() == [1] * 10, "what was enqueued first is done first"


def test_slots_of_a_device_are_page_locked_and_not_filled_before_their_copies_are_done() -> None:
    accelerator, device = FakeAccelerator(), torch.device("cpu")
    ring = Ring(DeviceCarrier(accelerator, device, accelerator.training_stream), size_bytes=100)
    targets = [torch.zeros(100, dtype=torch.uint8) for _ in range(5)]
    fill(ring, targets)
    assert targets[4].sum() == 0, "the last one is still under way"
    ring.carrier.drain()
    assert [int(target[0]) for target in targets] == [1, 2, 3, 4, 5]
    locked = [size_bytes for name, (_, size_bytes) in accelerator.calls if name == "page_lock"]
    assert locked == [100]
    ring.close()
    released = [where for name, where in accelerator.calls if name == "undo_page_lock"]
    assert sorted(released) == sorted(where for name, (where, _) in accelerator.calls[:1]), "nothing stays locked"


def test_a_slot_for_more_than_the_others_hold_is_released_after_its_copies() -> None:
    accelerator, device = FakeAccelerator(), torch.device("cpu")
    ring = Ring(DeviceCarrier(accelerator, device, accelerator.training_stream), size_bytes=100)
    target = torch.zeros(5000, dtype=torch.uint8)
    with ring.slot(5000) as slot:
        slot.fill_(7)
        ring.carrier.copy(target, slot)
    assert target.tolist() == [7] * 5000
    assert [name for name, _ in accelerator.calls] == ["page_lock", "undo_page_lock"]


def test_where_no_page_locked_memory_is_left_a_slot_is_in_other_memory() -> None:
    accelerator, target = FakeAccelerator(refuses=True), torch.zeros(100, dtype=torch.uint8)
    ring = Ring(DeviceCarrier(accelerator, torch.device("cpu"), accelerator.training_stream), size_bytes=100)
    fill(ring, [target])
    ring.carrier.drain()
    assert target.tolist() == [1] * 100


def test_a_device_without_an_accelerator_or_a_stream_of_this_thread_is_copied_to_at_once() -> None:
    carrier = carriers_after_this_thread(Accelerators([FakeAccelerator()]))
    assert isinstance(carrier(torch.device("cpu")), DeviceCarrier)
    assert isinstance(carrier(torch.device("cpu", 0)), HostCarrier)
    assert isinstance(carrier(torch.device("meta")), HostCarrier)


def test_a_thread_of_a_restore_uses_the_device_of_its_copies_and_the_caller_keeps_its_own() -> None:
    accelerator, device = FakeAccelerator(), torch.device("cpu")
    carrier = carriers_after_this_thread(Accelerators([accelerator]))
    carrier(device)
    assert accelerator.calls == []
    thread = threading.Thread(target=lambda: carrier(device))
    thread.start()
    thread.join()
    assert accelerator.calls == [("set_device", device)]


class CarefulAccelerator(FakeAccelerator):
    """Refuses to unlock memory while a copy from it may be under way."""

    def undo_page_lock(self, address: int) -> None:
        assert all(stream.done == len(stream.work) for stream in self.streams), (
            "a device would read what is no longer there"
        )
        super().undo_page_lock(address)


@pytest.mark.parametrize("size_bytes", [50, 5000])
def test_slots_are_released_when_the_copies_from_them_are_done_and_not_before(size_bytes: int) -> None:
    accelerator, device = CarefulAccelerator(), torch.device("cpu")
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    ring = Ring(DeviceCarrier(accelerator, device, accelerator.training_stream), size_bytes=100)
    with ring.slot(size_bytes) as slot:
        slot.fill_(7)
        ring.carrier.copy(target, slot)
    ring.close()
    assert target.tolist() == [7] * size_bytes
    assert [name for name, _ in accelerator.calls] == ["page_lock", "undo_page_lock"]


def test_rings_release_the_slots_of_all_threads_at_their_end() -> None:
    accelerator, device = FakeAccelerator(), torch.device("cpu")
    targets = [torch.zeros(10, dtype=torch.uint8) for _ in range(3)]
    with Rings(carriers_after_this_thread(Accelerators([accelerator]))) as rings:
        threads = [threading.Thread(target=lambda t=target: fill(rings.of(device), [t])) for target in targets]
        for thread in threads:
            thread.start()
            thread.join()
    assert sum(name == "undo_page_lock" for name, _ in accelerator.calls) == 3


def test_a_ring_whose_copies_cannot_be_waited_for_keeps_its_slots_and_the_others_are_closed() -> None:
    class Broken(LateCarrier):
        """A device that is lost."""

        released = 0

        def drain(self) -> None:
            raise RuntimeError("the device is lost")

        def release(self, memory: torch.Tensor) -> None:
            Broken.released += 1

    made: list[LateCarrier] = []

    def carrier(device: torch.device) -> LateCarrier:
        made.append(Broken() if len(made) == 1 else LateCarrier())
        return made[-1]

    devices = [torch.device("meta"), torch.device("cpu"), torch.device("cpu", 0)]
    targets = [torch.zeros(10, dtype=torch.uint8) for _ in devices]
    rings = Rings(carrier)
    for device, target in zip(devices, targets, strict=True):
        fill(rings.of(device), [target])
    with pytest.raises(RuntimeError, match="the device is lost"):
        rings.__exit__(None, None, None)
    assert [int(target[0]) for target in targets] == [1, 0, 1]
    assert Broken.released == 0
    assert made[1] in [ring.carrier for ring in _lost]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_slot_has_room_for_a_piece_that_is_widened_to_whole_pages(device: str) -> None:
    carrier = LateCarrier()
    largest = max(piece_bytes(torch.device(device)), READ_PIECE_BYTES) + 2 * PAGE_BYTES
    with Rings(lambda device: carrier) as rings, rings.of(torch.device(device)).slot(largest) as slot:
        assert slot.nbytes == largest
        [made] = carrier.allocated
        assert made > largest, "the slot that is used again, and no memory for this one alone"
