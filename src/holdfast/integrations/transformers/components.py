"""State of the Trainer as components, and its limit as a policy. A Trainer enters; what a manager stores leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_pt_utils import nested_gather

import holdfast

__all__ = ["KeepTotal", "RunningLoss", "StepsDone", "Triggers"]


class StepsDone:
    """How many steps are done: the component by which all ranks find the checkpoint before anything else exists."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self._trainer.state.global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the Trainer has its state from trainer_state.json by now."""


class RunningLoss:
    """What the Trainer has in memory alone, one per rank: the sum of the losses since the last log, and the random
    state at the beginning of the epoch, from which some samplers draw the order of its samples."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epoch_rng: dict[str, Any] = {}
        self._restored: Mapping[str, Any] | None = None

    def begin_epoch(self, *, resumed: bool) -> None:
        """Take up what was restored, when the Trainer has set its sums to zero. `resumed`: the epoch had begun."""
        state, self._restored = self._restored, None
        if state is not None:
            trainer = self._trainer
            trainer._tr_loss += state["loss"]
            trainer._globalstep_last_logged = state["last_logged"]
            # The mean loss that `train` returns is that of the steps of this call.
            trainer._total_loss_scalar -= nested_gather(trainer._tr_loss, trainer.args.parallel_mode).mean().item()
            if resumed:
                holdfast.set_rng_state(state["epoch_rng"])
        self._epoch_rng = holdfast.get_rng_state()

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loss": trainer._tr_loss.item(),
            "last_logged": trainer._globalstep_last_logged,
            "epoch_rng": self._epoch_rng,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state

    def load_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Load after the number of ranks changed: every rank takes the mean of the losses."""
        mean = sum(state["loss"] for state in states) / len(states)
        self._restored = {**states[index % len(states)], "loss": mean}


class Triggers(TrainerCallback):  # type: ignore[misc]
    """Asks the triggers of the manager after every step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        manager = self._trainer.checkpoint_manager
        if manager is None:
            return
        if manager.should_save(state.global_step, epoch=int(state.epoch)):
            control.should_save = True
        if manager.should_stop:
            control.should_training_stop = True


@dataclass(frozen=True)
class KeepTotal(holdfast.KeepLast):
    """At most n checkpoints, as `save_total_limit` has it: the best model is one of them.

    ranking: the policy by whose metric the links to the best checkpoint go. best: returns the folder of the best model
    as the Trainer has it, which of several equal ones is the first.
    """

    ranking: holdfast.KeepBest | None
    best: Callable[[], str | None]

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        return () if self.ranking is None else self.ranking.metrics

    def choose(self, records: Sequence[Any]) -> dict[str, str]:
        kept = holdfast.KeepLast(self.n).choose(records)
        best = os.path.basename(self.best() or "")
        if best in kept or best not in {record.folder for record in records}:
            return kept
        # The newest stays beside the best, also with a limit of 1.
        newest = list(kept.items())[: max(self.n - 1, 1)]
        return {**dict(newest), best: "the best model"}
