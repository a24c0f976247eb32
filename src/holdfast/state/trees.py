"""The state of one component as a tree of encoded values and its tensors by path. Records only, no torch.

The live tensors travel in `CapturedTree`, which never leaves its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json
from holdfast.ondisk.manifest import MeshRecord
from holdfast.ondisk.regions import Box

TreeKind = Literal["module", "optimizer", "values"]


@dataclass(frozen=True, slots=True)
class CapturedTree:
    """One component's state on this rank: its values, encoded, and its tensors by their path in them.

    `scope` is None when the ranks must compare their states to know whether they share one. `led` are the tensors whose
    replicas may differ from rank to rank, where the first rank's is the one that counts. `united`: the ranks may hold
    different parts of the tree, and all of them are stored. `model` is the component that has all parameters of an
    optimizer.
    """

    component: str
    kind: TreeKind
    scope: str | None
    values: Json
    tensors: Mapping[str, Any]
    led: Set[str] = frozenset()
    type: str = ""
    united: bool = False
    model: str = ""

    @property
    def name(self) -> str:
        return paths.tree_name(self.component, self.scope or "")


@dataclass(frozen=True, slots=True)
class CarriedTree:
    """One tree of a component that is not attached yet, as a checkpoint had it, with the tensors that this rank writes:
    each is all of its leaf. `sharded` are the leaves that were cut over one of the `meshes`."""

    tree: CapturedTree
    sharded: Set[str]
    meshes: Set[MeshRecord]


class FrozenEntry(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a parameter that is not stored, by its fingerprint. Fingerprints of a tensor's pieces add up."""

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    fingerprint: int
