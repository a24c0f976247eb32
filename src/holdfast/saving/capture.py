"""Turn live training objects into named leaves. Knows torch; knows nothing of files, plans or formats.

Nothing is changed by being captured.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3

from holdfast.errors import UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import MeshRecord
from holdfast.ondisk.regions import Cut, whole
from holdfast.ranks.base import call_each
from holdfast.saving.messages import UNSAMPLED, Inventory, PartEntry, TreeEntry
from holdfast.state.devices import ACCELERATORS
from holdfast.state.frozen import take_frozen
from holdfast.state.names import cut_at, cuts_of, models_of, random_state_last, scope_of, unwrap
from holdfast.state.optimizers import makes_state_when_asked
from holdfast.state.state_dicts import component_state, tree_of
from holdfast.state.structure_cache import Remembered, remember
from holdfast.state.tensors import (
    dtype_name,
    held_piece,
    host_address,
    host_pieces,
    is_host_memory,
    is_sharded,
    mesh_of,
    ranks_of,
    whole_shape,
)
from holdfast.state.trees import CapturedTree, CarriedTree, FrozenEntry

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Capture:
    """The state of every component as it is now, its tensors still the live ones.

    `texts` are the values of each tree as JSON, `digests` what ranks compare of them. `parts` are the tensors as the
    leader must know them, and `memory` is what lies behind each of them, on all of the `devices`; `addresses` are where
    its bytes lie in host memory as a file has them, 0 where torch has to copy them, and `storages` keep that memory
    alive, whatever the tensors are given meanwhile. `structure` is a digest of all this
    that does not change from save to save by itself.
    """

    trees: list[CapturedTree]
    texts: list[bytes]
    digests: tuple[str, ...]
    parts: tuple[PartEntry, ...]
    meshes: tuple[MeshRecord, ...]
    frozen: tuple[FrozenEntry, ...]
    memory: list[torch.Tensor]
    addresses: list[int]
    storages: list[Any]
    devices: frozenset[torch.device]
    structure: str
    mesh_ranks: tuple[tuple[int, ...], ...] = ()

    def inventory(self) -> Inventory:
        """Return all that the coordinator needs in order to plan."""
        entries = tuple(map(_tree_entry, self.trees, self.texts, self.digests))
        return Inventory(entries, self.parts, self.meshes, self.frozen, self.mesh_ranks)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the last capture of a component found. `kind`: the class of the object itself."""

    kind: type
    remembered: Remembered | None
    parts: tuple[PartEntry, ...]
    meshes: frozenset[MeshRecord]
    devices: frozenset[torch.device]


class _Taken(NamedTuple):
    """One tree, what is known of it, and the memory of its tensors."""

    tree: CapturedTree
    known: _Known
    memory: Collection[torch.Tensor]
    addresses: Sequence[int]


class Capturer:
    """Captures again and again, and recognises what it has captured before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._heads: list[Any] = []
        self._parts: list[tuple[PartEntry, ...]] = []
        self._every_part: tuple[PartEntry, ...] = ()
        self._structure = ""
        self._mesh_ranks: dict[tuple[int, ...], int] = {}

    def capture(
        self,
        components: Mapping[str, Any],
        *,
        rank: int,
        size: int,
        pipeline_stage: int | None,
        carried: Sequence[CarriedTree] = (),
        only: Collection[str] | None = None,
    ) -> Capture:
        """Capture the components, and, after them, what is `carried` on from an earlier checkpoint. With `only`, the
        others give no more than the names of what optimizers refer to."""
        trees: list[CapturedTree] = []
        parts: list[tuple[PartEntry, ...]] = []
        memory: list[torch.Tensor] = []
        addresses: list[int] = []
        storages: list[Any] = []
        meshes: set[MeshRecord] = set()
        devices: set[torch.device] = set()
        chosen = {name: one for name, one in components.items() if only is None or name in only}
        order = list(random_state_last(chosen))

        def take(index: int) -> _Taken:
            name, component = order[index]
            scope = scope_of(component, rank=rank, size=size, pipeline_stage=pipeline_stage)
            return self._take(index, name, components, scope, storages)

        for (name, _), taken in zip(order, call_each(take, range(len(order))), strict=True):
            known = self._known[name] = taken.known
            trees.append(taken.tree)
            parts.append(known.parts)
            meshes |= known.meshes
            devices |= known.devices
            memory += taken.memory
            addresses += taken.addresses
        for index, one in enumerate(carried, len(trees)):
            trees.append(one.tree)
            parts.append(self._carried_parts(index, one))
            meshes |= one.meshes
            memory += one.tree.tensors.values()
            addresses += _addresses(one.tree.tensors.values(), storages)
            devices |= {tensor.device for tensor in one.tree.tensors.values()}
        texts = [_text(tree) for tree in trees]
        digests = tuple(_digest(tree, text) if size > 1 else "" for tree, text in zip(trees, texts, strict=True))
        ordered = tuple(sorted(meshes))
        structure = self._digest_structure(trees, parts, ordered)
        return Capture(
            trees,
            texts,
            digests,
            self._every_part,
            ordered,
            take_frozen(chosen),
            memory,
            addresses,
            storages,
            frozenset(devices),
            structure,
            tuple(self._mesh_ranks),
        )

    def _take(
        self, index: int, name: str, components: Mapping[str, Any], scope: str | None, storages: list[Any]
    ) -> _Taken:
        component = components[name]
        kind = type(unwrap(component))
        state = component_state(name, component, components)
        _warn_of_made_state(name, component)
        known = self._known.get(name)
        if known is not None and known.remembered is not None and known.kind is kind:
            found = known.remembered.recognise(state, storages)
            if (
                found is not None
                and found.tree.scope == scope
                and (not known.parts or known.parts[0].tree == index)
                and (_has_one_model(components) or found.tree.model == _model_of(component, components))
            ):
                return _Taken(found.tree, known, _memory(found.tree, known.meshes), found.addresses)
        tree = replace(tree_of(name, component, state, scope), model=_model_of(component, components))
        parts, meshes = _parts_of(index, tree, cuts_of(name, components), self._mesh_ranks)
        if known is not None and known.parts == parts:
            parts = known.parts
        memory = _memory(tree, meshes)
        devices = frozenset(tensor.device for tensor in memory)
        return _Taken(
            tree, _Known(kind, remember(tree, state), parts, meshes, devices), memory, _addresses(memory, storages)
        )

    def _carried_parts(self, index: int, carried: CarriedTree) -> tuple[PartEntry, ...]:
        known = self._known.get(carried.tree.name)
        parts = tuple(
            PartEntry(
                index,
                path,
                dtype_name(tensor),
                tuple(tensor.shape),
                whole(tuple(tensor.shape)),
                path in carried.sharded,
            )
            for path, tensor in carried.tree.tensors.items()
        )
        if known is None or known.parts != parts:
            known = self._known[carried.tree.name] = _Known(type(None), None, parts, frozenset(), frozenset())
        return known.parts

    def _digest_structure(
        self, trees: list[CapturedTree], parts: list[tuple[PartEntry, ...]], meshes: tuple[MeshRecord, ...]
    ) -> str:
        """Return a digest of the structure, computed only when something is new: a recognised tree keeps its parts."""
        heads = [meshes, *((tree.component, tree.kind, tree.scope, tree.type, tree.model) for tree in trees)]
        same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        if not same or heads != self._heads:
            self._heads, self._parts = heads, parts
            self._every_part = tuple(part for some in parts for part in some)
            self._structure = blake3(msgspec.msgpack.encode((heads, parts))).hexdigest()
        return self._structure


def _warn_of_made_state(name: str, component: Any) -> None:
    inner = unwrap(component)
    if isinstance(inner, torch.optim.Optimizer) and makes_state_when_asked(inner):
        logger.warning(
            "component '%s': %s has no state yet, and its state_dict() made one by a step; a run that resumes from "
            "this checkpoint counts that step, and does not continue exactly as this one; save after the first step",
            name,
            type(inner).__name__,
        )


def _parts_of(
    index: int, tree: CapturedTree, cuts: Mapping[str, Cut], mesh_ranks: dict[tuple[int, ...], int]
) -> tuple[tuple[PartEntry, ...], frozenset[MeshRecord]]:
    """Return the parts of a tree and their meshes; what is new among the meshes' ranks gets the next number."""
    parts = []
    meshes = set()
    for path, tensor in tree.tensors.items():
        cut, mesh = cut_at(cuts, path, tensor), -1
        box, _ = held_piece(tensor, leaf=paths.leaf_name(tree.component, path), cut=cut)
        if is_sharded(tensor):
            meshes.add(mesh_of(tensor))
            mesh = mesh_ranks.setdefault(ranks_of(tensor), len(mesh_ranks))
        parts.append(
            PartEntry(
                index,
                path,
                dtype_name(tensor),
                whole_shape(tensor, cut),
                box,
                sharded=cut is not None or is_sharded(tensor),
                led=path in tree.led,
                mesh=mesh,
                device=_device_type(tensor),
            )
        )
    return tuple(parts), frozenset(meshes)


def _device_type(tensor: torch.Tensor) -> str:
    known = tensor.is_cpu or ACCELERATORS.of(tensor.device) is not None
    return tensor.device.type if known else UNSAMPLED


def _has_one_model(components: Mapping[str, Any]) -> bool:
    return sum(isinstance(unwrap(one), torch.nn.Module) for one in components.values()) == 1


def _model_of(component: Any, components: Mapping[str, Any]) -> str:
    """Return the model that has all parameters of an optimizer; empty where there is none."""
    models = models_of(component, components)
    return models[0] if models else ""


def _addresses(memory: Collection[torch.Tensor], storages: list[Any]) -> list[int]:
    """Return where the bytes of each tensor lie, and note what keeps them there."""
    storages += [tensor.untyped_storage() for tensor in memory if is_host_memory(tensor)]
    return list(map(host_address, memory))


def _memory(tree: CapturedTree, meshes: Collection[MeshRecord]) -> Collection[torch.Tensor]:
    """Return what this rank has of each tensor of a tree."""
    tensors = tree.tensors.values()
    return [one.to_local().detach() if is_sharded(one) else one for one in tensors] if meshes else tensors


def _text(tree: CapturedTree) -> bytes:
    try:
        return msgspec.json.encode(tree.values)
    except RecursionError as error:
        raise UsageError("the values are nested too deep", component=tree.component) from error


def _tree_entry(tree: CapturedTree, text: bytes, digest: str) -> TreeEntry:
    mergeable = digest and tree.scope == "" and (tree.united or tree.kind != "values")
    values = msgspec.msgpack.encode(msgspec.json.decode(text)) if mergeable else b"\xc0"
    return TreeEntry(
        tree.component, tree.kind, tree.scope, digest, msgspec.Raw(values), tree.type, tree.united, tree.model
    )


def _digest(tree: CapturedTree, text: bytes) -> str:
    """Return what two ranks compare to know whether their states are the same. Tensors count where it is undecided."""
    state = blake3(text)
    if tree.scope is None:
        for path, tensor in tree.tensors.items():
            state.update(path.encode())
            if not is_sharded(tensor):
                for piece in host_pieces(tensor.detach()):
                    state.update(piece)
    return state.hexdigest()
