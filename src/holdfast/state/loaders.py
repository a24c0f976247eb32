"""Take a data loader's state with its generators, and let it resume without a draw. Knows torchdata's loader.

A loader builds its iterator after the restore, when the training first asks for a batch. Building it draws a seed from
torch's global generator, and skipping to the position may run the dataset's code. In the run that was saved all of this
happened before the save, so the random state that was restored has it behind it already: drawn once more, every later
random number would be another one. The same holds for generators that belong to the loader or to its samplers.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.errors import StateMismatchError
from holdfast.state.framework_wrappers import is_loader_adapter, loader_inside
from holdfast.state.names import is_stateful_loader
from holdfast.state.rng import random_state_kept
from holdfast.state.wrappers import check_plain_state, load_state, state_of

logger = logging.getLogger("holdfast")

__all__ = [
    "check_generators",
    "find_generators",
    "generator_states",
    "generators_kept",
    "load_generators",
    "load_loader_state",
    "loader_state",
    "samplers_of",
    "shield_random_state",
]

# Beside the loader's own keys, which begin with an underscore. The loader does not look at it.
_GENERATORS = "holdfast_generators"
# Where a loader or a sampler has the sampler below it.
_WRAPPED = "wrapped_sampler"
_SAMPLERS_BELOW = ("sampler", "batch_sampler", _WRAPPED)

_BUILD = "_get_iterator"
_PENDING = "next_iter_state"
_LEGACY = (random.Random, numpy.random.RandomState)
_STATELESS_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loader_state(loader: Any) -> Any:
    """Return the state of a `StatefulDataLoader`, and beside it that of the generators of it and its samplers."""
    # A loader without an iterator builds one for this, and draws: the generators come after it.
    state = state_of(loader)
    # Accelerate is a batch ahead: the generators are not those of the position that it gives.
    generators = {} if is_loader_adapter(loader) else find_generators(loader)
    if not generators or not isinstance(state, dict):
        return state
    return {**state, _GENERATORS: generator_states(loader)}


def load_loader_state(loader: Any, state: Any) -> None:
    """Give a `StatefulDataLoader` its state back. One of a checkpoint without generators is taken up as it is."""
    saved = state.get(_GENERATORS) if isinstance(state, Mapping) else None
    generators = find_generators(loader)
    if saved is not None:
        check_generators(generators, saved)
    load_state(loader, state)
    if saved is not None:
        load_generators(generators, saved)


def find_generators(owner: Any) -> dict[str, Any]:
    """Return the generators that are attributes of a loader or a sampler, or of a sampler below it, each once: those of
    torch, NumPy and Python."""
    found: dict[str, Any] = {}
    for label, one in {"": owner, **samplers_of(owner)}.items():
        for name, value in getattr(one, "__dict__", {}).items():
            known = any(value is other for other in found.values())
            if _is_generator(value) and not known:
                found[f"{label}.{name}" if label else name] = value
    return found


def generator_states(owner: Any) -> dict[str, Any]:
    """Return the state of each generator of a loader or a sampler."""
    return {label: _generator_state(generator) for label, generator in find_generators(owner).items()}


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | numpy.random.Generator):
        return True
    # Those of the modules themselves are part of the random state of the process, and the system's has no state.
    if value is getattr(random, "_inst", None) or value is getattr(numpy.random.mtrand, "_rand", None):
        return False
    return isinstance(value, _LEGACY) and not isinstance(value, random.SystemRandom)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return {"python": generator.getstate()}
    if isinstance(generator, numpy.random.RandomState):
        return {"numpy": generator.get_state(legacy=False)}
    return state_of(generator)


def _check_generator(generator: Any, state: Any) -> None:
    if not isinstance(generator, _LEGACY):
        check_plain_state(generator, state)
        return
    try:
        # On one of its own: nothing has changed when the state is refused.
        _load_legacy(type(generator)(), state)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        raise StateMismatchError(
            f"this is no state of a {type(generator).__name__}",
            advice="build the sampler as it was when it was saved, or leave the loader out with skip=",
        ) from None


def _load_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, _LEGACY):
        _load_legacy(generator, state)
    else:
        load_state(generator, state)


def _load_legacy(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state["python"])
    else:
        generator.set_state(state["numpy"])


def samplers_of(owner: Any) -> dict[str, Any]:
    """Return the samplers of a loader or a sampler, by where they are; the sampler itself, too, by an empty name."""
    found: dict[str, Any] = {} if isinstance(owner, torch.utils.data.DataLoader) else {"": owner}
    ahead = [("", owner)]
    while ahead:
        label, one = ahead.pop()
        for name in _SAMPLERS_BELOW:
            below = getattr(one, "__dict__", {}).get(name)
            if below is not None and not any(below is other for other in (owner, *found.values())):
                found[f"{label}.{name}" if label else name] = below
                ahead.append((f"{label}.{name}" if label else name, below))
    return found


def check_generators(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse what is no state of these generators, without changing any."""
    for label in generators.keys() & saved.keys():
        _check_generator(generators[label], saved[label])


def load_generators(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Set generators to the states that were saved; warn if there are others now."""
    check_generators(generators, saved)
    for label in generators.keys() & saved.keys():
        _load_generator(generators[label], saved[label])
    if generators.keys() != saved.keys():
        logger.warning(
            "the loader or sampler was saved with the generators %s and has %s now: the order of its samples is not "
            "the one of the run that was saved",
            sorted(saved) or "none",
            sorted(generators) or "none",
        )


@contextmanager
def generators_kept(owner: Any) -> Iterator[None]:
    """Put the generators of a loader back as they were, whatever runs inside."""
    generators = find_generators(owner)
    before = generator_states(owner)
    try:
        yield
    finally:
        load_generators(generators, before)


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
    elif _loses_order(batches, sampler):
        logger.warning(
            "the sampler %s of a restored loader has no state and draws its order anew: the rest of this epoch may "
            "have another order than in the run that was saved, and some samples may be seen twice or never; use "
            "shuffle=True, holdfast.data.ResumableSampler around the sampler (or around the batch sampler, where you "
            "pass one), or a sampler with state_dict() and load_state_dict()",
            type(sampler).__name__,
        )


def _loses_order(batches: Any, sampler: Any) -> bool:
    if _WRAPPED in getattr(batches, "__dict__", {}):
        return False
    # torch's own batch sampler does not pass on the state of what it draws from; torchdata's does.
    cut_off = type(batches) is BatchSampler and _WRAPPED in getattr(sampler, "__dict__", {})
    # Exactly these classes: a subclass, such as torchdata's own, may keep a state.
    return cut_off or type(sampler) in _STATELESS_SAMPLERS


class _Shield:
    """Stands in for a loader's method that builds an iterator, until it was called once.

    A class and not a closure, so that the loader can still be copied and pickled.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __call__(self) -> Any:
        loader = self._loader
        restored = _GENERATORS in (getattr(loader, _PENDING) or {})
        with random_state_kept(), generators_kept(loader) if restored else nullcontext():
            iterator = getattr(type(loader), _BUILD)(loader)
        vars(loader).pop(_BUILD, None)
        if not restored:
            _draw_own_seed(loader)
        return iterator


def _draw_own_seed(loader: Any) -> None:
    """Bring a generator of the loader's own, which its sampler shares, to where it was: a checkpoint of an earlier
    version does not have its state.

    Without workers the loader draws its seed from it after the sampler drew the order. When the sampler takes its state
    up it goes back to before the order, and draws that alone: the next epoch's order would be another one.
    """
    generator = getattr(loader, "generator", None)
    shared = generator is not None and getattr(loader.sampler, "generator", None) is generator
    if shared and loader.num_workers == 0:
        torch.empty((), dtype=torch.int64).random_(generator=generator)
