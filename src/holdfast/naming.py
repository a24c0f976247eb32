"""The names that a model's parameters have in a checkpoint, and what kind of thing a component is. Knows torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.components import PerRank, RNGState, Shared, Trainable
from holdfast.errors import UsageError
from holdfast.records.layout import rank_scope, stage_scope
from holdfast.records.state import TreeKind

# Wrappers that put a name of their own between a module and its parameters. A checkpoint has the model's own names.
_WRAPPER_PARTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def is_stateful_loader(component: Any) -> bool:
    """Whether this is torchdata's `StatefulDataLoader`, which need not be installed."""
    return any(base.__name__ == "StatefulDataLoader" for base in type(component).__mro__)


def unwrap(component: Any) -> Any:
    """The user's own object, without what says how to keep it."""
    return component.component if isinstance(component, PerRank | Shared | Trainable) else component


def kind_of(name: str, component: Any) -> TreeKind:
    """What a component is, or a UsageError for something that has no state to keep."""
    inner = unwrap(component)
    if isinstance(component, PerRank):
        _require_state(name, inner)
        return "values"
    if isinstance(inner, torch.nn.Module):
        return "module"
    if isinstance(inner, torch.optim.Optimizer):
        return "optimizer" if has_torch_layout(name, inner) else "values"
    _require_state(name, inner)
    return "values"


def holds_state(component: Any) -> bool:
    """Return False for a model without parameters and buffers, which has nothing to restore."""
    inner = unwrap(component)
    if not isinstance(inner, torch.nn.Module):
        return True
    return next(inner.parameters(), None) is not None or next(inner.buffers(), None) is not None


def has_torch_layout(name: str, optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state dict is laid out as PyTorch's are, so that its state can go by parameters' names.

    It is asked once, and stays so: a component is of the same kind at every save.
    """
    known: bool | None = _layouts.get(optimizer)
    if known is None:
        try:
            packed = optimizer.state_dict()
        except Exception as error:
            zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
            raise UsageError(
                f"state_dict() of the optimizer raised {type(error).__name__}: {error}",
                component=name,
                advice="pass PerRank(optimizer.optim) in its place: it has this rank's part of the state"
                if zero
                else "make it work on every rank at any time, or leave the optimizer out",
            ) from error
        known = _layouts[optimizer] = _is_torch_layout(optimizer, packed)
    return known


# Whether each optimizer has PyTorch's layout.
_layouts = WeakIdKeyDictionary()


def _is_torch_layout(optimizer: torch.optim.Optimizer, packed: Any) -> bool:
    """Whether `state` goes by the parameters' numbers and `param_groups` lists them in the optimizer's own order."""
    if not isinstance(packed, Mapping) or not isinstance(packed.get("state"), Mapping):
        return False
    groups = packed.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    numbers = [group.get("params") for group in groups]
    if not all(isinstance(some, list) for some in numbers) or [len(some) for some in numbers] != sizes:
        return False
    in_order = [number for some in numbers for number in some] == list(range(sum(sizes)))
    return in_order and all(not isinstance(key, int) or 0 <= key < sum(sizes) for key in packed["state"])


def refuse_flat_parameters(name: str, component: Any) -> None:
    """FSDP of the first kind keeps several parameters in one flat tensor, which no other number of ranks could read."""
    inner = unwrap(component)
    if isinstance(inner, torch.nn.Module) and any(
        isinstance(part, FullyShardedDataParallel) for part in inner.modules()
    ):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) is not supported",
            component=name,
            advice="shard the model with torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def scope_of(component: Any, *, rank: int, size: int, pipeline_stage: int | None) -> str | None:
    """Which ranks share this component's state; None when only comparing their states can tell."""
    if isinstance(component, PerRank):
        return rank_scope(component.place(rank, size)[0])
    if isinstance(component, RNGState) or _is_loader(component):
        return rank_scope(rank)
    if isinstance(component, Shared):
        return ""
    inner = unwrap(component)
    # With a layout of its own it is like any other object: only comparing tells whether the ranks share its state.
    if isinstance(inner, torch.optim.Optimizer) and not has_torch_layout("", inner):
        return None
    if isinstance(inner, torch.nn.Module | torch.optim.Optimizer):
        return "" if pipeline_stage is None else stage_scope(pipeline_stage)
    return None


def scopes_in_world(component: Any, *, rank: int, size: int) -> tuple[int, int]:
    """This rank's index among the states of a per-rank component, and how many there are."""
    return component.place(rank, size) if isinstance(component, PerRank) else (rank, size)


def parameter_names(module: torch.nn.Module) -> Mapping[int, str]:
    """Each parameter's name in a checkpoint, by the parameter's identity. A tied one has its first name."""
    parts = _parts(module)
    for part in parts:
        # After a forward pass without a backward one FSDP still shows whole parameters, which no optimizer knows.
        if isinstance(part, FSDPModule):
            part.reshard()
    if not _named_as_torch_does(parts):
        return _find_names(module)
    shape = _shape(parts)
    known: tuple[list[object], dict[int, str]] | None = _known_names.get(module)
    if known is None or known[0] != shape:
        known = _known_names[module] = (shape, _find_names(module))
    return known[1]


def _find_names(module: torch.nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for raw, parameter in module.named_parameters():
        names.setdefault(id(parameter), clean_name(module, raw))
    return names


def optimizer_names(optimizer: torch.optim.Optimizer, components: Mapping[str, Any], component: str) -> list[str]:
    """The names of an optimizer's parameters, in its own order.

    The model is found by the identity of its parameters. An optimizer over several models has the component's name in
    front of each parameter's. In a state without any model they go by their numbers.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners: dict[int, tuple[str, str]] = {}
    for name, candidate in components.items():
        if isinstance(unwrap(candidate), torch.nn.Module):
            for key, parameter in parameter_names(unwrap(candidate)).items():
                owners.setdefault(key, (name, parameter))
    found = [owners.get(id(parameter)) for parameter in parameters]
    if not any(isinstance(unwrap(candidate), torch.nn.Module) for candidate in components.values()):
        return [str(index) for index in range(len(parameters))]
    for index, owner in enumerate(found):
        if owner is None:
            raise UsageError(
                f"parameter {index} (shape {list(parameters[index].shape)}) belongs to no model of the state",
                component=component,
                advice="add the model that owns it to the manager's state",
            )
    several = len({owner[0] for owner in found if owner}) > 1
    return [f"{owner[0]}.{owner[1]}" if several else owner[1] for owner in found if owner]


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and all below it, each once."""
    parts: dict[int, torch.nn.Module] = {}
    ahead: list[torch.nn.Module | None] = [module]
    while ahead:
        part = ahead.pop()
        if part is not None and id(part) not in parts:
            parts[id(part)] = part
            ahead += part._modules.values()
    return list(parts.values())


def _named_as_torch_does(parts: list[torch.nn.Module]) -> bool:
    """Whether nothing but their shape decides about the names: a module may find its parameters in its own way."""
    base = torch.nn.Module
    kinds: set[type[torch.nn.Module]] = {type(part) for part in parts}
    return all(
        kind.named_parameters is base.named_parameters and kind.named_modules is base.named_modules for kind in kinds
    ) and not any("named_parameters" in own or "named_modules" in own for own in map(vars, parts))


def _shape(parts: list[torch.nn.Module]) -> list[object]:
    """All that the names of the parameters depend on: which parts and parameters there are, and under which keys."""
    found: list[object] = []
    for part in parts:
        found += (id(part), type(part), *part._modules.keys(), *part._parameters.keys())
        found += map(id, part._modules.values())
        found += map(id, part._parameters.values())
    return found


# The names that were found for a module, and what it looked like: to find them takes much longer than to look again.
_known_names = WeakIdKeyDictionary()


def clean_name(module: torch.nn.Module, raw: str) -> str:
    """A parameter's name without the parts that DDP, torch.compile and activation checkpointing put into it."""
    kept = []
    owner: Any = module
    for part in raw.split("."):
        wrapped = isinstance(owner, DistributedDataParallel) and part == "module"
        if not wrapped and part not in _WRAPPER_PARTS:
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def _require_state(name: str, component: Any) -> None:
    missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(component, method, None))]
    if missing:
        raise UsageError(
            f"a component of type '{type(component).__module__}.{type(component).__qualname__}' has no {missing[0]}()",
            component=name,
            advice="give it state_dict() and load_state_dict(), or pass plain values with extra= or progress=",
        )


def _is_loader(component: Any) -> bool:
    return isinstance(component, torch.utils.data.DataLoader) or is_stateful_loader(component)
