"""Fit a checkpoint to the live objects: which leaf goes where. Changes nothing; what does not fit is listed.

A checkpoint with its values, and live components, enter. For each component the memory to fill and the act that takes
the state up leave, or what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import CorruptCheckpointError, HoldfastError, StateMismatchError
from holdfast.loading.requests import Request
from holdfast.loading.strategy import LoadStrategy
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, Subclass, class_name, decode, subclass_of, typed
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.merging import references
from holdfast.ondisk.regions import Cut
from holdfast.state.names import (
    cut_at,
    cuts_of,
    is_loader,
    kind_of,
    models_of,
    optimizer_names,
    scopes_in_world,
    unwrap,
)
from holdfast.state.state_dicts import (
    OPTIONS_OF_SCHEDULERS,
    component_state,
    description_of,
    differing_values,
    is_described,
    live_subclasses,
    load_module,
    load_optimizer,
    load_values,
    state_keys,
    state_keys_with,
    tree_of,
)
from holdfast.state.tensors import (
    cut_like,
    dtype_name,
    even_shards,
    flattened,
    held_piece,
    is_same_form,
    is_sharded,
    require_memory,
    shares_elements,
    stored_form,
    tensor_class,
    torch_dtype,
    unflattened,
    whole_shape,
)
from holdfast.state.wrappers import (
    PerRank,
    RNGState,
    check_plain_state,
    check_rng_state,
    has_plain_state,
    load_state,
    random_state_kept,
    state_of,
)


@dataclass(slots=True)
class Fitted:
    """One component fitted to its saved state. `take_up` hands the state over once the requests are filled.

    `unused` are leaves of the checkpoint that this rank has no place for; another rank that takes from the same of
    the `trees` may have one. `accepted` are the differences that a loose restore lets pass. Of a model or an optimizer,
    `held` counts the leaves (an optimizer's parameters) on this rank, `stored` those in the checkpoint, and `common`
    those that both have and that are restored.
    """

    component: str
    kind: str
    skipped: str = ""
    trees: tuple[str, ...] = ()
    requests: list[Request] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    globs: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    held: int = 0
    stored: int = 0
    common: int = 0
    take_up: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint holds, ready to be looked up: leaves by name, trees by component, values by tree. `same_torch`:
    the version of torch that wrote it is this one; another may know other options of an optimizer."""

    leaves: Mapping[str, TensorRecord]
    trees: Mapping[str, Sequence[TreeRecord]]
    values: Callable[[TreeRecord], Json]
    require_file: Callable[[str], None]
    world_size: int
    same_torch: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands."""

    rank: int
    size: int
    pipeline_stage: int | None


def match(name: str, components: Mapping[str, Any], saved: SavedState, strategy: LoadStrategy, place: Place) -> Fitted:
    """Fit one component."""
    component = components[name]
    fitted = Fitted(name, kind_of(name, component))
    trees = _trees_for(name, component, saved, strategy, place)
    if not trees:
        fitted.skipped = "its per-rank state is of another number of ranks"
        return fitted
    fitted.trees = tuple(tree.name for tree in trees)
    # Trees that PyTorch's own planner laid out do not say what they are of; their names and shapes must do.
    if trees[0].kind not in (fitted.kind, "values"):
        raise StateMismatchError(f"it was saved as '{trees[0].kind}' and is '{fitted.kind}' now", component=name)
    _refuse_per_rank_state(fitted, component, trees[0])
    if len(trees) > 1 or _is_by_load_state_dict(trees[0], component):
        fitted.kind = "values"
    matcher = _Matcher(fitted, component, components, saved, strategy)
    if not matcher.is_of_same_model(trees[0]):
        return fitted
    if fitted.kind == "values" and not matcher.is_same_class(trees[0]):
        return fitted
    if fitted.kind == "module":
        matcher.match_module(trees[0])
    elif fitted.kind == "optimizer":
        matcher.match_optimizer(trees[0])
    elif len(trees) == 1:
        matcher.match_values(trees[0])
    else:
        matcher.match_world(trees, *scopes_in_world(component, rank=place.rank, size=place.size))
    return fitted


def _refuse_per_rank_state(fitted: Fitted, component: Any, tree: TreeRecord) -> None:
    """A model or an optimizer that all ranks share must not take the state that one rank had for itself."""
    if fitted.kind != "values" and not isinstance(component, PerRank) and paths.is_rank_scope(tree.scope):
        raise StateMismatchError(
            f"the state was saved once per rank, as '{tree.name}', and the component is not wrapped in PerRank now",
            component=fitted.component,
            advice=f"wrap the component in PerRank, or leave it out with skip=({fitted.component!r},)",
        )


def _is_by_load_state_dict(tree: TreeRecord, component: Any) -> bool:
    """Return whether a per-rank state is what the `state_dict` of a component gave: in checkpoints of older versions
    that of a `PerRank` model or optimizer is such, too, and goes back through `load_state_dict`."""
    return tree.kind == "values" and isinstance(component, PerRank) and paths.is_rank_scope(tree.scope)


def _trees_for(name: str, component: Any, saved: SavedState, strategy: LoadStrategy, place: Place) -> list[TreeRecord]:
    """The tree that this rank takes; all of them when the component adapts to another world; none to leave it."""
    by_scope = {tree.scope: tree for tree in saved.trees[name]}
    if "" in by_scope:
        return [by_scope[""]]
    if any(scope.startswith("stage-") for scope in by_scope):
        return [_stage_tree(name, by_scope, place)]
    index, count = scopes_in_world(component, rank=place.rank, size=place.size)
    # A component need not be on every rank; the ranks of a group that share a state are counted by the group.
    states = len(by_scope) if isinstance(component, PerRank) and component.group is not None else saved.world_size
    if count == states and paths.rank_scope(index) in by_scope:
        return [by_scope[paths.rank_scope(index)]]
    if strategy.on_world_change == "skip":
        return []
    if strategy.on_world_change == "adapt":
        if not callable(getattr(unwrap(component), "load_world_state", None)):
            raise StateMismatchError(
                f"it has the state of {len(by_scope)} ranks, there are {count} now, and it has no load_world_state()",
                component=name,
                advice="give it load_world_state(states, index, count), or leave it out with skip=",
            )
        return [by_scope[scope] for scope in sorted(by_scope)]
    raise StateMismatchError(
        f"it has the state of {len(by_scope)} ranks and there are {count} now",
        component=name,
        advice="choose on_world_change='skip' or 'adapt' in the LoadStrategy; "
        "wrap the component in Shared(...) if it is the same on all ranks",
    )


def _stage_tree(name: str, by_scope: Mapping[str, TreeRecord], place: Place) -> TreeRecord:
    scope = "" if place.pipeline_stage is None else paths.stage_scope(place.pipeline_stage)
    if scope not in by_scope:
        raise StateMismatchError(
            f"it was saved in {len(by_scope)} pipeline stages; this rank has pipeline_stage={place.pipeline_stage}",
            component=name,
            advice="give the manager the pipeline_stage= of this rank",
        )
    return by_scope[scope]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Values whose tensors are not filled yet. `preview` has the right form; what is made *from* a tensor's content, as
    an array in another byte order is, is only right in `value()`, which makes it anew when the tensors are filled."""

    preview: Any
    value: Callable[[], Any]

    @classmethod
    def of(cls, value: Any) -> _Pending:
        return cls(value, lambda: value)

    @classmethod
    def decode(
        cls,
        values: Json,
        path: str,
        target: Callable[[str], torch.Tensor],
        subclass: Callable[[str, Subclass], torch.Tensor],
    ) -> _Pending:
        """Check the values now, with a target for each tensor that they name."""
        targets: dict[str, torch.Tensor] = {}
        made: dict[str, torch.Tensor] = {}

        def find(reference: str) -> torch.Tensor:
            if reference not in targets:
                targets[reference] = target(reference)
            return targets[reference]

        def find_subclass(place: str, record: Subclass) -> torch.Tensor:
            if place not in made:
                made[place] = subclass(place, record)
            return made[place]

        preview = decode(values, path=path, tensor=find, subclass=find_subclass)
        return cls(preview, lambda: decode(values, path=path, tensor=find, subclass=find_subclass))


class _Matcher:
    """Fits one component; writes what it finds into its `Fitted`."""

    def __init__(
        self,
        fitted: Fitted,
        component: Any,
        components: Mapping[str, Any],
        saved: SavedState,
        strategy: LoadStrategy,
    ) -> None:
        self.fitted = fitted
        self.component = component
        self.components = components
        self.saved = saved
        self.strategy = strategy
        self.live_subclasses: dict[str, torch.Tensor] | None = None
        self.cuts = cuts_of(fitted.component, components)

    def is_same_class(self, tree: TreeRecord) -> bool:
        """Whether the state is of the component's class, or of one that it derives from. Only a loose restore takes
        that of another one, and lists it; a checkpoint that does not say is taken at its word, and so is a class of the
        user's own, which checks its state itself."""
        inner = unwrap(self.component)
        kind = type(inner)
        if is_described(inner, tree.type):
            return True
        theirs = getattr(getattr(kind, "load_state_dict", None), "__module__", "")
        if not issubclass(kind, LRScheduler | torch.optim.Optimizer) and not theirs.startswith("torch."):
            return True
        self._note_difference(
            f"{tree.name}: state of {tree.type} in the checkpoint, {description_of(inner)} now",
            f"skip=('{tree.component}',) leaves the component as it is, strict=False hands the state to its "
            "load_state_dict",
        )
        return not self.strategy.strict

    def is_of_same_model(self, tree: TreeRecord) -> bool:
        """Return whether an optimizer has parameters of the model that the checkpoint names, where both sides know it.
        Only a loose restore takes state of the parameters of another model, and lists it."""
        models = models_of(self.component, self.components) if tree.model else []
        if not models or tree.model in models:
            return True
        self._note_difference(
            f"{tree.name}: state of the parameters of '{tree.model}' in the checkpoint, of '{models[0]}' now",
            f"give each optimizer the component name that it was saved under, or leave it as it is with "
            f"skip=('{tree.component}',)",
        )
        return not self.strategy.strict

    def _note_difference(self, difference: str, ways: str) -> None:
        """List a difference that a strict restore refuses, with the ways through, and a loose one accepts."""
        if self.strategy.strict:
            self.fitted.mismatched.append(f"{difference}; {ways}")
        else:
            self.fitted.accepted.append(difference)

    def match_module(self, tree: TreeRecord) -> None:
        module = unwrap(self.component)
        state = self._live_state()
        self._require_memory(state, self.fitted.component)
        live = tree_of(self.fitted.component, self.component, state, None)
        live_values, saved_values = _object(live.values, tree), _object(self.saved.values(tree), tree)
        wanted: dict[str, list[str]] = {}
        inner: dict[str, str] = {}
        extras: dict[str, _Pending] = {}
        spared: set[str] = set()
        for key, value in live_values.items():
            # An extra state is the module's own to take up, also where it is a tensor.
            own = key.rpartition(".")[2] == "_extra_state"
            reference, subclass = (None, None) if own else (_reference(value), subclass_of(value))
            if self._excluded(paths.leaf_name(tree.name, key)):
                spared |= {reference} if reference is not None else set(references(value))
            elif key not in saved_values:
                self.fitted.missing.append(paths.leaf_name(tree.name, key))
            elif reference is not None:
                wanted.setdefault(reference, []).append(key)
            elif subclass is not None:
                pairs = self._pairs(paths.leaf_name(tree.name, key), subclass, subclass_of(saved_values[key]))
                self._refuse_other_content(tree, inner, pairs)
                inner.update(pairs)
                self.fitted.common += 1
            else:
                extras[key] = self._decode(tree, saved_values[key], key)
        self._note_unused(tree, [key for key in saved_values if key not in live_values])
        self.fitted.held, self.fitted.stored = len(live_values), len(saved_values)
        self.fitted.common += len(extras)
        for path, keys in wanted.items():
            # A tied tensor of which one name is excluded is excluded.
            if path not in spared:
                self.fitted.common += len(keys)
                cut = cut_at(self.cuts, path, live.tensors[path])
                self._want(tree, live.tensors[path], keys, saved_values, cut)
        for path, reference in inner.items():
            if path not in spared:
                self._fill_inner(self._leaf(tree, reference), live.tensors[path])

        def take_up() -> None:
            # The tensors in it are the live ones, filled by now: what is left to do is what the modules' own hooks and
            # extra states want to do.
            state.update({key: extra.value() for key, extra in extras.items()})
            load_module(self.fitted.component, module, state)

        self.fitted.take_up = take_up

    def match_optimizer(self, tree: TreeRecord) -> None:
        optimizer = unwrap(self.component)
        is_other = tree.type not in ("", type(optimizer).__name__)
        if is_other:
            self._note_difference(
                f"{tree.name}: state of {tree.type} in the checkpoint, {type(optimizer).__name__} now",
                f"skip=('{tree.component}',) leaves the optimizer as it is",
            )
            if self.strategy.strict:
                return
        names = optimizer_names(optimizer, self.components, self.fitted.component)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._require_memory(dict(zip(names, parameters, strict=True)), f"{self.fitted.component}.state")
        saved_values = _object(self.saved.values(tree), tree)
        saved_state = _object(saved_values.get("state", {}), tree)
        groups = [_object(group, tree) for group in _list(saved_values.get("param_groups", []), tree)]
        known = {name for group in groups for name in _names(group.get("params"), tree)}
        self.fitted.missing += [paths.leaf_name(tree.name, f"state.{name}") for name in names if name not in known]
        self._note_unused(tree, [f"state.{name}" for name in sorted(known - set(names))])
        spared = {name for name in names if name in saved_state and self._spares(tree, saved_state[name])}
        self.fitted.held, self.fitted.stored = len(names), len(known)
        self.fitted.common = len(known.intersection(names) - spared)
        kept = self._kept_groups(tree, optimizer)
        if len(kept) < len(optimizer.param_groups):
            self._compare_groups(tree, optimizer, names, groups, kept)
        if is_other and not self._check_state_keys(
            tree, optimizer, [saved_state[n] for n in names if n in saved_state]
        ):
            return
        self._check_kept_options(tree, optimizer, names, saved_state, groups, kept)
        packed_groups = _packed_groups(optimizer, names, groups, self.fitted, kept)
        states: dict[Any, _Pending] = {}
        for index, name in enumerate(names):
            if name in saved_state and name not in spared:
                states[index] = self._match_parameter(tree, saved_state[name], optimizer, parameters[index], name)
            elif (name in spared or name not in known) and parameters[index] in optimizer.state:
                states[index] = _Pending.of(dict(optimizer.state[parameters[index]]))
        for name in saved_state.keys() - known:
            states[name] = self._decode(tree, saved_state[name], f"state.{name}")
        rest = {
            key: self._decode(tree, value, key)
            for key, value in saved_values.items()
            if key not in ("state", "param_groups")
        }
        decoded = [
            _Options(group, self._decode(tree, group.saved, "param_groups"), is_other) for group in packed_groups
        ]

        def take_up() -> None:
            values = {key: state.value() for key, state in states.items()}
            options = [group.value() for group in decoded]
            load_optimizer(optimizer, values, options, {key: pending.value() for key, pending in rest.items()})

        self.fitted.take_up = take_up

    def match_values(self, tree: TreeRecord) -> None:
        state = self._decode(tree, self.saved.values(tree), "", self._template(tree))
        if isinstance(unwrap(self.component), RNGState):
            # It is taken up last, when everything else has changed: what is wrong with it must be known before. Its
            # tensors are not filled yet, so only the rest can be looked at.
            check_rng_state(state.preview)
        inner = unwrap(self.component)
        if not has_plain_state(inner):
            self.fitted.take_up = partial(load_values, self.fitted.component, inner, state.value)
            return
        try:
            check_plain_state(inner, state.preview)
        except StateMismatchError as error:
            raise error.at(component=self.fitted.component) from None
        keys = self._common_keys(tree, inner, state.preview) if isinstance(inner, dict) else None
        self.fitted.take_up = lambda: load_state(inner, _only(state.value(), keys))

    def _common_keys(self, tree: TreeRecord, live: Mapping[Any, Any], saved: Mapping[Any, Any]) -> Set[Any] | None:
        """The keys of a dict that both sides have. One that is empty takes all. Values of another form are listed."""
        if not live:
            return None
        self.fitted.missing += [paths.leaf_name(tree.name, str(key)) for key in live if key not in saved]
        self._note_unused(tree, [str(key) for key in saved if key not in live])
        for path, before, now in differing_values(live, saved, tree.name):
            self._note_difference(
                f"{path}: {before} in the checkpoint, {now} now",
                f"strict=False takes what was saved, skip=('{tree.component}',) leaves the dict as it is",
            )
        return live.keys() & saved.keys()

    def match_world(self, trees: Sequence[TreeRecord], index: int, count: int) -> None:
        states = [self._decode(tree, self.saved.values(tree), "") for tree in trees]
        self.fitted.take_up = lambda: unwrap(self.component).load_world_state(
            [state.value() for state in states], index, count
        )

    def _kept_groups(self, tree: TreeRecord, optimizer: torch.optim.Optimizer) -> set[int]:
        """The numbers of the groups that keep their live options."""
        kept = set()
        for index in range(len(optimizer.param_groups)):
            group = paths.leaf_name(tree.name, f"param_groups.{index}")
            glob = self.strategy.keeping_options(group)
            if glob is not None:
                self.fitted.globs.add(glob)
                self.fitted.left_out.add(group)
                kept.add(index)
        return kept

    def _compare_groups(
        self,
        tree: TreeRecord,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        groups: Sequence[dict[str, Json]],
        kept: Set[int],
    ) -> None:
        """List a number of groups, or names of options, that the two sides do not share."""
        way = f"exclude=('{tree.name}.param_groups*',) keeps the live options"
        before, now = self._count_groups(tree, optimizer, names, groups)
        if before != now:
            self._note_difference(f"{tree.name}.param_groups: {before} in the checkpoint, {now} now", way)
        by_name = {str(name): group for group in groups for name in _names(group.get("params"), tree)}
        start = 0
        for index, live in enumerate(optimizer.param_groups):
            own = names[start : start + len(live["params"])]
            start += len(own)
            found = next((by_name[name] for name in own if name in by_name), None)
            if found is None or index in kept:
                continue
            # Another version of torch may know more options, or fewer.
            tolerated = set() if self.saved.same_torch else set(optimizer.defaults)
            differing = (live.keys() ^ found.keys()) - OPTIONS_OF_SCHEDULERS - tolerated
            for option in sorted(map(str, differing)):
                side = "only in the checkpoint" if option in found else "only in the live optimizer"
                self._note_difference(f"{tree.name}.param_groups.{index}: '{option}' is {side}", way)

    def _check_kept_options(
        self,
        tree: TreeRecord,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        saved_state: Mapping[str, Json],
        groups: Sequence[dict[str, Json]],
        kept: Set[int],
    ) -> None:
        """List the groups that keep live options which want more state than was saved with other options: the next step
        would look for it in vain."""
        by_name = {str(name): group for group in groups for name in _names(group.get("params"), tree)}
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
            lacking = sorted(now - then - _object(saved_state[name], tree).keys())
            if lacking:
                options = sorted(key for key, value in before.items() if key in live and live[key] != value)
                self.fitted.mismatched.append(
                    f"{tree.name}.param_groups.{index}: the options that are kept want {', '.join(lacking)} for a "
                    f"parameter, which the checkpoint lacks (options that differ: {', '.join(options)}); give the "
                    f"optimizer the saved options, or leave it as it is with skip=('{tree.component}',)"
                )

    def _count_groups(
        self,
        tree: TreeRecord,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        groups: Sequence[dict[str, Json]],
    ) -> tuple[int, int]:
        """Return the number of groups on both sides. Ranks of a pipeline hold parts of the groups, and what several
        ranks saved may be one group for each of them: then the groups of this rank's parameters count, and as long as
        those that are one now had the same options, the number is the same."""
        group_of = {str(name): index for index, group in enumerate(groups) for name in group["params"]}  # type: ignore[union-attr]
        of_one_rank = self.saved.world_size == 1 or paths.is_rank_scope(tree.scope)
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

    def _check_state_keys(self, tree: TreeRecord, optimizer: torch.optim.Optimizer, states: Sequence[Json]) -> bool:
        """Whether state of another class of optimizer has what this one's has. Without it a step would fail, or begin
        anew without a word."""
        expected = state_keys(optimizer)
        for state in states:
            found = frozenset(_object(state, tree))
            if found != expected:
                has = "what is not known" if expected is None else ", ".join(sorted(expected)) or "nothing"
                self.fitted.mismatched.append(
                    f"{tree.name}: state of {tree.type} in the checkpoint, {type(optimizer).__name__} now: the one has "
                    f"{', '.join(sorted(found))} for a parameter, the other {has}; skip=('{tree.component}',) leaves "
                    "the optimizer as it is"
                )
                return False
        return True

    def _spares(self, tree: TreeRecord, values: Json) -> bool:
        """Return whether `exclude` leaves out the state of a parameter, by any part of it."""
        named = dict.fromkeys(references(values)) if self.strategy.exclude else {}
        return bool([reference for reference in named if self._excluded(paths.leaf_name(tree.name, reference))])

    def _match_parameter(
        self, tree: TreeRecord, values: Json, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str
    ) -> _Pending:
        """The state of one parameter: in the optimizer's own memory where it has some, else in new memory like it."""
        prefix = f"state.{name}."
        live = optimizer.state.get(parameter, {})

        def target(reference: str) -> torch.Tensor:
            leaf = self._leaf(tree, reference)
            current = live.get(reference.removeprefix(prefix)) if isinstance(live, Mapping) else None
            cut = cut_at(self.cuts, f"state.{name}", parameter)
            shape = whole_shape(parameter, cut)
            any_shape = isinstance(optimizer, torch.optim.LBFGS) or self._had_shape(tree, name, shape)
            wrong = None if any_shape else _misfit(leaf, shape)
            if wrong is not None:
                self.fitted.mismatched.append(f"{leaf.name}: {wrong}")
            if isinstance(current, torch.Tensor):
                own = cut_at(self.cuts, f"state.{name}", current)
                if _fits(leaf, current, own):
                    return self._fill(leaf, current, fresh=False, cut=own)
            if cut is not None and cut.shape == leaf.shape:
                shard = torch.empty_like(parameter.detach(), dtype=torch_dtype(leaf.dtype))
                return self._fill(leaf, shard, fresh=True, cut=cut)
            return self._fill(leaf, self._like_parameter(leaf, parameter), fresh=True)

        subclass = partial(self._subclass, tree, parameter, in_place=True)
        state = _Pending.decode(values, paths.leaf_name(tree.name, f"state.{name}"), target, subclass)
        if not _is_optimizer_state(state.preview):
            raise _unlike(tree, f"the state of '{name}' is not what an optimizer has")
        return state

    def _had_shape(self, tree: TreeRecord, parameter: str, shape: tuple[int, ...]) -> bool:
        """Return whether the checkpoint has the parameter itself, in this shape: then its state may have any shape, as
        that of optimizers which precondition by dimension has."""
        owners = (paths.tree_name(name, tree.scope) for name in self.components)
        names = (parameter, *(paths.leaf_name(owner, parameter) for owner in owners))
        return any(name in self.saved.leaves and self.saved.leaves[name].shape == shape for name in names)

    def _want(
        self,
        tree: TreeRecord,
        tensor: torch.Tensor,
        keys: Sequence[str],
        saved_values: Mapping[str, Json],
        cut: Cut | None,
    ) -> None:
        """One live tensor, known by one name or, when it is tied, by several."""
        references = {key: _reference(saved_values[key]) for key in keys}
        for key, reference in references.items():
            if reference is None:
                was = _described_value(saved_values[key])
                self.fitted.mismatched.append(f"{paths.leaf_name(tree.name, key)}: was {was} when it was saved")
                return
        leaves = [self._leaf(tree, reference) for reference in references.values() if reference is not None]
        if len({tuple(chunk.digests for chunk in leaf.chunks) for leaf in leaves}) > 1:
            self.fitted.mismatched.append(f"{leaves[0].name}: is tied to {leaves[1].name} now, and differed when saved")
        leaf = leaves[0]
        if shares_elements(tensor):
            self.fitted.mismatched.append(
                f"{leaf.name}: its elements share memory now (expand), so it cannot be filled"
            )
            return
        if not _fits(leaf, tensor, cut):
            self.fitted.mismatched.append(_other_form(leaf, tensor, cut))
            return
        self._fill(leaf, tensor, fresh=False, cut=cut)

    def _require_memory(self, state: Any, path: str) -> None:
        """Refuse a live state with a tensor that cannot be filled, at any depth."""
        if isinstance(state, torch.Tensor):
            require_memory(state, component=self.fitted.component, leaf=path)
        elif isinstance(state, Mapping | list | tuple):
            for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
                self._require_memory(value, f"{path}.{key}")

    def _live_state(self) -> Any:
        """Return the component's state in the form in which it was saved."""
        if self.fitted.kind == "values":
            return state_of(unwrap(self.component))
        return component_state(self.fitted.component, self.component, self.components)

    def _template(self, tree: TreeRecord) -> Mapping[str, torch.Tensor]:
        """The component's live tensors, where the saved ones must know a device or a mesh to go to."""
        # A loader that is asked for its state builds an iterator, and its tensors belong on the CPU anyway.
        if isinstance(self.component, RNGState) or is_loader(self.component):
            return {}
        own = [name for name in self.saved.leaves if name.startswith(f"{tree.name}.")]
        excluded = {name for name in own if self.strategy.excluding(name) is not None}
        per_rank = isinstance(self.component, PerRank)
        if not own or (per_rank and not excluded):
            return {}
        with random_state_kept():
            state = self._live_state()
        self._require_memory(state, self.fitted.component)
        live = tree_of(self.fitted.component, self.component, state, None).tensors
        kept = {path: tensor for path, tensor in live.items() if paths.leaf_name(tree.name, path) in excluded}
        return kept if per_rank else live

    def _decode(
        self, tree: TreeRecord, values: Json, path: str, template: Mapping[str, torch.Tensor] | None = None
    ) -> _Pending:
        def target(reference: str) -> torch.Tensor:
            leaf = self._leaf(tree, reference)
            live = (template or {}).get(reference)
            if template is not None and self._excluded(leaf.name):
                if live is not None:
                    return live
                self.fitted.mismatched.append(
                    f"{leaf.name}: excluded, and there is no live tensor that could stay in its place"
                )
            if live is not None and is_sharded(live) and _fits(leaf, live):
                return self._fill(leaf, torch.empty_like(live), fresh=True)
            if live is None and leaf.sharded and isinstance(unwrap(self.component), torch.optim.Optimizer):
                return self._fill(leaf, self._like_parameters(leaf, unwrap(self.component)), fresh=True)
            device = live.device if live is not None else torch.device("cpu")
            return self._fill(leaf, self._new_memory(leaf, device), fresh=True)

        subclass = partial(self._subclass, tree, None, in_place=False)
        return _Pending.decode(values, paths.leaf_name(tree.name, path), target, subclass)

    # Tensors of wrapper subclasses

    def _pairs(self, leaf: str, live: Subclass, saved: Subclass | None) -> dict[str, str]:
        """Which saved tensor each inner tensor of a live one takes; none where class or context are others."""
        if saved is None or not is_same_form(live, saved):
            was = "another value" if saved is None else _described(saved)
            self.fitted.mismatched.append(f"{leaf}: {was} in the checkpoint, {_described(live)} now")
            return {}
        pairs: dict[str, str] = {}
        for name, value in live.tensors.items():
            nested, reference, other = subclass_of(value), _reference(value), _reference(saved.tensors[name])
            if nested is not None:
                pairs.update(self._pairs(f"{leaf}.{name}", nested, subclass_of(saved.tensors[name])))
            elif reference is not None and other is not None:
                pairs[reference] = other
            else:
                self.fitted.mismatched.append(
                    f"{leaf}.{name}: a tensor of a subclass in the checkpoint, a plain one now"
                )
        return pairs

    def _refuse_other_content(self, tree: TreeRecord, known: Mapping[str, str], pairs: Mapping[str, str]) -> None:
        """A live tensor that is tied now takes one content; what its names had when saved must be the same."""
        for path, reference in pairs.items():
            leaf, other = self._leaf(tree, reference), self._leaf(tree, known.get(path, reference))
            if [chunk.digests for chunk in leaf.chunks] != [chunk.digests for chunk in other.chunks]:
                self.fitted.mismatched.append(f"{other.name}: is tied to {leaf.name} now, and differed when saved")

    def _fill_inner(self, leaf: TensorRecord, tensor: torch.Tensor) -> None:
        if _fits(leaf, tensor):
            self._fill(leaf, tensor, fresh=False)
        else:
            self.fitted.mismatched.append(_other_form(leaf, tensor))

    def _subclass(
        self, tree: TreeRecord, parameter: torch.Tensor | None, place: str, saved: Subclass, *, in_place: bool
    ) -> torch.Tensor:
        """A tensor of a wrapper subclass: the live one, filled, or a new one of the same class and context."""
        if self.live_subclasses is None:
            with random_state_kept():
                self.live_subclasses = live_subclasses(self._live_state())
        live = self.live_subclasses.get(place[len(tree.name) + 1 :])
        if live is None:
            return self._new_subclass(tree, place, saved, parameter)
        tensors: dict[str, torch.Tensor] = {}
        form = stored_form(live, tensors)
        pairs = self._pairs(place, form, saved)
        if pairs and not in_place:
            return self._new_subclass(tree, place, saved, live)
        for path, reference in pairs.items():
            self._fill_inner(self._leaf(tree, reference), tensors[path])
        return live

    def _new_subclass(self, tree: TreeRecord, place: str, saved: Subclass, like: torch.Tensor | None) -> torch.Tensor:
        """A new tensor of the saved class, cut and placed like another. Its class must be known to the program: it is
        that of the other tensor, or registered."""
        known = flattened(like) if like is not None else None
        same = known is not None and class_name(known.kind) == saved.name
        kind: Any = known.kind if known is not None and same else tensor_class(saved.name)
        if kind is None:
            self._cannot_be_made(place, f"a tensor of class '{saved.name}', which is not registered")
        if saved.shards != (even_shards(like) if is_sharded(like) else 1):
            self._cannot_be_made(place, f"a '{saved.name}' in {saved.shards} shards, and it is cut in another way now")
        inner = {
            name: self._new_inner(tree, f"{place}.{name}", value, like if is_sharded(like) else None, _device(like))
            for name, value in saved.tensors.items()
        }
        context = known.context if known is not None and same else decode(saved.context, path=place, tensor=None)
        return unflattened(kind, inner, context, saved, place, like)

    def _cannot_be_made(self, place: str, what: str) -> NoReturn:
        raise StateMismatchError(
            f"the checkpoint has {what}, and there is no live tensor to fill",
            component=self.fitted.component,
            leaf=place,
            advice="register its class with holdfast.register_type, or restore as many shards as were saved",
        )

    def _new_inner(
        self, tree: TreeRecord, place: str, value: Json, mesh: DTensor | None, device: torch.device
    ) -> torch.Tensor:
        """New memory for one inner tensor; of a sharded one, for this rank's piece."""
        reference, nested = _reference(value), subclass_of(value)
        if nested is not None:
            made = self._new_subclass(tree, place, nested, mesh if mesh is not None else torch.empty(0, device=device))
            return made.to_local() if is_sharded(made) else made
        leaf = self._leaf(tree, reference or "")
        if mesh is None:
            return self._fill(leaf, self._new_memory(leaf, device), fresh=True)
        shards = even_shards(mesh) or 1
        if not leaf.shape or leaf.shape[0] % shards:
            self._cannot_be_made(place, f"a tensor of shape {list(leaf.shape)} that is no {shards} equal pieces")
        for chunk in leaf.chunks:
            self.saved.require_file(chunk.file)
        rows = leaf.shape[0] // shards
        local = torch.empty((rows, *leaf.shape[1:]), dtype=torch_dtype(leaf.dtype), device=device)
        self._fill(leaf, cut_like(mesh, local), fresh=True)
        return local

    def _fill(self, leaf: TensorRecord, tensor: torch.Tensor, *, fresh: bool, cut: Cut | None = None) -> torch.Tensor:
        box, local = held_piece(tensor, leaf=leaf.name, cut=cut)
        if box.volume:
            self.fitted.requests.append(Request(leaf, box, local, fresh))
        return tensor

    def _like_parameter(self, leaf: TensorRecord, parameter: torch.Tensor) -> torch.Tensor:
        """New memory for a piece of optimizer state, sharded like the parameter that it belongs to."""
        if tuple(parameter.shape) == leaf.shape and len(leaf.shape) > 0:
            return torch.empty_like(parameter.detach(), dtype=torch_dtype(leaf.dtype))
        full = self._new_memory(leaf, parameter.device if leaf.sharded or leaf.shape else torch.device("cpu"))
        if leaf.sharded and isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return full

    def _like_parameters(self, leaf: TensorRecord, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """New memory for sharded state of an optimizer whose state dict does not say which parameter it belongs to: as
        all parameters of its shape are, whole where no parameter is sharded."""
        parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
        if parameters and not any(isinstance(parameter, DTensor) for parameter in parameters):
            return self._new_memory(leaf, parameters[0].device)
        alike = [parameter for parameter in parameters if tuple(parameter.shape) == leaf.shape]
        layouts = {(one.device_mesh, one.placements) if isinstance(one, DTensor) else None for one in alike}
        if len(layouts) == 1:
            return torch.empty_like(alike[0], dtype=torch_dtype(leaf.dtype))
        raise StateMismatchError(
            "a sharded tensor in an optimizer whose state dict has a layout of its own, and which has no state yet: "
            + ("parameters of its shape are sharded in different ways" if alike else "no parameter has its shape"),
            component=self.fitted.component,
            leaf=leaf.name,
            advice="nothing says how to shard it: make the optimizer's state before the restore, by a step "
            "with a learning rate of 0; no live object was changed",
        )

    def _new_memory(self, leaf: TensorRecord, device: torch.device) -> torch.Tensor:
        """Memory for a whole leaf, once it is known that there are as many bytes to fill it with."""
        for chunk in leaf.chunks:
            self.saved.require_file(chunk.file)
        return torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype), device=device)

    def _leaf(self, tree: TreeRecord, reference: str) -> TensorRecord:
        name = paths.leaf_name(tree.name, reference)
        try:
            return self.saved.leaves[name]
        except KeyError:
            raise CorruptCheckpointError(
                "its values name a tensor that is not listed", leaf=name, file=tree.file
            ) from None

    def _excluded(self, leaf: str) -> bool:
        glob = self.strategy.excluding(leaf)
        if glob is not None:
            self.fitted.globs.add(glob)
            self.fitted.left_out.add(leaf)
        return glob is not None

    def _note_unused(self, tree: TreeRecord, keys: Sequence[str]) -> None:
        names = (paths.leaf_name(tree.name, key) for key in keys)
        self.fitted.unused += [name for name in names if not self._excluded(name)]


def _described(subclass: Subclass) -> str:
    return f"'{subclass.name}' {subclass.dtype} {list(subclass.shape)} with the context {typed(subclass.context):.300}"


def _described_value(value: Json) -> str:
    subclass = subclass_of(value)
    return "no tensor" if subclass is None else _described(subclass)


def _device(like: torch.Tensor | None) -> torch.device:
    return like.device if like is not None else torch.device("cpu")


def _other_form(leaf: TensorRecord, tensor: torch.Tensor, cut: Cut | None = None) -> str:
    was, now = f"{leaf.dtype} {list(leaf.shape)}", f"{dtype_name(tensor)} {list(whole_shape(tensor, cut))}"
    return f"{leaf.name}: {was} in the checkpoint, {now} now"


def _fits(leaf: TensorRecord, tensor: torch.Tensor, cut: Cut | None = None) -> bool:
    return whole_shape(tensor, cut) == leaf.shape and tensor.dtype == torch_dtype(leaf.dtype)


def _misfit(leaf: TensorRecord, shape: tuple[int, ...]) -> str | None:
    """State of a parameter has its shape, or is reduced along some of its dimensions, or is of another rank."""
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
    saved: _Pending
    is_other: bool

    def value(self) -> dict[str, Any]:
        own = {key: value for key, value in self.group.live.items() if key != "params"}
        saved = self.saved.value()
        taken = {key: value for key, value in saved.items() if key in own or not self.is_other}
        if self.is_other:
            # By it torch tells AdamW from Adam: it is the class, not an option of it.
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
    """The saved options of each live group; a group that keeps its own, or of which nothing was saved, has none."""
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
    """Whether `load_state_dict` of torch's optimizers takes it: they count in `step`, and stumble over the rest."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        return False
    return isinstance(state.get("step", 0), torch.Tensor | int | float)


def _only(state: Any, keys: Set[Any] | None) -> Any:
    return state if keys is None else {key: value for key, value in state.items() if key in keys}


def _reference(value: Json) -> str | None:
    reference = value.get("$tensor") if isinstance(value, dict) else None
    return reference if isinstance(reference, str) else None


def _unlike(tree: TreeRecord, problem: str) -> HoldfastError:
    """Return the error for values that are not those of a model or an optimizer: damage, unless they were saved as the
    values of some other object."""
    if tree.kind != "values":
        return CorruptCheckpointError(problem, file=tree.file)
    of = f" of {tree.type}" if tree.type else ""
    return StateMismatchError(
        f"the state was saved as the plain values{of}, and the component is a model or an optimizer now: {problem}",
        component=tree.component,
        advice=f"restore it into an object like the saved one, or leave it out with skip=({tree.component!r},)",
    )


def _object(value: Json, tree: TreeRecord) -> dict[str, Json]:
    if not isinstance(value, dict) or any(key.startswith("$") for key in value):
        raise _unlike(tree, f"the values of '{tree.name}' have no names")
    return value


def _names(value: Json, tree: TreeRecord) -> list[str]:
    names = _list(value, tree)
    if not all(isinstance(name, str) for name in names):
        raise _unlike(tree, f"the values of '{tree.name}' name parameters by something else")
    return names


def _list(value: Json, tree: TreeRecord) -> list[Any]:
    if not isinstance(value, list):
        raise _unlike(tree, f"the values of '{tree.name}' are not what an optimizer has")
    return value
