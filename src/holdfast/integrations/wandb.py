"""Log the events of a manager to a run of Weights & Biases."""

from __future__ import annotations

from typing import Any

from holdfast import UsageError
from holdfast.integrations.observers import Scalars, ScalarsObserver

__all__ = ["WandbObserver"]

_STEP = "holdfast/step"


class WandbObserver(ScalarsObserver):
    """Logs the numbers of saves and restores to a W&B run: the one that is given, or the active one.

    One of `observers=` of a `CheckpointManager`. A checkpoint is committed some steps after the step that it is of, and
    W&B takes no value for a step that is over: the numbers are plotted over a metric of their own, `holdfast/step`, and
    sent with the next values that the training logs.
    """

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        if run is None:
            import wandb

            run = wandb.run
        if run is None:
            raise UsageError("there is no active W&B run", advice="call wandb.init() first, or pass run=")
        self._run = run
        run.define_metric(_STEP, hidden=True)
        run.define_metric("holdfast/*", step_metric=_STEP)

    def write(self, scalars: Scalars) -> None:
        # Not committed: that would move the run's own step on, over which everything else is plotted.
        self._run.log({**scalars.values, _STEP: scalars.step}, commit=False)
