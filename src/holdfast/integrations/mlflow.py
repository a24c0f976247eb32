"""Log the events of a manager to a run of MLflow."""

from __future__ import annotations

from typing import Any

from holdfast import UsageError
from holdfast.integrations.observers import Scalars, ScalarsObserver

__all__ = ["MlflowObserver"]


class MlflowObserver(ScalarsObserver):
    """Logs the numbers of saves and restores to an MLflow run: the one whose id is given, or the active one.

    One of `observers=` of a `CheckpointManager`. client: an `MlflowClient`; without it, one for the tracking server
    that is set.
    """

    def __init__(self, run_id: str | None = None, *, client: Any = None) -> None:
        super().__init__()
        import mlflow

        active = mlflow.active_run() if run_id is None else None
        if run_id is None and active is None:
            raise UsageError("there is no active MLflow run", advice="call mlflow.start_run() first, or pass run_id=")
        self._run_id = run_id if active is None else active.info.run_id
        self._client = client if client is not None else mlflow.MlflowClient()

    def write(self, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        milliseconds = int(scalars.time_seconds * 1000)
        metrics = [Metric(name, value, milliseconds, scalars.step) for name, value in scalars.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
