"""Rebuild the order of an epoch and go on at a position in it. Samplers enter; indices and states leave.

The order of an epoch follows from the random state, the sampler's generators and its epoch at the moment of the first
index. They are recorded then; to resume, the order is drawn again from them, and the indices that were used are
dropped. A digest of these shows whether it is the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import StateMismatchError, UsageError
from holdfast.state.loaders import find_generators, load_generators, samplers_of
from holdfast.state.rng import get_rng_state, random_state_kept, set_rng_state
from holdfast.state.wrappers import state_of

__all__ = ["IndexIterator", "ResumableSampler", "epochs_of", "set_epochs"]

_GLOBAL = ("python", "numpy", "torch")
_KEYS = {"count", "digest", "ended", "start"}


class ResumableSampler:
    """A sampler or a batch sampler that `StatefulDataLoader` resumes exactly, although it has no state of its own.

    sampler: what gives the indices, such as `RandomSampler(data, generator=generator)` or a batch sampler of yours. Its
        order may depend on Python's, NumPy's and torch's global random state when its first index is asked for, on
        generators of torch or NumPy that are its attributes, and on `set_epoch`.

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
        self._forget()

    def _forget(self) -> None:
        self._indices: Iterator[Any] | None = None
        self._peeked: list[Any] = []
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
        return index

    def _begin(self) -> Iterator[Any]:
        self.start.update(order_start(self._sampler))
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


def order_start(sampler: Iterable[Any]) -> dict[str, Any]:
    """Return all that the order of an epoch that begins now depends on."""
    everything = get_rng_state()
    return {
        "random": {name: everything[name] for name in _GLOBAL},
        "generators": {label: state_of(generator) for label, generator in find_generators(sampler).items()},
        "epochs": epochs_of(sampler),
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
