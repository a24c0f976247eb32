"""Let a restored data loader take up its position without drawing random numbers. Knows torchdata's loader.

A loader builds its iterator after the restore, when the training first asks for a batch. Building it draws a seed from
torch's global generator, and skipping to the position may run the dataset's code. In the run that was saved all of this
happened before the save, so the random state that was restored has it behind it already: drawn once more, every later
random number would be another one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.state.framework_wrappers import loader_inside
from holdfast.state.names import is_stateful_loader
from holdfast.state.rng import get_rng_state, set_rng_state

logger = logging.getLogger("holdfast")

__all__ = ["shield_random_state"]

_BUILD = "_get_iterator"
_PENDING = "next_iter_state"
_STATELESS_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def shield_random_state(component: Any) -> None:
    """Make the iterator that takes up a loader's restored state leave the random state as it is.

    Only that one: the iterator of the next epoch draws its seed, as it does without a restore.
    """
    if not is_stateful_loader(component):
        return
    component = loader_inside(component)
    _warn_of_stateless_sampler(component)
    if not hasattr(component, _PENDING) or not callable(getattr(type(component), _BUILD, None)):
        logger.warning(
            "this version of StatefulDataLoader is not known: its first iterator after the restore may draw random "
            "numbers, and the run would not resume exactly"
        )
    elif getattr(component, _PENDING) is not None:
        setattr(component, _BUILD, _Shield(component))


def _warn_of_stateless_sampler(loader: Any) -> None:
    """Warn of a sampler that draws a new order and has no state to restore."""
    batches: Any = getattr(loader, "batch_sampler", None)
    # One around another, as Accelerate's share of a rank is, does not pass the state of the inner one on.
    cut_off = hasattr(batches, "batch_sampler") and not hasattr(batches, "state_dict")
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    if cut_off and isinstance(sampler, _STATELESS_SAMPLERS) and not hasattr(sampler, "set_epoch"):
        logger.warning(
            "the state of the sampler %s of a restored loader is lost in the %s around it: the rest of this epoch may "
            "have another order than in the run that was saved, and some samples may be seen twice or never; with "
            "Accelerate, set use_seedable_sampler=True in the DataLoaderConfiguration",
            type(sampler).__name__,
            type(loader.batch_sampler).__name__,
        )
    # Exactly these classes: a subclass, such as torchdata's own, may keep a state.
    elif type(sampler) in _STATELESS_SAMPLERS and getattr(sampler, "generator", None) is None:
        logger.warning(
            "the sampler %s of a restored loader has no state and draws its order from torch's global generator: the "
            "rest of this epoch has another order than in the run that was saved, and some samples may be seen twice "
            "or never; use shuffle=True, or a sampler with state_dict() and load_state_dict()",
            type(sampler).__name__,
        )


class _Shield:
    """Stands in for a loader's method that builds an iterator, until it was called once.

    A class and not a closure, so that the loader can still be copied and pickled.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __call__(self) -> Any:
        loader = self._loader
        before = get_rng_state()
        try:
            iterator = getattr(type(loader), _BUILD)(loader)
        finally:
            set_rng_state(before)
        vars(loader).pop(_BUILD, None)
        _draw_own_seed(loader)
        return iterator


def _draw_own_seed(loader: Any) -> None:
    """Bring a generator of the loader's own, which its sampler shares, to where it was.

    Without workers the loader draws its seed from it after the sampler drew the order. When the sampler takes its state
    up it goes back to before the order, and draws that alone: the next epoch's order would be another one.
    """
    generator = getattr(loader, "generator", None)
    shared = generator is not None and getattr(loader.sampler, "generator", None) is generator
    if shared and loader.num_workers == 0:
        torch.empty((), dtype=torch.int64).random_(generator=generator)
