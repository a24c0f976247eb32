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
from holdfast.state.loaders import shield_random_state


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
