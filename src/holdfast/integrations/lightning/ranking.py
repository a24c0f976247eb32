"""Name the best and the latest checkpoint of a run, under the names that `ModelCheckpoint` has for them."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

import holdfast

__all__ = ["RankedRun"]


class RankedRun:
    """The attributes of a run that users of `ModelCheckpoint` read. They follow what is committed."""

    run: str | os.PathLike[str]
    monitor: str | None
    mode: str
    save_top_k: int
    _storage: Any

    @property
    def best_model_path(self) -> str:
        """Return the folder of the best checkpoint that is committed, or of the latest without `monitor`; empty where
        there is none."""
        ranked = self._ranked()
        return str(ranked[0].path) if ranked else ""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """Return the monitored metric of the best checkpoint."""
        ranked = self._ranked() if self.monitor is not None else []
        return torch.tensor(ranked[0].metrics[self.monitor]) if ranked else None

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Return the metric of each checkpoint among the best, by its folder."""
        ranked = self._ranked() if self.monitor is not None else []
        kept = ranked if self.save_top_k == -1 else ranked[: self.save_top_k]
        return {str(checkpoint.path): torch.tensor(checkpoint.metrics[self.monitor]) for checkpoint in kept}

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

    def _ranked(self) -> list[holdfast.Checkpoint]:
        """Return the committed checkpoints, the best first: by the metric, or the latest first without one."""
        found = self._checkpoints()
        if self.monitor is None:
            return found
        scored = [one for one in found if not math.isnan(one.metrics.get(self.monitor, math.nan))]
        return sorted(scored, key=lambda one: one.metrics[self.monitor], reverse=self.mode == "max")
