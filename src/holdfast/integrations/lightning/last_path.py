"""Give `ckpt_path="last"` its meaning beside a run of Holdfast.

Lightning asks callbacks of its own type alone for the last checkpoint. Where it finds none it warns and goes on with
the weights that the module has: `test` would measure a module that is not trained.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import holdfast
from holdfast.integrations.lightning.framework import lightning
from holdfast.integrations.lightning.ranking import RankedRun
from holdfast.integrations.lightning.reading import two_sources

__all__ = ["follow_last_path"]


def follow_last_path() -> None:
    """Make the trainers of this process ask a callback of Holdfast, where they have one, for the last checkpoint.

    A trainer decides on `ckpt_path` before the first hook of its callbacks, so this is done for all of them at once.
    """
    connector = importlib.import_module(f"{lightning.__name__}.trainer.connectors.checkpoint_connector")
    original = connector._CheckpointConnector._parse_ckpt_path
    if getattr(original, "follows_runs", False):
        return

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
        path = _last_of_run(self.trainer, state_fn) if ckpt_path == "last" else None
        return original(self, state_fn, ckpt_path if path is None else path, *args, **options)

    parse.follows_runs = True  # type: ignore[attr-defined]
    connector._CheckpointConnector._parse_ckpt_path = parse


def _last_of_run(trainer: Any, state_fn: Any) -> str | None:
    """Return the folder of the run's latest checkpoint; None leaves the decision to Lightning."""
    callback = next((one for one in trainer.callbacks if isinstance(one, RankedRun)), None)
    if callback is None:
        return None
    if state_fn == "fit":
        if callback.resume != "never" and not trainer.fast_dev_run:
            raise two_sources("last", callback.run)
        return None
    path = callback.last_model_path
    if not path:
        raise holdfast.UsageError(
            "ckpt_path='last' was given, and the run has no checkpoint",
            run=str(callback.run),
            advice="train first, or leave ckpt_path out to use the weights that the module has",
        )
    return path
