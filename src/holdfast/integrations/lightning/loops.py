"""The one place that reaches into Lightning's loops: call back between two batches and between two epochs, where the
state of a training is whole, and let a restored training go on exactly there.

Lightning's own hooks come before that: after `on_train_batch_end` of a callback there is still the module's own hook,
a validation that is due, and the step of a scheduler that follows a metric. A checkpoint from inside a hook lacks them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import holdfast
from holdfast.integrations.lightning.data import DataPosition, LateRNGState

__all__ = ["Boundary", "Loops"]

Boundary = Literal["batch", "epoch"]

_METHODS = {
    "fit_loop": ("_load_combined_loader_states", "setup_data", "on_advance_start", "on_advance_end"),
    "epoch_loop": ("reset", "on_run_start", "advance", "on_advance_end"),
}
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Loops:
    """The training loops of one trainer.

    on_boundary: called with "batch" when a batch, and the validation after it, is done, and with "epoch" when an epoch
        is, on all ranks.
    is_cut_short: whether the training stopped in the middle of an epoch, which Lightning counts as done.
    """

    def __init__(self, trainer: Any, on_boundary: Callable[[Boundary], None]) -> None:
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._on_boundary = on_boundary
        self._resume: Boundary | None = None
        self._loaded_in_epoch: int | None = None
        self._noted: dict[str, Any] = {}
        self.is_cut_short = False
        self.position = DataPosition(self._fit)
        self.rng = LateRNGState()

    def install(self) -> None:
        """Wrap the methods of this trainer's loops, until `remove`."""
        for loop, names in self._wrapped():
            for name in names:
                wrapper = getattr(self, f"_{'fit' if loop is self._fit else 'epoch'}_{name}")
                setattr(loop, name, _bound(wrapper, getattr(loop, name)))

    def remove(self) -> None:
        """Give the loops their own methods back."""
        for loop, names in self._wrapped():
            for name in names:
                vars(loop).pop(name, None)

    def is_accumulating(self) -> bool:
        """Return whether gradients of batches are waiting for the optimizer's step."""
        return bool(self._epoch._should_accumulate())

    def is_last_batch(self) -> bool:
        """Return whether the epoch's last batch was the last one."""
        return bool(self._epoch._num_ready_batches_reached())

    def has_validated(self) -> bool:
        """Return whether a validation has run in this fit."""
        return bool(self._epoch.val_loop._has_run)

    @property
    def epochs_done(self) -> int:
        return int(self._fit.epoch_progress.total.processed) - self.is_cut_short

    @property
    def batches_done(self) -> int:
        """Return how many batches of the current epoch are done."""
        return int(self._epoch.batch_progress.current.ready)

    def state_dict(self, boundary: Boundary) -> dict[str, Any]:
        """Return the progress of the loops. The loaders' states belong to each rank, and to `position`."""
        self.position.at_epoch_end = boundary == "epoch"
        state = self._fit.state_dict()
        state["state_dict"] = {key: value for key, value in state["state_dict"].items() if key != "combined_loader"}
        if self.is_cut_short:
            for counts in (state["epoch_progress"]["total"], state["epoch_progress"]["current"]):
                counts["processed"] -= 1
                counts["completed"] -= 1
        return {
            "fit_loop": state,
            "boundary": boundary,
            "loaded_in_epoch": _finite(self._fit._last_train_dl_reload_epoch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the progress; the training goes on from it when it starts."""
        progress = dict(state["fit_loop"])
        own = dict(progress.get("state_dict", {}))
        loader_states = own.pop("combined_loader", None)
        progress["state_dict"] = own
        self._fit.load_state_dict(progress)
        boundary = state.get("boundary")
        if boundary is None:
            boundary = self._finish_hook()
            if not self.position.pending:
                self.position.adopt(loader_states, self.batches_done)
        self._resume = boundary
        # It would run a validation that the training did not, and reset its progress.
        self._mark(fit=boundary == "batch", epoch=boundary == "batch", validation=True)
        if self._trainer.reload_dataloaders_every_n_epochs:
            self._loaded_in_epoch = state.get("loaded_in_epoch")

    def _finish_hook(self) -> Boundary:
        """Bring progress that Lightning saved inside of a hook to the end of that batch or epoch, and return which."""
        batches, epochs = self._epoch.batch_progress, self._fit.epoch_progress
        if batches.total.completed < batches.total.processed:
            batches.increment_completed()
        if epochs.total.processed == epochs.total.ready:
            if epochs.total.completed < epochs.total.processed:
                epochs.increment_completed()
            return "epoch"
        if not self.is_accumulating():
            self._epoch._batches_that_stepped += 1
        return "batch"

    def _mark(self, *, fit: bool, epoch: bool, validation: bool) -> None:
        """Set which loops Lightning takes for restarted."""
        for loop, restarting in ((self._fit, fit), (self._epoch, epoch), (self._epoch.val_loop, validation)):
            loop._restarting = restarting
            loop._loaded_from_state_dict = False
            loop._resuming_from_checkpoint = False

    def _wrapped(self) -> list[tuple[Any, tuple[str, ...]]]:
        return [(self._fit, _METHODS["fit_loop"]), (self._epoch, _METHODS["epoch_loop"])]

    def _iterator(self) -> Any:
        return getattr(getattr(self._fit, "_combined_loader", None), "_iterator", None)

    def _fit__load_combined_loader_states(self, original: Callable[[], None]) -> None:
        # The loaders are there, and the next thing is their iterator.
        self._noted = self.position.note_building()
        original()

    def _fit_setup_data(self, original: Callable[[], None]) -> None:
        before = self._iterator()
        original()
        if self._iterator() is not before:
            self.position.note_built(self._noted)
        if self._loaded_in_epoch is not None and self._fit._combined_loader is not None:
            self._fit._last_train_dl_reload_epoch, self._loaded_in_epoch = self._loaded_in_epoch, None

    def _fit_on_advance_start(self, original: Callable[[], None]) -> None:
        self.is_cut_short = False
        if self._resume == "epoch":
            self._resume = None
            self._mark(fit=False, epoch=False, validation=False)
            self.position.take_up_epoch_end()
            self.rng.take_up()
        original()

    def _fit_on_advance_end(self, original: Callable[[], None]) -> None:
        original()
        # By max_steps or should_stop: a training with a higher limit goes on with the rest of the epoch.
        self.is_cut_short = not self.is_last_batch() and not self.is_accumulating()
        self._on_boundary("batch" if self.is_cut_short else "epoch")

    def _epoch_reset(self, original: Callable[[], None]) -> None:
        if self._resume is None:
            original()
            return
        with warnings.catch_warnings():
            # Any loader is: what has no state of its own is skipped through.
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            original()

    def _epoch_on_run_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        before, noted = self._iterator(), self.position.note_building()
        original(fetcher)
        if self._iterator() is not before:
            self.position.note_built(noted)
        if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
            raise holdfast.UsageError(
                "training_step takes a dataloader_iter, and how many batches it fetched is not known",
                advice="take (batch, batch_idx) in training_step",
            )
        if self._resume == "batch":
            self._resume = None
            # From here on nothing is a restart: Lightning would leave out a validation or the step of a scheduler.
            self._mark(fit=False, epoch=False, validation=False)
            self.position.warn_of_changes()
            if not self.is_last_batch():
                self.position.take_up_mid_epoch(self.batches_done)
            self.rng.take_up()

    def _epoch_advance(self, original: Callable[[Any], None], fetcher: Any) -> None:
        before = self._epoch.batch_progress.total.ready
        self.position.note_fetching()
        original(fetcher)
        if self._epoch.batch_progress.total.ready > before:
            self.position.note_fetched()

    def _epoch_on_advance_end(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        self._on_boundary("batch")


def _bound(wrapper: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: wrapper(original, *args)


def _finite(epoch: float) -> int | None:
    return int(epoch) if epoch > float("-inf") else None
