"""Fit what is no model and no optimizer: dicts, loaders, schedulers, random state, objects with a `state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from holdfast.errors import HoldfastError, StateMismatchError
from holdfast.loading.match.forms import is_castable_form
from holdfast.loading.match.matching import Matching
from holdfast.loading.match.pending import decode_values
from holdfast.loading.requests import Request
from holdfast.loading.suggestions import CASTABLE
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import TreeRecord
from holdfast.state.descriptions import differing_values
from holdfast.state.names import is_loader, unwrap
from holdfast.state.rng import RNGState, check_rng_state, random_state_kept
from holdfast.state.state_dicts import load_values, tree_of
from holdfast.state.tensors import any_sharded, is_sharded, local_parts, shares_elements
from holdfast.state.wrappers import PerRank, check_plain_state, filled_pairs, has_plain_state, load_state

__all__ = ["match_values", "match_world"]


def match_values(matching: Matching, tree: TreeRecord) -> None:
    """Fit a component to the one tree of it."""
    excluded = _excluded_leaves(matching, tree)
    live = _live_state(matching, tree, excluded)
    template = _template(matching, tree, live, excluded)
    state = decode_values(matching, tree, matching.saved.values(tree), "", template)
    if live is not None:
        _note_other_shards(matching, tree, live, state.preview)
    if isinstance(unwrap(matching.component), RNGState):
        # It is loaded last, when everything else has changed: what is wrong with it must be known before. Its
        # tensors are not filled yet, so only the rest can be looked at.
        check_rng_state(state.preview)
    inner = unwrap(matching.component)
    if not has_plain_state(inner):
        _ask(matching, "check_state_dict", state.preview)
        matching.fitted.take_up = partial(load_values, matching.fitted.component, inner, state.value)
        return
    try:
        check_plain_state(inner, state.preview)
    except StateMismatchError as error:
        raise error.at(component=matching.fitted.component) from None
    keys = _common_keys(matching, tree, inner, state.preview) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        matching.fitted.copied += _copies(matching.fitted.requests, inner, _only(state.preview, keys))
    matching.fitted.take_up = lambda: load_state(inner, _only(state.value(), keys))


def match_world(matching: Matching, trees: Sequence[TreeRecord], index: int, count: int) -> None:
    """Fit a component that takes the states of all ranks of another world."""
    states = [decode_values(matching, tree, matching.saved.values(tree), "") for tree in trees]
    if isinstance(unwrap(matching.component), RNGState):
        for state in states:
            check_rng_state(state.preview)
    _ask(matching, "check_world_state", [state.preview for state in states], index, count)
    matching.fitted.take_up = lambda: unwrap(matching.component).load_world_state(
        [state.value() for state in states], index, count
    )


def _ask(matching: Matching, check: str, *arguments: Any) -> None:
    """Let a component refuse its state while no live object has changed on any rank, where it has a method for that.
    Tensors in the state are not filled yet."""
    method = getattr(unwrap(matching.component), check, None)
    if not callable(method):
        return
    component = matching.fitted.component
    try:
        with random_state_kept():
            method(*arguments)
    except HoldfastError as error:
        raise error.at(component=component) from None
    except Exception as error:
        raise StateMismatchError(
            f"{check} raised {type(error).__name__}: {error}", component=component, advice="no live object was changed"
        ) from error


def _common_keys(
    matching: Matching, tree: TreeRecord, live: Mapping[Any, Any], saved: Mapping[Any, Any]
) -> Set[Any] | None:
    """Return the keys of a dict that both sides have; None, for all, where the live one is empty. Values of another
    form are listed."""
    if not live:
        return None
    matching.fitted.missing += [paths.leaf_name(tree.name, str(key)) for key in live if key not in saved]
    matching.note_unused(tree, [str(key) for key in saved if key not in live])
    for path, before, now in differing_values(live, saved, tree.name):
        matching.note_difference(
            f"{path}: {before} in the checkpoint, {now} now",
            f"strict=False takes what was saved, skip=('{tree.component}',) leaves the dict as it is"
            + (CASTABLE if is_castable_form(before, now) else ""),
        )
    return live.keys() & saved.keys()


def _copies(requests: Sequence[Request], live: Mapping[Any, Any], saved: Any) -> Iterator[Request]:
    """Yield requests for the live tensors that a dict copies the content of new memory to."""
    by_address = {request.target.data_ptr(): request for request in requests}
    for one, new in filled_pairs(live, saved):
        # Such a tensor takes no copy: the dict gets the new one in its place.
        if one.layout is not torch.strided or one.is_inference() or shares_elements(one):
            continue
        for target, memory in zip(local_parts(one), local_parts(new), strict=False):
            request = by_address.get(memory.data_ptr())
            if request is not None and target.shape == memory.shape:
                yield replace(request, target=target, fresh=False)


def _live_state(matching: Matching, tree: TreeRecord, excluded: Set[str]) -> Any:
    """Return the component's own state, where the saved tensors must know a device or a mesh to go to; else None."""
    # A loader that is asked for its state builds an iterator, and its tensors belong on the CPU anyway.
    if isinstance(matching.component, RNGState) or is_loader(matching.component):
        return None
    front = f"{tree.name}."
    has_leaves = any(name.startswith(front) for name in matching.saved.leaves)
    per_rank = isinstance(matching.component, PerRank)
    if not has_leaves or (per_rank and not excluded and not matching.strategy.cast):
        return None
    with random_state_kept():
        state = matching.live_state()
    matching.require_memory(state, matching.fitted.component)
    return state


def _template(matching: Matching, tree: TreeRecord, state: Any, excluded: Set[str]) -> Mapping[str, torch.Tensor]:
    """Return the live tensors that show where saved ones go, by their path."""
    if state is None:
        return {}
    live = tree_of(matching.fitted.component, matching.component, state, None).tensors
    if not isinstance(matching.component, PerRank) or matching.strategy.cast:
        return live
    return {path: tensor for path, tensor in live.items() if paths.leaf_name(tree.name, path) in excluded}


def _excluded_leaves(matching: Matching, tree: TreeRecord) -> set[str]:
    """Return the leaves of a tree that the strategy excludes."""
    if not matching.strategy.exclude:
        return set()
    own = (name for name in matching.saved.leaves if name.startswith(f"{tree.name}."))
    return {name for name in own if matching.strategy.excluding(name) is not None}


def _note_other_shards(matching: Matching, tree: TreeRecord, live: Any, saved: Any) -> None:
    """List sharded tensors that only one side has: an object with shards is in the manner of a model, and one that
    loads what it finds, as torchtitan's ModelWrapper does, would leave the rest as it is. State of an optimizer may
    come and go."""
    if isinstance(unwrap(matching.component), torch.optim.Optimizer | dict):
        return
    now = dict(_tensors_by_path(live))
    sharded = [path for path, tensor in now.items() if is_sharded(tensor)] if any_sharded(now.values()) else []
    if not sharded:
        return
    before = dict(_tensors_by_path(saved))
    leaves = {path: matching.saved.leaves.get(paths.leaf_name(tree.name, path)) for path in before.keys() - now.keys()}
    names = [paths.leaf_name(tree.name, path) for path in sharded if path not in before]
    matching.fitted.missing += [name for name in names if not matching.excluded(name)]
    matching.note_unused(tree, sorted(path for path, leaf in leaves.items() if leaf is not None and leaf.sharded))


def _tensors_by_path(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _tensors_by_path(value, f"{path}.{key}" if path else str(key))


def _only(state: Any, keys: Set[Any] | None) -> Any:
    return state if keys is None else {key: value for key, value in state.items() if key in keys}
