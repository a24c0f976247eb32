"""Checkpoints of megatron-core's own models and optimizers, which may be cut over ranks. Their sharded state dicts
enter, a committed checkpoint leaves, and back.

The state is laid out by megatron-core and written through `HoldfastSaveStrategy`: another number of ranks loads what
megatron-core can lay out for it. A save returns when it is committed.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import distributed as dist

import holdfast
from holdfast.integrations.megatron import (
    BACKEND,
    VERSION,
    HoldfastCommonLoadStrategy,
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
)
from holdfast.integrations.megatron_state import (
    OPTIMIZER,
    SCHEDULER,
    Generators,
    is_optimizer,
    layout_of,
    models_of,
)

__all__ = ["ShardedRun", "Wanted"]

logger = logging.getLogger("holdfast")

_RNG = "rng_state"
_NOTE = "holdfast"
_METADATA = "content_metadata"
_SHARDING = "distrib_optim_sharding_type"
# How the keys begin that are none of the models'.
_OTHER_KEYS = ("optimizer.", "chained_", f"{_RNG}/", f"{_RNG}.")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which parts of a checkpoint to load."""

    models: bool = True
    optimizer: bool = True
    scheduler: bool = True
    rng: bool = True
    strict: bool = True


class ShardedRun:
    """A run of such checkpoints. All methods are for all ranks, in the same order."""

    def __init__(self, settings: holdfast.CheckpointConfig, config: Any) -> None:
        self._settings = settings
        self._config = config
        self._last_step: int | None = None
        if settings.mode != "sync":
            logger.warning("async_save has no effect: the state of megatron-core's models is saved synchronously")

    def save(self, step: int, ctx: Any, progress: Mapping[str, Any]) -> bool:
        """Commit the checkpoint of a step. False when it is the one that was saved or loaded last."""
        if step == self._last_step:
            return False
        metadata, parts = _metadata(ctx, self._config), []
        with_optimizer = getattr(self._config, "save_optim", True)
        state = _sharded(ctx, metadata, with_optimizer=with_optimizer, is_loading=False)
        parts += [name for name in (OPTIMIZER,) if name in state]
        if with_optimizer and ctx.opt_param_scheduler is not None:
            state[SCHEDULER] = ctx.opt_param_scheduler.state_dict()
            parts.append(SCHEDULER)
        if getattr(self._config, "save_rng", True):
            state[_RNG] = _own_object({"rng": holdfast.get_rng_state(), "generators": Generators().state_dict()})
            parts.append(_RNG)
        state[_NOTE] = {"progress": dict(progress), "parts": parts, "layout": layout_of(ctx)}
        stored = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
        strategy = HoldfastSaveStrategy(self._settings.run)
        with _folder(step) as folder:
            dist_checkpointing.save(state, folder, sharded_strategy=strategy, content_metadata=stored)
        self._last_step = step
        if self._settings.keep is not None and dist.get_rank() == 0:
            holdfast.prune(self._settings.run or "", self._settings.keep)
        return True

    def load(self, place: str, steps: Iterable[int], ctx: Any, wanted: Wanted) -> tuple[int, dict[str, Any], bool]:
        """Load the first of the steps that is sound. Returns it, its counters, and whether its optimizer was loaded."""
        rejected: list[holdfast.CorruptCheckpointError] = []
        for step in steps:
            try:
                progress, has_optimizer = self._load(place, step, ctx, wanted)
            except holdfast.CorruptCheckpointError as error:
                logger.warning("the checkpoint of iteration %d is damaged: %s", step, error)
                rejected.append(error)
                continue
            if place == self._settings.run:
                self._last_step = step
            return step, progress, has_optimizer
        raise rejected[0]

    def _load(self, place: str, step: int, ctx: Any, wanted: Wanted) -> tuple[dict[str, Any], bool]:
        """Nothing is changed where the checkpoint is damaged: all bytes are verified before the first is used."""
        common_strategy = HoldfastCommonLoadStrategy(place, verify=self._settings.verify)
        with _folder(step, is_saved=True) as folder:
            common = common_strategy.load_common(folder)
            note = _checked_note(common, step)
            metadata = {**_metadata(ctx, self._config), **(common.get(_METADATA) or {})}
            with_optimizer = wanted.models and wanted.optimizer and _has_part(OPTIMIZER, note)
            if with_optimizer:
                _check_layout(note["layout"], layout_of(ctx), metadata, step=step)
            state: dict[str, Any] = {}
            if wanted.models:
                state = _sharded(ctx, metadata, with_optimizer=with_optimizer, is_loading=True)
            with_rng = wanted.rng and _has_part(_RNG, note) and _is_same_layout(note["layout"], layout_of(ctx))
            if with_rng:
                state[_RNG] = _own_object(None)
            found, missing, unexpected = dist_checkpointing.load(
                state,
                folder,
                sharded_strategy=HoldfastLoadStrategy(place, verify=self._settings.verify),
                common_strategy=common_strategy,
                strict=StrictHandling.RETURN_ALL,
            )
        if wanted.models:
            _check_keys(missing, unexpected, strict=wanted.strict, step=step)
            _put(found, ctx, with_optimizer=with_optimizer, strict=wanted.strict)
        if wanted.scheduler and ctx.opt_param_scheduler is not None and _has_part(SCHEDULER, note):
            ctx.opt_param_scheduler.load_state_dict(found[SCHEDULER])
        if with_rng:
            Generators().load_state_dict(found[_RNG]["generators"])
            holdfast.set_rng_state(found[_RNG]["rng"])
        return dict(note["progress"]), with_optimizer


# The state dict


def _metadata(ctx: Any, config: Any) -> dict[str, Any]:
    """Return how megatron-core is to lay the state out, by the same settings as Megatron-Bridge does."""
    from megatron.core import parallel_state

    groups = getattr(ctx, "pg_collection", None)
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        if groups is None
        else groups.dp_cp,
    }
    if getattr(getattr(ctx.state.cfg, "optimizer", None), "use_distributed_optimizer", False):
        is_full = getattr(config, "dist_ckpt_optim_fully_reshardable", False)
        metadata[_SHARDING] = "fully_reshardable" if is_full else "dp_reshardable"
        if is_full:
            name = "distrib_optim_fully_reshardable_mem_efficient"
            metadata[name] = getattr(config, name, False)
    return metadata


def _sharded(ctx: Any, metadata: dict[str, Any], *, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    state = {name: model.sharded_state_dict(metadata=metadata) for name, model in models_of(ctx).items()}
    if with_optimizer and is_optimizer(ctx.optimizer):
        state[OPTIMIZER] = ctx.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _put(found: dict[str, Any], ctx: Any, *, with_optimizer: bool, strict: bool) -> None:
    for name, model in models_of(ctx).items():
        model.load_state_dict(found[name], strict=strict)
    if with_optimizer:
        # The optimizer copies into parameters, which are leaves of autograd.
        with torch.no_grad():
            ctx.optimizer.load_state_dict(found[OPTIMIZER])


def _own_object(data: Any) -> ShardedObject:
    """Return an object of which every rank has its own."""
    return ShardedObject(_RNG, data, (dist.get_world_size(),), (dist.get_rank(),))


@contextmanager
def _folder(step: int, *, is_saved: bool = False) -> Iterator[str]:
    """Yield a folder for the small files that megatron-core itself writes and wants to see. The checkpoint holds the
    content of all of them, so it is this rank's, and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        folder = Path(scratch) / f"iter_{step:07d}"
        folder.mkdir()
        if is_saved:
            save_config(CheckpointingConfig(BACKEND, VERSION), str(folder))
        yield str(folder)


# Whether it fits


def _checked_note(common: Any, step: int) -> dict[str, Any]:
    note = common.get(_NOTE) if isinstance(common, Mapping) else None
    if not isinstance(note, dict) or not {"progress", "parts", "layout"} <= note.keys():
        raise holdfast.StateMismatchError(
            "the checkpoint was not saved by MegatronBridgeManager",
            step=step,
            advice="load it with megatron-core's own functions and HoldfastLoadStrategy",
        )
    return note


def _has_part(name: str, note: Mapping[str, Any]) -> bool:
    if name in note["parts"]:
        return True
    logger.warning("the checkpoint was saved without %s, which stays as it is", name)
    return False


def _is_same_layout(saved: Mapping[str, int], live: Mapping[str, int]) -> bool:
    if saved == live:
        return True
    logger.warning(
        "the random state is not loaded: it was saved with another layout (%s) than this one (%s)",
        _in_words(saved),
        _in_words(live),
    )
    return False


def _check_layout(saved: Mapping[str, int], live: Mapping[str, int], metadata: Mapping[str, Any], *, step: int) -> None:
    """Refuse an optimizer's state that is laid out for other model parallel ranks, before it is read: buffers of
    another layout can have the same sizes."""
    sharding = metadata.get(_SHARDING)
    if sharding is None or sharding in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    cuts = [name for name in live if name != "ranks" and saved.get(name) != live[name]]
    if cuts:
        raise holdfast.StateMismatchError(
            f"the optimizer was saved as '{sharding}' with another layout ({_in_words(saved)}) than this one "
            f"({_in_words(live)})",
            step=step,
            mismatched=[OPTIMIZER],
            advice="save with dist_ckpt_optim_fully_reshardable, or load with load_optim=False",
        )


def _in_words(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in layout.items())


def _check_keys(missing: Iterable[str], unexpected: Iterable[str], *, strict: bool, step: int) -> None:
    """Raise, on all ranks, if a model and the checkpoint have different tensors; without `strict`, log them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(unexpected))
    absent = sorted({key for one in everyone for key in one})
    extra = sorted(key for key in missing if not key.startswith(_OTHER_KEYS) and key != _RNG)
    if not absent and not extra:
        return
    if strict:
        raise holdfast.StateMismatchError(
            "the models and the checkpoint have different tensors",
            step=step,
            missing=absent,
            unexpected=extra,
            advice="build the model as it was saved, or load with strict=False",
        )
    logger.warning("not in the checkpoint: %s; not in the models: %s", absent or "nothing", extra or "nothing")
