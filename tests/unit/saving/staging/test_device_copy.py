"""In which groups a device's copies are sent, which are left to the training's own stream, and who waits for them."""

import threading
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.saving.staging.arena import Arena
from holdfast.saving.staging.device_copy import Staging, _groups, _without


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


def test_nobody_waits_for_copies_that_are_not_sent_because_the_save_failed() -> None:
    arena = Arena.make(4096)
    staging = Staging(arena, 4096)
    staging.send(lambda: pytest.fail("the save has failed"), 1_000_000)
    step = threading.Thread(target=staging.wait_until_sent, daemon=True)
    step.start()
    assert step.is_alive(), "so many copies are enqueued later"
    staging.cancel()
    step.join(30)
    assert not step.is_alive()
    arena.close()
