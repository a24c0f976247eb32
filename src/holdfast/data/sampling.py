"""Rebuild the order of an epoch and go on at a position in it. Samplers enter; indices and states leave.

The order of an epoch follows from the random state, the sampler's generators, its epoch and its own state, where it has
a `state_dict`, at the moment of the first index. They are recorded then; to resume, the order is drawn again from them,
and the indices that were used are dropped. A digest of these shows whether it is the same order.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy
import torch

from holdfast.errors import StateMismatchError, UsageError
from holdfast.state.loaders import find_generators, generator_states, load_generators, samplers_of
from holdfast.state.rng import get_rng_state, random_state_kept, set_rng_state

__all__ = ["IndexIterator", "ResumableSampler", "epochs_of", "load_own_states", "own_states", "seeds_of", "set_epochs"]

logger = logging.getLogger("holdfast")

_GLOBAL = ("python", "numpy", "torch")
_KEYS = {"count", "digest", "ended", "start"}


class ResumableSampler:
    """A sampler or a batch sampler that `StatefulDataLoader` resumes exactly, although it has no state of its own.

    sampler: what gives the indices, such as `RandomSampler(data, generator=generator)` or a batch sampler of yours. Its
        order may depend on Python's, NumPy's and torch's global random state when its first index is asked for, on
        generators of torch, NumPy or Python that are its attributes, on `set_epoch`, and on its own `state_dict`.

    Other attributes are those of the sampler.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        if isinstance(sampler, ResumableSampler):
            raise UsageError("ResumableSampler cannot wrap a ResumableSampler", advice="wrap the sampler itself")
        if isinstance(sampler, Iterator) or not hasattr(sampler, "__iter__"):
            raise UsageError(
                f"ResumableSampler takes a sampler that can be iterated anew in every epoch, not {sampler!r:.100}"
            )
        self.wrapped_sampler = sampler

    def __iter__(self) -> IndexIterator:
        return IndexIterator(self.wrapped_sampler)

    def __len__(self) -> int:
        return len(self.wrapped_sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled or copied it has no sampler yet.
        if name == "wrapped_sampler":
            raise AttributeError(name)
        return getattr(self.wrapped_sampler, name)

    def __repr__(self) -> str:
        return f"ResumableSampler({type(self.wrapped_sampler).__name__})"


class IndexIterator(Iterator[Any]):
    """The indices of one epoch, with a state.

    `count` is how many it gave, and `ended` whether there are no more.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        # The samplers whose own state moves with each index.
        self.positional: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._indices: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._after_first: dict[str, Any] = {}
        # Filled in place: a loader with workers takes the state before it draws the first indices ahead, and keeps it.
        self.start: dict[str, Any] = {}
        self.count = 0
        self.ended = False
        self.digest = b""

    def __next__(self) -> Any:
        indices = self._indices if self._indices is not None else self._begin()
        try:
            index = self._peeked.pop() if self._peeked else next(indices)
        except StopIteration:
            self.ended = True
            raise
        self.count += 1
        self.digest = hashlib.blake2b(self.digest + _text(index).encode(), digest_size=8).digest()
        if self.count <= 2 and self.start["samplers"]:
            self._note_positional()
        return index

    def _note_positional(self) -> None:
        """Note whose own state is a position. It must not be loaded at the beginning of an epoch: the sampler would
        skip to there."""
        states = own_states(self._sampler, self.positional)
        if self.count == 1:
            self._after_first = states
            return
        moved = {label for label, state in states.items() if not _same(state, self._after_first.get(label))}
        self.positional |= moved

    def _begin(self) -> Iterator[Any]:
        self.start.update(order_start(self._sampler, self.positional))
        self._indices = iter(self._sampler)
        return self._indices

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "digest": self.digest.hex(), "ended": self.ended, "start": self.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the order again and go to the position; the random state of the process stays as it is."""
        if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
            raise StateMismatchError("this is no state of a ResumableSampler", advice="use the sampler that was saved")
        if state["start"]:
            with random_state_kept():
                self.replay(state)

    def replay(self, state: Mapping[str, Any]) -> None:
        """Draw the order again and drop the indices that were used. Changes the random state of the process."""
        if not state["start"].get("samplers"):
            self._replay(state)
            return
        try:
            load_own_states(self._sampler, state["start"]["samplers"])
            self._replay(state)
        except StateMismatchError:
            # A state that turns out to be a position, of an epoch before this one.
            self._replay(state)

    def _replay(self, state: Mapping[str, Any]) -> None:
        set_order_start(self._sampler, state["start"])
        self._forget()
        indices = self._begin()
        wanted = int(state["count"])
        try:
            for _ in range(wanted):
                IndexIterator.__next__(self)
            # Most samplers draw their order when the first index is asked for.
            self._peeked += [next(indices)] if wanted == 0 else []
        except StopIteration:
            if wanted:
                raise _another_order(f"{wanted} were used, and now there are {self.count}") from None
        if self.digest.hex() != state["digest"]:
            raise _another_order(f"the first {wanted} differ from those that were used")
        # A sampler may draw at its end, as torch's own does.
        if state["ended"] and next(self, None) is not None:
            raise _another_order(f"only {wanted} were there, and now there are more")


def _another_order(difference: str) -> StateMismatchError:
    return StateMismatchError(
        f"the sampler does not give the indices of the epoch that was saved: {difference}",
        advice="build dataset, sampler and batch size as they were, with the same seed; a sampler must not draw random "
        "numbers after its first index unless it draws them from a generator that is its attribute; or call "
        "end_epoch() on the ResumableLoader after the restore, to begin with a new epoch",
    )


def order_start(sampler: Iterable[Any], positional: Set[str] = frozenset()) -> dict[str, Any]:
    """Return all that the order of an epoch that begins now depends on."""
    everything = get_rng_state()
    return {
        "random": {name: everything[name] for name in _GLOBAL},
        "generators": generator_states(sampler),
        "epochs": epochs_of(sampler),
        "samplers": own_states(sampler, positional),
    }


def set_order_start(sampler: Iterable[Any], start: Mapping[str, Any]) -> None:
    set_rng_state(start["random"])
    load_generators(find_generators(sampler), start["generators"])
    set_epochs(sampler, start["epochs"])


def epochs_of(owner: Any) -> dict[str, int]:
    """Return the epoch of each sampler that has one."""
    found = {}
    for label, sampler in samplers_of(owner).items():
        epoch = getattr(sampler, "epoch", None)
        if isinstance(epoch, int) and not isinstance(epoch, bool):
            found[label] = epoch
    return found


def set_epochs(owner: Any, epochs: Mapping[str, int]) -> None:
    for label, sampler in samplers_of(owner).items():
        if label in epochs and getattr(sampler, "epoch", None) != epochs[label]:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epochs[label])
            else:
                sampler.epoch = epochs[label]


def own_states(owner: Any, positional: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the state of each sampler that has both a state_dict and a load_state_dict, without those whose state is a
    position in an epoch."""
    return {
        label: copy.deepcopy(sampler.state_dict())
        for label, sampler in samplers_of(owner).items()
        if _has_own_state(sampler) and label not in positional
    }


def load_own_states(owner: Any, states: Mapping[str, Any]) -> None:
    samplers = {label: sampler for label, sampler in samplers_of(owner).items() if _has_own_state(sampler)}
    if missing := sorted(type(owner).__name__ + (f".{label}" if label else "") for label in states.keys() - samplers):
        logger.warning(
            "the sampler %s was saved with a state_dict() and has none now: the order of its samples may not be the "
            "one of the run that was saved",
            ", ".join(missing),
        )
    for label in samplers.keys() & states.keys():
        try:
            samplers[label].load_state_dict(copy.deepcopy(states[label]))
        except Exception as error:
            raise StateMismatchError(
                f"load_state_dict of the sampler {type(samplers[label]).__name__} raised {type(error).__name__}: "
                f"{error}",
                advice="build the sampler as it was when it was saved",
            ) from error


def _has_own_state(sampler: Any) -> bool:
    # Of its class: a wrapper passes on what the sampler inside has. The state of torchdata's is a position.
    methods = (getattr(type(sampler), name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not hasattr(sampler, "next_yielded")


def seeds_of(owner: Any) -> dict[str, int]:
    """Return the seed of each sampler that has one. One with a state of its own may keep it there."""
    return {
        f"{label}.{name}" if label else name: seed
        for label, sampler in samplers_of(owner).items()
        if not _has_own_state(sampler)
        for name, seed in getattr(sampler, "__dict__", {}).items()
        if name in ("seed", "initial_seed") and isinstance(seed, int) and not isinstance(seed, bool)
    }


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal. What cannot be compared is not."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    try:
        return type(one) is type(other) and bool(numpy.array_equal(one, other))
    except Exception:
        return False


def _text(index: Any) -> str:
    """Return an index as a text that is the same in every process; of an object that has none, its type."""
    if isinstance(index, torch.Tensor):
        return str(index.tolist())
    if isinstance(index, list | tuple):
        return f"[{','.join(map(_text, index))}]"
    if isinstance(index, dict):
        return f"{{{','.join(f'{_text(key)}:{_text(value)}' for key, value in index.items())}}}"
    if hasattr(index, "tolist"):
        return str(index.tolist())
    return repr(index) if isinstance(index, int | str | float | bytes | None) else type(index).__name__
