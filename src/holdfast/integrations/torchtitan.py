"""A checkpoint manager that torchtitan's configuration can name: its trainer saves to a run of Holdfast and resumes.

torchtitan's own objects enter, as its trainer passes them; components of a `CheckpointManager` hold their state. Needs
torchtitan 0.3.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import holdfast
from holdfast import KeepLast, LoadStrategy, PerRank, RestoreResult, Shared, UsageError

try:
    import torch.distributed.checkpoint as dcp
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.checkpointer.base import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
except ImportError as missing:
    raise ImportError(
        "holdfast.integrations.torchtitan needs torchtitan 0.3: pip install 'torchtitan>=0.3,<0.4'"
    ) from missing

logger = logging.getLogger("holdfast")

__all__ = ["HoldfastCheckpointManager"]

_MODES = {"disabled": "sync", "async": "async", "async_with_pinned_mem": "async_pinned", "auto": "auto"}


class HoldfastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves torchtitan's training state to a run of Holdfast, in place of torchtitan's own checkpoint manager.

    Give the trainer's configuration `checkpoint=HoldfastCheckpointManager.Config(enable=True, ...)`. The options have
    the names and meanings that they have there. A checkpoint's step is torchtitan's: the number of steps that are done.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's checkpoint managers, and three more."""

        async_mode: Literal["auto", "disabled", "async", "async_with_pinned_mem"] = "auto"
        """How a save copies the state: "auto" takes the best way for the devices that hold it."""

        last_save_model_only: bool = False
        """Not supported: the last checkpoint holds the whole state, and `holdfast export` makes weights of it."""

        verify: Literal["full", "quick", "off"] = "full"
        """How much of a checkpoint is checked when it is loaded: every byte, sizes alone, or nothing."""

        rng: bool = True
        """Whether the random state is stored, which torchtitan's own checkpoints lack."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.async_mode not in _MODES:
                raise ValueError(f"Invalid async_mode: {self.async_mode}")
            if self.last_save_model_only or self.last_save_in_hf:
                raise ValueError(
                    "last_save_model_only and last_save_in_hf are not supported: the last checkpoint holds the whole "
                    "state; make weights of it with `holdfast export`."
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        self.config = config
        self.sd_adapter = sd_adapter
        self.model = ModelWrapper(model_parts)
        components: dict[str, Any] = {
            # A single module is stored as one, so that its weights can be exported; several are one state dict.
            MODEL: model_parts[0] if len(model_parts) == 1 else self.model,
            OPTIMIZER: optimizers,
            LR_SCHEDULER: Shared(lr_schedulers),
            **{name: Shared(state) for name, state in states.items()},
        }
        if dataloader is not None:
            components[DATALOADER] = PerRank(_loader_state(dataloader))
        for name in config.exclude_from_loading:
            if name not in components:
                raise ValueError(f"exclude_from_loading: {name!r} is none of {', '.join(components)}.")
        self.manager = holdfast.CheckpointManager(
            Path(base_folder) / config.folder,
            components,
            mode=_MODES[config.async_mode],  # type: ignore[arg-type]
            keep=KeepLast(config.keep_latest_k) if config.keep_latest_k else None,
            rng=config.rng,
            verify=config.verify,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        if self.config.load_only or not (first or last_step or curr_step % self.config.interval == 0):
            return False
        self.manager.save(curr_step, wait=last_step)
        return True

    def _load(self, step: int = -1) -> bool:
        """Restore the run's own checkpoint, or, where it has none, what `initial_load_...` name."""
        if step != -1 or self.manager.should_load():
            found = self.manager.peek(step if step != -1 else "latest")
            # A seed checkpoint, of step 0, has the weights that another number of processes begins with.
            only_model = found is not None and found.step == 0
            return self._restored(
                self.manager.restore(step if step != -1 else "latest", strategy=self._plan(only_model))
            )
        if self.config.initial_load_in_hf:
            self._load_hugging_face()
            return True
        path = self.config.initial_load_path
        if not path:
            logger.info("there is no checkpoint in %s, and no initial_load_path: starting fresh", self.config.folder)
            return False
        if not self.config.initial_load_model_only:
            return self._restored(self.manager.restore(path, strategy=self._plan(only_model=False)))
        if len(self.model.model) != 1:
            raise UsageError(
                "initial_load_path with several model parts on a rank can only be a checkpoint of Holdfast",
                advice="import it with `holdfast import`, and set initial_load_model_only=False",
            )
        holdfast.load_weights(self.model.model[0], path)
        return True

    def _plan(self, only_model: bool) -> LoadStrategy:
        if only_model:
            return LoadStrategy(only=(MODEL,))
        return LoadStrategy(skip=tuple(self.config.exclude_from_loading))

    def _restored(self, result: RestoreResult) -> bool:
        logger.info("restored step %s from %s", result.step, result.checkpoint.path if result.checkpoint else "")
        return result.resumed

    def _load_hugging_face(self) -> None:
        """Load weights in the layout of Hugging Face, whose names and shapes torchtitan's adapter translates."""
        if self.sd_adapter is None:
            raise UsageError("initial_load_in_hf needs a state dict adapter, and this model has none")
        path = self.config.initial_load_path or self.sd_adapter.hf_assets_path
        weights = self.sd_adapter.to_hf(self.model.state_dict())
        reader = self.sd_adapter.get_hf_storage_reader(path, self.config.initial_load_in_hf_quantized)
        dcp.load(weights, storage_reader=reader)
        self.model.load_state_dict(self.sd_adapter.from_hf(weights))

    def _maybe_wait_for_staging(self) -> None:
        self.manager.wait_for_staging()

    def _wait_for_saving(self) -> None:
        self.manager.wait()

    def _close(self) -> None:
        self.manager.close()


def _loader_state(loader: Any) -> Any:
    """Return what holds the position of a data loader: of one of torchdata's, without the pickle that torchtitan puts
    around it; loading that would run code from the checkpoint."""
    return _Position(loader) if isinstance(loader, StatefulDataLoader) else loader


class _Position:
    """The position in a `StatefulDataLoader`, as torchdata gives it, and how many ranks share the data."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {
            "ranks": getattr(self._loader, "dp_world_size", 1),
            "loader": StatefulDataLoader.state_dict(self._loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ranks = getattr(self._loader, "dp_world_size", 1)
        if state["ranks"] != ranks:
            raise holdfast.StateMismatchError(
                f"the data was shared by {state['ranks']} data-parallel ranks, and now there are {ranks}",
                advice="use the same number, or set exclude_from_loading=['dataloader'] to begin the data anew",
            )
        StatefulDataLoader.load_state_dict(self._loader, state["loader"])
        _keep_random_state(self._loader)


def _keep_random_state(loader: Any) -> None:
    """Let the loader's next iterator leave the random state as it is: the run that was saved had built it before."""
    build = type(loader)._get_iterator

    def build_once() -> Any:
        before = holdfast.get_rng_state()
        try:
            return build(loader)
        finally:
            holdfast.set_rng_state(before)
            vars(loader).pop("_get_iterator", None)

    loader._get_iterator = build_once
