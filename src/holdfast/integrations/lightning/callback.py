"""The callback: decide when to save, save when a batch or an epoch is wholly done, and resume when `fit` starts."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

import holdfast
from holdfast.integrations.lightning.arguments import Intervals, checked_options, policy_of
from holdfast.integrations.lightning.framework import Checkpoint, lightning
from holdfast.integrations.lightning.last_path import follow_last_path
from holdfast.integrations.lightning.loops import Boundary, Loops
from holdfast.integrations.lightning.metrics import logged_metrics, set_metrics
from holdfast.integrations.lightning.ranking import RankedRun
from holdfast.integrations.lightning.reading import ReadingIO, two_sources
from holdfast.integrations.lightning.state import TrainerState, plain_hyper_parameters

logger = logging.getLogger("holdfast")

__all__ = ["HoldfastCheckpoint"]

follow_last_path()


@dataclass(frozen=True)
class _Training:
    """What one `fit` has: the manager of the run, the loops of the trainer, and the rest of the trainer's state."""

    manager: holdfast.CheckpointManager
    loops: Loops
    state: TrainerState


class HoldfastCheckpoint(RankedRun, Checkpoint):  # type: ignore[misc]
    """Saves a Lightning training to a run of Holdfast, and resumes it from there when `fit` starts.

    run: the folder or URL that holds the run's checkpoints.
    monitor, mode: the metric that ranks checkpoints, and whether "min" or "max" is best.
    save_top_k: how many of the best stay; -1 keeps all. Without `monitor` 1 keeps the latest.
    save_last: the latest stays too, which is what happens unless this is False: then a checkpoint that is not among the
        best is not written.
    every_n_train_steps, train_time_interval, every_n_epochs: when to save, one of them; each epoch by default.
    save_on_train_epoch_end: True saves at the end of training epochs, False after validations. None decides as
        `ModelCheckpoint` does.
    resume: "auto" resumes when the run has a checkpoint, "required" makes it an error when it has none, "never" starts
        from the beginning.
    selector: which checkpoint to resume, as for `CheckpointManager.restore`.
    strategy: a `LoadStrategy` for the resume.
    keep: what else stays, such as `KeepEvery(steps=10_000)`.
    stop: when to save and stop the training: `OnSignal(...)`, `TimeLimit(...)`, or both combined with `|`.
    config: stored with every checkpoint, in place of the module's hyper-parameters.
    options: arguments of `CheckpointManager`: `save_mode` for its `mode`, `assets`, `storage`, `verify`, `timeout`,
        `staging_limit_bytes`, `links`, `on_event`, `observers`, `replicas`.

    A checkpoint has Lightning's `global_step` as its step. It is saved when the batch or the epoch is wholly done,
    after validations and after all hooks, and never between the batches of one optimizer step.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        resume: Literal["auto", "required", "never"] = "auto",
        selector: str | int = "latest",
        strategy: holdfast.LoadStrategy | None = None,
        keep: Any = None,
        stop: Any = None,
        config: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.run = run
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.resume = resume
        self._intervals = Intervals.checked(every_n_train_steps, train_time_interval, every_n_epochs)
        self._on_train_epoch_end = save_on_train_epoch_end
        self._selector = selector
        self._strategy = strategy
        self._stop = stop
        self._config = config
        self._options = checked_options(options)
        self._storage = self._options.get("storage")
        self._keep = policy_of(monitor, mode, save_top_k, save_last, keep)
        self._training: _Training | None = None
        self._reset()

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{{'run': {str(self.run)!r}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return what `ModelCheckpoint` has here, for programs that read it; a resume needs none of it."""
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "best_k_models": self.best_k_models,
            "current_score": self.current_score,
            "dirpath": str(self.run),
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: the run itself says what is best and what is last."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not isinstance(trainer, lightning.Trainer):
            raise holdfast.UsageError(
                f"this callback is one of {lightning.__name__}, and the trainer is one of {type(trainer).__module__}",
                advice="import one of the two packages only: `lightning` or `pytorch_lightning`",
            )
        if sum(isinstance(callback, HoldfastCheckpoint) for callback in trainer.callbacks) > 1:
            raise holdfast.UsageError(
                "the trainer has more than one HoldfastCheckpoint",
                advice="use one; keep= and stop= take policies and triggers that are combined with |",
            )
        if type(trainer.strategy).__name__ in ("DeepSpeedStrategy", "FSDPStrategy"):
            raise holdfast.UsageError(
                f"{type(trainer.strategy).__name__} is not supported: it keeps parameters in flat tensors of its own",
                advice="use ModelParallelStrategy with fully_shard (FSDP2), or DDP",
            )
        trainer.strategy.checkpoint_io = ReadingIO(trainer.strategy.checkpoint_io, self.run, trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the manager, and resume."""
        if trainer.fast_dev_run:
            return
        _refuse_path(trainer, self.run, self.resume)
        if trainer.global_step > 0 and self.resume != "never":
            raise holdfast.UsageError(
                "this trainer has trained before, and its run may have an older checkpoint",
                advice="build a new Trainer for another fit: it resumes where this one ended",
            )
        self._reset()
        loops = Loops(trainer, lambda boundary: self._at_boundary(trainer, boundary))
        state = TrainerState(trainer, loops, self, lightning.__version__)
        handler = signal.getsignal(signal.SIGTERM)
        self._training = _Training(self._open(trainer, loops, state), loops, state)
        if signal.getsignal(signal.SIGTERM) is not handler:
            # The manager stops the training at the same batch on all ranks. Lightning raises on each rank for itself.
            trainer._signal_connector._sigterm_notifier_fn = _leave_signal
        self._restore(trainer, self._training)
        loops.install()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._training is not None:
            # Strategies that load after the set-up have loaded it by now.
            _refuse_path(trainer, self.run, self.resume)
        self._last_time_seconds = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps, interval = self._intervals.steps, self._intervals.seconds
        due = False
        if interval is not None:
            # The clock of rank 0 decides for all.
            due = bool(trainer.strategy.broadcast(time.monotonic() - self._last_time_seconds >= interval))
            if due:
                self._last_time_seconds = time.monotonic()
        if not self._is_idle(trainer) and (due or (steps > 0 and trainer.global_step % steps == 0)):
            self._wanted = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if (
            not self._is_idle(trainer)
            and _saves_on_train_epoch_end(trainer, self._on_train_epoch_end)
            and self._is_epoch(trainer)
        ):
            self._wanted = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._is_idle(trainer) or _saves_on_train_epoch_end(trainer, self._on_train_epoch_end):
            return
        if self._deferred or self._is_epoch(trainer):
            self._wanted = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last save, before the strategy moves the model."""
        if self._training is None:
            return
        if self.save_last and self._last_step_saved == 0 and trainer.global_step > 0:
            self._save(trainer, self._training, "batch" if self._training.loops.is_cut_short else "epoch")
        self._training.manager.wait()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the save that is under way. What it raises is logged: the exception of the training is raised."""
        training = self._release(trainer)
        if training is not None:
            training.manager.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the manager; raise what failed."""
        training = self._release(trainer)
        if training is not None:
            training.manager.close()

    def _reset(self) -> None:
        self._wanted = False
        self._deferred = False
        self._last_step_saved = 0
        self._last_time_seconds = time.monotonic()
        self.current_score: torch.Tensor | None = None

    def _release(self, trainer: Any) -> _Training | None:
        """Give the trainer its own loops and its own way to read files back. Return the training, to be closed."""
        training, self._training = self._training, None
        if training is not None:
            training.loops.remove()
            vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        if isinstance(trainer.strategy.checkpoint_io, ReadingIO):
            trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io.wrapped
        return training

    def _open(self, trainer: Any, loops: Loops, state: TrainerState) -> holdfast.CheckpointManager:
        config, texts = plain_hyper_parameters(trainer.lightning_module)
        if texts and self._config is None and trainer.is_global_zero:
            logger.warning("hyper-parameters that are no plain values are stored as their text: %s", ", ".join(texts))
        return holdfast.CheckpointManager(
            self.run,
            {
                "model": trainer.lightning_module,
                **_numbered("optimizer", trainer.optimizers),
                **_numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
                # As in Lightning's own checkpoints, what rank 0 has counts.
                "lightning": holdfast.Shared(state),
                "loader": holdfast.PerRank(loops.position),
                "rng": loops.rng,
            },
            save=self._stop,
            keep=self._keep,
            config=(config or None) if self._config is None else self._config,
            resume=self.resume,
            **self._options,
        )

    def _restore(self, trainer: Any, training: _Training) -> None:
        strategy = self._strategy
        if strategy is None:
            strategy = _default_strategy(trainer, training.manager, self._selector, self.resume)
        if not training.manager.restore(self._selector, strategy=strategy).resumed:
            return
        own = training.state.take_up()
        self._deferred = bool(own.get("deferred", False))
        set_metrics(trainer, own.get("metrics", {}))
        self._last_step_saved = trainer.global_step

    def _is_idle(self, trainer: Any) -> bool:
        """Return whether nothing may be saved now, or this step is saved already."""
        return (
            self._training is None
            or trainer.state.fn != "fit"
            or trainer.sanity_checking
            or self._last_step_saved == trainer.global_step
        )

    def _is_epoch(self, trainer: Any) -> bool:
        epochs = self._intervals.epochs
        return epochs > 0 and (trainer.current_epoch + 1) % epochs == 0

    def _at_boundary(self, trainer: Any, boundary: Boundary) -> None:
        """Save if that is wanted, now that a batch or an epoch is wholly done; all ranks are here."""
        training = self._training
        if training is None:
            return
        manager, loops = training.manager, training.loops
        if trainer.world_size == 1:
            manager.poll()
        if boundary == "batch" and loops.is_last_batch():
            return  # the end of the epoch comes next, and the state is simpler there
        if boundary == "batch" and loops.is_accumulating():
            return  # gradients are not saved: the save waits for the optimizer's step
        if self._stop is not None and manager.should_save(trainer.global_step):
            self._wanted = True
        if self._wanted and self._last_step_saved != trainer.global_step:
            self._save(trainer, training, boundary)
        self._wanted = False
        if self._stop is not None and manager.should_stop:
            manager.wait()
            trainer.should_stop = True

    def _save(self, trainer: Any, training: _Training, boundary: Boundary) -> None:
        manager, loops, state = training.manager, training.loops, training.state
        logged = logged_metrics(trainer)
        metrics = {name: float(value) for name, value in logged.items()}
        if not self._is_worth_it(trainer, training, metrics) and not manager.should_stop:
            return
        state.take(boundary, {"deferred": self._deferred, "metrics": logged})
        data = trainer.datamodule
        manager.save(
            trainer.global_step,
            metrics=metrics,
            progress={
                "epoch": loops.epochs_done,
                "global_step": trainer.global_step,
                "batches_of_epoch": 0 if boundary == "epoch" else loops.batches_done,
            },
            extra={"datamodule_hyper_parameters": plain_hyper_parameters(data)[0]} if data and data.hparams else None,
            epoch=loops.epochs_done,
        )
        state.drop()
        self._last_step_saved = trainer.global_step

    def _is_worth_it(self, trainer: Any, training: _Training, metrics: Mapping[str, float]) -> bool:
        """Return whether a checkpoint with these metrics is kept, on all ranks alike."""
        if self.save_top_k == 0:
            return bool(self.save_last)
        if self.monitor is None:
            return True
        score = metrics.get(self.monitor)
        self.current_score = None if score is None else torch.tensor(score)
        self._deferred = score is None
        if score is None:
            self._report_missing(trainer, training, metrics)
        if self.save_last is not False or self.save_top_k == -1:
            return True
        training.manager.wait()
        return bool(trainer.strategy.broadcast(self._is_among_best(score) if trainer.is_global_zero else False))

    def _report_missing(self, trainer: Any, training: _Training, metrics: Mapping[str, float]) -> None:
        problem = f"the metric '{self.monitor}' that is monitored is not among {sorted(metrics)}"
        advice = f"call self.log('{self.monitor}', value) in the LightningModule"
        if training.loops.has_validated():
            raise holdfast.UsageError(problem, advice=advice)
        if trainer.is_global_zero:
            logger.warning("%s yet; a checkpoint without it ranks last", problem)

    def _is_among_best(self, score: float | None) -> bool:
        if score is None or math.isnan(score):
            return False
        best = list(self.best_k_models.values())
        if len(best) < self.save_top_k:
            return True
        return score < float(best[-1]) if self.mode == "min" else score > float(best[-1])


def _refuse_path(trainer: Any, run: Any, resume: str) -> None:
    path = trainer.ckpt_path
    # Lightning's search for a learning rate or a batch size reads back a file of its own.
    if path and resume != "never" and not Path(path).name.startswith((".lr_find_", ".scale_batch_size_")):
        raise two_sources(path, run)


def _default_strategy(
    trainer: Any, manager: holdfast.CheckpointManager, selector: str | int, resume: str
) -> holdfast.LoadStrategy:
    """Return how to restore: all of it, except that a checkpoint that was imported lacks what Lightning lacks."""
    strict = bool(trainer.lightning_module.strict_loading)
    found = manager.peek(selector) if resume != "never" and trainer.is_global_zero else None
    if trainer.strategy.broadcast(found is not None and "import" in found.extra):
        # Lightning keeps no random state, and the position of loaders among the progress of its loops.
        return holdfast.LoadStrategy(strict=strict, on_missing="skip")
    return holdfast.LoadStrategy(strict=strict)


def _saves_on_train_epoch_end(trainer: Any, chosen: bool | None) -> bool:
    """Return whether an epoch is saved at its end, not after its validation: decided as `ModelCheckpoint` does."""
    if chosen is not None:
        return chosen
    if getattr(trainer, "_val_check_time_interval", None) is not None or trainer.check_val_every_n_epoch != 1:
        return False
    batches = trainer.num_val_batches
    if (sum(batches) if isinstance(batches, list) else batches) == 0:
        return True
    return bool(trainer.val_check_interval == 1.0)


def _leave_signal(number: int, frame: Any) -> None:
    """Do nothing: the manager's handler, which is called as well, has seen the signal."""


def _numbered(name: str, objects: Any) -> dict[str, Any]:
    """Return components as an imported Lightning checkpoint has them: numbered where there are several."""
    listed = list(objects)
    return {name: listed[0]} if len(listed) == 1 else {f"{name}_{number}": one for number, one in enumerate(listed)}
