"""What is done about the random state when a loader is restored, by what the loader is."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import holdfast
from holdfast.data import ResumableSampler
from holdfast.errors import StateMismatchError
from holdfast.state.loaders import find_generators, samplers_of, shield_random_state


class Counter:
    """A component that is no loader."""

    next_iter_state = {"position": 3}

    def _get_iterator(self) -> Any:
        return torch.rand(())


class StatefulDataLoader:
    """One of a version that does not build its iterators as the known ones do."""


class NextStatefulDataLoader(Counter, StatefulDataLoader):
    """One that does, and is a subclass."""


def test_a_component_that_is_no_loader_is_left_alone() -> None:
    component = Counter()
    shield_random_state(component)
    assert vars(component) == {}


def test_a_loader_of_an_unknown_version_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        shield_random_state(StatefulDataLoader())
    assert "may draw random numbers" in caplog.text


def test_a_loader_that_took_no_state_up_draws_as_usual() -> None:
    loader = NextStatefulDataLoader()
    loader.next_iter_state = None  # type: ignore[assignment]
    shield_random_state(loader)
    before = torch.get_rng_state()
    loader._get_iterator()
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_first_iterator_of_a_restored_loader_alone_leaves_the_random_state() -> None:
    loader = NextStatefulDataLoader()
    shield_random_state(loader)
    before = torch.get_rng_state()
    loader._get_iterator()
    assert torch.equal(torch.get_rng_state(), before)
    loader._get_iterator()
    assert not torch.equal(torch.get_rng_state(), before)


class Drawing:
    """A component that draws random numbers when it is asked for its state."""

    def __init__(self) -> None:
        self.noise = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        random.random()
        numpy.random.rand()
        return {"noise": torch.rand(3) * 0.0 + self.noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise = state["noise"]


def test_to_fit_a_component_into_a_checkpoint_leaves_the_random_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with holdfast.CheckpointManager(tmp_path, {"model": model, "drawing": Drawing()}, mode="sync") as manager:
        manager.save(1)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, mode="sync") as manager:
        manager.restore()
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
        assert manager.attach("drawing", Drawing())
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]


class SamplerWithState(torch.utils.data.RandomSampler):
    """One that may keep a state of its own."""


@pytest.mark.parametrize("way", ["sampler", "batch_sampler"])
@pytest.mark.parametrize(
    ("sampler", "warned"),
    [
        (torch.utils.data.WeightedRandomSampler([1.0] * 8, 8), True),
        (torch.utils.data.RandomSampler(range(8)), True),
        (torch.utils.data.SubsetRandomSampler(range(8)), True),
        (torch.utils.data.RandomSampler(range(8), generator=torch.Generator()), True),
        (torch.utils.data.SequentialSampler(range(8)), False),
        (torch.utils.data.DistributedSampler(range(8), 1, 0), False),  # type: ignore[arg-type]
        (SamplerWithState(range(8)), False),
    ],
)
def test_a_sampler_without_state_that_draws_its_order_is_a_warning(
    way: str, sampler: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader

    given = sampler if way == "sampler" else torch.utils.data.BatchSampler(sampler, 2, False)
    with caplog.at_level(logging.WARNING, "holdfast"):
        shield_random_state(Loader(range(8), **{way: given}))
    assert ("another order" in caplog.text) == warned


def test_a_shuffled_loader_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader

    with caplog.at_level(logging.WARNING, "holdfast"):
        shield_random_state(Loader(range(8), shuffle=True))
    assert not caplog.text


# Generators of the loader and of its samplers


def shuffled(generator: torch.Generator | None) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader

    return Loader(list(range(8)), batch_size=2, shuffle=True, generator=generator)


def taken_after_a_batch() -> tuple[dict[str, Any], list[Any], torch.Generator]:
    """The state of a loader with a generator, what it gave after that, and the generator."""
    generator = torch.Generator().manual_seed(4)
    loader = shuffled(generator)
    batches = iter(loader)
    next(batches)
    state = holdfast.build_train_state({"loader": loader})
    rest = [batch.tolist() for batch in batches] + [batch.tolist() for batch in loader]
    return state, rest, generator


@pytest.mark.parametrize("version", ["this", "one that kept no generators"])
def test_the_generator_of_a_loader_is_restored_with_it(version: str) -> None:
    state, rest, first = taken_after_a_batch()
    if version != "this":
        del state["loader"]["holdfast_generators"]
    generator = torch.Generator().manual_seed(99)
    loader = shuffled(generator)
    holdfast.restore_train_state({"loader": loader}, state)
    assert [batch.tolist() for batch in loader] + [batch.tolist() for batch in loader] == rest
    assert torch.equal(generator.get_state(), first.get_state())


def test_a_generator_that_is_drawn_from_between_restore_and_first_batch_keeps_these_draws() -> None:
    state, _, _ = taken_after_a_batch()
    generator = torch.Generator()
    loader = shuffled(generator)
    holdfast.restore_train_state({"loader": loader}, state)
    torch.rand((), generator=generator)
    before = generator.get_state()
    next(iter(loader))
    assert torch.equal(generator.get_state(), before)


def test_a_loader_without_the_generator_that_was_saved_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state, _, _ = taken_after_a_batch()
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.restore_train_state({"loader": shuffled(None)}, state)
    assert "was saved with the generators ['generator'] and has ['sampler.generator'] now" in caplog.text


def test_a_generator_state_of_another_kind_is_refused_before_the_loader_changes() -> None:
    state, _, _ = taken_after_a_batch()
    state["loader"]["holdfast_generators"]["generator"] = {"state": torch.zeros(3)}
    loader = shuffled(torch.Generator())
    with pytest.raises(StateMismatchError, match="no state of a"):
        holdfast.restore_train_state({"loader": loader}, state)
    assert loader.next_iter_state is None


class SamplerOfNumpy:
    """A sampler with a generator of NumPy, below a batch sampler of a user's."""

    def __init__(self) -> None:
        self.source = numpy.random.default_rng(3)


class BatchesOf:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.also = sampler.source
        self.drawn = torch.Generator()


def test_generators_are_found_in_samplers_below_samplers_each_once() -> None:
    batches = BatchesOf(SamplerOfNumpy())
    assert find_generators(batches) == {"also": batches.also, "drawn": batches.drawn}
    assert samplers_of(batches) == {"": batches, "sampler": batches.sampler}
    batches.sampler.sampler = batches
    assert samplers_of(batches) == {"": batches, "sampler": batches.sampler}


@pytest.mark.parametrize(
    ("batches", "warned"),
    [
        (lambda sampler: torch.utils.data.BatchSampler(ResumableSampler(sampler), 2, False), True),
        (lambda sampler: ResumableSampler(torch.utils.data.BatchSampler(sampler, 2, False)), False),
    ],
)
def test_a_resumable_sampler_below_a_batch_sampler_without_state_is_a_warning(
    batches: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader

    sampler = torch.utils.data.RandomSampler(range(8))
    with caplog.at_level(logging.WARNING, "holdfast"):
        shield_random_state(Loader(range(8), batch_sampler=batches(sampler)))
    assert ("around the batch sampler" in caplog.text) == warned
