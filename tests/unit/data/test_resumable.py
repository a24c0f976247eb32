"""A plain DataLoader with a state: every position of every kind of order, and what a training does to a loader."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import holdfast
from holdfast.data import ResumableLoader
from holdfast.errors import StateMismatchError, UsageError

SAMPLES = 11


class Rows(Dataset[int]):
    """Numbers, and how often one was loaded."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class NumpySampler:
    """A sampler of a user's, with a generator of NumPy that it draws from all the time."""

    def __init__(self) -> None:
        self.source = numpy.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(self.source.integers(SAMPLES))


class PythonSampler:
    """A sampler of a user's that shuffles with Python's global generator."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


class CountingSampler:
    """A sampler of a user's that counts its epochs itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class OwnGeneratorSampler:
    """A sampler of a user's that shuffles with a generator of Python's or of NumPy's older kind."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.source.shuffle(order)
        return iter(order)


class StatefulSampler:
    """A sampler of a user's with a state: how many epochs it began."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class PositionSampler:
    """A sampler of a user's whose state is a position: after it was loaded, the next epoch begins there."""

    def __init__(self) -> None:
        self.given = self.skipped = 0

    def __iter__(self) -> Iterator[int]:
        skipped, self.skipped = self.skipped, 0
        for self.given in range(skipped + 1, SAMPLES + 1):
            yield self.given - 1

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["given"]


def torchdata_sampler() -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(Rows(), num_replicas=2, rank=1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def built(**options: Any) -> Callable[[], DataLoader[Any]]:
    """A function that builds the same loader anew, with samplers and generators of its own."""

    def build() -> DataLoader[Any]:
        made = {name: one() if callable(one) else one for name, one in options.items()}
        return DataLoader(Rows(), **{"batch_size": 2, **made})

    return build


def batched(sampler: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: BatchSampler(sampler(), 3, True)


ORDERS = {
    "sequential": built(),
    "shuffled": built(shuffle=True),
    "the last batch dropped": built(shuffle=True, drop_last=True),
    "single samples": built(shuffle=True, batch_size=None),
    "generator of the loader": built(shuffle=True, generator=generator),
    "generator for the seed alone": built(generator=generator),
    "generator of the sampler": built(sampler=lambda: RandomSampler(range(SAMPLES), generator=generator())),
    "with replacement": built(sampler=lambda: RandomSampler(range(3), True, 70, generator())),
    "weighted": built(sampler=lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "subset": built(sampler=lambda: SubsetRandomSampler(range(0, SAMPLES, 2))),
    "batch sampler": lambda: DataLoader(Rows(), batch_sampler=batched(lambda: RandomSampler(range(SAMPLES)))()),
    "list of batches": lambda: DataLoader(Rows(), batch_sampler=[[0, 1], [2], [5, 4, 3]]),
    "distributed": built(sampler=lambda: DistributedSampler(range(SAMPLES), 2, 1)),  # type: ignore[arg-type]
    "sampler with NumPy's generator": built(sampler=NumpySampler),
    "sampler with Python's generator": built(sampler=PythonSampler),
    "sampler that counts its epochs": built(sampler=CountingSampler),
    "sampler with a Random": built(sampler=lambda: OwnGeneratorSampler(random.Random(3))),
    "sampler with a RandomState": built(sampler=lambda: OwnGeneratorSampler(numpy.random.RandomState(3))),
    "sampler with a state": built(sampler=StatefulSampler),
    "sampler with a state in a batch sampler": lambda: DataLoader(Rows(), batch_sampler=batched(StatefulSampler)()),
    "sampler whose state is a position": built(sampler=PositionSampler),
    "torchdata's sampler, whose state is a position": built(sampler=torchdata_sampler),
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def draws(loader: Any) -> tuple[Any, ...]:
    """Draw from the global generators and from the loader's own, as a training step may."""
    own = float(torch.rand((), generator=loader.generator)) if loader.generator is not None else None
    return float(torch.rand(())), random.random(), float(numpy.random.rand()), own


def rows(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epoch(loader: Any, number: int) -> list[Any]:
    """One epoch of a training: each batch, and what the step drew."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(number)
    return [(rows(batch), draws(loader)) for batch in loader]


@pytest.mark.parametrize("order", ORDERS)
def test_without_a_restore_batches_and_draws_are_those_of_the_plain_loader(order: str) -> None:
    seed(1)
    plain = ORDERS[order]()
    expected = [epoch(plain, number) for number in range(3)]
    seed(1)
    loader = ResumableLoader(ORDERS[order]())
    assert [epoch(loader, number) for number in range(3)] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_loader_resumes_exactly_at_every_position(order: str) -> None:
    """The state and the random state are taken after each batch of two epochs; from each of them the run goes on."""
    seed(1)
    first = ResumableLoader(ORDERS[order]())
    seen: list[Any] = []
    saved = [(0, 0, pickle.dumps((first.state_dict(), holdfast.get_rng_state())))]
    for number in range(4):
        if isinstance(first.sampler, DistributedSampler):
            first.sampler.set_epoch(number)
        for batch in first:
            seen.append((rows(batch), draws(first)))
            saved.append((number, len(seen), pickle.dumps((first.state_dict(), holdfast.get_rng_state()))))
        saved.append((number + 1, len(seen), pickle.dumps((first.state_dict(), holdfast.get_rng_state()))))
    for number, position, state in saved:
        seed(31337)
        second = ResumableLoader(ORDERS[order]())
        own, everything = pickle.loads(state)
        second.load_state_dict(own)
        holdfast.set_rng_state(everything)
        resumed = [one for each in range(number, 4) for one in epoch(second, each)]
        assert resumed == seen[position:], f"after batch {position} in epoch {number}"


def resumed(loader: ResumableLoader, other: DataLoader[Any] | None = None) -> ResumableLoader:
    """A new loader with the state of another one."""
    second = ResumableLoader(other if other is not None else DataLoader(Rows(), batch_size=2, shuffle=True))
    second.load_state_dict(copy.deepcopy(loader.state_dict()))
    return second


def stopped(batches: int, loader: DataLoader[Any] | None = None) -> tuple[ResumableLoader, list[Any]]:
    """A loader after some batches, and the rest of its epoch."""
    first = ResumableLoader(loader if loader is not None else DataLoader(Rows(), batch_size=2, shuffle=True))
    iterator = iter(first)
    for _ in range(batches):
        next(iterator)
    rest = copy.deepcopy(first)
    return first, [rows(batch) for batch in rest]


def test_skipped_samples_are_not_loaded() -> None:
    first, rest = stopped(3)
    data = Rows()
    second = resumed(first, DataLoader(data, batch_size=2, shuffle=True))
    assert [rows(batch) for batch in second] == rest
    assert sorted(data.loaded) == sorted(index for batch in rest for index in batch)


def test_the_users_loader_is_not_changed() -> None:
    plain = DataLoader(Rows(), batch_size=2, shuffle=True)
    before = dict(vars(plain))
    list(resumed(stopped(2)[0], plain))
    assert vars(plain) == before


def test_length_and_attributes_are_those_of_the_loader() -> None:
    plain = DataLoader(Rows(), batch_size=2, shuffle=True)
    loader = ResumableLoader(plain)
    assert (len(loader), loader.dataset, loader.sampler) == (6, plain.dataset, plain.sampler)
    assert repr(loader) == "ResumableLoader(DataLoader)"
    with pytest.raises(AttributeError, match="colour"):
        _ = loader.colour


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_has_the_position(way: Callable[[Any], Any]) -> None:
    first, rest = stopped(2)
    assert [rows(batch) for batch in way(first)] == rest
    assert [rows(batch) for batch in way(resumed(first))] == rest


def test_a_loader_that_was_not_asked_for_a_batch_since_keeps_its_position() -> None:
    first, rest = stopped(4)
    again = resumed(resumed(resumed(first)))
    assert [rows(batch) for batch in again] == rest


def test_a_state_is_not_changed_by_what_the_loader_does_later() -> None:
    first = ResumableLoader(DataLoader(Rows(), batch_size=2, shuffle=True))
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    kept = pickle.dumps(state)
    list(iterator)
    list(first)
    assert pickle.dumps(state) == kept


def test_a_loop_that_breaks_out_of_an_epoch_begins_a_new_one() -> None:
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))
    for _ in loader:
        break
    assert rows(next(iter(loader))) == [0, 1]


def test_an_epoch_that_was_left_is_gone_on_with_after_a_restore_unless_it_was_ended() -> None:
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))
    for _ in loader:
        break
    plain = DataLoader(Rows(), batch_size=2)
    assert rows(next(iter(resumed(loader, plain)))) == [2, 3]
    loader.end_epoch()
    assert rows(next(iter(resumed(loader, plain)))) == [0, 1]
    second = resumed(stopped(1, DataLoader(Rows(), batch_size=2))[0], plain)
    second.end_epoch()
    assert rows(next(iter(second))) == [0, 1]


def test_a_loop_over_an_epoch_that_is_ended_gives_no_batch_that_is_not_counted() -> None:
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))
    seen = []
    for batch in loader:
        seen.append(rows(batch))
        if len(seen) == 2:
            loader.end_epoch()
    assert seen == [[0, 1], [2, 3]]
    assert rows(next(iter(loader))) == [0, 1]


def test_the_state_is_that_of_the_iterator_that_was_built_last_and_an_earlier_one_does_not_go_on() -> None:
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))
    one, other = iter(loader), iter(loader)
    next(other)
    for _ in range(2):
        with pytest.raises(UsageError, match="after another pass was begun"):
            next(one)
    assert loader.state_dict()["batches"] == 1
    assert rows(next(iter(resumed(loader, DataLoader(Rows(), batch_size=2))))) == [2, 3]


def test_an_iterator_does_not_go_on_after_a_restore() -> None:
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))
    running = iter(loader)
    next(running)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="a pass over a ResumableLoader goes on after the loader was restored"):
        next(running)
    assert rows(next(iter(loader))) == [2, 3]


def test_an_iterator_that_has_ended_stays_ended_in_later_epochs() -> None:
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))
    ended = iter(loader)
    list(ended)
    next(iter(loader))
    assert list(ended) == []


def test_a_resumed_epoch_that_is_left_for_a_new_one_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    second = resumed(stopped(2)[0])
    next(iter(second))
    with caplog.at_level(logging.WARNING, "holdfast"):
        list(second)
        assert "was left after 3 batches of its epoch, and a new epoch begins" in caplog.text
        caplog.clear()
        next(iter(second))
        list(second)
    assert caplog.text == "", "once"


def test_a_resumed_epoch_that_is_over_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        for batches, taken in [(0, 1), (2, 4), (2, 99)]:
            second = resumed(stopped(batches)[0])
            for _ in zip(range(taken), second, strict=False):
                pass
            list(second)
        second = resumed(stopped(2)[0])
        next(iter(second))
        second.end_epoch()
        list(second)
        second = resumed(stopped(2)[0])
        next(iter(second))
        list(resumed(second))
    assert caplog.text == ""


class Broken(Rows):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("sample 3 is damaged")
        return index


def test_a_batch_that_could_not_be_loaded_counts_as_used() -> None:
    loader = ResumableLoader(DataLoader(Broken(), batch_size=2))
    iterator = iter(loader)
    assert rows(next(iterator)) == [0, 1]
    with pytest.raises(ValueError, match="damaged"):
        next(iterator)
    assert rows(next(iter(resumed(loader, DataLoader(Broken(), batch_size=2))))) == [4, 5]
    assert rows(next(iterator)) == [4, 5]


# The sampler's epoch


def of_rank(epoch: int) -> tuple[DistributedSampler[Any], DataLoader[Any]]:
    sampler: DistributedSampler[Any] = DistributedSampler(Rows(), 2, 0)
    sampler.set_epoch(epoch)
    return sampler, DataLoader(Rows(), batch_size=2, sampler=sampler)


def test_the_epoch_of_the_sampler_is_restored_where_nobody_sets_it() -> None:
    first, rest = stopped(1, of_rank(3)[1])
    sampler, plain = of_rank(0)
    second = resumed(first, plain)
    assert sampler.epoch == 3
    assert [rows(batch) for batch in second] == rest


def test_another_epoch_in_the_middle_of_one_is_an_error_each_time() -> None:
    first, rest = stopped(1, of_rank(3)[1])
    sampler, plain = of_rank(0)
    second = resumed(first, plain)
    sampler.set_epoch(4)
    for _ in range(2):
        with pytest.raises(StateMismatchError, match="epoch 3, and the sampler was set to epoch 4"):
            iter(second)
    sampler.set_epoch(3)
    assert [rows(batch) for batch in second] == rest


def test_another_epoch_in_the_middle_of_one_is_begun_once_the_old_one_is_ended() -> None:
    sampler, plain = of_rank(0)
    second = resumed(stopped(1, of_rank(3)[1])[0], plain)
    sampler.set_epoch(4)
    second.end_epoch()
    assert [rows(batch) for batch in second] == [rows(batch) for batch in of_rank(4)[1]]


def test_after_the_last_batch_another_epoch_is_begun() -> None:
    first, rest = stopped(3, of_rank(3)[1])
    assert rest == []
    sampler, plain = of_rank(0)
    second = resumed(first, plain)
    sampler.set_epoch(4)
    assert [rows(batch) for batch in second] == [rows(batch) for batch in of_rank(4)[1]]


# The sampler's own state and its seed


def over(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=2, sampler=sampler)


def test_a_sampler_with_another_seed_is_refused() -> None:
    first = stopped(0, of_rank(0)[1])[0]
    other: DistributedSampler[Any] = DistributedSampler(Rows(), 2, 0, seed=4)
    with pytest.raises(StateMismatchError, match=r"sampler\.seed was 0 and is 4 now"):
        resumed(first, over(other))


def test_a_sampler_with_another_initial_seed_is_refused() -> None:
    def seeded(number: int) -> DataLoader[Any]:
        sampler = PythonSampler()
        sampler.initial_seed = number  # type: ignore[attr-defined]
        return over(sampler)

    first = stopped(0, seeded(1))[0]
    resumed(first, seeded(1))
    with pytest.raises(StateMismatchError, match=r"sampler\.initial_seed was 1 and is 2 now"):
        resumed(first, seeded(2))


def test_a_sampler_that_does_not_take_its_state_is_an_error() -> None:
    first = stopped(1, over(StatefulSampler()))[0]
    with pytest.raises(StateMismatchError, match="load_state_dict of the sampler PositionSampler raised KeyError"):
        resumed(first, over(PositionSampler()))


def test_a_sampler_that_had_a_state_and_has_none_now_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first = stopped(1, over(StatefulSampler()))[0]
    with caplog.at_level(logging.WARNING, "holdfast"):
        resumed(first, over(PythonSampler()))
    assert "the sampler BatchSampler.sampler was saved with a state_dict() and has none now" in caplog.text


def test_a_generator_of_a_sampler_that_is_another_one_now_is_refused() -> None:
    first = stopped(1, over(OwnGeneratorSampler(random.Random(3))))[0]
    second = OwnGeneratorSampler(numpy.random.RandomState(5))
    with pytest.raises(StateMismatchError, match="no state of a RandomState"):
        resumed(first, over(second))


def test_a_sampler_with_the_generators_of_the_modules_leaves_them_to_the_random_state() -> None:
    for source in (numpy.random.mtrand._rand, random._inst, random.SystemRandom()):  # type: ignore[attr-defined]
        assert ResumableLoader(over(OwnGeneratorSampler(source))).state_dict()["generators"] == {}


# An order that is not the same


class LazySampler:
    """A sampler of a user's that draws each index from the global generator when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)


@pytest.mark.parametrize(
    ("before", "now", "match"),
    [
        (built(shuffle=True), built(), "first 4 differ"),
        (built(), built(batch_size=3), "first 4 differ"),
        (built(sampler=LazySampler), built(sampler=LazySampler), "first 4 differ"),
    ],
)
def test_an_order_that_cannot_be_rebuilt_is_an_error_each_time(
    before: Callable[[], DataLoader[Any]], now: Callable[[], DataLoader[Any]], match: str
) -> None:
    first = ResumableLoader(before())
    iterator = iter(first)
    for _ in range(4):
        next(iterator)
        draws(first)
    second = resumed(first, now())
    held = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(StateMismatchError, match=match):
            iter(second)
    assert torch.equal(torch.get_rng_state(), held)
    second.end_epoch()
    assert len(list(second)) > 0


@pytest.mark.parametrize("batches", [0, 2])
@pytest.mark.parametrize("count", [SAMPLES - 1, SAMPLES + 3])
def test_a_dataset_of_another_length_is_refused(count: int, batches: int) -> None:
    first = stopped(batches, DataLoader(Rows(), batch_size=2))[0]
    with pytest.raises(StateMismatchError, match=f"the dataset had {SAMPLES} samples and has {count} now"):
        resumed(first, DataLoader(Rows(count), batch_size=2))


def test_a_sampler_of_another_length_is_refused() -> None:
    def over(count: int) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=2, sampler=range(count))

    with pytest.raises(StateMismatchError, match="the sampler had 8 samples and has 6 now"):
        resumed(stopped(2, over(8))[0], over(6))


class GrowingSampler(CountingSampler):
    """A sampler of a user's that gives more in every epoch."""

    def __len__(self) -> int:
        return 4 + self.epoch

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(len(self)))


def test_the_length_of_a_sampler_is_that_of_the_epoch() -> None:
    first = ResumableLoader(DataLoader(Rows(), sampler=GrowingSampler()))
    list(first)
    iterator = iter(first)
    next(iterator)
    second = resumed(first, DataLoader(Rows(), sampler=GrowingSampler()))
    assert [rows(batch) for batch in second] == [rows(batch) for batch in iterator] == [[1], [2], [3], [4], [5]]


def test_a_state_of_an_earlier_version_has_no_lengths_seeds_and_states_of_samplers_and_is_taken_up() -> None:
    first, rest = stopped(2)
    state = first.state_dict()
    del state["lengths"], state["seeds"], state["samplers"], state["start"]["samplers"]
    second = ResumableLoader(DataLoader(Rows(), batch_size=2, shuffle=True))
    second.load_state_dict(state)
    assert [rows(batch) for batch in second] == rest


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": -1},
        {"batches": "2"},
        {"begun": 1},
        {"digest": None},
        {"digest": "zz"},
        {"drawn": None},
        {"epochs": []},
        {"generators": None},
        {"lengths": 7},
        {"samplers": 7},
        {"seeds": 7},
        {"seed": 3},
        {"start": {}},
        {"start": {"random": {}}},
        {"start": {"random": {}, "generators": {}, "epochs": {}}},
        {"start": []},
        {"workers_running": None},
        {"generators": {"generator": {"state": 4}}},
    ],
)
def test_a_damaged_state_is_refused_before_anything_changes(wrong: dict[str, Any]) -> None:
    plain = DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator())
    loader, rest = stopped(2, plain)
    for take_up in (loader.check_state_dict, loader.load_state_dict):
        with pytest.raises(StateMismatchError):
            take_up({**loader.state_dict(), **wrong})
    again = resumed(loader, DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator()))
    assert [rows(batch) for batch in again] == rest


def test_a_state_of_something_else_is_refused() -> None:
    loader = ResumableLoader(DataLoader(Rows()))
    with pytest.raises(StateMismatchError, match="no state of a ResumableLoader"):
        loader.check_state_dict({"_num_yielded": 3})
    with pytest.raises(StateMismatchError, match="no state of a ResumableLoader"):
        loader.load_state_dict({"_num_yielded": 3})
    with pytest.raises(StateMismatchError, match="no state of a ResumableLoader"):
        loader.load_state_dict([])  # type: ignore[arg-type]


def test_generators_that_were_saved_and_are_missing_now_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first, _ = stopped(1, DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator()))
    with caplog.at_level(logging.WARNING, "holdfast"):
        resumed(first)
    assert "was saved with the generators ['generator'] and has none now" in caplog.text


# What cannot be wrapped


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class LateLoader(DataLoader[Any]):
    """Builds its iterator when the first batch is asked for."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_what_cannot_be_resumed_is_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    for given, match in [
        (StatefulDataLoader(Rows()), "has a state already"),
        (DataLoader(Stream()), "IterableDataset"),
        (Rows(), "not Rows"),
        (ResumableLoader(DataLoader(Rows())), "not ResumableLoader"),
        (DataLoader(Rows(), num_workers=1, in_order=False), "in_order=False"),
    ]:
        with pytest.raises(UsageError, match=match):
            ResumableLoader(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="LateLoader builds its iterator only when"):
        iter(ResumableLoader(LateLoader(Rows())))


@pytest.mark.parametrize(
    ("loader", "match"),
    [(DataLoader(Rows()), "holdfast.data.ResumableLoader"), (DataLoader(Stream()), "StatefulDataLoader, with a")],
)
def test_a_plain_loader_as_a_component_is_refused_with_advice(
    loader: DataLoader[Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=match):
        holdfast.CheckpointManager(tmp_path, {"loader": loader})
    with pytest.raises(UsageError, match=match):
        holdfast.CheckpointManager(tmp_path, {"loader": holdfast.PerRank(loader)})


# Workers


class Seeds(Rows):
    """Gives each sample with the seed that all workers of the epoch share."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        worker = torch.utils.data.get_worker_info()
        return index, (worker.seed - worker.id if worker is not None else 0)


def with_workers(workers: int, **options: Any) -> DataLoader[Any]:
    if workers:
        options |= {"num_workers": workers, "multiprocessing_context": "fork"}
    return DataLoader(Seeds(), batch_size=2, shuffle=True, generator=generator(), **options)


def indices(batches: Iterator[Any]) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (2, 1)])
def test_the_number_of_workers_may_change(before: int, now: int) -> None:
    first = ResumableLoader(with_workers(before, **({"prefetch_factor": 3} if before else {})))
    iterator = iter(first)
    next(iterator)
    second = resumed(first, with_workers(now))
    expected = indices(iterator), indices(iter(first)), indices(iter(first))
    assert (indices(iter(second)), indices(iter(second)), indices(iter(second))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_get_the_seed_of_the_epoch_that_is_resumed(persistent: bool) -> None:
    first = ResumableLoader(with_workers(2, persistent_workers=persistent))
    list(first)
    iterator = iter(first)
    next(iterator)
    second = resumed(first, with_workers(2, persistent_workers=persistent))
    expected = [[one.tolist() for one in batch] for batch in iterator]
    assert [[one.tolist() for one in batch] for batch in second] == expected
    first._copy = second._copy = None


@pytest.mark.slow
def test_workers_end_when_the_training_leaves_the_loop() -> None:
    loader = ResumableLoader(with_workers(2))
    for _ in loader:
        assert len(multiprocessing.active_children()) >= 2
        break
    assert multiprocessing.active_children() == []
