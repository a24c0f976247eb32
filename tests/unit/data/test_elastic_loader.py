"""An elastic loader goes on where the training was, and deals what is left of an epoch to any number of ranks."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

import holdfast
from holdfast.data import ElasticLoader
from holdfast.errors import StateMismatchError, UsageError

LENGTH = 101


def loaders(size: int, *, batch_size: int | None = 3, length: int = LENGTH, **options: Any) -> list[ElasticLoader[Any]]:
    return [
        ElasticLoader(
            list(range(length)),
            batch_size,
            **{"shuffle": True, "seed": 4, "collate_fn": list if batch_size else None, **options},
            rank=rank,
            size=size,
        )
        for rank in range(size)
    ]


def states_of(ranks: Sequence[ElasticLoader[Any]]) -> list[dict[str, Any]]:
    """The states as they come out of a checkpoint."""
    states: list[dict[str, Any]] = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
    return states


def resumed(states: Sequence[dict[str, Any]], size: int, **options: Any) -> list[ElasticLoader[Any]]:
    """New loaders in the place of those that were saved."""
    ranks = loaders(size, **options)
    for rank, loader in enumerate(ranks):
        if size == len(states):
            loader.load_state_dict(states[rank])
        else:
            loader.check_world_state(states, rank, size)
            loader.load_world_state(states, rank, size)
    return ranks


def take(ranks: Sequence[ElasticLoader[Any]], batches: Sequence[int]) -> list[int]:
    """Take some batches on each rank, and return their samples."""
    return [
        sample
        for loader, count in zip(ranks, batches, strict=True)
        for batch in itertools.islice(iter(loader), count)
        for sample in batch
    ]


# The same number of ranks


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_on_the_same_number_of_ranks_every_batch_is_the_one_that_would_have_come(drop_last: bool, workers: int) -> None:
    options = {"drop_last": drop_last, "num_workers": workers}
    steps = [0, 1, 5, 16, 17] if not workers else [4, 16]
    for rank, stop in itertools.product(range(2), steps):
        loader = loaders(2, **options)[rank]
        running = iter(loader)
        list(itertools.islice(running, min(stop, len(loader))))
        state = states_of([loader])[0]
        expected = [list(running), list(loader), list(loader)]
        again = loaders(2, **options)[rank]
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [list(again), list(again), list(again)] == expected
        assert len(again) == len(expected[1])


@pytest.mark.slow
def test_the_position_is_that_of_the_training_and_not_of_the_workers() -> None:
    (loader,) = loaders(1, num_workers=2, prefetch_factor=4)
    running = iter(loader)
    taken = [next(running), next(running)]
    assert loader.state_dict()["count"] == sum(map(len, taken)) == 6


@pytest.mark.slow
def test_persistent_workers_go_on_from_a_restored_position() -> None:
    (loader,) = loaders(1, num_workers=2, persistent_workers=True)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    expected = list(running)
    list(itertools.islice(iter(loader), 3))
    loader.load_state_dict(state)
    assert list(loader) == expected


def test_another_batch_size_goes_on_from_the_same_sample() -> None:
    first = loaders(2)
    seen = take(first, [4, 4])
    seen += take(resumed(states_of(first), 2, batch_size=5), [99, 99])
    assert Counter(seen) - Counter(range(LENGTH)) == Counter({seen[-1]: 1})


def test_samples_without_batches_are_counted_one_by_one() -> None:
    first = loaders(2, batch_size=None)
    seen = [sample for loader in first for sample in itertools.islice(iter(loader), 7)]
    seen += [sample for loader in resumed(states_of(first), 3, batch_size=None) for sample in loader]
    assert set(seen) == set(range(LENGTH))
    assert len(seen) == LENGTH


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_global_random_state_is_never_drawn_from(workers: int) -> None:
    before = holdfast.get_rng_state()
    (loader,) = loaders(1, num_workers=workers)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    after = holdfast.get_rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"] == random.getstate()
    assert numpy.array_equal(before["numpy"]["state"]["key"], after["numpy"]["state"]["key"])


# Another number of ranks


WORLDS = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 3), (3, 4, 1), (1, 2, 4, 3, 2), (4, 1, 4, 1)]


@pytest.mark.parametrize("ahead", [False, True], ids=["together", "one rank ahead"])
@pytest.mark.parametrize("worlds", WORLDS, ids=str)
def test_over_all_changes_of_an_epoch_every_sample_is_seen_once(worlds: tuple[int, ...], ahead: bool) -> None:
    for stop in (0, 1, 2):
        ranks, seen = loaders(worlds[0]), []
        for size in worlds[1:]:
            seen += take(ranks, [stop + (ahead and rank == 0) for rank in range(len(ranks))])
            ranks = resumed(states_of(ranks), size)
        assert len(set(seen)) == len(seen), "nothing twice before the last round"
        before_last = len(seen)
        rest = [[sample for batch in loader for sample in batch] for loader in ranks]
        assert len({len(share) for share in rest}) == 1, "every rank has as many"
        seen += itertools.chain(*rest)
        assert set(seen) == set(range(LENGTH))
        assert len(seen) - LENGTH == -(LENGTH - before_last) % worlds[-1], "what repeats fills up the last round"
        assert {loader.epoch for loader in ranks} == {1}


@pytest.mark.parametrize("worlds", WORLDS, ids=str)
def test_with_drop_last_no_sample_repeats_and_less_than_a_round_of_batches_is_dropped(worlds: tuple[int, ...]) -> None:
    ranks, seen = loaders(worlds[0], drop_last=True), []
    for size in worlds[1:]:
        seen += take(ranks, [1] * len(ranks))
        ranks = resumed(states_of(ranks), size, drop_last=True)
    rest = [list(loader) for loader in ranks]
    assert {len(batch) for batches in rest for batch in batches} == {3}
    assert len({len(batches) for batches in rest}) == 1
    seen += [sample for batches in rest for batch in batches for sample in batch]
    assert len(set(seen)) == len(seen)
    assert LENGTH - len(seen) < 3 * worlds[-1]


def test_the_order_of_an_epoch_does_not_depend_on_the_number_of_ranks() -> None:
    orders = []
    for size in (1, 2, 4):
        ranks = loaders(size, batch_size=1, length=60)
        rounds = zip(*(itertools.chain(*loader) for loader in ranks), strict=True)
        orders.append(list(itertools.chain(*rounds)))
    assert orders[0] == orders[1] == orders[2] != sorted(orders[0])


@pytest.mark.parametrize("drop_last", [False, True])
def test_after_the_last_batch_the_rest_of_the_epoch_is_empty_on_any_number_of_ranks(drop_last: bool) -> None:
    for size, then in itertools.permutations((1, 2, 4), 2):
        first = loaders(size, drop_last=drop_last)
        take(first, [len(loader) for loader in first])
        for loader in resumed(states_of(first), then, drop_last=drop_last, batch_size=1):
            assert (loader.epoch, list(loader), loader.epoch) == (0, [], 1)
            assert len(list(loader)) == len(loader)


def test_after_an_epoch_has_ended_the_next_one_begins_on_any_number_of_ranks() -> None:
    first = loaders(2)
    for loader in first:
        list(loader)
    then = resumed(states_of(first), 4)
    for loader, fresh in zip(then, loaders(4), strict=True):
        fresh.set_epoch(1)
        assert list(loader) == list(fresh)


def test_a_rank_that_has_begun_the_next_epoch_waits_for_none_that_has_got_its_last_batch() -> None:
    first = loaders(2)
    take(first[:1], [99])
    seen = take(first, [1, len(first[1])])
    ahead = seen[:3]
    then = resumed(states_of(first), 1)[0]
    assert then.epoch == 1
    rest = [sample for batch in then for sample in batch]
    assert sorted(ahead + rest) == list(range(LENGTH))


def test_ranks_in_different_epochs_are_refused_and_nothing_is_changed() -> None:
    first = loaders(2)
    take(first, [99, 3])
    (loader,) = loaders(1)
    before = loader.state_dict()
    for call in (loader.check_world_state, loader.load_world_state):
        with pytest.raises(StateMismatchError, match="different epochs, 0, 1"):
            call(states_of(first), 0, 1)
    assert loader.state_dict() == before


# What does not fit


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"length": 60}, "length was 101 and is 60 now"),
        ({"seed": 5}, "seed was 4 and is 5 now"),
        ({"shuffle": False}, "shuffle was True and is False now"),
    ],
    ids=["length", "seed", "shuffle"],
)
def test_a_position_in_other_data_is_refused(options: dict[str, Any], problem: str) -> None:
    states = states_of(loaders(2))
    same, other = loaders(2, **options)[0], loaders(3, **options)[0]
    with pytest.raises(StateMismatchError, match=problem):
        same.check_state_dict(states[0])
    with pytest.raises(StateMismatchError, match=problem):
        other.check_world_state(states, 0, 3)


@pytest.mark.parametrize(
    "damage",
    [
        {"deals": None},
        {"deals": [[]]},
        {"deals": [[1, -1]]},
        {"deals": [["1"]]},
        {"count": 52},
        {"count": -1},
        {"complete": 1},
        {"rank": 1},
        {"size": 3},
    ],
    ids=str,
)
def test_a_state_that_no_loader_has_is_refused(damage: dict[str, Any]) -> None:
    (state, _) = states_of(loaders(2))
    loader = loaders(2)[0]
    before = loader.state_dict()
    with pytest.raises(StateMismatchError):
        loader.load_state_dict(state | damage)
    assert loader.state_dict() == before


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "advice"),
    [
        (Stream(), {}, "ElasticShards"),
        ([1], {"sampler": [0]}, "shuffle= and seed="),
        ([1], {"batch_sampler": [[0]]}, "batch_size="),
        ([1], {"generator": torch.Generator()}, "seed="),
        ([1], {"in_order": False}, "no position"),
        ([1], {"batch_size": 0}, "at least 1"),
        ([1], {"seed": -1}, "at least 0"),
        ([1], {"seed": 1.5}, "at least 0"),
    ],
)
def test_what_it_cannot_be_built_with_is_refused(dataset: Any, options: dict[str, Any], advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        ElasticLoader(dataset, **options)


# Passes


def test_a_pass_that_was_left_is_begun_anew_and_the_next_epoch_is_another_one() -> None:
    (loader,) = loaders(1)
    first = next(iter(loader))
    whole = list(loader)
    assert whole[0] == first
    assert loader.epoch == 1
    assert list(loader) != whole
    loader.set_epoch(0)
    assert list(loader) == whole


def test_setting_the_epoch_that_it_is_in_keeps_the_position() -> None:
    (first,) = loaders(1)
    take([first], [4])
    then = resumed(states_of([first]), 1)[0]
    then.sampler.set_epoch(0)
    assert len(list(then)) == len(first) - 4


@pytest.mark.parametrize("epoch", [0, 2])
def test_another_epoch_after_a_restore_is_warned_of(epoch: int, caplog: pytest.LogCaptureFixture) -> None:
    (first,) = loaders(1)
    first.set_epoch(1)
    take([first], [4])
    then = resumed(states_of([first]), 1)[0]
    with caplog.at_level(logging.WARNING, "holdfast"):
        then.set_epoch(epoch)
    assert f"set_epoch({epoch}) gives up the restored position, 12 samples of this rank into epoch 1" in caplog.text
    assert len(list(then)) == len(then)


def test_the_next_epoch_after_a_restored_one_that_is_complete_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (first,) = loaders(1)
    take([first], [len(first)])
    then = resumed(states_of([first]), 1)[0]
    with caplog.at_level(logging.WARNING, "holdfast"):
        then.set_epoch(1)
        list(then)
        list(then)
    assert caplog.text == ""


def test_a_resumed_pass_that_is_left_and_begun_anew_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (first,) = loaders(1)
    take([first], [4])
    then = resumed(states_of([first]), 1)[0]
    next(iter(then))
    with caplog.at_level(logging.WARNING, "holdfast"):
        list(then)
    assert "samples will be seen twice" in caplog.text


def test_a_pass_does_not_go_on_after_another_epoch_was_set() -> None:
    (loader,) = loaders(1)
    running = iter(loader)
    next(running)
    loader.set_epoch(0)
    next(running)
    loader.sampler.set_epoch(1)
    before = loader.state_dict()
    with pytest.raises(UsageError, match="set to another epoch"):
        next(running)
    assert loader.state_dict() == before, "nothing is counted in the wrong epoch"
    list(loader)
    assert loader.epoch == 2


def test_the_next_epoch_may_be_set_in_the_loop_at_the_last_batch() -> None:
    (loader,) = loaders(1)
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            loader.set_epoch(1)
    assert loader.epoch == 1
    assert len(list(loader)) == len(loader)


def test_a_pass_that_has_ended_stays_ended_when_the_next_epoch_is_set() -> None:
    (loader,) = loaders(1)
    for epoch in range(2):
        running = iter(loader)
        list(running)
        loader.set_epoch(epoch + 1)
        assert list(running) == []


def test_a_pass_does_not_go_on_after_a_restore() -> None:
    (loader,) = loaders(1)
    running = iter(loader)
    next(running)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="begin a new pass"):
        next(running)
    ended = iter(loader)
    list(ended)
    loader.load_state_dict(loader.state_dict())
    assert list(ended) == []


class Flaky:
    """A dataset of which one sample cannot be read for a while."""

    def __init__(self) -> None:
        self.broken = True

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 4 and self.broken:
            raise OSError("sample 4 cannot be read")
        return index


def test_a_batch_that_raises_an_error_is_the_next_one_of_its_own_state() -> None:
    dataset = Flaky()
    loader: ElasticLoader[Any] = ElasticLoader(dataset, 2, collate_fn=list)  # type: ignore[arg-type]
    running = iter(loader)
    seen = [next(running), next(running)]
    with pytest.raises(OSError, match="sample 4"):
        next(running)
    with pytest.raises(UsageError, match="after an error in it"):
        next(running)
    dataset.broken = False
    loader.load_state_dict(loader.state_dict())
    assert [*seen, *loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
