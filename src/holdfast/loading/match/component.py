"""Choose the trees of one component, and fit them by its kind. Names and live components enter; a `Fitted` leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import StateMismatchError
from holdfast.loading.match.matching import Matching
from holdfast.loading.match.modules import match_module
from holdfast.loading.match.optimizers import match_optimizer
from holdfast.loading.match.records import Fitted, Place, SavedState
from holdfast.loading.match.values import match_values, match_world
from holdfast.loading.strategy import LoadStrategy
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import TreeRecord
from holdfast.state.descriptions import description_of, is_described
from holdfast.state.names import is_distributed_sampler, is_loader, kind_of, models_of, scopes_in_world, unwrap
from holdfast.state.wrappers import PerRank

__all__ = ["match"]

_ELASTIC = (
    "holdfast.data.ElasticLoader and ElasticShards deal out the rest of an epoch anew on any number of ranks, from a "
    "checkpoint that was saved with them"
)


def match(name: str, components: Mapping[str, Any], saved: SavedState, strategy: LoadStrategy, place: Place) -> Fitted:
    """Fit one component to its saved state."""
    component = components[name]
    fitted = Fitted(name, kind_of(name, component))
    trees, of_world = _trees_for(name, component, saved, strategy, place)
    if not trees:
        fitted.skipped = "the per-rank state is of another number of ranks"
        return fitted
    fitted.trees = tuple(tree.name for tree in trees)
    # Trees that PyTorch's own planner laid out have no class; only names and shapes can be compared.
    if trees[0].kind not in (fitted.kind, "values"):
        raise StateMismatchError(f"the state was saved as '{trees[0].kind}' and is '{fitted.kind}' now", component=name)
    _refuse_per_rank_state(fitted, component, trees[0])
    if of_world or _is_by_load_state_dict(trees[0], component):
        fitted.kind = "values"
        _refuse_rename(name, component, strategy)
    matching = Matching(fitted, component, components, saved, strategy)
    if not _is_of_same_model(matching, trees[0]):
        return fitted
    if fitted.kind == "values" and not _is_same_class(matching, trees[0]):
        return fitted
    if fitted.kind == "module":
        match_module(matching, trees[0])
    elif fitted.kind == "optimizer":
        match_optimizer(matching, trees[0])
    elif of_world:
        match_world(matching, trees, *scopes_in_world(component, rank=place.rank, size=place.size))
    else:
        match_values(matching, trees[0])
    return fitted


def _refuse_per_rank_state(fitted: Fitted, component: Any, tree: TreeRecord) -> None:
    """Raise if a model or an optimizer that all ranks share would take the state that one rank had for itself."""
    if fitted.kind != "values" and not isinstance(component, PerRank) and paths.is_rank_scope(tree.scope):
        raise StateMismatchError(
            f"the state was saved once per rank, as '{tree.name}', and the component is not wrapped in PerRank now",
            component=fitted.component,
            advice=f"wrap the component in PerRank, or leave it out with skip=({fitted.component!r},)",
        )


def _refuse_rename(name: str, component: Any, strategy: LoadStrategy) -> None:
    """Raise if a model that takes its state by `load_state_dict` is to be renamed: nothing would be."""
    if kind_of(name, component) == "module" and strategy.renaming(name) is not None:
        raise StateMismatchError(
            "the model takes the state of its rank by load_state_dict, so its leaves cannot be renamed",
            component=name,
            advice=f"give rename= for other models alone, or leave this one out with skip=({name!r},)",
        )


def _is_by_load_state_dict(tree: TreeRecord, component: Any) -> bool:
    """Return whether a per-rank state is what the `state_dict` of a component gave: in checkpoints of older versions
    that of a `PerRank` model or optimizer is such, too, and goes back through `load_state_dict`."""
    return tree.kind == "values" and isinstance(component, PerRank) and paths.is_rank_scope(tree.scope)


def _trees_for(
    name: str, component: Any, saved: SavedState, strategy: LoadStrategy, place: Place
) -> tuple[list[TreeRecord], bool]:
    """Return the tree that this rank takes; all of them, and True, when the component adapts to another world, also
    where that was of one rank; none to leave it."""
    by_scope = {tree.scope: tree for tree in saved.trees[name]}
    if "" in by_scope:
        return [by_scope[""]], False
    if any(scope.startswith("stage-") for scope in by_scope):
        return [_stage_tree(name, by_scope, place)], False
    index, count = scopes_in_world(component, rank=place.rank, size=place.size)
    # A component need not be on every rank; the ranks of a group that share a state are counted by the group.
    states = len(by_scope) if isinstance(component, PerRank) and component.group is not None else saved.world_size
    if count == states and paths.rank_scope(index) in by_scope:
        return [by_scope[paths.rank_scope(index)]], False
    if count == states and strategy.on_world_change != "adapt":
        held = ", ".join(sorted(scope.removeprefix("rank-").lstrip("0") or "0" for scope in by_scope))
        raise StateMismatchError(
            f"when it was saved only rank {held} had the component, and rank {place.rank} has it now, too",
            component=name,
            advice=f"give it to the manager on the same ranks, or leave it out with skip=({name!r},)",
        )
    if strategy.on_world_change == "skip":
        return [], False
    if strategy.on_world_change == "adapt" and callable(getattr(unwrap(component), "load_world_state", None)):
        return [by_scope[scope] for scope in sorted(by_scope)], True
    raise _other_world(name, component, strategy, len(by_scope), count)


def _other_world(name: str, component: Any, strategy: LoadStrategy, states: int, count: int) -> StateMismatchError:
    """Return the error for per-rank state of another number of ranks that the strategy, or the component, refuses."""
    inner = unwrap(component)
    adapts = callable(getattr(inner, "load_world_state", None))
    problem = f"the checkpoint has the state of {states} {'rank' if states == 1 else 'ranks'}"
    if not adapts and (is_loader(inner) or is_distributed_sampler(inner)):
        return StateMismatchError(
            f"{problem}, there are {count} now, and a {type(inner).__name__} has no load_world_state(): its position "
            "counts the samples of one rank",
            component=name,
            advice=f"{_ELASTIC}; skip=({name!r},) begins the data anew; no live object was changed",
        )
    if strategy.on_world_change == "adapt":
        return StateMismatchError(
            f"{problem}, there are {count} now, and the component has no load_world_state()",
            component=name,
            advice="give it load_world_state(states, index, count), or leave it out with skip=",
        )
    return StateMismatchError(
        f"{problem} and there are {count} now",
        component=name,
        advice="choose on_world_change='skip' or 'adapt' in the LoadStrategy; "
        "wrap the component in Shared(...) if it is the same on all ranks",
    )


def _stage_tree(name: str, by_scope: Mapping[str, TreeRecord], place: Place) -> TreeRecord:
    scope = "" if place.pipeline_stage is None else paths.stage_scope(place.pipeline_stage)
    if scope not in by_scope:
        raise StateMismatchError(
            f"the state is of {len(by_scope)} pipeline stages; this rank has pipeline_stage={place.pipeline_stage}",
            component=name,
            advice="give the manager the pipeline_stage= of this rank",
        )
    return by_scope[scope]


def _is_of_same_model(matching: Matching, tree: TreeRecord) -> bool:
    """Return whether an optimizer has parameters of the model that the checkpoint names, where both sides know it.
    Only a loose restore takes state of the parameters of another model, and lists it."""
    models = models_of(matching.component, matching.components) if tree.model else []
    if not models or tree.model in models:
        return True
    matching.note_difference(
        f"{tree.name}: state of the parameters of '{tree.model}' in the checkpoint, of '{models[0]}' now",
        f"give each optimizer the component name that it was saved under, or leave it as it is with "
        f"skip=('{tree.component}',)",
    )
    return not matching.strategy.strict


def _is_same_class(matching: Matching, tree: TreeRecord) -> bool:
    """Return whether the state is of the component's class, or of one that it derives from. Only a loose restore takes
    that of another one, and lists it; a checkpoint without a class is accepted, and so is a class of the
    user's own, which checks its state itmatching."""
    inner = unwrap(matching.component)
    kind = type(inner)
    if is_described(inner, tree.type):
        return True
    theirs = getattr(getattr(kind, "load_state_dict", None), "__module__", "")
    if not issubclass(kind, LRScheduler | torch.optim.Optimizer) and not theirs.startswith("torch."):
        return True
    matching.note_difference(
        f"{tree.name}: state of {tree.type} in the checkpoint, {description_of(inner)} now",
        f"skip=('{tree.component}',) leaves the component as it is, strict=False hands the state to its "
        "load_state_dict",
    )
    return not matching.strategy.strict
