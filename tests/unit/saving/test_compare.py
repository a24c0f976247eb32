"""How replicas are sampled and digested, and what the leader makes of samples that come in late."""

from __future__ import annotations

import pytest
import torch

from holdfast.saving.compare import (
    WINDOW_BYTES,
    ReplicaMonitor,
    Sampler,
    _sums_on_devices,
    _total,
    _windows,
    digest_parts,
    digest_sets,
)
from holdfast.saving.messages import ReplicaSet, Sample, StateSummary
from holdfast.state.devices import Accelerators
from tests.unit.state.devices.fake import FakeAccelerator, FakeStream

PAIR = ReplicaSet((0, 1), ((0, 1),), (0, 0), "cpu", 1)


def device_digest(*tensors: torch.Tensor) -> bytes:
    """What a device would make of these."""
    return _total(_sums_on_devices(tensors))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.int8),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(5, 3),
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros((9 << 20) + 3, dtype=torch.int16),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_every_bit_counts_in_the_sum_that_a_device_makes(tensor: torch.Tensor) -> None:
    before = device_digest(torch.ones(3), tensor, torch.ones(3))
    bytes_of = tensor.view(-1).view(torch.uint8)
    for place in (0, bytes_of.numel() // 2, bytes_of.numel() - 1):
        for bit in (0, 7):
            bytes_of[place] ^= 1 << bit
            assert device_digest(torch.ones(3), tensor, torch.ones(3)) != before
            bytes_of[place] ^= 1 << bit
    assert device_digest(torch.ones(3), tensor, torch.ones(3)) == before


def test_order_counts_and_the_order_in_memory_does_not() -> None:
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    assert device_digest(one, other) != device_digest(other, one)
    assert device_digest(one) == device_digest(one.t().contiguous().t())
    assert device_digest(torch.zeros(4)) != device_digest(-torch.zeros(4))


def test_every_element_of_every_part_comes_round() -> None:
    sizes = [1, 3, WINDOW_BYTES // 4, WINDOW_BYTES // 4 + 1, 5 * WINDOW_BYTES // 4 + 7, 2]
    memory = [torch.full((size,), float(index)) for index, size in enumerate(sizes)]
    parts, quota = range(len(sizes)), 4
    seen = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    turns = max(-(-size * 4 // WINDOW_BYTES) for size in sizes)
    for number in range(-(-turns * len(sizes) // quota)):
        windows = _windows(memory, parts, quota, number)
        assert len(windows) == quota
        for window in windows:
            assert window.nbytes <= WINDOW_BYTES
            index = int(window[0])
            start = (window.data_ptr() - memory[index].data_ptr()) // 4
            seen[index][start : start + window.numel()] = True
    assert all(bool(one.all()) for one in seen)


def test_a_window_is_the_same_however_the_memory_is_ordered() -> None:
    dense = torch.randn(300, 200)
    turned = dense.t().contiguous().t()
    for number in range(8):
        (one,), (other,) = (_windows([tensor], [0], 1, number) for tensor in (dense, turned))
        assert torch.equal(one.reshape(-1), other.reshape(-1))


def summary(*samples: Sample, comparison: int = 1) -> StateSummary:
    return StateSummary("", (), (), 1, comparison=comparison, samples=samples)


def watch() -> ReplicaMonitor:
    found = ReplicaMonitor()
    found.begin((PAIR,), (("model.a", "model.b"),))
    return found


def test_a_sample_that_one_rank_sends_later_is_compared_when_it_is_there() -> None:
    watching = watch()
    assert watching.note_samples([summary(Sample(1, 10, ((0, b"x"),))), summary()], 20) == ()
    assert watching.note_samples([summary(), summary(Sample(1, 10, ((0, b"y"),)))], 30) == (0,)
    error = watching.difference((0,), [((b"1", b"2"),), ((b"1", b"3"),)])
    assert error.leaf == "model.b"
    assert "step 10" in error.problem
    assert "1 of 2 replicated leaves" in error.problem


def test_a_difference_that_is_gone_again_is_still_an_error() -> None:
    watching = watch()
    assert watching.note_samples([summary(Sample(1, 10, ((0, b"x"),))), summary(Sample(1, 10, ((0, b"y"),)))], 20) == (
        0,
    )
    same = ((b"1", b"2"),)
    assert "step 10" in watching.difference((0,), [same, same]).problem


def test_samples_of_other_sets_are_not_compared() -> None:
    watching = watch()
    stale = summary(Sample(1, 10, ((0, b"y"),)), comparison=7)
    assert watching.note_samples([summary(Sample(1, 10, ((0, b"x"),))), stale], 20) == ()


def test_a_state_of_another_structure_is_not_sampled() -> None:
    sampler = Sampler(0)
    memory = [torch.zeros(2), torch.ones(2)]
    sampler.begin((PAIR,), 3, "structure")
    assert sampler.comparison("structure") == 3
    assert len(sampler.take(memory, "structure", 1)) == 1
    assert sampler.comparison("another") == 0
    assert sampler.take(memory, "another", 1) == ()


def test_the_leader_finds_the_set_and_the_leaf_from_digests() -> None:
    watching = watch()
    left, right = [torch.zeros(2), torch.ones(2)], [torch.zeros(2), torch.ones(2) + 1]
    digests = [digest_sets((PAIR,), rank, memory) for rank, memory in enumerate((left, right))]
    assert watching.compare(digests) == (0,)
    details = [digest_parts((PAIR,), (0,), rank, memory) for rank, memory in enumerate((left, right))]
    assert watching.difference((0,), details).leaf == "model.b"
    assert watching.compare([digests[0], digests[0]]) == ()


def test_a_sample_of_a_device_is_sent_when_the_device_has_come_to_it() -> None:
    accelerator, memory = FakeAccelerator(), [torch.ones(3), torch.ones(5)]
    accelerator.training_stream = FakeStream()
    accelerator.training_stream.add(lambda: None)
    sampler = Sampler(0, Accelerators([accelerator]))
    sampler.begin([ReplicaSet((0, 1), ((0, 1),), (0, 0), "xpu", 2)], 1, "structure")
    assert sampler.take(memory, "structure", 10) == ()
    assert sampler.take(memory, "structure", 11) == (), "the device is behind"
    accelerator.training_stream.run(1)
    samples = sampler.take(memory, "structure", 12)
    assert [(sample.step, sample.digests) for sample in samples] == [
        (step, ((0, device_digest(*memory)),)) for step in (10, 11)
    ]


def test_a_state_that_has_left_its_device_is_sampled_where_it_is_now() -> None:
    sampler, memory = Sampler(0, Accelerators([])), [torch.ones(3), torch.ones(5)]
    sampler.begin([ReplicaSet((0, 1), ((0, 1),), (0, 0), "xpu", 2)], 1, "structure")
    assert sampler.take(memory, "structure", 10) == ()
    (sample,) = sampler.take(memory, "structure", 11)
    assert sample.digests == ((0, device_digest(*memory)),)
