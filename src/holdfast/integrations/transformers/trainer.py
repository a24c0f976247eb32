"""A mix-in over the methods with which the `Trainer` of transformers writes and reads its checkpoints. What these
methods do is in `session`; here is only where the Trainer calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import holdfast
from holdfast.integrations.transformers.support import check_version, refuse_unsupported

check_version()

import transformers  # noqa: E402

from holdfast.integrations.transformers.components import Triggers  # noqa: E402
from holdfast.integrations.transformers.resuming import AnotherCheckpointError, Selector  # noqa: E402
from holdfast.integrations.transformers.session import Session, replace_jit_callback  # noqa: E402

__all__ = ["HoldfastTrainer"]


class HoldfastTrainer:
    """A mix-in that makes a `transformers.Trainer` save to a Holdfast run, its `output_dir`, and resume from it.

        class MyTrainer(HoldfastTrainer, Trainer): ...

    checkpoint_options: options of `CheckpointManager` that `TrainingArguments` have no word for: `mode`, `verify`,
        `timeout`, `staging_limit_bytes`, `links`, `on_event`, `observers`, `replicas`; `save`, triggers beside those of
        `save_strategy`, such as `OnSignal("SIGTERM")`; `keep`, a policy in place of `save_total_limit`; and `strategy`,
        the `LoadStrategy` of a resume.
    """

    # Of the Trainer.
    args: Any
    hp_search_backend: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if transformers.Trainer in order and order.index(transformers.Trainer) < order.index(HoldfastTrainer):
            raise holdfast.UsageError(
                f"{cls.__name__} derives from Trainer first, which would write checkpoints of its own",
                advice=f"class {cls.__name__}(HoldfastTrainer, Trainer)",
            )

    def __init__(self, *args: Any, checkpoint_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if not isinstance(self, transformers.Trainer):
            raise holdfast.UsageError(
                f"{type(self).__name__} is no Trainer", advice="class MyTrainer(HoldfastTrainer, Trainer)"
            )
        self._holdfast = Session(self, checkpoint_options or {})
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)
        self._holdfast.check_arguments()
        if self.args.enable_jit_checkpoint:
            replace_jit_callback(self, self._holdfast.options)
        if self._holdfast.options.get("save") is not None:
            self.add_callback(Triggers(self))

    @property
    def checkpoint_manager(self) -> holdfast.CheckpointManager | None:
        """Return the manager while `train` runs, and None otherwise."""
        return self._holdfast.manager

    def train(
        self,
        resume_from_checkpoint: Selector | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as `Trainer.train` does; return when every checkpoint is committed, and raise what failed.

        `resume_from_checkpoint` is True for the latest checkpoint of the run, "auto" for the latest if there is one, a
        step, any other selector of the run, or the path of a checkpoint, also in another run.
        """
        if trial is not None or self.hp_search_backend is not None:
            raise holdfast.UsageError(
                "a hyperparameter search is not supported: its trials share one output_dir",
                advice="search with a plain Trainer, and train what it found with this one",
            )
        try:
            return self._train_from(resume_from_checkpoint, ignore_keys_for_eval)
        except AnotherCheckpointError as another:
            # The latest was damaged, or a later one was committed meanwhile. The Trainer has counted its steps from the
            # one that was found first, so it begins again.
            return self._train_from(another.path, ignore_keys_for_eval)

    def _train_from(self, resume: Selector | bool | None, ignore_keys_for_eval: list[str] | None) -> Any:
        with self._holdfast.chosen(resume) as folder:
            try:
                output = super().train(folder, None, ignore_keys_for_eval)  # type: ignore[misc]
            except BaseException as error:
                self._holdfast.close(error)
                raise
            self._holdfast.close(None)
            return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `_prepare_for_training` restores the model together with everything else."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        # Without the checkpoint: of what the Trainer would load nothing is in its own form.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)  # type: ignore[misc]
        self._holdfast.open()
        return prepared

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._holdfast.begin_epoch(kwargs["steps_trained_in_current_epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put the random state back. The Trainer calls this after the first batch, which draws from it as well."""
        self._holdfast.take_up_random_state()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._holdfast.save()

    def _load_best_model(self) -> None:
        self._holdfast.load_best_model()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._holdfast.finish()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        # With a limit of 1 the Trainer removes all folders `checkpoint-*` but the best here. Those that an earlier
        # training left are not for this one to remove.
        try:
            return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit
