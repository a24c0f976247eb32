"""A checkpoint manager that Megatron-Bridge's config can name: its contexts enter, checkpoints of a run leave.

    CheckpointConfig(custom_manager_class="holdfast.integrations.megatron_bridge.MegatronBridgeManager", ...)

Bridge decides when to save; its config names where to, what to keep and what to load. `HoldfastManager` does the rest.
Needs neither Bridge nor megatron-core to be imported: whatever has their attributes is taken.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import holdfast
from holdfast.integrations.megatron_state import (
    OPTIMIZER,
    SCHEDULER,
    TRACKER,
    components_of,
    is_sharded,
    models_in,
    plain_config,
    put_train_state,
    reload_master_weights,
    train_state_of,
    update_microbatches,
)
from holdfast.integrations.megatron_tracker import mark_run, write_tracker

__all__ = ["MegatronBridgeManager"]

logger = logging.getLogger("holdfast")

_EVENT = "on_checkpoint_save"

# Settings of Bridge that would be dropped without a word, with the values that ask for nothing.
_REFUSED = {
    "non_persistent_save_interval": (
        "non-persistent checkpoints are not offered",
        "save more often with save_interval, and keep few with most_recent_k",
    ),
    "also_save_hf_checkpoint": (
        "no Hugging Face folder is written beside a checkpoint",
        "export one with holdfast.export, or `holdfast export`, when it is needed",
    ),
    "load_main_params_from_ckpt": (
        "the optimizer's own copy of the weights is stored with the optimizer alone",
        "load the optimizer with load_optim, or start from the model's weights",
    ),
}


@dataclass(frozen=True, slots=True)
class _Source:
    """What a load takes: a place (None is the manager's own run), a checkpoint in it, and whether weights alone."""

    place: str | None
    selector: str | int
    weights_alone: bool


class MegatronBridgeManager:
    """Saves and loads for Megatron-Bridge's training loop.

    A checkpoint's step is Bridge's count of iterations that are done. The train state is kept as its `progress`. With
    `async_save` a save returns when the state is copied; otherwise when it is committed. The state of megatron-core's
    own models and optimizers, which may be cut over ranks, is laid out by megatron-core (`megatron_sharded`), and a
    save of it always returns when it is committed.

    options: settings of `holdfast.CheckpointConfig` that Bridge's config does not have, such as `verify`, `timeout` or
        a `keep` of your own in place of `most_recent_k`. A subclass sets them.
    """

    options: Mapping[str, Any] = {}

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self._settings = _settings_of(checkpoint_config, self.options)
        for place in (checkpoint_config.load, _value(checkpoint_config, "pretrained_checkpoint")):
            if place is not None:
                mark_run(place)
        self._inner: holdfast.HoldfastManager | None = None
        self._sharded: Any = None
        self._state: dict[str, Any] = {}
        self._tracked: list[_Tracked] = []
        self._committed: list[_Tracked] = []
        self._is_terminated = False
        self._has_warned_of_data = False

    @property
    def manager(self) -> holdfast.CheckpointManager:
        """The `CheckpointManager` inside, once something was saved or loaded."""
        if self._inner is None:
            raise holdfast.UsageError("nothing was saved or loaded yet", advice="the first save or load builds it")
        return self._inner.manager

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save the state after the iterations that are done. Callbacks for it are called when it is committed."""
        if _value(self.checkpoint_config, "save") is None:
            raise holdfast.UsageError("a save without a place for it", advice="set save in the checkpoint config")
        if ctx.non_persistent_ckpt:
            _refuse("non_persistent_save_interval")
        self._require_open()
        self._warn_of_data(ctx.train_data_iterator)
        progress = train_state_of(ctx.state.train_state)
        progress["floating_point_operations_so_far"] = int(ctx.num_floating_point_operations_so_far)
        step = int(ctx.state.train_state.step)
        if is_sharded(ctx):
            self._save_sharded(ctx, callback_manager, step, progress)
            return
        inner, state = self._opened(ctx), self._state_of(ctx)
        with self._forgetting_failures():
            handle = inner.save(holdfast.SaveContext(step=step, state=state, progress=progress))
        # A save waits for the one before it, on all ranks alike: so what is done now, is done on all of them.
        self._report_committed()
        self._tracked.append(_Tracked(step, handle, ctx, callback_manager))
        if self._settings.mode == "sync":
            self._report_committed()

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load what the config names into the context's objects. Returns the iterations that are done, and the
        operations that were counted; (0, 0) when there is nothing to load."""
        self._require_open()
        is_whole = not is_sharded(ctx)
        if is_whole:
            self._opened(ctx)
            self._state_of(ctx)
        source = self._source()
        if source is None:
            logger.warning("no checkpoint in load='%s': the training starts from scratch", self.checkpoint_config.load)
            return 0, 0
        if not is_whole:
            self._load_sharded(source, ctx)
        elif source.weights_alone:
            self._load_weights(self._opened(ctx), source, ctx)
        else:
            self._resume(self._opened(ctx), source, ctx)
        train_state = ctx.state.train_state
        return int(train_state.step), int(train_state.floating_point_operations_so_far)

    def finalize_async_saves(self, state: Any = None, blocking: bool = False, terminate: bool = False) -> None:
        """Raise what failed in the background; with `blocking`, when all saves have ended. `terminate` closes. May be
        called any number of times, also after that."""
        self._is_terminated = self._is_terminated or terminate
        if self._inner is not None:
            with self._forgetting_failures():
                self._inner.finalize_async_saves(blocking=blocking, terminate=terminate)
            if blocking or terminate:
                self._report_committed()
            else:
                self._note_ended()

    # Models and optimizers of megatron-core

    def _save_sharded(self, ctx: Any, callbacks: Any, step: int, progress: dict[str, Any]) -> None:
        if not self._sharded_run().save(step, ctx, progress):
            return
        if _rank() == 0:
            write_tracker(self.checkpoint_config.save, step)
        _fire(ctx, callbacks)

    def _load_sharded(self, source: _Source, ctx: Any) -> None:
        from holdfast.integrations.megatron_sharded import Wanted

        run = self._sharded_run()
        place = os.fspath(self._settings.run or "") if source.place is None else source.place
        newest = _of_first_rank(lambda: _steps_in(place, source.selector))
        # As everywhere: only the latest of the training's own run may give way to the one before it.
        steps = newest if source.place is None else newest[:1]
        left_out = self._left_out(ctx)
        is_resumed = not source.weights_alone
        wanted = Wanted(
            models=not ctx.skip_load_to_model_and_opt or _loads_in_place(ctx),
            optimizer=is_resumed and OPTIMIZER not in left_out,
            scheduler=is_resumed and SCHEDULER not in left_out,
            rng=is_resumed and TRACKER not in left_out,
            strict=ctx.strict,
        )
        step, progress, has_optimizer = run.load(place, steps, ctx, wanted)
        if is_resumed:
            put_train_state(ctx.state.train_state, progress)
        ctx.state.train_state.step = step if is_resumed else 0
        if wanted.models:
            reload_master_weights(ctx.optimizer, is_restored=has_optimizer)
        if is_resumed:
            update_microbatches(ctx.state.train_state.consumed_train_samples)

    def _sharded_run(self) -> Any:
        if self._sharded is None:
            from holdfast.integrations.megatron_sharded import ShardedRun

            self._sharded = ShardedRun(self._settings, self.checkpoint_config)
        return self._sharded

    # The objects of a context

    def _require_open(self) -> None:
        if self._is_terminated:
            raise holdfast.ClosedError(
                "the manager was terminated", advice="save and load before finalize_async_saves(terminate=True)"
            )

    def _opened(self, ctx: Any) -> holdfast.HoldfastManager:
        """Return the manager of the context's objects, which are known only when something is saved or loaded."""
        if self._inner is None:
            self._state = components_of(ctx, self.checkpoint_config)
            self._inner = holdfast.HoldfastManager(
                self._settings, state=self._state, config_to_store=plain_config(ctx.state.cfg)
            )
        return self._inner

    def _state_of(self, ctx: Any) -> dict[str, Any]:
        """Return the context's objects by name. Refuses others than those of the first call."""
        now = components_of(ctx, self.checkpoint_config)
        for name in (TRACKER,):
            if name in now and name in self._state:
                now[name] = self._state[name]
        different = [name for name in {**now, **self._state} if now.get(name) is not self._state.get(name)]
        if different:
            raise holdfast.UsageError(
                f"the context has another {', '.join(sorted(different))} than the one before",
                advice="save and load the same objects for the whole training, or build a new manager",
            )
        return now

    def _warn_of_data(self, iterator: Any) -> None:
        if self._has_warned_of_data or not hasattr(getattr(iterator, "iterable", None), "save_state"):
            return
        self._has_warned_of_data = True
        logger.warning(
            "the data iterator has a position of its own, which is not saved: a load cannot give it back, because "
            "Megatron-Bridge builds the iterator after it; after a resume the data starts as its dataset decides"
        )

    # Loading

    def _source(self) -> _Source | None:
        """Return what to load: of `load`, or else the weights of `pretrained_checkpoint`; None if there is nothing."""
        config = self.checkpoint_config
        step = _value(config, "ckpt_step")
        own = _is_same(config.load, self._settings.run)
        if config.load is not None and (step is not None or self._has_checkpoint(config.load, own)):
            place = None if own else os.fspath(config.load)
            return _Source(place, "latest" if step is None else step, bool(config.finetune))
        pretrained = _value(config, "pretrained_checkpoint")
        if pretrained is not None:
            # Bridge itself does so: other parts of it read this.
            config.finetune = True
            return _Source(os.fspath(pretrained), "latest", True)
        if _value(config, "exit_on_missing_checkpoint"):
            raise holdfast.CheckpointNotFoundError(
                "there is no checkpoint to load, and exit_on_missing_checkpoint is set",
                run=str(config.load),
                advice="check load, or start without exit_on_missing_checkpoint",
            )
        return None

    def _has_checkpoint(self, place: str, own: bool) -> bool:
        if own and self._inner is not None:
            # Waits for writers of a training that ended, and is the leader's answer on every rank.
            return self._inner.manager.should_load()
        return bool(_of_first_rank(lambda: holdfast.is_restart(place)))

    def _resume(self, inner: holdfast.HoldfastManager, source: _Source, ctx: Any) -> None:
        context = holdfast.LoadContext(source=source.place, selector=source.selector)
        stored = _of_first_rank(lambda: _components_in(context.where, self._settings.run))
        skipped = self._left_out(ctx)
        alone = [name for name in (OPTIMIZER, SCHEDULER, "rng", TRACKER) if name in stored and name not in self._live]
        strategy = holdfast.LoadStrategy(
            strict=ctx.strict,
            on_missing="skip",
            skip=[*(name for name in self._live if name in skipped), *alone],
        )
        result = inner.manager.restore(context.where, strategy=strategy)
        lost = [name for name in models_in(self._state) if name in result.missing]
        if lost:
            raise holdfast.StateMismatchError(
                f"the checkpoint has no {', '.join(lost)}",
                step=result.step,
                missing=lost,
                advice="it was saved with another number of model chunks; load it with as many",
            )
        restored = {*result.restored, *self._restore_unsaved(result, skipped, ctx)}
        put_train_state(ctx.state.train_state, result.progress)
        ctx.state.train_state.step = result.step
        if not ctx.skip_load_to_model_and_opt or _loads_in_place(ctx):
            reload_master_weights(ctx.optimizer, is_restored=OPTIMIZER in restored)
        update_microbatches(ctx.state.train_state.consumed_train_samples)

    def _load_weights(self, inner: holdfast.HoldfastManager, source: _Source, ctx: Any) -> None:
        """Load the models alone; the training starts at iteration 0, with a new optimizer."""
        if not ctx.skip_load_to_model_and_opt or _loads_in_place(ctx):
            strategy = holdfast.LoadStrategy.weights_only(strict=ctx.strict)
            inner.load_weights(
                holdfast.LoadContext(
                    purpose="inference", source=source.place, selector=source.selector, strategy=strategy
                )
            )
            reload_master_weights(ctx.optimizer, is_restored=False)
        ctx.state.train_state.step = 0

    @property
    def _live(self) -> list[str]:
        return [*self._state, *(["rng"] if self._settings.rng else [])]

    def _left_out(self, ctx: Any) -> set[str]:
        """Return the components that the config or the context does not want to be loaded."""
        config = self.checkpoint_config
        left_out: set[str] = set()
        if not _value(config, "load_optim", True):
            left_out |= {OPTIMIZER, SCHEDULER}
        if not _value(config, "load_rng", True):
            left_out |= {"rng", TRACKER}
        if ctx.skip_load_to_model_and_opt and not _loads_in_place(ctx):
            left_out |= {OPTIMIZER, *models_in(self._state)}
        return left_out

    def _restore_unsaved(self, result: holdfast.RestoreResult, skipped: set[str], ctx: Any) -> tuple[str, ...]:
        """Restore what is loaded and, because of `save_optim=False`, not saved. Returns the components."""
        if result.checkpoint is None or _value(self.checkpoint_config, "save_optim", True):
            return ()
        objects = {OPTIMIZER: ctx.optimizer, SCHEDULER: ctx.opt_param_scheduler}
        stored = {tree.name for tree in result.checkpoint.manifest.trees}
        rest = {
            name: one for name, one in objects.items() if one is not None and name in stored and name not in skipped
        }
        if not rest:
            return ()
        # An optimizer's state is stored by the names of its model's parameters.
        state = {**{name: self._state[name] for name in models_in(self._state)}, **rest}
        with holdfast.CheckpointManager(
            self._settings.run or "", state, mode="sync", rng=False, links=False, timeout=self._settings.timeout
        ) as loader:
            strategy = holdfast.LoadStrategy(only=list(rest), strict=ctx.strict)
            return loader.restore(result.checkpoint.path, strategy=strategy).restored

    # After the commit

    def _report_committed(self) -> None:
        """Call back for the saves that were committed. Only where all ranks are at the same place: a callback may be
        one that needs all of them."""
        self._note_ended()
        while self._committed:
            tracked = self._committed.pop(0)
            _fire(tracked.context, tracked.callbacks)

    def _note_ended(self) -> None:
        """Note which saves were committed, and let the file by which Bridge finds a run name the last of them."""
        while self._tracked and self._tracked[0].handle.done():
            tracked = self._tracked.pop(0)
            tracked.handle.wait()  # raises if it failed, and so nothing takes it for committed
            if not tracked.handle.skipped:
                self._committed.append(tracked)
            if _rank() == 0:
                write_tracker(self.checkpoint_config.save, tracked.step)

    @contextmanager
    def _forgetting_failures(self) -> Iterator[None]:
        """Forget the saves that have ended if an error is raised: it is that of one of them, and is raised once."""
        try:
            yield
        except BaseException:
            self._tracked = [one for one in self._tracked if not one.handle.done()]
            raise


@dataclass(frozen=True, slots=True)
class _Tracked:
    """A save that is under way, or was just committed, and for whom to call back."""

    step: int
    handle: holdfast.SaveHandle
    context: Any
    callbacks: Any


def _fire(ctx: Any, callbacks: Any) -> None:
    """Call the functions that Bridge's callback manager has for a checkpoint that was saved."""
    if callbacks is None or not callbacks.has_callbacks(_EVENT):
        return
    made = import_module("megatron.bridge.training.callbacks").CallbackContext(
        state=ctx.state, model=ctx.model, user_state=callbacks.user_state, optimizer=ctx.optimizer
    )
    callbacks.fire(_EVENT, made)


# The config


def _settings_of(config: Any, options: Mapping[str, Any]) -> holdfast.CheckpointConfig:
    """Return the settings of the manager inside. Refuses what Bridge's config asks for and nothing here would do."""
    for name in ("save", "load"):
        if not hasattr(config, name):
            raise holdfast.UsageError(
                f"the checkpoint config has no '{name}', and is {type(config).__name__}",
                advice="MegatronBridgeManager takes Megatron-Bridge's own CheckpointConfig",
            )
    for name in _REFUSED:
        if _value(config, name):
            _refuse(name)
    run = config.save if config.save is not None else config.load
    if run is None:
        raise holdfast.UsageError("neither save nor load is set", advice="set save in the checkpoint config")
    kept = _value(config, "most_recent_k", -1)
    settings: dict[str, Any] = {
        "run": run,
        "mode": "auto" if _value(config, "async_save", False) else "sync",
        "rng": bool(_value(config, "save_rng", True)),
        "keep": None if kept is None or kept < 0 else holdfast.KeepLast(max(1, kept)),
    }
    return holdfast.CheckpointConfig.from_dict({**settings, **options})


def _refuse(setting: str) -> None:
    problem, advice = _REFUSED[setting]
    raise holdfast.UsageError(f"{setting} is set in the checkpoint config, and {problem}", advice=advice)


def _value(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


def _is_same(place: Any, run: Any) -> bool:
    return place is not None and run is not None and os.path.realpath(place) == os.path.realpath(run)


def _loads_in_place(ctx: Any) -> bool:
    """Return whether Bridge asks to skip models and optimizers only because its own load fills them in place, which is
    so for torch's FSDP2. Skipping them here would train on from weights that were never loaded."""
    return bool(getattr(getattr(ctx.state.cfg, "dist", None), "use_torch_fsdp2", False))


def _components_in(where: Any, run: Any) -> list[str]:
    """Return the names of the components of the checkpoint that is meant, or none where it cannot be found."""
    text = os.fspath(where) if isinstance(where, os.PathLike) else where
    is_place = isinstance(text, str) and ("/" in text or "@" in text)
    try:
        found = holdfast.peek(text) if is_place else holdfast.peek(run, text)
    except holdfast.HoldfastError:
        return []  # the restore finds another one, or raises the same
    return [] if found is None else [tree.name.partition("@")[0] for tree in found.manifest.trees]


def _steps_in(place: str, selector: str | int) -> list[int]:
    """Return the steps to try, the newest first."""
    meant = holdfast.resolve(place, selector).step
    if selector != "latest":
        return [meant]
    steps = [found.step for found in holdfast.checkpoints(place)]
    return list(dict.fromkeys([meant, *steps]))


# Ranks


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _of_first_rank(look: Callable[[], Any]) -> Any:
    """Return what rank 0 found, or raise its error, on every rank: a commit between the looks of two ranks must not
    part them."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return look()
    answers: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answers = [(look(), None)]
        except holdfast.HoldfastError as error:
            answers = [(None, error)]
    dist.broadcast_object_list(answers, src=0)
    value, failure = answers[0]
    if failure is not None:
        raise failure
    return value
