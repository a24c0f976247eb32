"""Name the best and the latest checkpoint of a run, under the names that `ModelCheckpoint` has for them."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import torch

import holdfast

__all__ = ["RankedRun"]


class RankedRun:
    """The attributes of a run that users of `ModelCheckpoint` read. They follow what is committed."""

    run: str | os.PathLike[str]
    monitor: str | None
    mode: str
    save_top_k: int
    resume: Literal["auto", "required", "never"]
    _storage: Any

    @property
    def best_model_path(self) -> str:
        """Return the folder of the best checkpoint that is committed, or of the latest without `monitor`; empty where
        there is none."""
        return self.last_model_path if self.monitor is None else next(iter(self._ranked()), "")

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """Return the monitored metric of the best checkpoint."""
        return next(iter(self._ranked().values()), None)

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Return the metric of each checkpoint among the best, by its folder, the best first."""
        ranked = list(self._ranked().items())
        return dict(ranked if self.save_top_k == -1 else ranked[: self.save_top_k])

    @property
    def last_model_path(self) -> str:
        """Return the folder of the checkpoint that was committed last; empty where there is none."""
        found = self._checkpoints()
        return str(found[0].path) if found else ""

    def _checkpoints(self) -> list[holdfast.Checkpoint]:
        try:
            return holdfast.checkpoints(self._storage or self.run)
        except holdfast.CheckpointNotFoundError:
            return []

    def _ranked(self) -> dict[str, torch.Tensor]:
        """Return the monitored metric of each checkpoint that has one, the best first."""
        name = self.monitor
        if name is None:
            return {}
        found = [(str(one.path), one.metrics.get(name, math.nan)) for one in self._checkpoints()]
        scored = [pair for pair in found if not math.isnan(pair[1])]
        ordered = sorted(scored, key=lambda pair: pair[1], reverse=self.mode == "max")
        return {path: torch.tensor(score) for path, score in ordered}
