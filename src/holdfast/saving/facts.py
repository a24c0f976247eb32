"""The facts of a manifest besides its files, and which leaves and trees it lists. Values only, all of them encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.ondisk.manifest import MeshRecord, TensorRecord, TreeRecord, UserMetadata
from holdfast.saving.training_lineage import Ancestry

if TYPE_CHECKING:
    # The writer imports this module, plans nothing, and should start fast.
    from holdfast.saving.plan import GlobalPlan


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a manifest besides its files. The commit assigns the sequence number. `lease` is the number under
    which this process writes, and `lease_token` tells its claim from another's; nothing is committed under one that has
    been taken over. `links`: move `latest`. `block_bytes`: how many bytes of a chunk one digest is of."""

    step: int
    folder: str
    metadata: UserMetadata
    ancestry: Ancestry
    meshes: tuple[MeshRecord, ...]
    versions: dict[str, str]
    lease: int = 0
    lease_token: str = ""
    links: bool = True
    block_bytes: int


class Listing(msgspec.Struct, frozen=True):
    """The leaves and trees of the plan; the leaves still without their chunks."""

    leaves: tuple[TensorRecord, ...]
    trees: tuple[TreeRecord, ...]

    @classmethod
    def of(cls, planned: GlobalPlan, *, first_part: int = 0) -> Listing:
        """Return what the manifest lists of a plan, in a save whose files have names from this part on."""
        leaves = tuple(
            TensorRecord(name=leaf.name, dtype=leaf.dtype, shape=leaf.shape, chunks=(), sharded=leaf.sharded)
            for leaf in planned.leaves
        )
        trees = tuple(
            TreeRecord(
                component=tree.component,
                kind=tree.kind,
                file=tree.file_in(first_part),
                scope=tree.scope,
                type=tree.type,
                model=tree.model,
            )
            for tree in planned.trees
        )
        return cls(leaves, trees)
