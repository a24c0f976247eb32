"""Save and resume everything that an `Accelerator` has prepared, in place of its `save_state` and `load_state`.

An accelerator with its prepared and registered objects enters; a manager with a component for each of them is inside.
Needs Accelerate 1.x, of which 1.15 is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.utils.data

import holdfast
from holdfast import CheckpointManager, KeepLast, RestoreResult, SaveHandle, UsageError
from holdfast.data import ResumableLoader

try:
    import accelerate
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.utils import DistributedType
except ImportError as missing:
    raise ImportError(
        "holdfast.integrations.accelerate needs Accelerate: pip install holdfast[accelerate]"
    ) from missing

__all__ = ["HoldfastState"]

_KINDS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "dataloader": "_dataloaders"}
_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


class HoldfastState:
    """The whole state of a training with Accelerate, saved to a run of Holdfast.

    accelerator: after `prepare` and `register_for_checkpointing`, with all that belongs to the training. Its models,
        optimizers, schedulers and data loaders become the components "model", "optimizer", "scheduler" and
        "dataloader", further ones "model_1" and so on, in the order in which they were prepared.
    run: where the checkpoints go; without it, the folder `checkpoints` in the accelerator's `project_dir`.
    objects: names for the objects of `register_for_checkpointing`. One without a name is stored under that of its
        class.
    options: those of `CheckpointManager`. Without `keep`, `ProjectConfiguration(total_limit=n)` is `KeepLast(n)`.

    The position in every loader is kept, also of those that are no `StatefulDataLoader`, and a resume in the middle of
    an epoch takes up the very next batch, with the random state as it was.

    Every process makes it and calls its methods, in the same order. `close`, or leaving the `with` block, finishes what
    is pending.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        run: Any = None,
        *,
        objects: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _require_supported(accelerator)
        self._accelerator = accelerator
        self._known = _prepared(accelerator)
        for loader in accelerator._dataloaders:
            _give_position(loader)
        components = _components(accelerator, dict(objects or {}))
        limit = accelerator.project_configuration.total_limit
        if limit is not None:
            options.setdefault("keep", KeepLast(limit))
        self.manager = CheckpointManager(run if run is not None else _default_run(accelerator), components, **options)

    @property
    def epoch(self) -> int:
        """Return the epoch in which the first data loader is, counted from 0: where the loop over epochs goes on."""
        loaders = self._accelerator._dataloaders
        if not loaders:
            raise UsageError("no data loader was prepared", advice="keep the epoch in progress=")
        return int(loaders[0].iteration)

    def save_state(self, step: int, **options: Any) -> SaveHandle:
        """Save after `step` optimizer steps are done. options: those of `CheckpointManager.save`.

        Between the micro-batches of one step it is an error: gradients are not stored.
        """
        if not self._accelerator.sync_gradients:
            raise UsageError(
                f"step {step!r:.40} is not done: gradients are still being accumulated, and they are not stored",
                advice="save only when accelerator.sync_gradients is True",
            )
        self._require_known()
        return self.manager.save(step, **options)

    def load_state(self, selector: Any = "latest", **options: Any) -> RestoreResult:
        """Restore a checkpoint, or start fresh where there is none. Arguments as for `CheckpointManager.restore`."""
        self._require_known()
        return self.manager.restore(selector, **options)

    def close(self) -> None:
        """Finish what is pending; raise what failed, once. Idempotent."""
        self.manager.close()

    def _require_known(self) -> None:
        """Refuse to leave out what was prepared since: a checkpoint without it would look complete."""
        if _prepared(self._accelerator) != self._known:
            raise UsageError(
                "the accelerator prepared or registered objects after HoldfastState was made, or freed some",
                advice="make HoldfastState when everything is prepared and registered",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.manager.__exit__(kind, error, trace)


class _Steps:
    """The accelerator's own count of micro-batches, which decides when gradients are applied."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


class _AheadLoader(ResumableLoader):
    """The loader inside of a prepared one, which fetches each batch while the one before is still to be handed out.

    What fetching it draws from the random state lies before the save, so the first batch after a restore is fetched
    with the random state of that time, and the random state of the save is left as it is.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._random_state: Any = None

    def __iter__(self) -> Iterator[Any]:
        random_state, self._random_state = self._random_state, None
        batches = super().__iter__()
        return batches if random_state is None else _after_first(batches, random_state)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "random_state": holdfast.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._random_state = state["random_state"] if state["begun"] else None


def _after_first(batches: Iterator[Any], random_state: Mapping[str, Any]) -> Iterator[Any]:
    kept = holdfast.get_rng_state()
    holdfast.set_rng_state(random_state)
    try:
        first = next(batches)
    except StopIteration:
        return
    finally:
        holdfast.set_rng_state(kept)
    yield first
    yield from batches


def _require_supported(accelerator: Any) -> None:
    if not isinstance(accelerator, accelerate.Accelerator):
        raise UsageError(f"accelerator={accelerator!r:.100}", advice="give an accelerate.Accelerator")
    if missing := [name for name in (*_KINDS.values(), "_custom_objects") if not hasattr(accelerator, name)]:
        raise UsageError(
            f"this version of Accelerate, {accelerate.__version__}, is not known: an Accelerator has no {missing[0]}",
            advice="use Accelerate 1.15",
        )
    kind = accelerator.distributed_type
    if kind.name not in _SUPPORTED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        name = "FSDP1" if kind == DistributedType.FSDP else kind.name
        raise UsageError(
            f"Accelerate runs with {name}, whose state Holdfast does not store",
            advice="use one process, DDP, or FSDP2 (FullyShardedDataParallelPlugin(fsdp_version=2))",
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise UsageError(
            "hooks of register_save_state_pre_hook or register_load_state_pre_hook are not called by Holdfast",
            advice="remove them, and register what they store with register_for_checkpointing",
        )


def _prepared(accelerator: accelerate.Accelerator) -> list[list[int]]:
    """Return which objects the accelerator knows, by identity."""
    return [[id(one) for one in getattr(accelerator, name)] for name in (*_KINDS.values(), "_custom_objects")]


def _components(accelerator: accelerate.Accelerator, objects: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"accelerate": _Steps(accelerator)}
    for kind, attribute in _KINDS.items():
        for index, one in enumerate(getattr(accelerator, attribute)):
            found[kind if index == 0 else f"{kind}_{index}"] = one
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    named = {id(one): name for name, one in objects.items()}
    registered = {id(one) for one in accelerator._custom_objects}
    for name, one in objects.items():
        if id(one) not in registered:
            raise UsageError(
                f"objects['{name}'] is not registered", advice="call accelerator.register_for_checkpointing with it"
            )
    for one in accelerator._custom_objects:
        name = named.get(id(one), type(one).__name__)
        if name in found:
            raise UsageError(
                f"two objects would have the name '{name}'",
                advice=f"name the registered {type(one).__name__}: HoldfastState(..., objects={{'my_name': it}})",
            )
        found[name] = one
    return found


def _give_position(loader: Any) -> None:
    """Let a prepared loader keep its position, where the loader inside of it has none."""
    if isinstance(loader, DataLoaderDispatcher) or not issubclass(type(loader), DataLoaderShard):
        raise UsageError(
            f"the position in a prepared {type(loader).__name__} cannot be kept",
            advice="use DataLoaderConfiguration(dispatch_batches=False)",
        )
    inner = loader.base_dataloader
    if callable(getattr(inner, "state_dict", None)):
        _require_known_order(inner)
        return
    loader.base_dataloader = _AheadLoader(inner)
    loader.dl_state_dict = loader.base_dataloader.state_dict()


def _require_known_order(loader: Any) -> None:
    """Refuse a `StatefulDataLoader` with a sampler that shuffles: nobody keeps its order in a prepared loader."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if sampler is not None and not isinstance(sampler, torch.utils.data.SequentialSampler):
        raise UsageError(
            f"the order of the {type(sampler).__name__} of a StatefulDataLoader that Accelerate prepared is not stored",
            advice="leave use_stateful_dataloader out: Holdfast keeps the order and the position of a plain DataLoader",
        )


def _default_run(accelerator: accelerate.Accelerator) -> Path:
    if accelerator.project_dir is None:
        raise UsageError("no run is given", advice="pass run=, or Accelerator(project_dir=...)")
    return Path(accelerator.project_dir) / "checkpoints"
