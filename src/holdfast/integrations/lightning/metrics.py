"""The metrics that a training has logged: taken when it saves, and set again when it resumes.

Schedulers and callbacks that follow a metric read its last value, which may be of a validation before the save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["logged_metrics", "set_metrics"]


def logged_metrics(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the metrics that are single numbers, each as a tensor of its own on the CPU."""
    found = {}
    for name, value in trainer.callback_metrics.items():
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1:
            found[name] = tensor.detach().to("cpu", copy=True)
    return found


def set_metrics(trainer: Any, metrics: Mapping[str, torch.Tensor]) -> None:
    """Make `trainer.callback_metrics` have these values until they are logged again."""
    # Lightning empties them when `fit` starts, before the hook `on_fit_start`, and again after a sanity check, which a
    # resumed training does not have.
    device = trainer.strategy.root_device
    trainer._logger_connector._callback_metrics.update({name: value.to(device) for name, value in metrics.items()})
