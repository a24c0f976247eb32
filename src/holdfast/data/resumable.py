"""Give torch's plain `DataLoader` a state, so that it resumes in the middle of an epoch. Batches leave; no files."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.data.positions import count_in, refuse, require_live_pass
from holdfast.data.sampling import IndexIterator, epochs_of, load_own_states, own_states, seeds_of, set_epochs
from holdfast.errors import StateMismatchError, UsageError
from holdfast.state.loaders import (
    check_generators,
    find_generators,
    generator_states,
    generators_kept,
    load_generators,
)
from holdfast.state.names import is_stateful_loader
from holdfast.state.rng import check_rng_state, random_state_kept

__all__ = ["ResumableLoader"]

logger = logging.getLogger("holdfast")

_KEYS = {"batches", "begun", "digest", "drawn", "epochs", "generators", "seed", "start", "workers_running"}
_KINDS: dict[str, Any] = {
    "begun": bool,
    "digest": str,
    "epochs": Mapping,
    "generators": Mapping,
    "lengths": Mapping,
    "samplers": Mapping,
    "seed": torch.Tensor | None,
    "seeds": Mapping,
    "start": Mapping,
    "workers_running": bool,
}


class ResumableLoader:
    """A plain `DataLoader` with a state: iterate over this in its place, and make this the component.

    loader: a `torch.utils.data.DataLoader` over a map-style dataset, with any sampler or batch sampler and any number
        of workers. It is not changed, and what is read from it directly is not counted.

    After a restore the first epoch goes on where it was: its order is drawn again from the random state, the generators
    and the sampler's epoch and own state at its beginning, and the samples that were used are dropped by their index,
    without being loaded. The restored random state stays as it is. Call `sampler.set_epoch` as always; after a restore
    in the middle of an epoch, with that epoch.

    An epoch that the training breaks out of is gone on with after a restore, unless `end_epoch` was called. An iterator
    cannot go on once another one was begun, or a state was loaded: only the newest has a position that is saved.

    `len()` and other attributes are those of the loader.
    """

    # Data loaders have one state per rank, also where these happen to be equal.
    has_state_per_rank = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        _require_plain_loader(loader)
        self.wrapped_loader = loader
        self._position = _Position()
        self._passes = 0
        # The state that was loaded, until the training asks for the first batch after it.
        self._pending: dict[str, Any] | None = None
        # The state of the generator from which the seed of the workers was drawn.
        self._seed: torch.Tensor | None = None
        self._workers_running = False
        self._copy: Any = None
        batched = loader.batch_sampler is not None
        self._indices = _NotedIndices(loader.batch_sampler if batched else loader.sampler)

    def __iter__(self) -> Iterator[Any]:
        pending = self._pending
        if pending is None:
            self._warn_of_unfinished_epoch()
        if self._copy is None or not self._keeps_workers():
            self._copy = self._copied()
        if pending is not None and self._workers_running:
            self._start_workers()
        if pending is not None and pending["begun"] and not self._begins_anew(pending):
            iterator = self._resume(pending)
        else:
            iterator = self._begin()
        self._pending, self._workers_running = None, self._keeps_workers()
        self._passes += 1
        iterator.number = self._passes
        self._position = iterator.position
        return iterator

    def __len__(self) -> int:
        return len(self.wrapped_loader)

    def __getattr__(self, name: str) -> Any:
        # While it is copied it has no loader yet.
        if name == "wrapped_loader":
            raise AttributeError(name)
        return getattr(self.wrapped_loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.wrapped_loader, self.state_dict())

    def __repr__(self) -> str:
        return f"ResumableLoader({type(self.wrapped_loader).__name__})"

    def end_epoch(self) -> None:
        """Leave out the rest of this epoch: a loop over it ends, and the next pass, here and after a restore, begins a
        new one."""
        self._position.finished = True
        self._position = _Position()
        if self._pending is not None:
            self._pending["begun"] = False

    def state_dict(self) -> dict[str, Any]:
        now = {
            "generators": generator_states(self.wrapped_loader),
            "epochs": epochs_of(self.wrapped_loader),
            "samplers": own_states(self._indices.sampler, self._indices.positional),
            "seeds": seeds_of(self.wrapped_loader),
            "lengths": {name: _length(getattr(self.wrapped_loader, name)) for name in ("dataset", "sampler")},
        }
        if self._pending is not None:
            return {**self._pending, **now}
        position = self._position
        indices = position.indices
        return now | {
            "begun": indices is not None and not position.finished,
            "batches": position.batches,
            "digest": position.digest.hex(),
            "drawn": 0 if indices is None else indices.drawn,
            "start": {} if indices is None else indices.start,
            "seed": self._seed,
            "workers_running": self._workers_running,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a StateMismatchError for a state that `load_state_dict` could not take up. Tensors in it need not be
        filled yet."""
        _check_form(state)
        check_generators(find_generators(self.wrapped_loader), state["generators"])
        _require_seeds(state.get("seeds", {}), seeds_of(self.wrapped_loader))
        lengths = state.get("lengths", {})
        _require_length("dataset", lengths, self.wrapped_loader.dataset)
        # That of a sampler may depend on its epoch.
        if epochs_of(self.wrapped_loader) == state["epochs"]:
            _require_length("sampler", lengths, self.wrapped_loader.sampler)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position. The next pass over the loader goes on from there."""
        self.check_state_dict(state)
        load_own_states(self._indices.sampler, state.get("samplers", {}))
        load_generators(find_generators(self.wrapped_loader), state["generators"])
        set_epochs(self.wrapped_loader, state["epochs"])
        self._pending, self._position, self._copy = dict(state), _Position(), None
        self._seed, self._workers_running = state["seed"], bool(state["workers_running"])
        self._passes += 1  # A pass that was begun before the restore ends.

    def _warn_of_unfinished_epoch(self) -> None:
        position = self._position
        if position.resumed and not position.finished and position.batches != _length(self.wrapped_loader):
            logger.warning(
                "the pass that went on from the restored position was left after %d batches of its epoch, and a new "
                "epoch begins: the samples that were left in the restored one are not seen in it; use one iterator for "
                "the rest of the epoch, or call end_epoch() to leave it out",
                position.batches,
            )

    def _keeps_workers(self) -> bool:
        return bool(self.wrapped_loader.persistent_workers) and self.wrapped_loader.num_workers > 0

    def _copied(self) -> Any:
        """Return a copy of the loader that draws its indices where they are counted."""
        copied = copy.copy(self.wrapped_loader)
        copied._iterator = None
        attribute = "batch_sampler" if copied.batch_sampler is not None else "sampler"
        # The class refuses to set it, because nothing else would follow; here nothing else must.
        object.__setattr__(copied, attribute, self._indices)
        return copied

    def _begin(self) -> _Batches:
        """Begin an epoch, as the loader itself does."""
        if self.wrapped_loader.num_workers > 0 and self._copy._iterator is None:
            self._seed = self._seed_generator().get_state()
        self._indices.resumed = None
        return self._build(_Position())

    def _resume(self, pending: Mapping[str, Any]) -> _Batches:
        """Go on with the epoch of a loaded state, and leave the random state and all generators as they are."""
        _require_length("sampler", pending.get("lengths", {}), self.wrapped_loader.sampler)
        epochs = epochs_of(self.wrapped_loader)
        generators = find_generators(self.wrapped_loader)
        position = _Position(
            batches=pending["batches"], digest=bytes.fromhex(pending["digest"]), resumed=pending["batches"] > 0
        )
        replayed = {"start": pending["start"], "count": pending["batches"], "digest": pending["digest"], "ended": False}
        self._indices.resumed = replayed if pending["start"] else None
        try:
            with random_state_kept(), generators_kept(self.wrapped_loader):
                self._set_seed()
                iterator = self._build(position)
                # Without workers nothing has asked for an index yet.
                indices = iterator.indices.go_to_position()
                derived = generator_states(self.wrapped_loader)
        finally:
            self._indices.resumed = None
            set_epochs(self.wrapped_loader, epochs)
        if indices.drawn != pending["drawn"]:
            # Another number of indices was drawn ahead for the workers: the generators follow from that.
            load_generators(generators, derived)
        return iterator

    def _build(self, position: _Position) -> _Batches:
        self._indices.take_newest()
        batches = iter(self._copy)
        indices = self._indices.take_newest()
        if indices is None:
            raise UsageError(
                f"{type(self.wrapped_loader).__name__} builds its iterator only when the first batch is asked for",
                advice="give ResumableLoader the DataLoader itself, and change batches in the training loop or in "
                "collate_fn",
            )
        position.indices = indices
        return _Batches(self, batches, position, indices)

    def _start_workers(self) -> None:
        """Start the workers that live as long as the loader. In the run that was saved they ran already, so that an
        epoch draws no seed for them."""
        with random_state_kept(), generators_kept(self.wrapped_loader):
            self._set_seed()
            self._indices.gives_none = True
            try:
                iter(self._copy)
            finally:
                self._indices.gives_none = False

    def _set_seed(self) -> None:
        if self._seed is not None:
            self._seed_generator().set_state(self._seed.cpu())

    def _seed_generator(self) -> torch.Generator:
        own: torch.Generator | None = self.wrapped_loader.generator
        return torch.default_generator if own is None else own

    def _begins_anew(self, pending: Mapping[str, Any]) -> bool:
        """Return whether the sampler was set to another epoch, and nothing is left of the one that was saved."""
        now = epochs_of(self.wrapped_loader)
        if now == pending["epochs"]:
            return False
        if pending["batches"] in (0, _length(self.wrapped_loader)):
            return True
        raise StateMismatchError(
            f"the state is from the middle of an epoch, after {pending['batches']} batches with the sampler's epoch "
            f"{_epoch_text(pending['epochs'])}, and the sampler was set to epoch {_epoch_text(now)}",
            advice="go on with the epoch that was saved (keep its number in progress=), or call end_epoch() on the "
            "loader after the restore, to leave the rest of it out",
        )


@dataclass
class _Position:
    """How far the training is in an epoch: what it got, not what was drawn ahead for the workers."""

    batches: int = 0
    digest: bytes = b""
    finished: bool = False
    resumed: bool = False
    indices: _NotedIterator | None = None


class _Batches(Iterator[Any]):
    """The batches of one epoch. The loader does not hold it: its workers end when the training leaves the loop."""

    def __init__(
        self, loader: ResumableLoader, batches: Iterator[Any], position: _Position, indices: _NotedIterator
    ) -> None:
        self._loader = loader
        self._batches = batches
        self.position = position
        self.indices = indices
        self.number = 0

    def __next__(self) -> Any:
        if self.position.finished:
            raise StopIteration
        require_live_pass("ResumableLoader", self.number == self._loader._passes, failed=False)
        try:
            batch = next(self._batches)
        except StopIteration:
            self.position.finished = True
            raise
        except Exception:
            # A batch that cannot be loaded is used up: torch's iterator goes on with the next one.
            self._count()
            raise
        self._count()
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def _count(self) -> None:
        if self.indices.noted:
            self.position.batches += 1
            self.position.digest = self.indices.noted.popleft()


class _NotedIndices:
    """What the copied loader has in place of its sampler or batch sampler."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.positional: set[str] = set()
        self._newest: _NotedIterator | None = None
        self.resumed: Mapping[str, Any] | None = None
        self.gives_none = False

    def __iter__(self) -> Iterator[Any]:
        if self.gives_none:
            return iter(())
        self._newest = _NotedIterator(self.sampler, self.resumed)
        self._newest.positional = self.positional
        return self._newest

    def take_newest(self) -> _NotedIterator | None:
        """Return the last iterator that was built, if one was built since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class _NotedIterator(IndexIterator):
    """Indices whose digests are noted until the training has the batch."""

    def __init__(self, sampler: Iterable[Any], resumed: Mapping[str, Any] | None) -> None:
        super().__init__(sampler)
        # torch builds one more than it uses, so that nothing is drawn before the first index is asked for.
        self._resumed = resumed
        self.noted: deque[bytes] = deque()

    def __next__(self) -> Any:
        self.go_to_position()
        index = super().__next__()
        self.noted.append(self.digest)
        return index

    @property
    def drawn(self) -> int:
        """How often the sampler was asked: at its end once more than it gave."""
        return self.count + self.ended

    def go_to_position(self) -> _NotedIterator:
        """Draw the order again, if that is still to be done."""
        if self._resumed is not None:
            state, self._resumed = self._resumed, None
            self.replay(state)
        return self


def _rebuilt(loader: DataLoader[Any], state: Mapping[str, Any]) -> ResumableLoader:
    rebuilt = ResumableLoader(loader)
    rebuilt.load_state_dict(state)
    return rebuilt


def _require_plain_loader(loader: Any) -> None:
    if is_stateful_loader(loader):
        raise UsageError("a StatefulDataLoader has a state already", advice="make it a component as it is")
    if not isinstance(loader, DataLoader):
        raise UsageError(f"ResumableLoader takes a torch.utils.data.DataLoader, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "ResumableLoader cannot skip to a position in an IterableDataset: it has no indices",
            advice="use torchdata's StatefulDataLoader, with a dataset that has state_dict() and load_state_dict()",
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise UsageError(
            "a DataLoader with in_order=False gives batches in another order in every run",
            advice="leave in_order=False out",
        )


def _check_form(state: Any) -> None:
    """Refuse what is no state of a `ResumableLoader`."""
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        refuse("this is no state of a ResumableLoader", "use the loader that was saved, or skip the component")
    for name in ("batches", "drawn"):
        count_in(state, name)
    for name, kind in _KINDS.items():
        if name in state and not isinstance(state[name], kind):
            refuse(f"this is no state of a ResumableLoader: {name} is {state[name]!r:.100}")
    if state["begun"] and state["batches"] and not state["start"]:
        refuse("this is no state of a ResumableLoader: an epoch was begun, and the beginning of its order is missing")
    if state["start"] and not state["start"].keys() >= {"random", "generators", "epochs"}:
        refuse(f"this is no state of a ResumableLoader: its order begins with {sorted(map(str, state['start']))}")
    try:
        bytes.fromhex(state["digest"])
    except ValueError:
        refuse(f"this is no state of a ResumableLoader: digest is {state['digest']!r:.100}")
    for name in ("generators", "epochs"):
        if state["start"] and not isinstance(state["start"][name], Mapping):
            refuse(f"this is no state of a ResumableLoader: its order begins with {name}={state['start'][name]!r:.100}")
    if state["start"]:
        check_rng_state(state["start"]["random"])


def _require_length(name: str, lengths: Mapping[str, Any], now: Any) -> None:
    """Refuse a dataset or a sampler of another length. States of earlier versions do not have it."""
    before, length = lengths.get(name), _length(now)
    if before is not None and length is not None and before != length:
        refuse(
            f"the data is not what was saved: the {name} had {before!r:.100} samples and has {length} now",
            "build the loader as it was, or leave it out with skip= to begin the data anew",
        )


def _require_seeds(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Refuse samplers with other seeds: their orders are others in every epoch."""
    for label in sorted(before.keys() & now.keys()):
        if before[label] != now[label]:
            refuse(
                f"the order of the data is not what was saved: {label} was {before[label]!r:.100} and is {now[label]} "
                "now",
                "build the sampler with the seed that was saved, or leave the loader out with skip= to begin the data "
                "anew",
            )


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _epoch_text(epochs: Mapping[str, int]) -> str:
    return ", ".join(str(epoch) for epoch in dict.fromkeys(epochs.values())) or "none"
