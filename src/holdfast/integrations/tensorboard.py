"""Write the events of a manager to TensorBoard, by way of torch's own `SummaryWriter`."""

from __future__ import annotations

from typing import Protocol

from holdfast.integrations.observers import Scalars, ScalarsObserver

__all__ = ["TensorBoardObserver"]


class _SummaryWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> object: ...

    def flush(self) -> object: ...


class TensorBoardObserver(ScalarsObserver):
    """Writes the numbers of saves and restores to a `torch.utils.tensorboard.SummaryWriter`, which stays the caller's.

    One of `observers=` of a `CheckpointManager`.
    """

    def __init__(self, writer: _SummaryWriter) -> None:
        super().__init__()
        self._writer = writer

    def write(self, scalars: Scalars) -> None:
        for name, value in scalars.values.items():
            self._writer.add_scalar(name, value, global_step=scalars.step, walltime=scalars.time_seconds)

    def close(self) -> None:
        super().close()
        self._writer.flush()
