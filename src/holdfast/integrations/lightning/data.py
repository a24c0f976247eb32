"""Where a Lightning trainer is in its training data: taken between two batches, and taken up again there.

Loaders with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, give their own state. For any
other the random state is noted when its iterator is built and when its first batch is fetched: a resume builds the
iterator under the same random state and skips the batches that were trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import holdfast
from holdfast.integrations.lightning.loader_changes import changes_of_loaders, described_loaders

logger = logging.getLogger("holdfast")

__all__ = ["DataPosition", "LateRNGState"]

_DRAWING_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class LateRNGState(holdfast.RNGState):
    """The random state of a rank, which a restore keeps until the training goes on.

    Between the restore and the next batch Lightning builds loaders and iterators, which draw random numbers.
    """

    def __init__(self) -> None:
        self._pending: Any = None

    def load_state_dict(self, state: Any) -> None:
        self._pending = state

    def load_world_state(self, states: Sequence[Any], index: int, count: int) -> None:
        before = holdfast.get_rng_state()
        super().load_world_state(states, index, count)
        self._pending = holdfast.get_rng_state()
        holdfast.set_rng_state(before)

    def take_up(self) -> None:
        """Set the random state that was restored, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            holdfast.set_rng_state(pending)


class DataPosition:
    """The position of one rank in its training loaders, as a component.

    `fit_loop` is Lightning's loop, which holds the loaders and what fetches from them. `at_epoch_end` is whether what
    is saved next lies between two epochs.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._batches = 0
        self._built: dict[str, Any] = {}
        self._first_fetch: Any = None
        self._ahead: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self.at_epoch_end = False

    @property
    def pending(self) -> bool:
        """Return whether a restored position was not taken up yet."""
        return self._pending is not None

    def note_building(self) -> dict[str, Any]:
        """Return what an iterator that is built next depends on; `note_built` takes it when one was."""
        loaders = self._loaders()
        return {
            "rng": holdfast.get_rng_state(),
            "generators": _states(_generators(loaders)),
            "starts_workers": [_keeps_workers(loader) and loader._iterator is None for loader in loaders],
        }

    def note_built(self, before: dict[str, Any]) -> None:
        """Note that an iterator was built: no batch of it is trained on yet."""
        self._built, self._batches, self._first_fetch = before, 0, None

    def note_fetching(self) -> None:
        """Note that the next batch is about to be fetched."""
        fetcher = self._fit_loop._data_fetcher
        if self._batches == 0:
            self._first_fetch = holdfast.get_rng_state()
        if fetcher.length is None:
            # Lightning reads one batch ahead where it does not know how many there are. What was before that is the
            # state whose next batch is the next one of the training.
            loaders = self._loaders()
            states = [loader.state_dict() for loader in loaders] if _all_stateful(loaders) else []
            self._ahead = {"rng": holdfast.get_rng_state(), "loaders": states}

    def note_fetched(self) -> None:
        """Note that a batch was fetched."""
        self._batches += 1

    def state_dict(self) -> dict[str, Any]:
        fetcher = self._fit_loop._data_fetcher
        loaders = self._loaders()
        if not loaders:
            return {}
        state: dict[str, Any] = {
            "batches": self._batches,
            "at_epoch_end": self.at_epoch_end,
            "generators": _states(_generators(loaders)),
            "described": described_loaders(loaders),
        }
        if fetcher.length is None and self._ahead is not None and not self.at_epoch_end:
            state["ahead"] = self._ahead["rng"]
            state["loaders"] = self._ahead["loaders"]
        elif _all_stateful(loaders):
            state["loaders"] = [loader.state_dict() for loader in loaders]
        if not _all_stateful(loaders):
            _refuse_mixed(loaders)
            state["built"] = self._built
            state["first_fetch"] = self._first_fetch
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = state

    def load_world_state(self, states: Sequence[dict[str, Any]], index: int, count: int) -> None:
        """Load after the number of ranks changed. Between two epochs there is no position to share out."""
        if any(state.get("batches") for state in states) and not all(state.get("at_epoch_end") for state in states):
            raise holdfast.StateMismatchError(
                f"the position in the middle of an epoch of {len(states)} ranks cannot be shared out among {count}",
                component="loader",
                advice="resume a checkpoint from the end of an epoch, or pass a strategy with on_world_change='skip': "
                "the data of that epoch then begins anew",
            )
        self._pending = {"batches": 0, "generators": states[index % len(states)].get("generators", [])}

    def adopt(self, loader_states: list[Any] | None, batches: int) -> None:
        """Take a position that Lightning itself had saved: the states of its loaders, or a number of batches alone."""
        self._pending = {"batches": batches}
        if loader_states:
            self._pending["loaders"] = loader_states

    def take_up_epoch_end(self) -> None:
        """Bring loaders to the end of the epoch that was saved. The next epoch builds its own iterator."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        loaders = self._loaders()
        # Loaders without a state have nothing to take up between two epochs.
        for loader, state in zip(loaders, _loader_states(pending, loaders), strict=False):
            loader.load_state_dict(state)
            if isinstance(loader, DataLoader):
                # Its sampler and its dataset take their state up when an iterator is built.
                iter(loader)
        _set_states(_generators(loaders), pending.get("generators"))
        _warn_of_kept_workers(loaders)

    def take_up_mid_epoch(self, batches: int) -> None:
        """Bring the fetcher to the batch after the last that was trained on, with the sampler's epoch set by now.

        `batches` is how many of the epoch are done.
        """
        done = batches if self._pending is None else self._pending["batches"]
        try:
            self._take_up(batches)
        except StopIteration:
            # Lightning would take it for the end of the training.
            raise _too_short(done, None) from None

    def warn_of_changes(self) -> None:
        """Warn of loaders that are not those of the saved position."""
        loaders = self._loaders()
        changes = changes_of_loaders((self._pending or {}).get("described") or described_loaders(loaders), loaders)
        if changes:
            logger.warning(
                "the training data is not that of the saved position: %s; the position counts batches, so this epoch "
                "may train on samples twice, or leave some out",
                ", ".join(changes),
            )

    def _take_up(self, batches: int) -> None:
        fetcher = self._fit_loop._data_fetcher
        loaders = self._loaders()
        pending, self._pending = self._pending, None
        if pending is None:
            logger.warning(
                "no position in the data was restored: %d batches of this epoch are done, and it goes on with its first"
                " one",
                batches,
            )
            noted = self.note_building()
            iter(fetcher)
            self.note_built(noted)
            fetcher.fetched += batches
            return
        if fetcher.length is not None and pending["batches"] > fetcher.length:
            raise _too_short(pending["batches"], fetcher.length)
        states = _loader_states(pending, loaders)
        self._built, self._first_fetch = pending.get("built", {}), pending.get("first_fetch")
        self._batches = pending["batches"]
        if states:
            for loader, state in zip(loaders, states, strict=True):
                loader.load_state_dict(state)
            _read_ahead(fetcher, pending.get("ahead"))
            fetcher.fetched += batches
        else:
            self._skip(fetcher, loaders, pending.get("ahead"))
            # More are done where an earlier resume had no position, and began the epoch's data anew.
            fetcher.fetched += batches - self._batches
        _set_states(_generators(loaders), pending.get("generators"))

    def _loaders(self) -> list[Any]:
        combined = self._fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _skip(self, fetcher: Any, loaders: Sequence[Any], ahead: Any) -> None:
        """Build the iterator as it was built then, and fetch what was trained on."""
        if self._built:
            holdfast.set_rng_state(self._built["rng"])
            _set_states(_generators(loaders), self._built["generators"])
            _stop_workers(loaders, self._built.get("starts_workers", ()))
        else:
            _warn_of_drawn_order(loaders)
        _warn_of_cycles(fetcher, loaders, self._batches)
        _warn_of_kept_workers(loaders)
        iter(fetcher)
        if self._first_fetch is not None:
            holdfast.set_rng_state(self._first_fetch)
        if self._batches:
            logger.info("skipping %d batches; a StatefulDataLoader would start at its position at once", self._batches)
        for number in range(self._batches):
            if ahead is not None and number == self._batches - 1:
                # With the last of them Lightning reads the next batch, which is trained on.
                holdfast.set_rng_state(ahead)
            next(fetcher)


def _too_short(done: int, length: int | None) -> holdfast.StateMismatchError:
    now = "fewer" if length is None else length
    return holdfast.StateMismatchError(
        f"{done} batches of this epoch are done, and the training data now has {now}",
        component="loader",
        advice="give fit the data of the training that was saved, resume a checkpoint from the end of an epoch with "
        "selector=, or pass strategy=LoadStrategy(skip=('loader',)) to go on without the position",
    )


def _keeps_workers(loader: Any) -> bool:
    return type(loader) is DataLoader and loader.persistent_workers and loader.num_workers > 0


def _stop_workers(loaders: Sequence[Any], started: Sequence[bool]) -> None:
    """Stop the workers of loaders that had none when the iterator was built: it draws the seed of new ones."""
    for loader, new in zip(loaders, started, strict=False):
        if new and _keeps_workers(loader) and loader._iterator is not None:
            loader._iterator._shutdown_workers()
            loader._iterator = None


def _warn_of_kept_workers(loaders: Sequence[Any]) -> None:
    """Warn of workers that went on from an earlier epoch: the random state that they had by then is in them alone."""
    if any(_keeps_workers(loader) and loader._iterator is not None for loader in loaders):
        logger.warning(
            "a training loader has persistent_workers=True: the order of the data is that of the run that was saved, "
            "and random numbers that its workers draw, as for augmentations, are others; they are the same without "
            "persistent_workers"
        )


def _read_ahead(fetcher: Any, random_state: Any) -> None:
    """Build the iterator, and where Lightning reads one batch ahead, read it under the random state of that time."""
    if random_state is None:
        iter(fetcher)
        return
    count, fetcher.prefetch_batches = fetcher.prefetch_batches, 0
    try:
        iter(fetcher)
        holdfast.set_rng_state(random_state)
        fetcher.batches.append(next(fetcher))
    finally:
        fetcher.prefetch_batches = count


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _all_stateful(loaders: Sequence[Any]) -> bool:
    return bool(loaders) and all(map(_is_stateful, loaders))


def _refuse_mixed(loaders: Sequence[Any]) -> None:
    if any(map(_is_stateful, loaders)):
        kinds = ", ".join(type(loader).__name__ for loader in loaders)
        raise holdfast.UsageError(
            f"some of the training loaders ({kinds}) have a state_dict and others have none",
            component="loader",
            advice="use a StatefulDataLoader for all of them, or a DataLoader for all of them",
        )


def _loader_states(pending: dict[str, Any], loaders: Sequence[Any]) -> list[Any]:
    """Return the saved states, one for each loader, or none where the loaders keep none."""
    states = list(pending.get("loaders") or ())
    if states and (len(states) != len(loaders) or not _all_stateful(loaders)):
        kinds = ", ".join(type(loader).__name__ for loader in loaders)
        raise holdfast.StateMismatchError(
            f"the checkpoint has the states of {len(states)} training loaders, and there are now: {kinds}",
            component="loader",
            advice="build the loaders as they were when the checkpoint was saved",
        )
    if not states and pending.get("batches") and _all_stateful(loaders) and "built" in pending:
        raise holdfast.StateMismatchError(
            "the training loaders have a state_dict now, and had none when the checkpoint was saved",
            component="loader",
            advice="build the loaders as they were, or resume a checkpoint from the end of an epoch",
        )
    return states


def _generators(loaders: Sequence[Any]) -> list[torch.Generator]:
    """Return the generators that a user gave loaders and samplers, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        for holder in holders:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor] | None) -> None:
    if states is None:
        return
    if len(states) != len(generators):
        raise holdfast.StateMismatchError(
            f"the checkpoint has the states of {len(states)} generators of training loaders, and there are "
            f"{len(generators)} now",
            component="loader",
            advice="give the loaders generator= as when the checkpoint was saved",
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.cpu())


def _warn_of_drawn_order(loaders: Sequence[Any]) -> None:
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        if type(sampler) in _DRAWING_SAMPLERS and getattr(sampler, "generator", None) is None:
            logger.warning(
                "the checkpoint has no random state, and %s draws the order of the data from it: the rest of this epoch"
                " has another order than in the run that was saved",
                type(sampler).__name__,
            )


def _warn_of_cycles(fetcher: Any, loaders: Sequence[Any], batches: int) -> None:
    """Warn of a shorter loader that began again within the epoch: its new order may have been drawn then."""
    if len(loaders) < 2 or fetcher.length is None:
        return
    lengths = [len(loader) for loader in loaders]
    if min(lengths) < batches:
        logger.warning(
            "a training loader with %d batches began again within this epoch; if its order is drawn at random it is not"
            " the same after this resume: use StatefulDataLoader",
            min(lengths),
        )
