"""Fit an optimizer, by the names of its parameters. Its tree and the live one enter; requests, and the act, leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast.loading.match.forms import CAST, fits, list_of, names_of, object_of, unlike
from holdfast.loading.match.matching import Matching
from holdfast.loading.match.pending import Pending, decode_values
from holdfast.loading.match.records import Fitted
from holdfast.loading.match.subclasses import fill_or_make
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, decode
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.merging import references
from holdfast.state.names import cut_at, kind_of, models_of, optimizer_names, unwrap
from holdfast.state.optimizers import OPTIONS_OF_SCHEDULERS, load_optimizer, state_keys, state_keys_with
from holdfast.state.tensors import torch_dtype, whole_shape

__all__ = ["match_optimizer"]


def match_optimizer(matching: Matching, tree: TreeRecord) -> None:
    """Fit an optimizer: its groups and options, then the state of each parameter."""
    optimizer = unwrap(matching.component)
    is_other = tree.type not in ("", type(optimizer).__name__)
    if is_other:
        matching.note_difference(
            f"{tree.name}: state of {tree.type} in the checkpoint, {type(optimizer).__name__} now",
            f"skip=('{tree.component}',) leaves the optimizer as it is",
        )
        if matching.strategy.strict:
            return
    names = optimizer_names(optimizer, matching.components, matching.fitted.component)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    matching.require_memory(dict(zip(names, parameters, strict=True)), f"{matching.fitted.component}.state")
    saved = _renamed(matching, tree)
    saved_state, groups, known = saved.state, saved.groups, set(saved.olds)
    missing = (paths.leaf_name(tree.name, f"state.{name}") for name in names if name not in known)
    matching.fitted.missing += [leaf for leaf in missing if not matching.excluded(leaf)]
    matching.note_unused(tree, [f"state.{name}" for name in sorted(known - set(names))])
    spared = {name for name in names if name in saved_state and _spares(matching, tree, saved, name)}
    matching.fitted.held, matching.fitted.stored = len(names), len(known)
    matching.fitted.common = len(known.intersection(names) - spared)
    kept = _kept_groups(matching, tree, optimizer)
    if len(kept) < len(optimizer.param_groups):
        _compare_groups(matching, tree, optimizer, names, groups, kept)
    if is_other and not _check_state_keys(
        matching, tree, optimizer, [saved_state[n] for n in names if n in saved_state]
    ):
        return
    _check_kept_options(matching, tree, optimizer, names, saved_state, groups, kept)
    packed_groups = _packed_groups(optimizer, names, groups, matching.fitted, kept)
    states: dict[Any, Pending] = {}
    for index, name in enumerate(names):
        if name in saved_state and name not in spared:
            states[index] = _match_parameter(matching, tree, saved, optimizer, parameters[index], name)
        elif (name in spared or name not in known) and parameters[index] in optimizer.state:
            states[index] = Pending.of(dict(optimizer.state[parameters[index]]))
    stray = _stray(optimizer, saved_state, known)
    matching.note_unused(tree, [f"state.{name}" for name in sorted(stray)])
    for name in saved_state.keys() - known - stray:
        states[name] = decode_values(matching, tree, saved_state[name], f"state.{name}")
    rest = {key: decode_values(matching, tree, value, key) for key, value in saved.rest.items()}
    decoded = [
        _Options(group, decode_values(matching, tree, group.saved, "param_groups"), is_other) for group in packed_groups
    ]

    def take_up() -> None:
        values = {key: state.value() for key, state in states.items()}
        options = [group.value() for group in decoded]
        load_optimizer(optimizer, values, options, {key: pending.value() for key, pending in rest.items()})

    matching.fitted.take_up = take_up


class _Saved(NamedTuple):
    """The saved state by the names that the parameters have now, the groups with these names, and everything else.
    `olds` are the names in the checkpoint, which the references to tensors have."""

    state: dict[str, Json]
    groups: list[dict[str, Json]]
    olds: Mapping[str, str]
    rest: dict[str, Json]

    def path_now(self, name: str, reference: str) -> str:
        """Return the path that a tensor of a parameter's state would have if it was saved now."""
        return f"state.{name}{reference.removeprefix(f'state.{self.olds[name]}')}"


def _renamed(matching: Matching, tree: TreeRecord) -> _Saved:
    """Return what was saved, with the parameters renamed as the models' leaves are."""
    values = object_of(matching.saved.values(tree), tree)
    state = object_of(values.get("state", {}), tree)
    groups = [object_of(group, tree) for group in list_of(values.get("param_groups", []), tree)]
    names = [name for group in groups for name in names_of(group.get("params"), tree)]
    olds = _names_now(matching, names)
    news = {old: new for new, old in olds.items()}
    for old in names:
        now = f"state.{news[old]}" if old in news else None
        matching.note_renamed(tree, f"state.{old}", now)
    known = set(names)
    return _Saved(
        {news.get(name, name): value for name, value in state.items() if name in news or name not in known},
        [{**group, "params": _renamed_list(names_of(group["params"], tree), news)} for group in groups],
        olds,
        {key: value for key, value in values.items() if key not in ("state", "param_groups")},
    )


def _renamed_list(names: Sequence[str], news: Mapping[str, str]) -> list[Any]:
    return [news[name] for name in names if name in news]


def _stray(optimizer: torch.optim.Optimizer, state: Mapping[str, Json], known: Set[str]) -> set[str]:
    """Return the keys of state that is that of a parameter and belongs to none: numbers, and those under which there is
    what the optimizer keeps for a parameter. Other keys are of state that a class keeps for all parameters together."""
    others = [name for name in state if name not in known and name not in optimizer.state]
    expected = state_keys(optimizer) if others else None
    return {name for name in others if name.isdecimal() or (_entries(state[name]) or None) == expected}


def _entries(state: Json) -> frozenset[str]:
    return frozenset(state) if isinstance(state, dict) else frozenset()


def _names_now(matching: Matching, names: Sequence[str]) -> dict[str, str]:
    """Return the saved name of each parameter by the name that it has now. Of an optimizer over several models it has
    the model in front; parameters that go by their numbers keep these."""
    components = matching.components
    models = models_of(matching.component, components)
    if models:
        return matching.renamed(models[0], names)
    own = {name for name, one in components.items() if kind_of(name, one) == "module"}
    found: dict[str, str] = {}
    by_model: dict[str, list[str]] = {}
    for name in names:
        model, dot, rest = name.partition(".")
        if dot and model in own:
            by_model.setdefault(model, []).append(rest)
        else:
            found[name] = name
    for model, rests in by_model.items():
        found |= {f"{model}.{new}": f"{model}.{old}" for new, old in matching.renamed(model, rests).items()}
    return found


def _kept_groups(matching: Matching, tree: TreeRecord, optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the numbers of the groups that keep their live options."""
    kept = set()
    for index in range(len(optimizer.param_groups)):
        group = paths.leaf_name(tree.name, f"param_groups.{index}")
        glob = matching.strategy.keeping_options(group)
        if glob is not None:
            matching.fitted.globs.add(glob)
            matching.fitted.left_out.add(group)
            kept.add(index)
    return kept


def _compare_groups(
    matching: Matching,
    tree: TreeRecord,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    groups: Sequence[dict[str, Json]],
    kept: Set[int],
) -> None:
    """List a number of groups, or names of options, that the two sides do not share."""
    way = f"exclude=('{tree.name}.param_groups*',) keeps the live options"
    before, now = _count_groups(matching, tree, optimizer, names, groups)
    if before != now:
        matching.note_difference(f"{tree.name}.param_groups: {before} in the checkpoint, {now} now", way)
    by_name = {str(name): group for group in groups for name in names_of(group.get("params"), tree)}
    start = 0
    for index, live in enumerate(optimizer.param_groups):
        own = names[start : start + len(live["params"])]
        start += len(own)
        found = next((by_name[name] for name in own if name in by_name), None)
        if found is None or index in kept:
            continue
        # Another version of torch may know more options, or fewer.
        tolerated = set() if matching.saved.same_torch else set(optimizer.defaults)
        differing = (live.keys() ^ found.keys()) - OPTIONS_OF_SCHEDULERS - tolerated
        for option in sorted(map(str, differing)):
            side = "only in the checkpoint" if option in found else "only in the live optimizer"
            matching.note_difference(f"{tree.name}.param_groups.{index}: '{option}' is {side}", way)


def _check_kept_options(
    matching: Matching,
    tree: TreeRecord,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    saved_state: Mapping[str, Json],
    groups: Sequence[dict[str, Json]],
    kept: Set[int],
) -> None:
    """List the groups that keep live options which want more state than was saved with other options: the next step
    would look for it in vain."""
    by_name = {str(name): group for group in groups for name in names_of(group.get("params"), tree)}
    start = 0
    for index, live in enumerate(optimizer.param_groups):
        own = list(zip(names[start : start + len(live["params"])], live["params"], strict=True))
        start += len(own)
        stated = next(((name, one) for name, one in own if saved_state.get(name) and name in by_name), None)
        if index not in kept or stated is None:
            continue
        name, parameter = stated
        before = _plain_options(by_name[name], tree)
        now, then = (
            state_keys_with(optimizer, options, parameter.dim()) or frozenset() for options in (live, live | before)
        )
        lacking = sorted(now - then - object_of(saved_state[name], tree).keys())
        if lacking:
            options = sorted(key for key, value in before.items() if key in live and live[key] != value)
            matching.fitted.mismatched.append(
                f"{tree.name}.param_groups.{index}: the options that are kept want {', '.join(lacking)} for a "
                f"parameter, which the checkpoint lacks (options that differ: {', '.join(options)}); give the "
                f"optimizer the saved options, or leave it as it is with skip=('{tree.component}',)"
            )


def _count_groups(
    matching: Matching,
    tree: TreeRecord,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    groups: Sequence[dict[str, Json]],
) -> tuple[int, int]:
    """Return the number of groups on both sides. Ranks of a pipeline hold parts of the groups, and what several
    ranks saved may be one group for each of them: then the groups of this rank's parameters count, and as long as
    those that are one now had the same options, the number is the same."""
    group_of = {str(name): index for index, group in enumerate(groups) for name in group["params"]}  # type: ignore[union-attr]
    of_one_rank = matching.saved.world_size == 1 or paths.is_rank_scope(tree.scope)
    if of_one_rank and set(names) == set(group_of):
        return len(groups), len(optimizer.param_groups)
    used = {group_of[name] for name in names if name in group_of}
    known = set(group_of)
    start, now = 0, 0
    for live in optimizer.param_groups:
        now += any(name in known for name in names[start : start + len(live["params"])])
        start += len(live["params"])
    kinds = {json.dumps({**groups[index], "params": []}, sort_keys=True) for index in used}
    return (now, now) if len(kinds) <= now <= len(used) else (len(used), now)


def _check_state_keys(
    matching: Matching, tree: TreeRecord, optimizer: torch.optim.Optimizer, states: Sequence[Json]
) -> bool:
    """Return whether state of another class of optimizer has what this one's has. Without it a step would fail, or
    begin anew silently."""
    expected = state_keys(optimizer)
    for state in states:
        found = frozenset(object_of(state, tree))
        if found != expected:
            has = "what is not known" if expected is None else ", ".join(sorted(expected)) or "nothing"
            matching.fitted.mismatched.append(
                f"{tree.name}: state of {tree.type} in the checkpoint, {type(optimizer).__name__} now: the one has "
                f"{', '.join(sorted(found))} for a parameter, the other {has}; skip=('{tree.component}',) leaves "
                "the optimizer as it is"
            )
            return False
    return True


def _spares(matching: Matching, tree: TreeRecord, saved: _Saved, name: str) -> bool:
    """Return whether `exclude` leaves out the state of a parameter, by any part of it."""
    found = dict.fromkeys(references(saved.state[name])) if matching.strategy.exclude else {}
    named = (paths.leaf_name(tree.name, saved.path_now(name, reference)) for reference in found)
    return bool([leaf for leaf in named if matching.excluded(leaf)])


def _match_parameter(
    matching: Matching,
    tree: TreeRecord,
    saved: _Saved,
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    name: str,
) -> Pending:
    """Return the state of one parameter: in the optimizer's own memory where it has some, else in new memory like
    it."""
    live = optimizer.state.get(parameter, {})
    was = _saved_parameters(matching, tree, saved.olds[name])

    def target(reference: str) -> torch.Tensor:
        leaf = matching.leaf(tree, reference)
        path = saved.path_now(name, reference)
        key = path.removeprefix(f"state.{name}.")
        current = live.get(key) if isinstance(live, Mapping) else None
        cut = cut_at(matching.cuts, f"state.{name}", parameter)
        shape = whole_shape(parameter, cut)
        # A parameter that was saved in this shape may have state of any shape, as optimizers have it which precondition
        # by dimension.
        any_shape = isinstance(optimizer, torch.optim.LBFGS) or any(one.shape == shape for one in was)
        wrong = None if any_shape else _misfit(leaf, shape)
        if wrong is not None:
            matching.fitted.mismatched.append(f"{paths.leaf_name(tree.name, path)}: {wrong}")
        if isinstance(current, torch.Tensor):
            own = cut_at(matching.cuts, f"state.{name}", current)
            if fits(leaf, current, own) or (key != "step" and matching.takes(leaf, current, own)):
                return matching.fill(leaf, current, fresh=False, cut=own)
        dtype = _dtype_now(matching, leaf, parameter, was) if key != "step" else torch_dtype(leaf.dtype)
        if cut is not None and cut.shape == leaf.shape:
            shard = torch.empty_like(parameter.detach(), dtype=dtype)
            return matching.fill(leaf, shard, fresh=True, cut=cut)
        return matching.fill(leaf, _like_parameter(matching, leaf, parameter, dtype), fresh=True)

    subclass = partial(fill_or_make, matching, tree, parameter, in_place=True)
    state = Pending.decode(saved.state[name], paths.leaf_name(tree.name, f"state.{name}"), target, subclass)
    if not _is_optimizer_state(state.preview):
        raise unlike(tree, f"the state of '{name}' is not what an optimizer has")
    return state


def _saved_parameters(matching: Matching, tree: TreeRecord, parameter: str) -> list[TensorRecord]:
    """Return the leaves of the checkpoint that can be the parameter itself, by its name in the checkpoint."""
    owners = (paths.tree_name(name, tree.scope) for name in matching.components)
    names = (parameter, *(paths.leaf_name(owner, parameter) for owner in owners))
    return [matching.saved.leaves[name] for name in names if name in matching.saved.leaves]


def _dtype_now(
    matching: Matching, leaf: TensorRecord, parameter: torch.Tensor, was: Sequence[TensorRecord]
) -> torch.dtype:
    """Return the type of new memory for a piece of optimizer state: the saved one or, if types are converted, that of
    the parameter where both had one type when they were saved."""
    saved = torch_dtype(leaf.dtype)
    convertible = matching.strategy.cast and {saved, parameter.dtype} <= CAST
    return parameter.dtype if convertible and any(one.dtype == leaf.dtype for one in was) else saved


def _like_parameter(
    matching: Matching, leaf: TensorRecord, parameter: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return new memory for a piece of optimizer state, sharded like the parameter that it belongs to."""
    if tuple(parameter.shape) == leaf.shape and len(leaf.shape) > 0:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    device = parameter.device if leaf.sharded or leaf.shape else torch.device("cpu")
    full = matching.new_memory(leaf, device, dtype)
    if leaf.sharded and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return full


def _misfit(leaf: TensorRecord, shape: tuple[int, ...]) -> str | None:
    """Return what is wrong with the shape of a parameter's state: it has the parameter's shape, or is reduced along
    some of its dimensions, or has another number of them."""
    if len(leaf.shape) != len(shape) or not leaf.shape:
        return None
    if all(size in (1, live) for size, live in zip(leaf.shape, shape, strict=True)):
        return None
    return f"{list(leaf.shape)} in the checkpoint, for a parameter of {list(shape)}"


class _Group(NamedTuple):
    """One group of the live optimizer: its own options, the numbers of its parameters, and its saved options."""

    live: Mapping[str, Any]
    numbers: list[int]
    saved: dict[str, Json]


@dataclass(frozen=True, slots=True)
class _Options:
    """The options that a group will have: the saved ones, and its own where nothing was saved. Of another class of
    optimizer only those that the group has itself are taken."""

    group: _Group
    saved: Pending
    is_other: bool

    def value(self) -> dict[str, Any]:
        own = {key: value for key, value in self.group.live.items() if key != "params"}
        saved = self.saved.value()
        taken = {key: value for key, value in saved.items() if key in own or not self.is_other}
        if self.is_other:
            # torch distinguishes AdamW from Adam by it: it stands for the class and is not an option.
            taken.pop("decoupled_weight_decay", None)
        return {**own, **taken, "params": self.group.numbers}


def _plain_options(group: Mapping[str, Json], tree: TreeRecord) -> dict[str, Any]:
    """Return the saved options of a group that are no tensors."""
    return {
        key: decode(value, path=tree.name, tensor=None)
        for key, value in group.items()
        if key != "params" and not any(references(value))
    }


def _packed_groups(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    groups: Sequence[dict[str, Json]],
    fitted: Fitted,
    kept: Set[int],
) -> list[_Group]:
    """Return the saved options of each live group; a group that keeps its own, or of which nothing was saved, has
    none."""
    by_name = {str(name): group for group in groups for name in group["params"]}  # type: ignore[union-attr]
    packed: list[_Group] = []
    start = 0
    for index, live in enumerate(optimizer.param_groups):
        numbers = list(range(start, start + len(live["params"])))
        start += len(numbers)
        if index in kept:
            packed.append(_Group(live, numbers, {}))
            continue
        found = [by_name[names[number]] for number in numbers if names[number] in by_name]
        options = [{key: value for key, value in group.items() if key != "params"} for group in found]
        if any(option != options[0] for option in options[1:]):
            fitted.mismatched.append(
                f"{fitted.component}.param_groups.{index}: its parameters were in groups with different options; "
                f"exclude=('{fitted.trees[0]}.param_groups*',) keeps the live options"
            )
        if not options and index < len(groups) and not groups[index]["params"]:
            options = [{key: value for key, value in groups[index].items() if key != "params"}]
        packed.append(_Group(live, numbers, options[0] if options else {}))
    return packed


def _is_optimizer_state(state: Any) -> bool:
    """Return whether `load_state_dict` of torch's optimizers takes it: they count in `step`, and stumble over the
    rest."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        return False
    return isinstance(state.get("step", 0), torch.Tensor | int | float)
