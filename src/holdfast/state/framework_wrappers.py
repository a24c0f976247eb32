"""See through the wrappers that Accelerate and Lightning put around optimizers, schedulers and data loaders. A user's
object enters, and what holds its state leaves. Imports neither torch nor any framework.

A class counts as a framework's only if it is the very class that the framework's loaded module has. One that merely has
the name is taken as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from holdfast.errors import StateMismatchError, UsageError

logger = logging.getLogger("holdfast")

__all__ = [
    "is_loader_adapter",
    "load_loader_adapter",
    "loader_adapter_state",
    "loader_inside",
    "object_inside",
    "refuse_same_object",
    "require_adapter_state",
]

# The attribute in which each wrapper has the object whose state counts: by the module and the name of its class.
_INNER = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("accelerate.scheduler", "AcceleratedScheduler"): "scheduler",
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"): "_optimizer",
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"): "_optimizer",
    ("lightning.fabric.wrappers", "_FabricOptimizer"): "_optimizer",
    ("lightning_fabric.wrappers", "_FabricOptimizer"): "_optimizer",
}
_LOADER_ADAPTERS = {("accelerate.data_loader", "DataLoaderAdapter"): "base_dataloader"}
_STATE_METHODS = frozenset({"state_dict", "load_state_dict"})

_EPOCH = "_accelerate_iteration"
_SEED = "_accelerate_seed"
_FINISHED = "_iterator_finished"


def object_inside(component: Any) -> Any:
    """Return the optimizer or scheduler that a framework has wrapped, and any other object as it is."""
    while True:
        attribute = _registered(type(component), _INNER)
        if attribute is None:
            return component
        component = _attribute(component, attribute)


def loader_inside(component: Any) -> Any:
    """Return the loader around which Accelerate put one of its own, and any other object as it is."""
    attribute = _registered(type(component), _LOADER_ADAPTERS)
    return component if attribute is None else _attribute(component, attribute)


def is_loader_adapter(component: Any) -> bool:
    """Return whether this is a data loader that Accelerate prepared."""
    return _registered(type(component), _LOADER_ADAPTERS) is not None


def require_adapter_state(name: str, adapter: Any) -> None:
    """Refuse a prepared loader around one that cannot save its position."""
    inner = loader_inside(adapter)
    if not callable(getattr(inner, "state_dict", None)):
        raise UsageError(
            f"Accelerate's {type(adapter).__name__} is around a {type(inner).__name__}, which has no state_dict()",
            component=name,
            advice="prepare the loader with Accelerator(dataloader_config=DataLoaderConfiguration("
            "use_stateful_dataloader=True)), or leave it out",
        )
    sampler = _sampler_inside(inner)
    if getattr(inner, "num_workers", 0) > 0 and getattr(inner, "_iterator", None) and hasattr(sampler, "initial_seed"):
        # Accelerate asks the loader for its state before it sets the sampler: the workers start with the old one.
        raise UsageError(
            f"the workers of Accelerate's {type(adapter).__name__} have begun their first epoch in an order that is "
            f"not that of its {type(sampler).__name__}, and which nobody can draw again",
            component=name,
            advice="use holdfast.integrations.accelerate.HoldfastState with a plain DataLoader, or no workers",
        )


def _sampler_inside(loader: Any) -> Any:
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def loader_adapter_state(adapter: Any) -> Any:
    """Return the position of a loader that Accelerate prepared, as the loader inside of it has it, and its epoch.

    The loader inside is a batch ahead, because Accelerate fetches each batch before it hands out the one before. What
    belongs to the batch that was handed out is in the adapter.
    """
    state = adapter.state_dict()
    epoch = _epoch_of(adapter, state)
    if not isinstance(state, Mapping) or epoch is None:
        return state
    seed = getattr(_sampler_inside(loader_inside(adapter)), "initial_seed", None)
    return {**state, _EPOCH: epoch} | ({_SEED: seed} if isinstance(seed, int) else {})


def load_loader_adapter(adapter: Any, state: Any) -> None:
    """Give a loader that Accelerate prepared its position and its epoch."""
    if not isinstance(state, Mapping):
        raise StateMismatchError(f"a loader cannot take {type(state).__name__}")
    seed, saved_seed = getattr(_sampler_inside(loader_inside(adapter)), "initial_seed", None), state.get(_SEED)
    if saved_seed is not None and seed != saved_seed:
        raise StateMismatchError(
            f"the order of the loader was made from the seed {saved_seed}, and that of its sampler is {seed}",
            advice="call set_seed() with the seed of the run before the loader is made and prepared, or give "
            "DataLoaderConfiguration(data_seed=...)",
        )
    position = {key: value for key, value in state.items() if key not in (_EPOCH, _SEED)}
    adapter.load_state_dict(position)
    # Accelerate renews this only at the next batch: until then a save would store the position before the restore.
    adapter.dl_state_dict = dict(position)
    if _EPOCH in state:
        adapter.iteration = state[_EPOCH]
    elif hasattr(adapter, "iteration"):
        logger.warning(
            "the state of the loader was saved without Accelerate and has no epoch: %s goes on with epoch %d; if its "
            "order depends on the epoch, call set_epoch() with the right one before the next batch",
            type(adapter).__name__,
            adapter.iteration,
        )


def refuse_same_object(components: Mapping[str, Any]) -> None:
    """Refuse a framework's wrapper beside the object that it wraps: one state would be stored under two names.

    The components are the user's own objects, without Holdfast's wrappers.
    """
    known: dict[int, str] = {}
    for name, component in components.items():
        inner = loader_inside(object_inside(component))
        first = known.setdefault(id(inner), name)
        if first != name and not (component is inner and components[first] is inner):
            raise UsageError(
                f"the component is the same {type(inner).__name__} as '{first}': one of them is a wrapper of the other",
                component=name,
                advice="pass one of the two",
            )


def _epoch_of(adapter: Any, state: Any) -> int | None:
    """Return the epoch that the adapter is in after a restore. With the last batch of an epoch handed out that is the
    next one, which the adapter only counts when it is asked for another batch."""
    epoch = getattr(adapter, "iteration", None)
    if not isinstance(epoch, int):
        return None
    finished = isinstance(state, Mapping) and state.get(_FINISHED) is True
    in_use = any(one is adapter for one in adapter.gradient_state.dataloader_references)
    return epoch + 1 if finished and in_use else epoch


def _registered(kind: type, registry: Mapping[tuple[str, str], str]) -> str | None:
    """Return the attribute of the first class in the registry that a class is or derives from.

    None if there is none, or if a class in between has a state of its own.
    """
    for base in kind.__mro__:
        name = (base.__module__, base.__qualname__)
        if name in registry and getattr(sys.modules.get(name[0]), name[1], None) is base:
            return registry[name]
        if _STATE_METHODS & vars(base).keys():
            return None
    return None


def _attribute(component: Any, attribute: str) -> Any:
    # Not getattr: Lightning's wrappers pass what they lack on to the object inside of them.
    inner = vars(component).get(attribute)
    if inner is None:
        raise UsageError(
            f"this version of '{type(component).__module__}.{type(component).__qualname__}' has no '{attribute}'",
            advice="pass the object that it wraps",
        )
    return inner
