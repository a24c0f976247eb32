"""One Trainer and its run: what is restored before the first step, what is saved, what is kept. The Trainer's live
objects and arguments enter; committed checkpoints leave."""

from __future__ import annotations

import json
import logging
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import holdfast
from holdfast.integrations.transformers.components import KeepTotal, RunningLoss, StepsDone
from holdfast.integrations.transformers.files import (
    STATE_FILE,
    is_adapter,
    metric_name,
    metrics_of,
    model_files,
    processing_files,
    trainer_files,
)
from holdfast.integrations.transformers.resuming import (
    AnotherCheckpointError,
    Selector,
    Source,
    find,
    require_weights_alone,
    warn_of_differences,
)
from holdfast.integrations.transformers.support import check_options

logger = logging.getLogger("holdfast")

__all__ = ["Session", "replace_jit_callback"]


class Session:
    """The checkpoints of one Trainer. `manager` is there while the Trainer trains; `options` are those of the manager.

    The Trainer is not complete when this is made: only `check_arguments` and what follows may look at it.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        self.manager: holdfast.CheckpointManager | None = None
        self.options = dict(options)
        self._strategy = self.options.pop("strategy", None) or holdfast.LoadStrategy()
        self._trainer = trainer
        self._source: Source | None = None
        self._running_loss = RunningLoss(trainer)
        self._saved_step: int | None = None
        self._fixed_files: dict[str, bytes] = {}

    def check_arguments(self) -> None:
        """Raise for options that are not known, or that contradict the TrainingArguments."""
        check_options(self.options, self._strategy, self._trainer.args)

    @contextmanager
    def chosen(self, resume: Selector | bool | None) -> Iterator[str | None]:
        """Find the checkpoint to resume from, and yield a folder with its trainer_state.json; None to start fresh."""
        arguments = self._trainer.args
        self._source = find(arguments.output_dir, resume, self.options.get("timeout"))
        if self._source is None:
            if arguments.should_save and holdfast.is_restart(arguments.output_dir):
                logger.warning(
                    "%s has checkpoints, and the training starts at step 0 beside them; "
                    "train(resume_from_checkpoint=True) would resume from the latest",
                    arguments.output_dir,
                )
            yield None
            return
        if arguments.should_save:
            warn_of_differences(self._source, arguments)
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            Path(folder, STATE_FILE).write_text(json.dumps(self._source.trainer_state))
            yield folder

    def open(self) -> None:
        """Build the manager, when everything that it saves exists, and restore."""
        arguments = self._trainer.args
        # With `auto_find_batch_size` a training begins several times.
        self.close(None)
        self._saved_step = None
        components = self._components()
        # A checkpoint that was imported does not have this one, so it is attached after the restore.
        late = {"trainer": components.pop("trainer")} if self._lacks(components, "trainer") else {}
        options = {**self.options, "keep": self._keep()}
        rng = not arguments.save_only_model
        self.manager = holdfast.CheckpointManager(arguments.output_dir, components, rng=rng, **options)
        if self._source is not None:
            self._restore(self._source, self.manager)
        for name, component in late.items():
            self.manager.attach(name, component)
        self._fixed_files = processing_files(self._trainer) if arguments.should_save else {}

    def begin_epoch(self, steps_done: int) -> None:
        """Take up what was restored, before the epoch draws the order of its samples. `steps_done`: in that epoch."""
        resumed, self._source = self._source is not None, None
        if resumed and not steps_done:
            self.take_up_random_state()
        self._running_loss.begin_epoch(resumed=resumed and steps_done > 0)

    def take_up_random_state(self) -> None:
        """Put the restored random state back, once."""
        self._open_manager.restore_rng()

    def save(self) -> None:
        """Save the state after the last step."""
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        is_best = state.best_global_step == state.global_step
        handle = self._open_manager.save(
            state.global_step,
            metrics=metrics_of(state),
            progress={"epoch": state.epoch, "max_steps": state.max_steps, "total_flos": state.total_flos},
            epoch=int(state.epoch),
            assets=self._files(is_best) if trainer.args.should_save else None,
            # Callbacks may have one step saved twice: when it is done, and when the epoch ends with it.
            resave=self._saved_step == state.global_step,
        )
        self._saved_step = state.global_step
        if is_best:
            state.best_model_checkpoint = handle.path

    def finish(self) -> None:
        """Wait for every save, so that callbacks at the end of the training find committed checkpoints alone."""
        # Where no step was left to train, nothing has asked for it.
        self.take_up_random_state()
        self._open_manager.wait()
        if self._keep() is not None:
            self._open_manager.prune()

    def load_best_model(self) -> None:
        """Load the weights of the best checkpoint, and nothing else of it."""
        best = self._trainer.state.best_model_checkpoint
        logger.info("loading the best model from %s (score: %s)", best, self._trainer.state.best_metric)
        self._open_manager.restore(Path(best), strategy=holdfast.LoadStrategy.weights_only())

    def close(self, error: BaseException | None) -> None:
        """Finish what is pending, and raise what failed unless an error is on its way already."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(type(error) if error is not None else None, error, None)

    @property
    def _open_manager(self) -> holdfast.CheckpointManager:
        if self.manager is None:
            raise holdfast.UsageError("there is no checkpoint manager", advice="it is there while train() runs")
        return self.manager

    def _components(self) -> dict[str, Any]:
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        components: dict[str, Any] = {
            "model": holdfast.Trainable(model) if is_adapter(model) else model,
            "trainer_state": holdfast.Shared(StepsDone(trainer)),
        }
        if trainer.args.save_only_model:
            return components
        optimizer = trainer.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        scaler = getattr(trainer.accelerator, "scaler", None)
        components |= {"optimizer": optimizer, "scheduler": trainer.lr_scheduler}
        components["trainer"] = holdfast.PerRank(self._running_loss)
        return components if scaler is None else components | {"scaler": scaler}

    def _lacks(self, components: Mapping[str, Any], name: str) -> bool:
        return name in components and self._source is not None and not self._source.has(name)

    def _keep(self) -> Any:
        """Return the policy of `save_total_limit`, which counts the best model, or the one of the options."""
        arguments, best = self._trainer.args, None
        if "keep" in self.options:
            return self.options["keep"]
        if arguments.metric_for_best_model is not None:
            best = holdfast.KeepBest(metric_name(arguments), mode="max" if arguments.greater_is_better else "min")
        if arguments.save_total_limit is None or arguments.save_total_limit <= 0:
            return None if best is None else holdfast.KeepAll() | best
        return KeepTotal(arguments.save_total_limit, best, lambda: self._trainer.state.best_model_checkpoint)

    def _restore(self, source: Source, manager: holdfast.CheckpointManager) -> None:
        if self._trainer.args.save_only_model:
            require_weights_alone(source.checkpoint)
            logger.warning(
                "save_only_model=True: checkpoints have no optimizer, no scheduler and no random state; these start "
                "fresh at step %d",
                source.checkpoint.step,
            )
        result = manager.restore(source.selector, strategy=self._strategy, rng="later")
        if result.checkpoint is not None and result.checkpoint != source.checkpoint:
            # Not its random state: the training begins again as it began.
            before = holdfast.get_rng_state()
            manager.restore_rng()
            holdfast.set_rng_state(before)
            raise AnotherCheckpointError(result.checkpoint.path, source.checkpoint.path)

    def _files(self, is_best: bool) -> dict[str, bytes]:
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        return {**self._fixed_files, **model_files(model), **trainer_files(trainer, is_best=is_best)}


def replace_jit_callback(trainer: Any, options: dict[str, Any]) -> None:
    """Save on SIGTERM at the end of a step. The callback of the Trainer saves in the middle of one as well, when random
    numbers of the next step are drawn already."""
    callback = trainer.pop_callback(JITCheckpointCallback)
    if callback is not None and callback.jit_manager is not None:
        signal.signal(signal.SIGTERM, callback.jit_manager._original_sigterm_handler)
    given, stop = options.get("save"), holdfast.OnSignal("SIGTERM")
    options["save"] = stop if given is None else given | stop
