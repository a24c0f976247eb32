"""Turn live training objects into named leaves. Knows torch; knows nothing of files, plans or formats.

Nothing is changed by being captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.components import Trainable
from holdfast.errors import UsageError
from holdfast.live import live_tree
from holdfast.naming import parameter_names, scope_of
from holdfast.records import layout
from holdfast.records.boxes import whole
from holdfast.records.state import CapturedTree, FrozenEntry, Inventory, PartEntry, TreeEntry
from holdfast.tensors import dtype_name, fingerprint, held_piece, host_pieces, is_sharded, mesh_of, sample_of

_PIECE_BYTES = 32 << 20


def capture(components: Mapping[str, Any], *, rank: int, size: int, pipeline_stage: int | None) -> list[CapturedTree]:
    """The state of every component as it is now, its tensors still the live ones."""
    return [
        live_tree(name, component, components, scope_of(component, rank=rank, size=size, pipeline_stage=pipeline_stage))
        for name, component in components.items()
    ]


def take_inventory(
    trees: list[CapturedTree], frozen: tuple[FrozenEntry, ...], *, size: int
) -> tuple[Inventory, list[torch.Tensor]]:
    """What the leader must know of a capture in order to plan, and the memory behind each of its parts, in order."""
    entries = tuple(_tree_entry(tree, size) for tree in trees)
    parts: list[PartEntry] = []
    memory: list[torch.Tensor] = []
    meshes = set()
    for index, tree in enumerate(trees):
        for path, tensor in tree.tensors.items():
            shape = tuple(tensor.shape)
            if is_sharded(tensor):
                box, local = held_piece(tensor, leaf=layout.leaf_name(tree.component, path))
                meshes.add(mesh_of(tensor))
            else:
                box, local = whole(shape), tensor
            parts.append(PartEntry(index, path, dtype_name(tensor), shape, box, local is not tensor, path in tree.led))
            memory.append(local)
    return Inventory(entries, tuple(parts), tuple(sorted(meshes)), frozen), memory


def take_frozen(components: Mapping[str, Any], *, anew: bool = False) -> tuple[FrozenEntry, ...]:
    """The fingerprint of every parameter that a `Trainable` component leaves out; `anew` trusts no earlier reading."""
    if anew:
        _fingerprints.clear()
    entries = []
    for name, component in components.items():
        if isinstance(component, Trainable):
            names = parameter_names(component.component)
            for parameter in component.component.parameters():
                if not parameter.requires_grad:
                    entries.append(_frozen_entry(name, names[id(parameter)], parameter))
    return tuple(entries)


def _frozen_entry(component: str, name: str, parameter: torch.nn.Parameter) -> FrozenEntry:
    key = (parameter._version, parameter.data_ptr(), sample_of(parameter))
    known: tuple[object, FrozenEntry] | None = _fingerprints.get(parameter)
    if known is not None and known[0] == key:
        return known[1]
    box, local = held_piece(parameter, leaf=f"{component}.{name}")
    shape = tuple(parameter.shape)
    entry = FrozenEntry(component, name, str(parameter.dtype), shape, box, fingerprint(local, box, shape))
    _fingerprints[parameter] = (key, entry)
    return entry


# A frozen parameter is read through once and not at every save, unless its version or a sample of its content changed.
# The sample is there for writes through `.data`, which the version does not count.
_fingerprints = WeakIdKeyDictionary()


def _tree_entry(tree: CapturedTree, size: int) -> TreeEntry:
    try:
        text = msgspec.json.encode(tree.values)
    except RecursionError as error:
        raise UsageError("the values are nested too deep", component=tree.component) from error
    if size == 1:
        return TreeEntry(tree.component, tree.kind, tree.scope, "", msgspec.Raw(b"\xc0"), tree.type)
    mergeable = tree.kind != "values" and tree.scope == ""
    values = msgspec.Raw(msgspec.msgpack.encode(tree.values)) if mergeable else msgspec.Raw(b"\xc0")
    return TreeEntry(tree.component, tree.kind, tree.scope, _digest(tree, text), values, tree.type)


def _digest(tree: CapturedTree, text: bytes) -> str:
    """What two ranks compare to know whether their states are one. Tensors count only where that is the question."""
    state = blake3(text)
    if tree.scope is None:
        for path, tensor in tree.tensors.items():
            state.update(path.encode())
            if not is_sharded(tensor):
                for piece in host_pieces(tensor.detach(), _PIECE_BYTES):
                    state.update(piece)
    return state.hexdigest()
