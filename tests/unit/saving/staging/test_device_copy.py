"""In which groups a device's copies are sent, which are left to the training's own stream, and who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from holdfast.ondisk.safetensors import SMALL_BYTES
from holdfast.saving.staging.arena import Arena
from holdfast.saving.staging.chunks import Chunk, Placement
from holdfast.saving.staging.device_copy import DeviceCopier, Staging, _groups, _without, best_mode
from holdfast.state.devices import Accelerators
from tests.unit.state.devices.fake import GIBI, FakeAccelerator


# A busy machine is no reason to fail.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 400), max_size=60))
def test_every_copy_is_in_one_group_and_no_group_is_empty(sizes: list[int]) -> None:
    groups = list(_groups(list(accumulate(sizes)), 100))
    assert [index for first, last in groups for index in range(first, last)] == list(range(len(sizes)))
    assert all(first < last for first, last in groups)


def test_groups_grow() -> None:
    groups = list(_groups(range(1, 1001), 100))
    assert [last - first for first, last in groups] == [100, 200, 400, 300]


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_a_large_state_has_few_groups(count: int) -> None:
    groups = list(_groups(range(1, count + 1), 1))
    assert len(groups) <= count.bit_length()
    assert all(later[1] - later[0] == 2 * (earlier[1] - earlier[0]) for earlier, later in pairwise(groups[:-1]))


class CountedInt(int):
    """An index that counts how often any of its kind is hashed."""

    hashed = 0

    def __hash__(self) -> int:
        CountedInt.hashed += 1
        return int.__hash__(self)


def test_tensors_of_no_optimizer_are_taken_out_in_one_pass_over_them() -> None:
    singles = [CountedInt(number) for number in range(1000)]
    loose = singles[::2]
    CountedInt.hashed = 0
    assert _without(singles, loose) == list(range(1, 1000, 2))
    assert len(singles) + len(loose) == CountedInt.hashed


class Sending:
    """Enqueues nothing, and counts how often. `fails`: raises that."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.count = 0
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self._fails = fails

    def __call__(self) -> list[tuple[Any, int]]:
        self.count += 1
        self.begun.set()
        self.goes_on.wait(30)
        if self._fails is not None:
            raise self._fails
        return []


@pytest.fixture
def staging() -> Iterator[Staging]:
    arena = Arena.make(4096)
    yield Staging(arena, 4096)
    arena.close()


def test_copies_are_not_sent_after_the_save_failed(staging: Staging) -> None:
    sending = Sending()
    staging.send_later(sending, 0.0)
    staging.cancel()
    staging.send()
    assert sending.count == 0


def test_a_step_that_comes_before_the_copies_are_sent_sends_them_and_they_are_sent_once(staging: Staging) -> None:
    sending = Sending()
    sending.goes_on.set()
    staging.send_later(sending, 0.0)
    staging.send()
    assert sending.count == 1
    staging.finish()
    staging.send()
    assert sending.count == 1


@pytest.mark.guarantee("G2")
def test_a_step_waits_while_another_thread_is_sending(staging: Staging) -> None:
    sending = Sending()
    staging.send_later(sending, 0.0)
    finishing, step = threading.Thread(target=staging.finish), threading.Thread(target=staging.send)
    finishing.start()
    assert sending.begun.wait(30)
    step.start()
    step.join(0.2)
    assert step.is_alive(), "the device would change what is not enqueued yet"
    sending.goes_on.set()
    step.join(30)
    finishing.join(30)
    assert (step.is_alive(), sending.count) == (False, 1)


def test_the_thread_that_finishes_leaves_the_interpreter_to_the_training_until_that_has_sent(staging: Staging) -> None:
    sending = Sending()
    sending.goes_on.set()
    staging.send_later(sending, 3600.0)
    finishing = threading.Thread(target=staging.finish_beside_training)
    finishing.start()
    finishing.join(0.2)
    assert (finishing.is_alive(), sending.count) == (True, 0)
    staging.send()
    finishing.join(30)
    assert (finishing.is_alive(), sending.count) == (False, 1)


@pytest.mark.parametrize("give_up", [True, False])
def test_a_head_start_ends_with_its_time_or_with_the_save(staging: Staging, give_up: bool) -> None:
    sending = Sending()
    sending.goes_on.set()
    staging.send_later(sending, 3600.0 if give_up else 0.05)
    if give_up:
        staging.cancel()
    staging.finish_beside_training()
    assert sending.count == (0 if give_up else 1)


def test_what_a_step_could_not_send_fails_the_save_and_not_the_step(staging: Staging) -> None:
    sending = Sending(RuntimeError("the device is lost"))
    sending.goes_on.set()
    staging.send_later(sending, 0.0)
    staging.send()
    with pytest.raises(RuntimeError, match="the device is lost"):
        staging.finish()


def test_an_interrupt_of_a_step_reaches_the_training_and_fails_the_save(staging: Staging) -> None:
    sending = Sending(KeyboardInterrupt())
    sending.goes_on.set()
    staging.send_later(sending, 0.0)
    with pytest.raises(KeyboardInterrupt):
        staging.send()
    with pytest.raises(KeyboardInterrupt):
        staging.finish()


# Copies of an accelerator that does its work as late as it may

SIZE = SMALL_BYTES // 4  # floats that are not gathered with others


class Scene:
    """Two small tensors, one weight that an optimizer owns and one buffer that it does not, all on one device."""

    def __init__(self, accelerator: FakeAccelerator | None = None) -> None:
        self.accelerator = accelerator or FakeAccelerator()
        self.weight = torch.nn.Parameter(torch.ones(SIZE))
        self.buffer = torch.ones(SIZE)
        self.small = [torch.ones(5), torch.ones(7)]
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.copier = DeviceCopier(Accelerators([self.accelerator]))
        self.sources = [self.weight.detach(), *self.small, self.buffer]
        self.arena = Arena.make(4 * sum(source.numel() for source in self.sources))
        self.placement = Placement(self.arena)
        start = 0
        for index, source in enumerate(self.sources):
            self.placement.add(index, Chunk(start, start + source.nbytes, source.dtype, tuple(source.shape)))
            start += source.nbytes
        self.end = start

    def start(self, *, clones: bool = False) -> Staging:
        staging = Staging(self.arena, self.end)
        self.copier.start(list(self.sources), self.placement, [self.optimizer], staging, clones=clones)
        return staging

    def change(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.detach().fill_(7)

    def staged(self) -> list[list[float]]:
        return [view.unique().tolist() for view in self.placement.views]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.copier.release(made.arena)
    made.arena.close()


@pytest.mark.guarantee("G2")
def test_what_changes_after_the_optimizer_waited_is_staged_as_it_was(scene: Scene) -> None:
    staging = scene.start()
    assert scene.staged()[0] == [0], "the device has not begun"
    scene.change(*scene.small, scene.buffer)
    scene.copier.wait_for_staging()
    scene.change(scene.weight)
    staging.finish()
    assert scene.staged() == [[1]] * 4
    assert scene.arena.staged == scene.end


@pytest.mark.guarantee("G2")
def test_after_an_interrupt_of_the_wait_the_next_step_waits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = scene.start()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(staging, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.copier.wait_for_staging()
    scene.copier.wait_for_staging()
    scene.change(scene.weight)
    staging.finish()
    assert scene.staged()[0] == [1]


@pytest.mark.guarantee("G2")
def test_a_weight_that_is_given_other_memory_before_its_copy_is_sent_is_staged_as_it_was(scene: Scene) -> None:
    scene.sources[0] = scene.weight.data
    live = scene.sources[0]
    staging = scene.start()
    live.set_(torch.full((SIZE,), 7.0))
    staging.finish()
    assert scene.staged() == [[1]] * 4


def test_a_weight_that_is_changed_without_the_wait_is_staged_changed(scene: Scene) -> None:
    """The test above can fail."""
    staging = scene.start()
    scene.change(scene.weight)
    staging.finish()
    assert scene.staged() == [[7], [1], [1], [1]]


@pytest.mark.guarantee("G2")
def test_from_clones_everything_is_staged_as_it_was_without_a_wait(scene: Scene) -> None:
    staging = scene.start(clones=True)
    scene.change(scene.weight, *scene.small, scene.buffer)
    staging.finish()
    assert scene.staged() == [[1]] * 4


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("clones", [False, True])
def test_without_room_for_clones_what_no_optimizer_owns_is_copied_in_the_call(scene: Scene, clones: bool) -> None:
    scene.accelerator.free = 0
    staging = scene.start(clones=clones)
    assert scene.staged()[3] == [1]
    scene.change(scene.buffer)
    scene.copier.wait_for_staging()
    scene.change(scene.weight)
    staging.finish()
    assert scene.staged() == [[1]] * 4


def test_the_arena_is_page_locked_once_and_released(scene: Scene) -> None:
    for _ in range(2):
        scene.start().finish()
    assert scene.accelerator.calls == [("page_lock", (scene.arena.address, scene.arena.size_bytes))]
    scene.copier.release(scene.arena)
    assert scene.accelerator.calls[1:] == [("undo_page_lock", scene.arena.address)]
    scene.start().finish()
    assert scene.accelerator.calls[2:] == scene.accelerator.calls[:1], "another arena may be at the same place"


def test_one_stream_per_device_serves_all_saves(scene: Scene) -> None:
    for _ in range(3):
        scene.start().finish()
    assert len(scene.accelerator.streams) == 1


def test_an_arena_that_cannot_be_page_locked_is_a_warning_and_is_filled(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(FakeAccelerator(refuses=True))
    scene.start().finish()
    assert scene.staged() == [[1]] * 4
    scene.start().finish()
    assert caplog.text.count("could not be page-locked (error 2 of this device)") == 1
    scene.copier.release(scene.arena)
    assert [name for name, _ in scene.accelerator.calls if name == "undo_page_lock"] == []
    scene.arena.close()


def test_the_best_mode_is_that_for_which_the_devices_have_room() -> None:
    memory = [torch.empty(1000)]
    assert best_mode(memory)[0] == "async"
    for free, cached, mode in [
        (2 * GIBI, 0, "async_device"),
        (GIBI, 0, "async_pinned"),  # what a clone must leave free
        (0, 4 * GIBI, "async_device"),  # of which the training has used half at its peak
        (0, 2 * GIBI, "async_pinned"),
    ]:
        accelerator = FakeAccelerator(free=free, cached=cached)
        assert best_mode(memory, Accelerators([accelerator]))[0] == mode, (free, cached)
