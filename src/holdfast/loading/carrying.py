"""Carry the state of components that are not attached yet from the checkpoint that was restored into the next saves.

A checkpoint and names of components enter; this rank's share of their trees, tensors in host memory, leaves. Nothing is
decoded: the values stay the text that was stored, and the tensors keep their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError
from holdfast.loading.files import check_files, parse_texts, read_values
from holdfast.loading.read import read
from holdfast.loading.requests import Request
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.paths import is_rank_scope
from holdfast.ondisk.regions import whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.state.tensors import torch_dtype
from holdfast.state.trees import CapturedTree, CarriedTree

__all__ = ["bound_to_ranks", "carry", "carried_guards"]


def bound_to_ranks(checkpoint: Checkpoint, components: Sequence[str], size: int) -> tuple[str, ...]:
    """Return the components whose state is of each rank of another number of ranks, so that no save can hold it."""
    if checkpoint.world_size == size:
        return ()
    per_rank = {tree.component for tree in checkpoint.head.trees if _is_per_rank(tree)}
    return tuple(name for name in components if name in per_rank)


def carried_guards(checkpoint: Checkpoint, components: Sequence[str]) -> dict[str, Any]:
    """Return the fingerprints of the frozen bases that belong to these components."""
    names = {f"frozen:{name}" for name in components}
    return {name: value for name, value in checkpoint.head.guards.items() if name in names}


def carry(
    checkpoint: Checkpoint, components: Sequence[str], *, rank: int, size: int, checked: bool
) -> tuple[CarriedTree, ...]:
    """Read this rank's share of the components' state. Every rank calls it with the same arguments but for `rank`.

    Every rank has the trees that all ranks share, with the tensors that fall to it, and the trees of its own scope.
    """
    manifest = checkpoint.manifest
    wanted = set(components)
    every = [tree for tree in manifest.trees if tree.component in wanted]
    trees = [tree for tree in every if _falls_to(tree, rank, size)]
    leaves = _share_out(manifest.tensors, every, size)[rank]
    leaves_of: dict[str, list[TensorRecord]] = {tree.name: [] for tree in trees}
    for leaf in leaves:
        leaves_of[_tree_of(leaf)].append(leaf)
    tensors = _read_tensors(checkpoint, leaves, checked=checked, readers=size)
    values = {
        file: parse_texts(read_values(checkpoint, file, checked=checked), file)
        for file in {tree.file for tree in trees}
    }
    meshes = frozenset(manifest.meshes if any(leaf.sharded for leaf in leaves) else ())
    carried = []
    for tree in trees:
        if tree.name not in values[tree.file]:
            raise CorruptCheckpointError(f"the file has no values of '{tree.name}'", file=tree.file)
        own = {leaf.name[len(tree.name) + 1 :]: leaf for leaf in leaves_of[tree.name]}
        held = {path: tensors[leaf.name] for path, leaf in own.items()}
        kind: Any = tree.kind
        text: Any = values[tree.file][tree.name]
        captured = CapturedTree(tree.component, kind, tree.scope, text, held, type=tree.type, model=tree.model)
        sharded = frozenset(path for path, leaf in own.items() if leaf.sharded)
        carried.append(CarriedTree(captured, sharded, meshes))
    return tuple(carried)


def _is_per_rank(tree: TreeRecord) -> bool:
    return is_rank_scope(tree.scope)


def _falls_to(tree: TreeRecord, rank: int, size: int) -> bool:
    return not _is_per_rank(tree) or _rank_of(tree.scope, size) == rank


def _rank_of(scope: str, size: int) -> int:
    return int(scope.removeprefix("rank-")) % size


def _tree_of(leaf: TensorRecord) -> str:
    return leaf.name.partition(".")[0]


def _share_out(leaves: Sequence[TensorRecord], trees: Sequence[TreeRecord], size: int) -> list[list[TensorRecord]]:
    """Give each leaf of the trees, whole, to one rank: a rank's own state to it, others to the rank with the least."""
    scopes = {tree.name: tree.scope for tree in trees}
    load = [0] * size
    shares: list[list[TensorRecord]] = [[] for _ in range(size)]
    for leaf in leaves:
        scope = scopes.get(_tree_of(leaf))
        if scope is None:
            continue
        rank = _rank_of(scope, size) if is_rank_scope(scope) else load.index(min(load))
        shares[rank].append(leaf)
        load[rank] += leaf.size_bytes
    return shares


def _read_tensors(
    checkpoint: Checkpoint, leaves: Sequence[TensorRecord], *, checked: bool, readers: int
) -> Mapping[str, torch.Tensor]:
    # The sizes first: a manifest alone is no reason to allocate memory.
    problems = check_files(checkpoint, {chunk.file for leaf in leaves for chunk in leaf.chunks})
    if not problems:
        tensors = {leaf.name: torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype)) for leaf in leaves}
        wanted = [Request(leaf, whole(leaf.shape), tensors[leaf.name], True) for leaf in leaves if 0 not in leaf.shape]
        problems = read(checkpoint, wanted, checked=checked, readers=readers)
    if problems:
        raise CorruptCheckpointError(
            "the state of components that are not attached yet cannot be carried on",
            run=checkpoint.storage.url,
            problems=[str(problem) for problem in problems],
            advice="restore another checkpoint, or leave the components out with skip= in the LoadStrategy",
        )
    return tensors
