"""What is done about the random state when a loader is restored, by what the loader is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from holdfast.loaders import shield_random_state


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
