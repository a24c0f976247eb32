"""Check the arguments of the callback, and turn those of `ModelCheckpoint` into policies of Holdfast."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import holdfast

__all__ = ["Intervals", "checked_options", "policy_of"]

_ELSEWHERE = {
    "dirpath": "the first argument is the run's folder",
    "filename": "pass links='{name}-{val_loss:.3f}-{step}' for links with such names",
    "auto_insert_metric_name": "pass links= with the names that you want",
    "enable_version_counter": "a step that is saved again gets a folder of its own",
    "save_weights_only": "a run resumes from whole checkpoints; holdfast.export writes the weights of one",
    "save_on_exception": "an exception may leave the state between two steps; pass a shorter interval, which costs "
    "little, because saves are asynchronous",
    "verbose": "the logger 'holdfast' has a line for each save",
}
_OF_THE_MANAGER = (
    "save_mode",
    "assets",
    "storage",
    "verify",
    "timeout",
    "staging_limit_bytes",
    "links",
    "on_event",
    "observers",
    "replicas",
)


class Intervals:
    """When to save: one of a number of steps, of seconds, of epochs."""

    def __init__(self, steps: int, seconds: float | None, epochs: int) -> None:
        self.steps = steps
        self.seconds = seconds
        self.epochs = epochs

    @classmethod
    def checked(cls, steps: int | None, interval: timedelta | None, epochs: int | None) -> Intervals:
        for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise holdfast.UsageError(f"{name}={value!r}", advice="give a whole number from 0 on")
        if interval is not None and not isinstance(interval, timedelta):
            raise holdfast.UsageError(f"train_time_interval={interval!r}", advice="give a datetime.timedelta")
        if bool(steps) + bool(epochs) + (interval is not None) > 1:
            raise holdfast.UsageError(
                "more than one of every_n_train_steps, train_time_interval and every_n_epochs is given",
                advice="give one of them; keep=KeepEvery(...) keeps more of what is saved",
            )
        if steps is None and epochs is None and interval is None:
            epochs = 1
        return cls(steps or 0, None if interval is None else interval.total_seconds(), epochs or 0)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name in _ELSEWHERE:
            raise holdfast.UsageError(f"HoldfastCheckpoint takes no {name}=", advice=_ELSEWHERE[name])
        if name not in _OF_THE_MANAGER:
            raise TypeError(f"HoldfastCheckpoint got an unexpected argument '{name}'")
    chosen = dict(options)
    if "save_mode" in chosen:
        chosen["mode"] = chosen.pop("save_mode")
    return chosen


def policy_of(monitor: str | None, mode: str, save_top_k: int, save_last: bool | None, keep: Any) -> Any:
    """Return what stays, as a policy of Holdfast; None keeps all."""
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise holdfast.UsageError(f"save_top_k={save_top_k!r}", advice="give a whole number from -1 on; -1 keeps all")
    if mode not in ("min", "max"):
        raise holdfast.UsageError(f"mode={mode!r}", advice="use 'min' or 'max'")
    if save_last not in (None, True, False):
        raise holdfast.UsageError(
            f"save_last={save_last!r}", advice="use True; the run has a link `latest` to the last checkpoint"
        )
    if monitor is None and save_top_k > 1:
        raise holdfast.UsageError(
            f"save_top_k={save_top_k} without monitor=",
            advice="name the metric that ranks them, or pass keep=KeepLast(...) with save_top_k=1",
        )
    if save_top_k == -1:
        return None
    policy: Any = holdfast.KeepLast(1)
    if monitor is not None and save_top_k > 0:
        best = holdfast.KeepBest(monitor, save_top_k, mode=mode)  # type: ignore[arg-type]
        policy = best if save_last is False else best | policy
    return policy if keep is None else policy | keep
