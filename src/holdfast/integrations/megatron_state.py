"""The objects of Megatron-Bridge's contexts as components. A context enters; components, counters and configs leave."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

import holdfast

__all__ = [
    "OPTIMIZER",
    "SCHEDULER",
    "TRACKER",
    "Generators",
    "components_of",
    "is_optimizer",
    "is_sharded",
    "layout_of",
    "models_in",
    "models_of",
    "plain_config",
    "put_train_state",
    "reload_master_weights",
    "train_state_of",
    "update_microbatches",
]

OPTIMIZER = "optimizer"
SCHEDULER = "opt_param_scheduler"
TRACKER = "rng_tracker"

_CORE = "megatron.core"
_RANDOM = "megatron.core.tensor_parallel.random"
_MICROBATCHES = "megatron.core.num_microbatches_calculator"
_COUNTERS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "floating_point_operations_so_far",
    "do_train",
    "do_valid",
    "do_test",
)


# Components


def models_of(ctx: Any) -> dict[str, Any]:
    """Return the model chunks by name, without Megatron's own wrappers: `model`, or `model0`, `model1` ..."""
    chunks = list(ctx.model) if isinstance(ctx.model, list | tuple) else [ctx.model]
    if not chunks:
        raise holdfast.UsageError("the context has no model", advice="give the list of model chunks")
    models = _unwrapped(chunks)
    names = ["model"] if len(models) == 1 else [f"model{index}" for index in range(len(models))]
    return dict(zip(names, models, strict=True))


def components_of(ctx: Any, config: Any) -> dict[str, Any]:
    """Return the objects of a context by name: the models, `optimizer`, `opt_param_scheduler`, and the generators of
    tensor parallel regions where megatron-core is in use."""
    state = models_of(ctx)
    if getattr(config, "save_optim", True):
        if is_optimizer(ctx.optimizer):
            state[OPTIMIZER] = ctx.optimizer
        if ctx.opt_param_scheduler is not None:
            state[SCHEDULER] = ctx.opt_param_scheduler
    if getattr(config, "save_rng", True) and _RANDOM in sys.modules:
        state[TRACKER] = holdfast.PerRank(Generators())
    return state


def is_optimizer(optimizer: Any) -> bool:
    """Return whether a rank has an optimizer with state. Megatron gives one without any to ranks that train nothing."""
    return optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False)


def models_in(state: Mapping[str, Any]) -> list[str]:
    return [name for name in state if name not in (OPTIMIZER, SCHEDULER, TRACKER)]


def _unwrapped(chunks: list[Any]) -> list[Any]:
    """Return the models without Megatron's own wrappers; Holdfast knows those of PyTorch."""
    if f"{_CORE}.utils" not in sys.modules or f"{_CORE}.distributed" not in sys.modules:
        return chunks
    found: list[Any] = sys.modules[f"{_CORE}.utils"].unwrap_model(chunks)
    return found


# Layouts


def is_sharded(ctx: Any) -> bool:
    """Return whether the objects lay their state out themselves, as those of megatron-core do on any number of ranks.
    Refuses state that is cut over ranks and objects that do not say how, and what nothing here can store."""
    cfg = ctx.state.cfg
    if getattr(ctx, "module_name", None) is not None:
        raise holdfast.UsageError(
            f"module_name={ctx.module_name!r} asks for one part of a model of several modules",
            advice="a checkpoint here is one of the whole training; use Megatron-Bridge's own manager for such a model",
        )
    for part, name in _REFUSED:
        if getattr(getattr(cfg, part, None), name, None):
            raise holdfast.UsageError(
                f"{name} is set, and such a state is not laid out as it is stored",
                advice="use Megatron-Bridge's own manager for this training",
            )
    objects = [*models_of(ctx).values(), *([ctx.optimizer] if is_optimizer(ctx.optimizer) else [])]
    plain = [one for one in objects if not callable(getattr(one, "sharded_state_dict", None))]
    cut = [name for name, size in layout_of(ctx).items() if size > 1 and name in _CUTS]
    if getattr(getattr(cfg, "optimizer", None), "use_distributed_optimizer", False):
        cut.append("use_distributed_optimizer")
    if cut and plain:
        raise holdfast.UsageError(
            f"the training cuts its state over ranks ({', '.join(cut)}), and {type(plain[0]).__name__} has no "
            "sharded_state_dict()",
            advice="use models and optimizers of megatron-core, which know how they are cut",
        )
    return not plain


def layout_of(ctx: Any) -> dict[str, int]:
    """Return over how many ranks the config cuts what."""
    model = getattr(ctx.state.cfg, "model", None)
    return {
        **{name: int(getattr(model, name, 1) or 1) for name in _CUTS},
        "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    }


_CUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_REFUSED = (
    ("ddp", "use_megatron_fsdp"),
    ("model", "moe_mlp_glu_interleave_size"),
    ("model", "moe_shared_expert_glu_interleave_size"),
)


class Generators:
    """The states of the generators that megatron-core keeps for tensor parallel regions and for experts."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _as_tensor(state) for name, state in self._tracker().get_states().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        module, tracker = sys.modules[_RANDOM], self._tracker()
        graphable = module.is_graph_safe_cuda_rng_tracker(tracker)
        tracker.set_states(
            {name: module.convert_cuda_rng_state(value, to_graphable=graphable) for name, value in state.items()}
        )

    @staticmethod
    def _tracker() -> Any:
        return sys.modules[_RANDOM].get_cuda_rng_tracker()


def _as_tensor(state: Any) -> torch.Tensor:
    """Return a generator's state as a tensor. Where CUDA graphs are in use, the tracker gives the generators."""
    return state if isinstance(state, torch.Tensor) else state.get_state()


# The train state


def train_state_of(train_state: Any) -> dict[str, Any]:
    """Return the counters of Bridge's train state as plain numbers, those of a subclass included."""
    names = [field.name for field in fields(train_state)] if is_dataclass(train_state) else ["step", *_COUNTERS]
    return {name: _plain_number(getattr(train_state, name)) for name in names if hasattr(train_state, name)}


def put_train_state(train_state: Any, progress: Mapping[str, Any]) -> None:
    """Set the counters in place: parts of Bridge hold the object."""
    for name, value in progress.items():
        if hasattr(train_state, name):
            setattr(train_state, name, value)


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def update_microbatches(consumed_samples: int) -> None:
    """Tell megatron-core how many samples are consumed, as Bridge's own load does: a batch size that grows with them
    would otherwise start small again."""
    module = sys.modules.get(_MICROBATCHES)
    if module is not None and getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is not None:
        module.update_num_microbatches(consumed_samples=consumed_samples)


def reload_master_weights(optimizer: Any, *, is_restored: bool) -> None:
    """Let an optimizer with a copy of the weights in a higher precision take the weights that were loaded, unless its
    own copy was restored. Without it the first step would put the weights from before the load back."""
    if not is_restored and callable(getattr(optimizer, "reload_model_params", None)):
        optimizer.reload_model_params()


# The config


def plain_config(value: Any) -> Any:
    """Return a config as plain data to be read by people; what is none of it stands as its text."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_config(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_config(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_config(getattr(value, field.name)) for field in fields(value)}
    named = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{named}" if named else type(value).__name__ if _is_opaque(value) else str(value)


def _is_opaque(value: Any) -> bool:
    """Return whether the text of an object would be its address in memory, which differs on every rank."""
    return " at 0x" in str(value)
