"""Decide who writes what. Every rank's inventory enters, each rank's assignment leaves. Knows no torch, no files.

A leaf that several ranks hold is written once, by the rank that has least to write so far, or, where they may differ,
by the first. How a sharded tensor is cut was decided by PyTorch before; here the pieces are only checked to make up the
whole. Whether a leaf that several ranks hold is the same on all of them cannot be seen from an inventory: the plan
lists the leaves that they must compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast.errors import UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.manifest import block_bytes_for
from holdfast.ondisk.merging import references, union_of
from holdfast.ondisk.regions import Box, cover_exactly
from holdfast.ranks.wording import ranks_in_words
from holdfast.saving.messages import (
    HOST,
    UNSAMPLED,
    Inventory,
    PartEntry,
    ReplicaSet,
    TreeEntry,
    WriteAssignment,
)

Replicas = Literal["compare", "trust"]
"""Whether the ranks compare what they hold of one leaf, or the user has declared it to be the same."""

SAMPLED_HOST_PARTS = 64
SAMPLED_DEVICE_PARTS = 24
"""How many parts of a rank are sampled at each save: about half a millisecond of the call, in host memory as on a
device."""


class LeafPlan(NamedTuple):
    """One tensor as a whole, as the manifest will list it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True, slots=True)
class TreePlan:
    """One tree as the manifest will list it, who writes it, and its merged values where ranks hold parts of it."""

    component: str
    kind: str
    scope: str
    owner: int
    merged: Json | None = None
    type: str = ""
    model: str = ""

    @property
    def name(self) -> str:
        return paths.tree_name(self.component, self.scope)

    @property
    def file(self) -> str:
        return self.file_in(0)

    def file_in(self, part: int) -> str:
        """Return the file that holds the tree, in a save whose files have names from this part on."""
        is_shared = self.scope == "" and self.owner == 0
        return paths.shared_values(part) if is_shared else paths.values_file(self.owner, part)


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """The whole save: what each rank does, what the manifest will list, each rank's bytes of tensors, and what must be
    the same on several ranks. `compared` are the names of the leaves in each of the replica sets. `block_bytes`: as of
    the assignments."""

    assignments: tuple[WriteAssignment, ...]
    leaves: tuple[LeafPlan, ...]
    trees: tuple[TreePlan, ...]
    sizes: tuple[int, ...]
    block_bytes: int
    replicas: tuple[ReplicaSet, ...] = ()
    compared: tuple[tuple[str, ...], ...] = ()


def plan(
    inventories: Sequence[Inventory], replicas: Replicas = "compare", block_bytes: int | None = None
) -> GlobalPlan:
    """Return who writes what, from the inventories of all ranks. `block_bytes`: that of the checkpoint of which a part
    is stored anew; None chooses one."""
    scopes = _agree_on_scopes(inventories)
    trees = _assign_trees(inventories, scopes)
    holdings = _named(inventories, trees, _collect_holdings(inventories, scopes))
    if replicas == "compare":
        _check_meshes(inventories, holdings)
        _check_optimizer_states(inventories, trees)
    leaves, parts, sizes = _assign_parts(len(inventories), holdings)
    sets, compared = _replica_sets(inventories, holdings) if replicas == "compare" else ((), ())
    block_bytes = block_bytes or block_bytes_for(sizes)
    assignments = tuple(
        WriteAssignment(
            scopes=scopes[rank],
            trees=tuple(
                index
                for index, tree in enumerate(inventory.trees)
                if trees[paths.tree_name(tree.component, scopes[rank][index])].owner == rank
            ),
            parts=tuple(parts[rank]),
            block_bytes=block_bytes,
        )
        for rank, inventory in enumerate(inventories)
    )
    return GlobalPlan(assignments, tuple(leaves), tuple(trees.values()), sizes, block_bytes, sets, compared)


def partly_held(inventories: Sequence[Inventory]) -> dict[str, list[int]]:
    """Return the components that only some ranks have, each with these ranks. What is declared to be a rank's own, or a
    stage's, does not count."""
    holders: dict[str, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        for tree in inventory.trees:
            if tree.scope is None:
                holders.setdefault(tree.component, []).append(rank)
    return {name: ranks for name, ranks in holders.items() if len(ranks) < len(inventories)}


def _agree_on_scopes(inventories: Sequence[Inventory]) -> list[tuple[str, ...]]:
    """Return the scope of every tree on every rank. Undecided ones are shared when all ranks have the same state."""
    digests: dict[str, set[str]] = {}
    holders: dict[str, int] = {}
    for inventory in inventories:
        for tree in inventory.trees:
            if tree.scope is None:
                digests.setdefault(tree.component, set()).add(tree.digest)
                holders[tree.component] = holders.get(tree.component, 0) + 1
    shared = {name for name, seen in digests.items() if len(seen) == 1 and holders[name] == len(inventories)}

    def scope(rank: int, tree: TreeEntry) -> str:
        if tree.scope is not None:
            return tree.scope
        return "" if tree.component in shared else paths.rank_scope(rank)

    return [tuple(scope(rank, tree) for tree in inventory.trees) for rank, inventory in enumerate(inventories)]


def _assign_trees(inventories: Sequence[Inventory], scopes: Sequence[tuple[str, ...]]) -> dict[str, TreePlan]:
    """Assign each tree to the lowest rank that has it; what ranks hold in parts is merged by the leader."""
    holders: dict[str, list[tuple[int, TreeEntry]]] = {}
    for rank, inventory in enumerate(inventories):
        for tree, scope in zip(inventory.trees, scopes[rank], strict=True):
            holders.setdefault(paths.tree_name(tree.component, scope), []).append((rank, tree))
    trees = {}
    for name, held in holders.items():
        owner, first = held[0]
        scope = name.partition("@")[2]
        if len({tree.kind for _, tree in held}) > 1:
            raise UsageError("the ranks have different kinds of object under this name", component=first.component)
        merged = None
        if len({tree.digest for _, tree in held}) == 1:
            pass
        elif all(tree.united for _, tree in held):
            merged, owner = reduce(union_of, (msgspec.msgpack.decode(tree.values) for _, tree in held)), 0
        elif first.kind != "values" and not paths.is_rank_scope(scope):
            # The ranks that share a per-rank state do so on the user's word: the first one's counts.
            merged, owner = _merge(first.component, scope, [tree for _, tree in held]), 0
        # Ranks of a pipeline may name their parts of a model differently: then no one component has all parameters.
        model = first.model if len({tree.model for _, tree in held}) == 1 else ""
        trees[name] = TreePlan(first.component, first.kind, scope, owner, merged, first.type, model)
    return trees


def _merge(component: str, scope: str, trees: Sequence[TreeEntry]) -> Json:
    """Merge the parts that pipeline ranks hold to one tree; raise where two of them disagree."""
    if scope:
        raise UsageError(f"the ranks of '{scope}' have different values", component=component)
    merged: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for tree in trees:
        values = msgspec.msgpack.decode(tree.values)
        groups = values.pop("param_groups", None) if tree.kind == "optimizer" else None
        _merge_into(merged, values, component)
        for group in groups or ():
            _merge_group(merged.setdefault("param_groups", []), options, group, component)
    return merged


def _merge_group(groups: list[Any], options: dict[str, Any], group: dict[str, Any], component: str) -> None:
    """Add a group, and raise where a parameter has other options on another rank."""
    own = {key: value for key, value in group.items() if key != "params"}
    for name in group["params"]:
        if options.setdefault(name, own) != own:
            differing = sorted(
                key for key in own.keys() | options[name].keys() if own.get(key) != options[name].get(key)
            )
            raise UsageError(
                f"the ranks have different options for it: {', '.join(differing)}",
                component=component,
                leaf=f"{component}.{name}",
                advice="make them the same on all ranks, or wrap the optimizer in PerRank",
            )
    if group not in groups:
        groups.append(group)


def _merge_into(merged: dict[str, Any], values: dict[str, Any], path: str) -> None:
    for name, value in values.items():
        known = merged.setdefault(name, value)
        if known == value:
            continue
        if not (isinstance(known, dict) and isinstance(value, dict)) or any(key.startswith("$") for key in known):
            raise UsageError(
                "the ranks hold different values under one name",
                component=path.partition(".")[0],
                leaf=f"{path}.{name}",
                advice="give pipeline_stage= to the manager when the stages' names collide, "
                "or wrap the component in PerRank or Shared",
            )
        _merge_into(known, value, f"{path}.{name}")


def _named(
    inventories: Sequence[Inventory], trees: Mapping[str, TreePlan], holdings: dict[str, _Holding]
) -> dict[str, _Holding]:
    """Leave out what a rank holds under a key of which an earlier rank's value counts: no tree names it."""
    named = {
        name: {paths.leaf_name(name, reference) for reference in references(tree.merged)}
        for name, tree in trees.items()
        if tree.merged is not None and tree.kind == "values"
    }
    if not named:
        return holdings

    def is_named(leaf: str, holding: _Holding) -> bool:
        rank, part = holding.first
        tree = inventories[rank].trees[part.tree]
        return tree.scope != "" or tree.component not in named or leaf in named[tree.component]

    return {leaf: holding for leaf, holding in holdings.items() if is_named(leaf, holding)}


@dataclass(slots=True)
class _Holding:
    """All that is known of one leaf: who holds which box of it."""

    plan: LeafPlan
    first: tuple[int, PartEntry]
    boxes: dict[Box, list[tuple[int, int]]]


def _assign_parts(size: int, holdings: dict[str, _Holding]) -> tuple[list[LeafPlan], list[list[int]], tuple[int, ...]]:
    load = [0] * size
    parts: list[list[int]] = [[] for _ in range(size)]
    for holding in holdings.values():
        item_bytes = ELEMENT_TYPES[holding.plan.dtype].item_bytes
        for box, holders in holding.boxes.items():
            alone = len(holders) == 1 or holding.first[1].led
            rank, index = holders[0] if alone else min(holders, key=lambda holder: load[holder[0]])
            parts[rank].append(index)
            load[rank] += box.volume * item_bytes
    for indices in parts:
        indices.sort()
    return [holding.plan for holding in holdings.values()], parts, tuple(load)


def _check_meshes(inventories: Sequence[Inventory], holdings: dict[str, _Holding]) -> None:
    """Refuse a leaf that lies on meshes which nothing joins, as pipeline stages are: it is not cut from one tensor.

    Where another leaf lies on a mesh of both, they may hold replicas, as of a layer that only FSDP cuts in a model
    of which other layers are cut by tensor parallelism, too. Then content decides.
    """
    region = _regions({ranks for inventory in inventories for ranks in inventory.mesh_ranks})
    for name, holding in holdings.items():
        if not holding.plan.sharded:
            continue
        first: tuple[int, ...] = ()
        for rank, index in (holder for holders in holding.boxes.values() for holder in holders):
            part = inventories[rank].parts[index]
            ranks = inventories[rank].mesh_ranks[part.mesh] if part.mesh >= 0 else ()
            first = first or ranks
            if ranks and region[ranks[0]] != region[first[0]]:
                one, other = (ranks_in_words(some) for some in (first, ranks))
                raise UsageError(
                    f"the leaf is sharded over the mesh of {one} and over the mesh of {other}",
                    leaf=name,
                    advice="give pipeline_stage= to the manager when pipeline stages' names collide, or wrap the "
                    "component in PerRank; if the meshes hold replicas of one tensor, pass replicas='trust'",
                )


def _check_optimizer_states(inventories: Sequence[Inventory], trees: Mapping[str, TreePlan]) -> None:
    """Refuse optimizer state of a parameter that one of the ranks with that parameter has and another one lacks.

    Ranks that hold the same values have nothing to merge, and nothing to look for.
    """
    for tree in trees.values():
        if tree.kind != "optimizer" or tree.merged is None or _is_led(inventories, tree.component):
            continue
        states: dict[str, dict[int, Any]] = {}
        for rank, inventory in enumerate(inventories):
            for entry in inventory.trees:
                if entry.component == tree.component:
                    _note_states(states, rank, msgspec.msgpack.decode(entry.values))
        for parameter, of_rank in states.items():
            _refuse_lack(tree.component, f"{tree.name}.state.{parameter}", of_rank)


def _is_led(inventories: Sequence[Inventory], component: str) -> bool:
    """Return whether the first rank's state of this component is stored, as the user has declared."""
    return any(
        part.led and inventory.trees[part.tree].component == component
        for inventory in inventories
        for part in inventory.parts
    )


def _note_states(states: dict[str, dict[int, Any]], rank: int, values: Any) -> None:
    for group in values.get("param_groups", ()):
        for parameter in group["params"]:
            states.setdefault(parameter, {})[rank] = values.get("state", {}).get(parameter, {})


def _refuse_lack(component: str, leaf: str, of_rank: Mapping[int, Any]) -> None:
    """Raise for the first entry that some of the ranks have, in the order of the entries."""
    for key in dict.fromkeys(key for state in of_rank.values() for key in state):
        having = [rank for rank, state in of_rank.items() if key in state]
        lacking = [rank for rank in of_rank if rank not in having]
        if lacking:
            empty = not any(of_rank[rank] for rank in lacking)
            raise UsageError(
                f"the optimizer has this state on {ranks_in_words(having)} and lacks it on {ranks_in_words(lacking)}",
                component=component,
                leaf=leaf if empty else f"{leaf}.{key}",
                advice="step the parameter on all of these ranks or on none, or wrap the optimizer in PerRank; "
                "replicas='trust' stores the state of the ranks that have it",
            )


def _regions(meshes: Iterable[tuple[int, ...]]) -> dict[int, int]:
    """Return for each rank of the meshes a number that it has in common with all ranks to which meshes join it."""
    region: dict[int, int] = {}
    for ranks in meshes:
        joined = {region[rank] for rank in ranks if rank in region}
        number = min([*joined, *ranks])
        region.update({rank: number for rank, old in region.items() if old in joined})
        region.update(dict.fromkeys(ranks, number))
    return region


def _replica_sets(
    inventories: Sequence[Inventory], holdings: dict[str, _Holding]
) -> tuple[tuple[ReplicaSet, ...], tuple[tuple[str, ...], ...]]:
    """Return the boxes that several ranks hold and that must be the same, by who holds them, with the leaves' names."""
    found: dict[tuple[tuple[int, ...], str], list[tuple[str, tuple[int, ...]]]] = {}
    for name, holding in holdings.items():
        first_rank, first = holding.first
        # Plain tensors of a component with values of its own are part of the digests by which its scope was found.
        digested = inventories[first_rank].trees[first.tree].kind == "values" and not first.sharded
        if first.led or digested:
            continue
        for box, holders in holding.boxes.items():
            if len(holders) > 1 and box.volume:
                devices = {inventories[rank].parts[index].device for rank, index in holders}
                ranks, indices = zip(*holders, strict=True)
                device = devices.pop() if len(devices) == 1 else UNSAMPLED
                found.setdefault((ranks, device), []).append((name, indices))
    of_rank = Counter(rank for ranks, _ in found for rank in ranks)
    most = max(of_rank.values(), default=1)
    sets = tuple(_replica_set(ranks, device, held, most) for (ranks, device), held in found.items())
    return sets, tuple(tuple(name for name, _ in held) for held in found.values())


def _replica_set(
    ranks: tuple[int, ...], device: str, held: Sequence[tuple[str, tuple[int, ...]]], sets_of_rank: int
) -> ReplicaSet:
    # Most ranks have the same inventory, and so the same parts: they are sent once.
    distinct: dict[tuple[int, ...], int] = {}
    choice = [
        distinct.setdefault(parts, len(distinct)) for parts in zip(*(indices for _, indices in held), strict=True)
    ]
    most = {HOST: SAMPLED_HOST_PARTS, UNSAMPLED: 0}.get(device, SAMPLED_DEVICE_PARTS)
    quota = max(most // sets_of_rank, 1) if most else 0
    return ReplicaSet(ranks, tuple(distinct), tuple(choice), device, quota)


def _collect_holdings(inventories: Sequence[Inventory], scopes: Sequence[tuple[str, ...]]) -> dict[str, _Holding]:
    holdings: dict[str, _Holding] = {}
    for rank, inventory in enumerate(inventories):
        names = [
            paths.tree_name(tree.component, scope) for tree, scope in zip(inventory.trees, scopes[rank], strict=True)
        ]
        for index, part in enumerate(inventory.parts):
            name = paths.leaf_name(names[part.tree], part.path)
            holding = holdings.get(name)
            if holding is None:
                leaf = LeafPlan(name, part.dtype, part.shape, part.sharded)
                holding = holdings[name] = _Holding(leaf, (rank, part), {})
            elif not _agree(holding.plan, part):
                raise _disagreement(name, holding, rank, part)
            # A rank that got nothing of an uneven cut writes nothing, but an empty tensor is a tensor.
            if part.box.volume or 0 in part.shape:
                holding.boxes.setdefault(part.box, []).append((rank, index))
    for name, holding in holdings.items():
        if 0 in holding.plan.shape:
            _keep_one_empty(holding)
        if len(holding.boxes) == 1 and next(iter(holding.boxes)).sizes == holding.plan.shape:
            continue
        wrong = cover_exactly(list(holding.boxes), holding.plan.shape)
        if wrong is not None:
            raise UsageError(
                f"the ranks that save do not hold all of it: {wrong}",
                leaf=name,
                advice="save with every rank of its mesh; a sharded tensor cannot be part of a PerRank component, nor "
                "of one whose other values differ from rank to rank: wrap that in Shared if the first rank's count",
            )
    return holdings


def _agree(leaf: LeafPlan, part: PartEntry) -> bool:
    return leaf.dtype == part.dtype and leaf.shape == part.shape and leaf.sharded == part.sharded


def _keep_one_empty(holding: _Holding) -> None:
    box = Box((0,) * len(holding.plan.shape), holding.plan.shape)
    holders = [holder for held in holding.boxes.values() for holder in held]
    holding.boxes.clear()
    holding.boxes[box] = holders


def _disagreement(name: str, holding: _Holding, rank: int, part: PartEntry) -> UsageError:
    first_rank, first = holding.first
    declared = all(entry.sharded and entry.mesh < 0 for entry in (first, part))

    def describe(entry: PartEntry) -> str:
        if declared:
            return f"a shard of {list(entry.box.sizes)}"
        return f"{'sharded ' if entry.sharded else ''}{entry.dtype} {list(entry.shape)}"

    return UsageError(
        f"the leaf is {describe(first)} on rank {first_rank} and {describe(part)} on rank {rank}",
        leaf=name,
        advice="Sharded takes shards that have the same type and sizes on all ranks"
        if declared
        else "give pipeline_stage= to the manager when pipeline stages' names collide, or use PerRank",
    )
