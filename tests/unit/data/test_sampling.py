"""Samplers without a state, in torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import ResumableSampler
from holdfast.errors import StateMismatchError, UsageError

SAMPLES = 9


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


class Shuffled:
    """A sampler of a user's with a generator of its own, of Python's or of NumPy's older kind."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.source.shuffle(order)
        return iter(order)


class Counted:
    """A sampler of a user's with a state that is no position: how many epochs it began."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(range(SAMPLES)),
    "random with a generator": lambda: RandomSampler(range(SAMPLES), generator=generator()),
    "with replacement": lambda: RandomSampler(range(3), True, 70, generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
    "subset": lambda: SubsetRandomSampler(range(0, SAMPLES, 2), generator()),
    "distributed": lambda: DistributedSampler(range(SAMPLES), 2, 1),  # type: ignore[arg-type]
    "Random": lambda: Shuffled(random.Random(3)),
    "RandomState": lambda: Shuffled(numpy.random.RandomState(3)),
    "state of its own": Counted,
}


def loader_of(sampler: Any, way: str) -> StatefulDataLoader[int]:
    if way == "sampler":
        return StatefulDataLoader(list(range(SAMPLES)), batch_size=2, sampler=ResumableSampler(sampler))
    return StatefulDataLoader(list(range(SAMPLES)), batch_sampler=ResumableSampler(BatchSampler(sampler, 2, False)))


@pytest.mark.parametrize("way", ["sampler", "batch sampler"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_without_state_resumes_exactly_at_every_position(name: str, way: str) -> None:
    torch.manual_seed(1)
    first = loader_of(SAMPLERS[name](), way)
    seen, saved = [], []
    for _ in range(3):
        for batch in first:
            seen.append((batch.tolist(), float(torch.rand(()))))
            state = holdfast.build_train_state({"loader": first, "rng": holdfast.RNGState()})
            saved.append((len(seen), pickle.dumps(state)))
    for position, state in saved:
        torch.manual_seed(31337)
        second = loader_of(SAMPLERS[name](), way)
        holdfast.restore_train_state({"loader": second, "rng": holdfast.RNGState()}, pickle.loads(state))
        resumed: list[Any] = []
        while len(resumed) < len(seen) - position:
            resumed += [(batch.tolist(), float(torch.rand(()))) for batch in second]
        assert resumed == seen[position:], f"after batch {position}"


def test_length_and_attributes_are_those_of_the_sampler() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(range(SAMPLES), 2, 1)  # type: ignore[arg-type]
    wrapped = ResumableSampler(sampler)
    wrapped.set_epoch(3)
    assert (len(wrapped), sampler.epoch, wrapped.epoch) == (5, 3, 3)
    assert list(copy.deepcopy(wrapped)) == list(pickle.loads(pickle.dumps(wrapped))) == list(sampler)
    assert repr(wrapped) == "ResumableSampler(DistributedSampler)"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (ResumableSampler([1, 2]), "cannot wrap a ResumableSampler"),
        (iter([1, 2]), "iterated anew in every epoch"),
        (3, "iterated anew in every epoch"),
    ],
)
def test_what_is_no_sampler_is_refused(given: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ResumableSampler(given)


def test_another_order_and_another_state_are_refused() -> None:
    indices = iter(ResumableSampler([[1, 2], [3]]))
    next(indices)
    with pytest.raises(StateMismatchError, match="first 1 differ"):
        iter(ResumableSampler([[2, 1], [3]])).load_state_dict(indices.state_dict())
    with pytest.raises(StateMismatchError, match="1 were used, and now there are 0"):
        iter(ResumableSampler([])).load_state_dict(indices.state_dict())
    list(indices)
    with pytest.raises(StateMismatchError, match="only 2 were there"):
        iter(ResumableSampler([[1, 2], [3], [4]])).load_state_dict(indices.state_dict())
    with pytest.raises(StateMismatchError, match="no state of a ResumableSampler"):
        iter(ResumableSampler([])).load_state_dict({"yielded": 3})


class Key:
    """An index that is no number and has no text of its own."""


@pytest.mark.parametrize(
    "index", [3, "a", b"a", None, 0.5, (1, [2]), {"a": 1}, torch.tensor([1, 2]), numpy.int64(3), numpy.arange(3), Key()]
)
def test_an_index_of_any_type_can_be_gone_past(index: Any) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[Any]:
            return iter([copy.deepcopy(index), "last"])

    indices = iter(ResumableSampler(Sampler()))
    next(indices)
    again = iter(ResumableSampler(Sampler()))
    again.load_state_dict(indices.state_dict())
    assert list(again) == ["last"]
