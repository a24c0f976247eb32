"""Memory that stands in for live tensors: who gets some, and that live tensors change only when it is copied."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from holdfast.loading.requests import Request
from holdfast.loading.side_buffers import SideBuffers, room_on
from holdfast.ondisk.manifest import TensorRecord
from holdfast.ondisk.regions import whole
from holdfast.state.devices import Accelerators
from tests.unit.state.devices.fake import GIBI, FakeAccelerator


def request(tensor: torch.Tensor, name: str = "t") -> Request:
    leaf = TensorRecord(name=name, dtype="float32", shape=tuple(tensor.shape), chunks=())
    return Request(leaf, whole(leaf.shape), tensor, fresh=False)


def live(*shapes: tuple[int, ...]) -> list[Request]:
    return [request(torch.zeros(shape), f"t{index}") for index, shape in enumerate(shapes)]


def test_live_tensors_change_when_they_are_filled_and_not_before() -> None:
    requests = live((3, 5), (), (7,))
    requests.append(request(torch.zeros(4, 6).t()))
    buffers = SideBuffers.of(requests, lambda device: 1 << 20)
    assert buffers.rest == []
    for number, one in enumerate(buffers.requests):
        assert one.fresh
        assert one.target.is_contiguous()
        assert one.target.shape == requests[number].target.shape
        one.target.fill_(number + 1)
    assert all(one.target.sum() == 0 for one in requests)
    buffers.fill()
    assert [one.target.unique().item() for one in requests] == [1, 2, 3, 4]
    assert not buffers.held, "and the memory is let go"


def test_side_buffers_of_neighbours_do_not_touch() -> None:
    requests = live((1,), (3,), (1000,))
    buffers = SideBuffers.of(requests, lambda device: 1 << 20)
    places = sorted((one.target.data_ptr(), one.target.nbytes) for one in buffers.requests)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(places))


def test_what_there_is_no_room_for_is_left() -> None:
    requests = live((1000,), (10_000,), (1000,))
    buffers = SideBuffers.of(requests, lambda device: 10_000)
    assert [one.leaf.name for one in buffers.requests] == ["t0", "t2"]
    assert buffers.rest == [requests[1]]


def test_without_room_there_are_no_side_buffers_and_filling_them_is_nothing() -> None:
    requests = live((10,), (20,))
    buffers = SideBuffers.of(requests, lambda device: 0)
    assert buffers.rest == requests
    buffers.fill()


def test_memory_that_is_not_given_is_no_error() -> None:
    class Huge:
        """More than any machine has."""

        device = torch.device("cpu")
        nbytes = 1 << 60

        def is_inference(self) -> bool:
            return False

        is_conj = is_neg = is_inference

    leaf = TensorRecord(name="huge", dtype="float32", shape=(1 << 58,), chunks=())
    wanted = Request(leaf, whole(leaf.shape), Huge(), fresh=False)
    assert SideBuffers.of([wanted], lambda device: 1 << 61).rest == [wanted]


def test_a_tensor_of_inference_mode_takes_no_copy_and_gets_no_side_buffer() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert len(SideBuffers.of([request(tensor)], lambda device: 1 << 20).rest) == 1


def test_host_memory_has_half_of_this_ranks_share_of_what_is_free_less_what_it_is_about_to_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    one, reading = partial(room_on, torch.device("cpu"), free_host_bytes=lambda: 10_000 * GIBI), 128 << 20
    assert one() == 5 * GIBI - reading // 2
    assert one(unfilled_bytes=7 * GIBI) == 1.5 * GIBI - reading // 2
    assert one(unfilled_bytes=20 * GIBI) < 0


def test_a_device_whose_memory_is_not_known_has_no_room() -> None:
    assert [room_on(torch.device(kind)) for kind in ("meta", "xpu", "mps")] == [0, 0, 0]


def test_new_host_memory_is_taken_for_those_alone_that_it_pays_for() -> None:
    requests = live((10,), (20,), (30,))
    buffers = SideBuffers.of(requests, lambda device: 1 << 20, takes_new=lambda request: request is requests[1])
    assert [one.leaf.name for one in buffers.requests] == ["t1"]
    assert buffers.rest == [requests[0], requests[2]]


def test_a_device_has_the_room_that_is_free_or_only_cached_less_a_tenth_of_it_all() -> None:
    accelerators = Accelerators([FakeAccelerator(free=20 * GIBI, cached=3 * GIBI)])
    assert room_on(torch.device("cpu"), accelerators=accelerators) == (20 + 3 - 8) * GIBI


def test_memory_of_a_device_goes_back_to_it_once() -> None:
    accelerator = FakeAccelerator()
    buffers = SideBuffers.of(live((3,), (4,)), lambda device: 1 << 20, accelerators=Accelerators([accelerator]))
    buffers.fill()
    assert accelerator.calls == [("release_cached_memory", None)]
    buffers.drop()
    assert len(accelerator.calls) == 1, "there is nothing left to release"


# Spare memory of the host

LARGE = 4 * 1024 * 1024


def test_large_live_tensors_are_held_in_spare_memory_and_small_ones_are_left() -> None:
    memory = memoryview(bytearray(3 * 4 * LARGE))
    requests = live((LARGE,), (10,), (2, LARGE // 2))
    buffers = SideBuffers.of(requests, lambda device: 0, lambda: memory)
    assert [one.leaf.name for one in buffers.requests] == ["t0", "t2"]
    assert buffers.rest == [requests[1]]
    assert not any(one.fresh for one in buffers.requests), "zeros in it must not be given back to the system"
    for number, one in enumerate(buffers.requests):
        one.target.fill_(number + 1)
    held = torch.frombuffer(memory, dtype=torch.float32)
    assert held.unique().tolist() == [0, 1, 2]
    assert all(one.target.sum() == 0 for one in requests)
    buffers.fill()
    assert [one.target.unique().tolist() for one in requests] == [[1], [0], [2]]


def test_what_does_not_fit_into_the_spare_memory_is_left() -> None:
    memory = memoryview(bytearray(4 * LARGE + 10))
    requests = live((LARGE,), (LARGE,))
    buffers = SideBuffers.of(requests, lambda device: 0, lambda: memory)
    assert [one.leaf.name for one in buffers.requests] == ["t0"]
    assert buffers.rest == [requests[1]]


def test_spare_memory_is_not_asked_for_where_there_is_little_to_hold() -> None:
    asked: list[int] = []
    requests = live((LARGE // 8,), (10,))
    buffers = SideBuffers.of(requests, lambda device: 0, lambda: asked.append(1))
    assert (buffers.rest, asked) == (requests, [])


def test_without_spare_memory_all_is_left() -> None:
    requests = live((2 * LARGE,))
    assert SideBuffers.of(requests, lambda device: 0, lambda: None).rest == requests
    assert SideBuffers.of(requests, lambda device: 0, lambda: memoryview(b"")).rest == requests
