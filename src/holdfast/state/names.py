"""The names that a model's parameters have in a checkpoint, and what kind of thing a component is. Knows torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.errors import UsageError
from holdfast.ondisk.paths import rank_scope, stage_scope
from holdfast.ondisk.regions import Cut
from holdfast.state.framework_wrappers import (
    is_loader_adapter,
    loader_inside,
    object_inside,
    refuse_same_object,
    require_adapter_state,
)
from holdfast.state.optimizers import own_layout_state
from holdfast.state.rng import RNGState
from holdfast.state.trees import TreeKind
from holdfast.state.wrappers import PerRank, Sharded, Shared, Trainable, has_plain_state

# Wrappers that put a name of their own between a module and its parameters. A checkpoint has the model's own names.
_WRAPPER_PARTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def is_stateful_loader(component: Any) -> bool:
    """Return whether this is torchdata's `StatefulDataLoader`, which need not be installed, or one inside of a loader
    that Accelerate prepared."""
    return any(base.__name__ == "StatefulDataLoader" for base in type(loader_inside(component)).__mro__)


def unwrap(component: Any) -> Any:
    """Return the user's own object, without the wrapper that declares how to store it, and without the one that a
    framework put around an optimizer or a scheduler."""
    declared = isinstance(component, PerRank | Shared | Sharded | Trainable)
    return object_inside(component.component if declared else component)


def random_state_last(components: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the components in the order in which state is taken or given back.

    The random state comes last, because the others may draw from it: a loader that has no iterator yet does so when it
    is asked for its state.
    """
    return sorted(components.items(), key=lambda item: isinstance(unwrap(item[1]), RNGState))


def kind_of(name: str, component: Any) -> TreeKind:
    """Return what a component is, or a UsageError for something that has no state."""
    inner = unwrap(component)
    if isinstance(inner, torch.nn.Module):
        return "module"
    if isinstance(inner, torch.optim.Optimizer):
        return "optimizer" if has_torch_layout(name, inner) else "values"
    _require_state(name, inner)
    return "values"


def holds_state(component: Any) -> bool:
    """Return False for a model whose state dict is empty, as that of a loss or a metric may be."""
    inner = unwrap(component)
    return not isinstance(inner, torch.nn.Module) or len(inner.state_dict()) > 0


def has_torch_layout(name: str, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's state dict is laid out as PyTorch's are, so that its state can go by names.

    It is asked once, and stays so: a component is of the same kind at every save.
    """
    known: bool | None = _layouts.get(optimizer)
    if known is None:
        try:
            packed = own_layout_state(optimizer)
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
    """Return whether `state` goes by the parameters' numbers and `param_groups` lists them in order."""
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


def refuse_same_objects(components: Mapping[str, Any]) -> None:
    """Refuse one object under two names, once as it is and once in the wrapper of a framework."""
    declared = PerRank | Shared | Sharded | Trainable
    refuse_same_object({name: one.component if isinstance(one, declared) else one for name, one in components.items()})


def scope_of(component: Any, *, rank: int, size: int, pipeline_stage: int | None) -> str | None:
    """Return which ranks share this component's state; None if their states must be compared to find out."""
    if isinstance(component, PerRank):
        return rank_scope(component.place(rank, size)[0])
    if isinstance(component, RNGState) or is_loader(component) or is_distributed_sampler(component):
        return rank_scope(rank)
    if isinstance(component, Shared):
        return ""
    inner = unwrap(component)
    # It takes the states of all ranks, so each rank has one, also while they happen to be equal: stored once, the state
    # would be given to every rank of another world as it is.
    if _takes_world_state(inner):
        return rank_scope(rank)
    # With another layout it is like any other object: only comparing shows whether the ranks share its state.
    if isinstance(inner, torch.optim.Optimizer) and not has_torch_layout("", inner):
        return None
    if isinstance(inner, torch.nn.Module | torch.optim.Optimizer):
        return "" if pipeline_stage is None else stage_scope(pipeline_stage)
    return None


def scopes_in_world(component: Any, *, rank: int, size: int) -> tuple[int, int]:
    """Return this rank's index among the states of a per-rank component, and how many there are."""
    return component.place(rank, size) if isinstance(component, PerRank) else (rank, size)


def follow_models(components: Mapping[str, Any], *, pipeline_stage: int | None) -> dict[str, Any]:
    """Return the components, each optimizer wrapped as the model whose parameters it has.

    The moments of a `PerRank` model are as much a rank's own as its weights. An optimizer over models that are stored
    in different ways has no one place to be stored in, and is refused.
    """
    models = {name: one for name, one in components.items() if isinstance(unwrap(one), torch.nn.Module)}
    if not any(isinstance(one, PerRank | Shared) for one in models.values()):
        return dict(components)
    owners: dict[int, str] = {}
    for name, one in models.items():
        for key in parameter_names(unwrap(one)):
            owners.setdefault(key, name)
    return {name: _following(name, one, components, owners, pipeline_stage) for name, one in components.items()}


def _following(
    name: str, component: Any, components: Mapping[str, Any], owners: Mapping[int, str], pipeline_stage: int | None
) -> Any:
    optimizer = unwrap(component)
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(component, PerRank):
        return component
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    found = dict.fromkeys(owners[id(parameter)] for parameter in parameters if id(parameter) in owners)
    ways = {model: _way_of_keeping(components[model], pipeline_stage) for model in found}
    first = next(iter(found), None)
    if first is None:
        return component
    for model, way in ways.items():
        if way != ways[first]:
            raise UsageError(
                f"the optimizer has parameters of '{first}' and of '{model}', which are stored in different ways",
                component=name,
                advice="wrap both models in the same way, or use one optimizer for each",
            )
    model = components[first]
    if isinstance(model, PerRank):
        if isinstance(component, Shared):
            raise UsageError(
                f"the optimizer is Shared and its model '{first}' is PerRank",
                component=name,
                advice="leave the optimizer as it is, or wrap it in PerRank, too",
            )
        return PerRank(optimizer, group=model.group)
    return Shared(optimizer) if all(isinstance(components[one], Shared) for one in found) else component


def _way_of_keeping(component: Any, pipeline_stage: int | None) -> object:
    """Return what must be the same for all models of one optimizer."""
    if isinstance(component, PerRank):
        return "per rank", id(component.group)
    # Without stages a shared model and any other are stored in one place.
    return "shared" if pipeline_stage is None or isinstance(component, Shared) else "stage"


def parameter_names(module: torch.nn.Module) -> Mapping[int, str]:
    """Return each parameter's name in a checkpoint, by the parameter's identity. A tied one has its first name."""
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
    """Return the names of an optimizer's parameters, in its own order.

    The model is found by the identity of its parameters. An optimizer over several models has the component's name in
    front of each parameter's. In a state without any model they go by their numbers, and so do those of a `PerRank`
    optimizer of which the state has not every parameter's model.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners: dict[int, tuple[str, str]] = {}
    for name, candidate in components.items():
        if isinstance(unwrap(candidate), torch.nn.Module):
            for key, parameter in parameter_names(unwrap(candidate)).items():
                owners.setdefault(key, (name, parameter))
    found = [owners.get(id(parameter)) for parameter in parameters]
    has_model = any(isinstance(unwrap(candidate), torch.nn.Module) for candidate in components.values())
    if not has_model or (None in found and isinstance(components.get(component), PerRank)):
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


def models_of(component: Any, components: Mapping[str, Any]) -> list[str]:
    """Return the names of the models that have all parameters of an optimizer; none for any other component."""
    optimizer = unwrap(component)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    models = {name: unwrap(one) for name, one in components.items() if isinstance(unwrap(one), torch.nn.Module)}
    return [name for name, model in models.items() if parameters and parameters <= parameter_names(model).keys()]


def cuts_of(name: str, components: Mapping[str, Any]) -> Mapping[str, Cut]:
    """Return the declared shards of a component by their path in its tree; for an optimizer, by the path of each
    parameter's state. `cut_at` looks them up. The state of a `PerRank` component is whole on its rank."""
    component = components[name]
    if isinstance(component, PerRank):
        return {}
    if isinstance(component, Sharded):
        return dict(_declared_cuts(name, component))
    optimizer = unwrap(component)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {}
    models = {key: one for key, one in components.items() if isinstance(one, Sharded)}
    if not models:
        return {}
    cuts: dict[int, Cut] = {}
    for key, model in models.items():
        declared = dict(_declared_cuts(key, model))
        names = parameter_names(model.component)
        cuts.update({parameter: declared[first] for parameter, first in names.items() if first in declared})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names_here = optimizer_names(optimizer, components, name)
    return {
        f"state.{own}": cuts[id(parameter)]
        for own, parameter in zip(names_here, parameters, strict=True)
        if id(parameter) in cuts
    }


def cut_at(cuts: Mapping[str, Cut], path: str, tensor: torch.Tensor) -> Cut | None:
    """Return the declared shard that a tensor is, by its path or by that of the parameter whose state it is. State of
    another shape than the parameter's is not cut."""
    while cuts and path:
        cut = cuts.get(path)
        if cut is not None:
            return cut if cut.sizes == tuple(tensor.shape) else None
        path = path.rpartition(".")[0]
    return None


def _declared_cuts(name: str, component: Sharded) -> Iterator[tuple[str, Cut]]:
    """Yield each declared parameter and buffer with its shard; refuse what cannot be declared so."""
    module = component.component
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    unmatched = set(component.layouts)
    first: dict[int, tuple[str, tuple[int, int, int] | None]] = {}
    for raw, tensor in named:
        own = clean_name(module, raw)
        globs = [glob for glob in component.layouts if fnmatch.fnmatchcase(own, glob)]
        unmatched.difference_update(globs)
        layout = _one_layout(f"{name}.{own}", {glob: component.layouts[glob] for glob in globs})
        tied, counts = first.setdefault(id(tensor), (own, layout))
        if layout is not None and layout != counts:
            raise UsageError(
                f"the parameter is tied to '{tied}', whose layout counts",
                leaf=f"{name}.{own}",
                advice=f"declare '{tied}'",
            )
        if layout is not None:
            dimension, place, places = layout
            yield own, Cut(_checked_dimension(f"{name}.{own}", tensor, dimension), place, places, tuple(tensor.shape))
    if unmatched:
        raise UsageError(
            f"no parameter and no buffer matches {', '.join(repr(glob) for glob in sorted(unmatched))}",
            component=name,
            advice="globs are compared with names such as those of model.named_parameters()",
        )


def _one_layout(leaf: str, layouts: Mapping[str, tuple[int, int, int]]) -> tuple[int, int, int] | None:
    if len(set(layouts.values())) > 1:
        raise UsageError(f"the globs {', '.join(map(repr, layouts))} give different layouts", leaf=leaf)
    return next(iter(layouts.values()), None)


def _checked_dimension(leaf: str, tensor: torch.Tensor, dimension: int) -> int:
    if isinstance(tensor, DTensor):
        raise UsageError("a DTensor has a layout of its own", leaf=leaf, advice="leave it out of Sharded")
    if not -tensor.dim() <= dimension < tensor.dim():
        raise UsageError(f"a tensor of shape {list(tensor.shape)} has no dimension {dimension}", leaf=leaf)
    return int(dimension % tensor.dim())


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all below it, each once."""
    parts: dict[int, torch.nn.Module] = {}
    ahead: list[torch.nn.Module | None] = [module]
    while ahead:
        part = ahead.pop()
        if part is not None and id(part) not in parts:
            parts[id(part)] = part
            ahead += part._modules.values()
    return list(parts.values())


def _named_as_torch_does(parts: list[torch.nn.Module]) -> bool:
    """Return whether nothing but their shape decides about the names: a module may override how they are listed."""
    base = torch.nn.Module
    kinds: set[type[torch.nn.Module]] = {type(part) for part in parts}
    return all(
        kind.named_parameters is base.named_parameters and kind.named_modules is base.named_modules for kind in kinds
    ) and not any("named_parameters" in own or "named_modules" in own for own in map(vars, parts))


def _shape(parts: list[torch.nn.Module]) -> list[object]:
    """Return all that the names of the parameters depend on: the parts and parameters, and their keys."""
    found: list[object] = []
    for part in parts:
        found += (id(part), type(part), *part._modules.keys(), *part._parameters.keys())
        found += map(id, part._modules.values())
        found += map(id, part._parameters.values())
    return found


# The names that were found for a module, and what it looked like: to find them takes much longer than to look again.
_known_names = WeakIdKeyDictionary()


def clean_name(module: torch.nn.Module, raw: str) -> str:
    """Return a parameter's name without the parts that DDP, torch.compile and activation checkpointing put into it."""
    kept = []
    owner: Any = module
    for part in raw.split("."):
        wrapped = isinstance(owner, DistributedDataParallel) and part == "module"
        if not wrapped and part not in _WRAPPER_PARTS:
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def _require_state(name: str, component: Any) -> None:
    if has_plain_state(component):
        return
    if is_loader_adapter(component):
        require_adapter_state(name, component)
    missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(component, method, None))]
    if missing and isinstance(component, torch.utils.data.DataLoader):
        iterable = isinstance(component.dataset, torch.utils.data.IterableDataset)
        raise UsageError(
            f"a {type(component).__name__} has no state: a resumed run would begin its data at the front",
            component=name,
            advice="use torchdata's StatefulDataLoader, with a dataset that has state_dict() and load_state_dict()"
            if iterable
            else "make it a component as holdfast.data.ResumableLoader(loader), and iterate over that; or use "
            "torchdata's StatefulDataLoader",
        )
    if missing:
        raise UsageError(
            f"a component of type '{type(component).__module__}.{type(component).__qualname__}' has no {missing[0]}()",
            component=name,
            advice="give it state_dict() and load_state_dict(), make it a dict, or pass plain values with extra= or "
            "progress=",
        )


def is_loader(component: Any) -> bool:
    """Return whether this is a data loader, of which every rank has its own state."""
    if isinstance(component, torch.utils.data.DataLoader) or is_stateful_loader(component):
        return True
    return getattr(type(component), "has_state_per_rank", False) is True


def is_distributed_sampler(component: Any) -> bool:
    """Return whether this is a sampler of one rank's share: its position counts that rank's samples, so that equal
    positions on all ranks are no state that ranks of another number share."""
    return isinstance(component, torch.utils.data.DistributedSampler)


def _takes_world_state(component: Any) -> bool:
    return not isinstance(component, torch.nn.Module | torch.optim.Optimizer) and callable(
        getattr(component, "load_world_state", None)
    )
