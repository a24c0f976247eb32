"""Shards are dealt to any number of ranks, and go on from where they were on whichever rank gets them."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from holdfast.data import ElasticShards, ShardReader
from holdfast.errors import StateMismatchError, UsageError

# A shard is named after how many samples it has.
SIZES = [5, 0, 9, 1, 14, 3, 7, 2, 11, 6, 4, 8]
SHARDS = [f"{number}/{size}" for number, size in enumerate(SIZES)]
EVERY = [(number, sample) for number, size in enumerate(SIZES) for sample in range(size)]


def read(shard: str, position: int) -> Iterator[tuple[int, int]]:
    number, size = map(int, shard.split("/"))
    for sample in range(position, size):
        yield number, sample


def as_list(samples: Sequence[Any]) -> list[Any]:
    return list(samples)


def loaders(size: int, *, batch_size: int | None = 3, **options: Any) -> list[ElasticShards[Any]]:
    given = {"shuffle": True, "seed": 4, "collate_fn": as_list, **options}
    shards = given.pop("shards", SHARDS)
    return [ElasticShards(shards, read, batch_size, **given, rank=rank, size=size) for rank in range(size)]


def states_of(ranks: Sequence[ElasticShards[Any]]) -> list[dict[str, Any]]:
    """The states as they come out of a checkpoint."""
    states: list[dict[str, Any]] = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
    return states


def resumed(states: Sequence[dict[str, Any]], size: int, **options: Any) -> list[ElasticShards[Any]]:
    ranks = loaders(size, **options)
    for rank, loader in enumerate(ranks):
        if size == len(states):
            loader.load_state_dict(states[rank])
        else:
            loader.check_world_state(states, rank, size)
            loader.load_world_state(states, rank, size)
    return ranks


def take(ranks: Sequence[ElasticShards[Any]], batches: Sequence[int]) -> list[Any]:
    return [
        sample
        for loader, count in zip(ranks, batches, strict=True)
        for batch in itertools.islice(iter(loader), count)
        for sample in batch
    ]


def test_an_epoch_has_every_sample_once_and_each_epoch_another_order() -> None:
    reader: ShardReader[tuple[int, int]] = read
    loader: ElasticShards[Any] = ElasticShards(SHARDS, reader, 3, shuffle=True, collate_fn=as_list)
    epochs = [list(loader), list(loader)]
    for batches in epochs:
        assert sorted(itertools.chain(*batches)) == EVERY
        assert {len(batch) for batch in batches[:-1]} == {3}
    assert epochs[0] != epochs[1]
    loader.set_epoch(0)
    assert list(loader) == epochs[0]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_on_the_same_number_of_ranks_every_batch_is_the_one_that_would_have_come(workers: int) -> None:
    whole = list(loaders(2, num_workers=workers)[0])
    for stop in range(len(whole) + 1) if not workers else (1, 4, len(whole) - 1):
        loader = loaders(2, num_workers=workers)[0]
        running = iter(loader)
        assert list(itertools.islice(running, stop)) == whole[:stop]
        (state,) = states_of([loader])
        expected = [list(running), next(iter(loader))]
        again = loaders(2, num_workers=workers)[0]
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [list(again), next(iter(again))] == expected


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 4), (4, 3), (1, 2, 4, 3, 1), (4, 1, 4)], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["together", "one rank ahead"])
def test_over_all_changes_of_an_epoch_every_sample_is_seen_once(worlds: tuple[int, ...], ahead: bool) -> None:
    for stop in range(4):
        ranks, seen = loaders(worlds[0]), []
        for size in worlds[1:]:
            # Ranks that have ended the epoch begin no other.
            steps = [stop + (ahead and rank == 0) if loader.epoch == 0 else 0 for rank, loader in enumerate(ranks)]
            seen += take(ranks, steps)
            ranks = resumed(states_of(ranks), size)
        for loader in ranks:
            if loader.epoch == 0:
                seen += itertools.chain(*loader)
        assert Counter(seen) == Counter(EVERY)


@pytest.mark.slow
def test_workers_that_have_read_ahead_lose_and_repeat_nothing_on_another_number_of_ranks() -> None:
    ranks = loaders(2, num_workers=2, prefetch_factor=4)
    seen = take(ranks, [3, 4])
    for loader in resumed(states_of(ranks), 3, num_workers=1):
        seen += itertools.chain(*loader)
    assert Counter(seen) == Counter(EVERY)


def test_single_samples_and_an_incomplete_batch_that_is_dropped() -> None:
    (single,) = loaders(1, batch_size=None)
    assert sorted(map(tuple, single)) == EVERY
    (full,) = loaders(1, batch_size=4, drop_last=True)
    batches = list(full)
    assert {len(batch) for batch in batches} == {4}
    assert len(EVERY) - 4 * len(batches) == len(EVERY) % 4


def test_batches_are_collated_as_a_data_loader_does() -> None:
    loader: ElasticShards[Any] = ElasticShards(["0/4"], read, 2)
    numbers, samples = next(iter(loader))
    assert torch.equal(numbers, torch.tensor([0, 0]))
    assert torch.equal(samples, torch.tensor([0, 1]))


@pytest.mark.slow
def test_another_number_of_workers_is_warned_of_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    (first,) = loaders(1, num_workers=2)
    seen = take([first], [4])
    with caplog.at_level(logging.WARNING, "holdfast"):
        (then,) = resumed(states_of([first]), 1, num_workers=0)
    assert "read by 2 workers and is by 1 now" in caplog.text
    assert Counter(seen + list(itertools.chain(*then))) == Counter(EVERY)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_global_random_state_is_never_drawn_from(workers: int) -> None:
    before = torch.get_rng_state()
    (loader,) = loaders(1, num_workers=workers)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_that_has_ended_the_epoch_has_nothing_left_of_it() -> None:
    first = loaders(2)
    seen = take(first, [99, 2])
    assert [loader.epoch for loader in first] == [1, 0]
    (then,) = resumed(states_of(first), 1)
    assert then.epoch == 0
    assert Counter(seen + list(itertools.chain(*then))) == Counter(EVERY)


def test_ranks_in_different_epochs_are_refused_and_nothing_is_changed() -> None:
    first = loaders(2)
    take(first, [99, 2])
    take(first[:1], [1])
    (loader,) = loaders(1)
    before = loader.state_dict()
    for call in (loader.check_world_state, loader.load_world_state):
        with pytest.raises(StateMismatchError, match="different epochs, 0, 1"):
            call(states_of(first), 0, 1)
    assert loader.state_dict() == before


def test_ranks_without_a_shard_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    first = loaders(1)
    seen = take(first, [22])
    with caplog.at_level(logging.WARNING, "holdfast"):
        ranks = resumed(states_of(first), 3)
    assert "shards left for 3 ranks" in caplog.text
    for loader in ranks:
        seen += itertools.chain(*loader)
    assert Counter(seen) == Counter(EVERY)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shards": SHARDS[:-1]}, "shards was 12 and is 11 now"),
        ({"shards": [*SHARDS[:-1], "12/8"]}, "names was"),
        ({"seed": 5}, "seed was 4 and is 5 now"),
        ({"shuffle": False}, "shuffle was True and is False now"),
    ],
    ids=["number", "names", "seed", "shuffle"],
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
        {"lanes": None},
        {"lanes": []},
        {"lanes": [3]},
        {"lanes": [[[0]]]},
        {"lanes": [[[0, -1]]]},
        {"lanes": [[[12, 0]]]},
        {"turn": 1},
        {"begun": None},
        {"rank": 1},
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


def test_two_ranks_with_the_same_shard_are_refused() -> None:
    states = states_of(loaders(2))
    states[1]["lanes"] = states[0]["lanes"]
    with pytest.raises(StateMismatchError, match="the same shard"):
        loaders(1)[0].check_world_state(states, 0, 1)


@pytest.mark.parametrize(
    ("shards", "options", "advice"),
    [
        ("0/1", {}, "a list of names"),
        ([1, 2], {}, "a list of texts"),
        (["a", "a"], {}, "name each once"),
        (["a"], {"rank": 0, "size": 2}, "at least 2 shards"),
        (["a"], {"num_workers": 2}, "at least 2 shards"),
        (["a"], {"sampler": [0]}, "shuffle= and seed="),
        (["a"], {"in_order": False}, "in turns"),
        (["a"], {"batch_size": 0}, "at least 1"),
        (["a"], {"num_workers": -1}, "at least 0"),
    ],
)
def test_what_it_cannot_be_built_with_is_refused(shards: Any, options: dict[str, Any], advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        ElasticShards(shards, read, **options)


def test_an_option_that_no_data_loader_has_is_refused_when_it_is_built() -> None:
    with pytest.raises(TypeError, match="prefetch"):
        ElasticShards(["a"], read, prefetch=3)


def test_what_gives_up_a_restored_position_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (first,) = loaders(1)
    take([first], [4])
    with caplog.at_level(logging.WARNING, "holdfast"):
        (then,) = resumed(states_of([first]), 1)
        then.set_epoch(0)
        assert caplog.text == ""
        then.set_epoch(1)
        assert "gives up the restored position in epoch 0" in caplog.text
        (then,) = resumed(states_of([first]), 1)
        next(iter(then))
        assert sorted(itertools.chain(*then)) == EVERY
    assert "samples will be seen twice; use one iterator" in caplog.text


def test_a_pass_does_not_go_on_after_another_epoch_was_set() -> None:
    (loader,) = loaders(1)
    running = iter(loader)
    next(running)
    loader.set_epoch(0)
    next(running)
    loader.set_epoch(1)
    before = loader.state_dict()
    with pytest.raises(UsageError, match="set to another epoch"):
        next(running)
    assert loader.state_dict() == before, "nothing is counted in the wrong epoch"
    list(loader)
    assert loader.epoch == 2


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


def read_strangely(shard: str, position: int) -> Iterable[Any]:
    raise OSError(f"{shard} cannot be read")


def test_an_error_of_the_reader_reaches_the_training_and_moves_nothing() -> None:
    loader: ElasticShards[Any] = ElasticShards(["a"], read_strangely)
    before = loader.state_dict()
    running = iter(loader)
    with pytest.raises(OSError, match="a cannot be read"):
        next(running)
    assert loader.state_dict() == before
    with pytest.raises(UsageError, match="after an error in it"):
        next(running)
