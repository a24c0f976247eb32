"""A data loader over a map-style dataset whose position follows to another number of ranks.

A dataset enters and batches leave. What it knows of a checkpoint is `state_dict` and its counterparts; it knows nothing
of files, and of other ranks only its own place among them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from holdfast.data.dealing import count_left, derived_seed, epoch_order, left_after, share_length, share_of
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

__all__ = ["ElasticLoader", "ElasticSampler"]

logger = logging.getLogger("holdfast")

T = TypeVar("T")

_KIND = "ElasticLoader"
_REFUSED = {
    "sampler": "the loader has a sampler of its own; give shuffle= and seed=",
    "batch_sampler": "give batch_size= and drop_last=",
    "generator": "the order of the samples and the seeds of the workers come from seed=",
}


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where in the data a rank is: the deals of the epoch that have ended, and how many samples of the present one the
    training got. `complete`: the epoch has no further batch for it."""

    epoch: int = 0
    deals: tuple[tuple[int, ...], ...] = ()
    count: int = 0
    complete: bool = False


class ElasticSampler(Sampler[int]):  # type: ignore[misc]
    """The sampler of an `ElasticLoader`: this rank's samples of an epoch, from the loader's position on."""

    def __init__(self, length: int, place: Place, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.length, self.place = length, place
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.cursor = Cursor()
        # A restored position waits for its pass; a pass that goes on from one is under way.
        self.restored = self.resumed = False
        # Counts what ends a pass: another pass, a restore, another epoch.
        self.passes = 0

    @property
    def epoch(self) -> int:
        """Return the epoch that the loader is in, or that begins next."""
        return self.cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, and end the pass over another one. The epoch that the loader is in keeps its
        position."""
        check_count("epoch", epoch)
        if epoch == self.cursor.epoch:
            return
        next_one = self.cursor.complete and epoch == self.cursor.epoch + 1
        if self.restored and not next_one:
            logger.warning(
                "set_epoch(%d) gives up the restored position, %d samples of this rank into epoch %d: samples will be "
                "seen twice or never; begin the loop at the epoch of the restored loader, loader.epoch",
                epoch,
                self.cursor.count,
                self.cursor.epoch,
            )
        self.restored = self.resumed = False
        self.cursor = Cursor(epoch)
        self.passes += 1

    def begin(self) -> None:
        """Begin a pass: from the restored position, or from the beginning of the epoch."""
        if self.restored:
            self.resumed = bool(self.cursor.count or self.cursor.deals)
        else:
            if self.resumed:
                logger.warning(
                    "the pass that went on from the restored position was left in the middle of epoch %d, and a new "
                    "one begins this epoch from its first sample: samples will be seen twice; use one iterator for "
                    "the rest of the epoch",
                    self.cursor.epoch,
                )
            self.resumed = False
            self.cursor = Cursor(self.cursor.epoch)
        self.restored = False

    def end(self) -> None:
        """End an epoch: the next pass is the next one."""
        self.resumed = False
        self.cursor = Cursor(self.cursor.epoch + 1)

    def remaining(self) -> int:
        """Return how many samples of this rank are left in the epoch, from the position on."""
        cursor = self.cursor
        if cursor.complete:
            return 0
        left = count_left(self.length, cursor.deals)
        return share_length(left, self.place.size, drop_last=self.drop_last) - cursor.count

    def __iter__(self) -> Iterator[int]:
        cursor = self.cursor
        if cursor.complete:
            return iter(())
        order = epoch_order(self.length, shuffle=self.shuffle, seed=self.seed, epoch=cursor.epoch)
        left = left_after(order, cursor.deals)
        share = share_of(left, self.place.rank, self.place.size, drop_last=self.drop_last)
        return iter(share[cursor.count :].tolist())

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch."""
        return share_length(self.length, self.place.size, drop_last=self.drop_last)


class ElasticLoader(DataLoader[T]):  # type: ignore[misc]
    """A `DataLoader` over a map-style dataset that deals its samples to the ranks, and whose position is restored on
    any number of ranks. It takes the place of a `DataLoader` with a `DistributedSampler`, and deals as that does.

    dataset, batch_size, shuffle, drop_last: as for a `DataLoader`. With `drop_last` every rank gets the same number of
        full batches, and the rest is dropped; without it the last round of samples is filled up with samples that were
        seen, so that every rank gets as many.
    seed: the order of an epoch depends on it and on the number of the epoch alone.
    rank, size: this rank among those that read different data; those of torch.distributed if they are not given.
    options: other arguments of `DataLoader`, such as `num_workers` and `collate_fn`.

    Each pass over the loader is one epoch, and the next pass the next one; `set_epoch` goes to another. A pass that is
    left in the middle is begun anew by the next, unless the loader was restored in between. The position counts the
    batches that the training got, not those that workers have prepared. As a component, every rank has its own state;
    on another number of ranks `LoadStrategy(on_world_change="adapt")` deals out the samples of the epoch that no rank
    got. The global random state is never drawn from. A batch that raises an error ends the pass and moves nothing.
    """

    sampler: ElasticSampler

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
        **options: Any,
    ) -> None:
        _check_options(dataset, batch_size, options)
        check_count("seed", seed)
        length = len(dataset)
        sampler = ElasticSampler(length, Place.of(rank, size), shuffle=bool(shuffle), seed=seed, drop_last=drop_last)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            generator=torch.Generator(),
            **options,
        )

    @property
    def epoch(self) -> int:
        """Return the epoch that the loader is in, or that begins next."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, and end the pass over another one. The epoch that the loader is in keeps its
        position."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Any:
        """Begin an epoch, or go on from the restored position."""
        sampler, place = self.sampler, self.sampler.place
        sampler.begin()
        # The seed of the workers is drawn from this generator: the global one stays as it is. Other ranks and other
        # positions get other seeds.
        position = (sampler.cursor.epoch, sampler.cursor.deals, sampler.cursor.count)
        self.generator.manual_seed(derived_seed(sampler.seed, place.rank, place.size, *position))
        sampler.passes += 1
        return _Pass(self, super().__iter__(), sampler.passes)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is: the position of the next batch that the training has not got."""
        cursor = self.sampler.cursor
        return {
            **self._identity(),
            "epoch": cursor.epoch,
            "rank": self.sampler.place.rank,
            "size": self.sampler.place.size,
            "deals": [list(counts) for counts in cursor.deals],
            "count": cursor.count,
            "complete": cursor.complete,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a StateMismatchError for a state that `load_state_dict` could not take up."""
        self._cursor_of(state)
        require_place(state, self.sampler.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the position of this rank. The next pass over the loader goes on from there."""
        self.check_state_dict(state)
        self._take_up(self._cursor_of(state))

    def check_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Raise a StateMismatchError for states that `load_world_state` could not deal out anew."""
        self._redealt(states)

    def load_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Take up the positions of another number of ranks: what none of them got is dealt out anew."""
        self._take_up(self._redealt(states))

    def _take_up(self, cursor: Cursor) -> None:
        self.sampler.cursor, self.sampler.restored = cursor, True
        self.sampler.passes += 1  # A pass that was begun before the restore ends.

    def _identity(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            "kind": _KIND,
            "length": sampler.length,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def _cursor_of(self, state: Mapping[str, Any]) -> Cursor:
        """Return the position that a state holds, or raise a StateMismatchError."""
        require_same(state, _KIND, self._identity())
        deals = state.get("deals")
        if not isinstance(deals, list) or not all(isinstance(one, list) and one for one in deals):
            refuse(f"the state has deals={deals!r:.100}")
        for counts in deals:
            for count in counts:
                count_in({"deals": count}, "deals")
        if not isinstance(state.get("complete"), bool):
            refuse(f"the state has complete={state.get('complete')!r:.100}")
        taken, count = tuple(tuple(counts) for counts in deals), count_in(state, "count")
        most = share_length(count_left(self.sampler.length, taken), state["size"], drop_last=False)
        if count > most:
            refuse(f"the state has count={count}, and a rank of {state['size']} gets {most} samples")
        return Cursor(state["epoch"], taken, count, state["complete"])

    def _redealt(self, states: Sequence[Mapping[str, Any]]) -> Cursor:
        """Return the position of a new deal of what the ranks of the old one left."""
        for state in states:
            self._cursor_of(state)
        cursors = [self._cursor_of(state) for state in states_by_rank(states)]
        if len({cursor.epoch for cursor in cursors}) > 1:
            # A rank that has got its last batch of an epoch is where one is that has begun the next.
            cursors = [Cursor(cursor.epoch + 1) if cursor.complete else cursor for cursor in cursors]
        if len({(cursor.epoch, cursor.deals) for cursor in cursors}) > 1:
            epochs = sorted({cursor.epoch for cursor in cursors})
            refuse(
                f"the ranks were in different epochs, {', '.join(map(str, epochs))}, or in different deals of one",
                "save where all ranks are in the same epoch, or restore on the same number of ranks",
            )
        first = cursors[0]
        counts = tuple(cursor.count for cursor in cursors)
        if not any(counts):
            return replace(first, complete=False)
        complete = all(cursor.complete for cursor in cursors)
        return Cursor(first.epoch, (*first.deals, counts), 0, complete)

    def _got_batch(self) -> None:
        """Note that the training got a batch."""
        batch = self.batch_size or 1
        left = self.sampler.remaining()
        got = min(batch, left)
        complete = left - got < (batch if self.drop_last else 1)
        cursor = self.sampler.cursor
        self.sampler.cursor = replace(cursor, count=cursor.count + got, complete=complete)


class _Pass(Iterator[T]):
    """One pass over an `ElasticLoader`; counts what the training gets."""

    def __init__(self, loader: ElasticLoader[T], batches: Iterator[T], number: int) -> None:
        self._loader, self._batches, self._number = loader, batches, number
        self._complete = self._ended = self._failed = False

    def __next__(self) -> T:
        newest = self._number == self._loader.sampler.passes
        # After its last batch a pass may end when the next epoch is set already.
        if self._ended or (self._complete and not newest):
            raise StopIteration
        require_live_pass(_KIND, newest, failed=self._failed)
        self._failed = True  # Until the batch is there: after an error the position of what follows is not known.
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended = True
            self._loader.sampler.end()
            raise
        self._loader._got_batch()
        self._complete, self._failed = self._loader.sampler.cursor.complete, False
        return batch

    def __len__(self) -> int:
        return len(self._loader)


def _check_options(dataset: object, batch_size: int | None, options: Mapping[str, Any]) -> None:
    """Refuse what an ElasticLoader cannot be built with."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a dataset without positions, of type {type(dataset).__name__}, cannot be dealt out by samples",
            advice="use holdfast.data.ElasticShards, which deals out shards",
        )
    if batch_size is not None:
        check_count("batch_size", batch_size, least=1)
    for name in sorted(set(options) & set(_REFUSED)):
        raise UsageError(f"an ElasticLoader takes no {name}=", advice=_REFUSED[name])
    if options.get("in_order") is False:
        raise UsageError("in_order=False", advice="batches in no fixed order have no position that could be saved")
