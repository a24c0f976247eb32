"""A data loader over shards, such as files, that are read from front to back, on any number of ranks.

Names of shards and a function that reads one enter; batches leave. A *unit* is a shard with the number of its samples
that the training got: units are what ranks are dealt, and what is dealt anew to another number of ranks.

With workers, each has units of its own, a *lane*. Batches are taken from the lanes in turns, so that their order does
not depend on which worker is faster, and a worker sends the units of a batch along with it: the position is that of the
batches that the training got, however many the workers have prepared.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from holdfast.data.dealing import derived_seed, epoch_order
from holdfast.data.positions import (
    Place,
    check_count,
    count_in,
    refuse,
    require_live_pass,
    require_place,
    require_same,
    states_by_rank,
)
from holdfast.errors import UsageError

__all__ = ["ElasticShards", "ShardReader"]

logger = logging.getLogger("holdfast")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# A shard by its number, and how many of its samples were taken.
Unit = tuple[int, int]
Lanes = list[list[Unit]]

_KIND = "ElasticShards"
_FINISHED = -1
_REFUSED = {
    "sampler": "shards are dealt to ranks; give shuffle= and seed=",
    "batch_sampler": "give batch_size= and drop_last=",
    "generator": "the order of the shards and the seeds of the workers come from seed=",
    "persistent_workers": "workers are started for each epoch",
    "in_order": "batches are taken from the workers in turns",
}


class ShardReader(Protocol[T_co]):
    """What reads one shard: any function with these arguments. With workers it is called in their processes."""

    def __call__(self, shard: str, position: int) -> Iterable[T_co]:
        """Return the samples of a shard without the first `position` of them, in the same order every time."""
        ...


class ElasticShards(Generic[T]):
    """Batches of the samples of shards, which are dealt to the ranks as wholes, and whose position is restored on any
    number of ranks: shards that were not read to their end go on from where they were, on the rank that gets them.

    shards: the names of the shards, in the same order on every rank.
    read: called with a name and a position, returns the samples from there on; see `ShardReader`.
    batch_size, drop_last, num_workers: as for a `DataLoader` over an iterable dataset: each worker makes batches of its
        own, so that each may end with an incomplete one, or drop it. None gives single samples.
    shuffle, seed: in each epoch the shards come in another order, which depends on the seed and the epoch alone.
    rank, size: this rank among those that read different data; those of torch.distributed if they are not given.
    options: other arguments of `DataLoader`, such as `collate_fn`, `pin_memory` or `prefetch_factor`.

    Each pass is one epoch, and the next pass the next one; `set_epoch` goes to another. Ranks may get different numbers
    of batches in an epoch, because shards have different lengths. The global random state is never drawn from.
    """

    def __init__(
        self,
        shards: Sequence[str],
        read: ShardReader[Any],
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        rank: int | None = None,
        size: int | None = None,
        **options: Any,
    ) -> None:
        check_count("seed", seed)
        check_count("num_workers", num_workers)
        if batch_size is not None:
            check_count("batch_size", batch_size, least=1)
        for name in sorted(set(options) & set(_REFUSED)):
            raise UsageError(f"an ElasticShards takes no {name}=", advice=_REFUSED[name])
        self.shards = _checked_shards(shards)
        self.place = Place.of(rank, size)
        self.batch_size, self.drop_last, self.num_workers = batch_size, drop_last, num_workers
        self.shuffle, self.seed = bool(shuffle), seed
        self._read = read
        self._options = options
        self._passes = 0
        self._epoch, self._turn, self._begun = 0, 0, False
        # A restored position waits for its pass; a pass that goes on from one is under way.
        self._restored = self._resumed = False
        lanes = self.place.size * max(num_workers, 1)
        if len(self.shards) < lanes:
            raise UsageError(
                f"{len(self.shards)} shards for {self.place.size} ranks with {max(num_workers, 1)} readers each: some "
                "would have no data",
                advice=f"cut the data into at least {lanes} shards, or give a lower num_workers=",
            )
        self._begin_epoch(0)
        self._loader_of(0)  # What DataLoader refuses is refused now.

    @property
    def epoch(self) -> int:
        """Return the epoch that the loader is in, or that begins next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, and end the pass over another one. The epoch that the loader is in keeps its
        position."""
        check_count("epoch", epoch)
        if epoch == self._epoch:
            return
        if self._restored:
            logger.warning(
                "set_epoch(%d) gives up the restored position in epoch %d: samples will be seen twice or never; begin "
                "the loop at the epoch of the restored loader, loader.epoch",
                epoch,
                self._epoch,
            )
        self._begin_epoch(epoch)
        self._passes += 1

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch, or go on from the restored position."""
        if not self._restored:
            if self._resumed:
                logger.warning(
                    "the pass that went on from the restored position was left in the middle of epoch %d, and a new "
                    "one begins this epoch anew: samples will be seen twice; use one iterator for the rest of the "
                    "epoch",
                    self._epoch,
                )
            self._begin_epoch(self._epoch)
        self._resumed, self._restored = self._restored, False
        self._passes += 1
        return _Pass(self, [self._open(number) for number in range(len(self._lanes))], self._passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the units of this rank that are not read to their end, by lane, and the lane whose turn it is."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "rank": self.place.rank,
            "size": self.place.size,
            "lanes": [[list(unit) for unit in lane] for lane in self._lanes],
            "turn": self._turn,
            "begun": self._begun,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a StateMismatchError for a state that `load_state_dict` could not take up."""
        self._lanes_of(state)
        require_place(state, self.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the position of this rank. The next pass over the loader goes on from there."""
        self.check_state_dict(state)
        lanes, turn = self._lanes_of(state), int(state["turn"])
        if len(lanes) != max(self.num_workers, 1):
            logger.warning(
                "the data was read by %d workers and is by %d now: the rest of epoch %d is dealt out anew to them, so "
                "its samples come in another order",
                len(lanes),
                max(self.num_workers, 1),
                state["epoch"],
            )
            lanes, turn = self._in_lanes([unit for lane in lanes for unit in lane]), 0
        self._take_up(state["epoch"], lanes, turn, begun=state["begun"])

    def check_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Raise a StateMismatchError for states that `load_world_state` could not deal out anew."""
        self._units_left(states)

    def load_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Take up the positions of another number of ranks: shards that are not read to their end are dealt anew."""
        epoch, units = self._units_left(states)
        if units and len(units) < self.place.size:
            logger.warning(
                "epoch %d has %d shards left for %d ranks: ranks without one get no batch until the next epoch",
                epoch,
                len(units),
                self.place.size,
            )
        own = units[self.place.rank :: self.place.size]
        self._take_up(epoch, self._in_lanes(own), 0, begun=any(state["begun"] for state in states))

    def _take_up(self, epoch: int, lanes: Lanes, turn: int, *, begun: bool) -> None:
        self._epoch, self._lanes, self._turn, self._begun = epoch, lanes, turn, begun
        self._restored, self._resumed = True, False
        self._passes += 1  # A pass that was begun before the restore ends.

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.blake2b("\0".join(self.shards).encode(), digest_size=16).hexdigest()
        return {
            "kind": _KIND,
            "shards": len(self.shards),
            "names": digest,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def _begin_epoch(self, epoch: int) -> None:
        own = self._order(epoch)[self.place.rank :: self.place.size]
        self._epoch, self._lanes = epoch, self._in_lanes([(shard, 0) for shard in own])
        self._turn, self._begun = 0, False
        self._restored = self._resumed = False

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = epoch_order(len(self.shards), shuffle=self.shuffle, seed=self.seed, epoch=epoch).tolist()
        return order

    def _in_lanes(self, units: Sequence[Unit]) -> Lanes:
        count = max(self.num_workers, 1)
        return [list(units[lane::count]) for lane in range(count)]

    def _lanes_of(self, state: Mapping[str, Any]) -> Lanes:
        """Return the units of a state by lane, or raise a StateMismatchError."""
        require_same(state, _KIND, self._identity())
        lanes = state.get("lanes")
        if not isinstance(lanes, list) or not lanes or not all(isinstance(lane, list) for lane in lanes):
            refuse(f"the state has lanes={lanes!r:.100}")
        if count_in(state, "turn") >= len(lanes) or not isinstance(state.get("begun"), bool):
            refuse(f"the state has turn={state['turn']!r:.100} and begun={state.get('begun')!r:.100}")
        return [[self._unit_of(unit) for unit in lane] for lane in lanes]

    def _unit_of(self, unit: object) -> Unit:
        if not isinstance(unit, list) or len(unit) != 2:
            refuse(f"the state has the unit {unit!r:.100}")
        shard, position = (count_in({"units": number}, "units") for number in unit)
        if shard >= len(self.shards):
            refuse(f"the state has a unit of shard {shard}, and there are {len(self.shards)}")
        return shard, position

    def _units_left(self, states: Sequence[Mapping[str, Any]]) -> tuple[int, list[Unit]]:
        """Return the epoch and its units that are not read to their end on any rank: first those that were begun."""
        for state in states:
            self._lanes_of(state)
        apart = states_by_rank(states)
        epoch = min(state["epoch"] for state in apart)
        # A rank that has ended the epoch and got nothing of the next one has nothing left in this one.
        ahead = [state for state in apart if state["epoch"] > epoch]
        if any(state["begun"] or state["epoch"] > epoch + 1 for state in ahead):
            epochs = sorted({state["epoch"] for state in apart})
            refuse(
                f"the ranks were in different epochs, {', '.join(map(str, epochs))}",
                "save where all ranks are in the same epoch, or restore on the same number of ranks",
            )
        units = [unit for state in apart if state["epoch"] == epoch for lane in self._lanes_of(state) for unit in lane]
        if len({shard for shard, _ in units}) != len(units):
            refuse("two ranks were reading the same shard", "their loaders were not built with different ranks")
        place_in_epoch = {shard: place for place, shard in enumerate(self._order(epoch))}
        return epoch, sorted(units, key=lambda unit: (unit[1] == 0, place_in_epoch[unit[0]]))

    def _open(self, lane: int) -> Iterator[tuple[Mapping[int, int], T]]:
        """Return the batches of a lane, each with the new positions of its units."""
        return iter(self._loader_of(lane)) if self._lanes[lane] else iter(())

    def _loader_of(self, lane: int) -> DataLoader[Any]:
        collate = self._options.get("collate_fn") or (default_convert if self.batch_size is None else default_collate)
        units = tuple(self._lanes[lane])
        # The seed of the worker is drawn from this generator: the global one stays as it is.
        seed = derived_seed(self.seed, self.place.rank, self.place.size, self._epoch, lane, units)
        settings = {
            **self._options,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "num_workers": min(self.num_workers, 1),
            "collate_fn": _WithPositions(collate, batched=self.batch_size is not None),
            "generator": torch.Generator().manual_seed(seed),
        }
        return DataLoader(_Lane(self.shards, units, self._read), **settings)

    def _got_batch(self, lane: int, positions: Mapping[int, int]) -> None:
        """Note that the training got a batch of a lane."""
        moved = ((shard, positions.get(shard, position)) for shard, position in self._lanes[lane])
        self._lanes[lane] = [unit for unit in moved if unit[1] != _FINISHED]
        self._turn = (lane + 1) % len(self._lanes)
        self._begun = True

    def _end_lane(self, lane: int) -> None:
        self._lanes[lane] = []


class _Pass(Iterator[T]):
    """One pass over an `ElasticShards`; takes batches from its lanes in turns."""

    def __init__(self, loader: ElasticShards[T], lanes: Sequence[Iterator[Any]], number: int) -> None:
        self._loader, self._lanes, self._number = loader, list(lanes), number
        self._open = [bool(units) for units in loader._lanes]
        self._ended = self._failed = False

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        loader = self._loader
        require_live_pass(_KIND, self._number == loader._passes, failed=self._failed)
        self._failed = True  # Until the batch is there: a reader that raised an error does not go on.
        for lane in self._turns():
            try:
                positions, batch = next(self._lanes[lane])
            except StopIteration:
                self._open[lane] = False
                loader._end_lane(lane)
                continue
            loader._got_batch(lane, positions)
            self._failed = False
            result: T = batch
            return result
        self._ended = True
        loader._begin_epoch(loader.epoch + 1)
        raise StopIteration

    def _turns(self) -> list[int]:
        """Return the lanes that have units left, the one whose turn it is first."""
        count, turn = len(self._lanes), self._loader._turn
        return [lane % count for lane in range(turn, turn + count) if self._open[lane % count]]


class _Lane(IterableDataset[Any]):  # type: ignore[misc]
    """The samples of some units, each with the positions that its unit, and those before it, have then."""

    def __init__(self, shards: Sequence[str], units: Sequence[Unit], read: ShardReader[Any]) -> None:
        self._shards, self._units, self._read = shards, units, read

    def __iter__(self) -> Iterator[tuple[dict[int, int], Any]]:
        finished: dict[int, int] = {}
        for shard, start in self._units:
            for position, sample in enumerate(self._read(self._shards[shard], start), start + 1):
                yield {**finished, shard: position}, sample
                finished = {}
            finished[shard] = _FINISHED


class _WithPositions:
    """Collates samples, and puts their positions beside the batch. A class, so that it can be pickled."""

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self._collate, self._batched = collate, batched

    def __call__(self, samples: Any) -> tuple[dict[int, int], Any]:
        if not self._batched:
            positions, sample = samples
            return positions, self._collate(sample)
        merged: dict[int, int] = {}
        for positions, _ in samples:
            merged |= positions
        return merged, self._collate([sample for _, sample in samples])


def _checked_shards(shards: Sequence[str]) -> tuple[str, ...]:
    """Return the names, or raise a UsageError."""
    if isinstance(shards, str) or not isinstance(shards, Iterable):
        raise UsageError(f"shards={shards!r:.100}", advice="give a list of names, such as paths of files")
    names = tuple(shards)
    if not all(isinstance(name, str) for name in names):
        raise UsageError("a name of a shard is no text", advice="give a list of texts, such as paths of files")
    if len(set(names)) != len(names):
        raise UsageError("two shards have the same name", advice="name each once: its samples would be seen twice")
    return names
