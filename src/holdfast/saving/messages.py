"""The messages of a save: what each rank has, what the coordinator decides, what was written. Values, no torch."""

from __future__ import annotations

import msgspec

from holdfast.ondisk.manifest import ChunkRecord, FileRecord, MeshRecord
from holdfast.ondisk.regions import Box
from holdfast.state.trees import FrozenEntry

HOST = "cpu"
"""The device type of host memory."""
UNSAMPLED = ""
"""In place of a device type: the device has no accelerator here, or the ranks hold the leaf on different ones."""


class TreeEntry(msgspec.Struct, frozen=True, array_like=True):
    """A captured tree as the leader sees it. `values` travels only where the leader may have to merge."""

    component: str
    kind: str
    scope: str | None
    digest: str
    values: msgspec.Raw
    type: str = ""
    united: bool = False
    model: str = ""


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one tree as the leader sees it: the whole's type and shape, and the box that this rank holds.

    `mesh` is the index, in the inventory's `mesh_ranks`, of the mesh that cuts a DTensor; -1: no mesh does. `device` is
    the type of the device that holds the box, or `UNSAMPLED`.
    """

    tree: int
    path: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    sharded: bool
    led: bool = False
    mesh: int = -1
    device: str = HOST


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank could write, and what it leaves out on purpose. `mesh_ranks` are the ranks of each mesh."""

    trees: tuple[TreeEntry, ...]
    parts: tuple[PartEntry, ...]
    meshes: tuple[MeshRecord, ...]
    frozen: tuple[FrozenEntry, ...] = ()
    mesh_ranks: tuple[tuple[int, ...], ...] = ()


class ReplicaSet(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of leaves that the same ranks hold, whose content is compared.

    `choice` has for each of `ranks` which of `parts` are its parts of the inventory; all of `parts` are equally long.
    `device` is the type of the device that holds them on every rank, or `UNSAMPLED`. `quota` is how many of them are
    sampled at each save.
    """

    ranks: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    choice: tuple[int, ...]
    device: str
    quota: int = 0

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """Return the parts of this set on one of its ranks."""
        return self.parts[self.choice[self.ranks.index(rank)]]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the sampled replicas on one rank: of the save of `step`, by the number of their set."""

    round: int
    step: int
    digests: tuple[tuple[int, bytes], ...]


class WriteAssignment(msgspec.Struct, frozen=True, array_like=True):
    """What one rank writes: the scope of each of its trees, which trees' values, and which parts, by their index.
    `block_bytes` is the same on all ranks: how many bytes of a chunk one digest is of."""

    scopes: tuple[str, ...]
    trees: tuple[int, ...]
    parts: tuple[int, ...]
    block_bytes: int


class StateSummary(msgspec.Struct, frozen=True, array_like=True):
    """What a rank sends first. It is enough where the coordinator knows the structure: the plan of the last save holds.

    plan: the number of the plan that this rank has.
    room_bytes: the memory that is free for staging on its `machine`, for all ranks there, which are `ranks_here` at
        least; None when all that it needs is allocated already. held_bytes: what is allocated.
    unreported: the failure of the save before was not raised on this rank yet.
    comparison: the number of the replica sets that this rank has. samples: digests of some of them.
    argument_digests: of the arguments of the save, in the order of `COMPARED_ARGUMENTS`, each empty where the argument
        was not given; none for a single rank. asset_names: those of the assets that this rank's caller gave.
    """

    structure: str
    digests: tuple[str, ...]
    frozen: tuple[FrozenEntry, ...]
    plan: int
    room_bytes: int | None = None
    unreported: bool = False
    comparison: int = 0
    samples: tuple[Sample, ...] = ()
    held_bytes: int = 0
    machine: str = ""
    ranks_here: int = 1
    argument_digests: tuple[str, ...] = ()
    asset_names: tuple[str, ...] = ()


class SavePlan(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's decision about one save.

    committed: the step is committed already and there is nothing to write; `digest`, `size_bytes` and `sequence` are
        those of its checkpoint, as the leader has read it.
    number: that of the plan to follow. Without `assignments` it is the one that every rank has; 0 asks the ranks for
        their inventories.
    streamed: there is no memory to stage in, so the save is written before the call returns.
    unreported: raise the failure of the save before; no save starts.
    lease: the number under which the leader writes. lease_token: the token of its claim, which no other run has.
    ranks_here: with a new plan, for each rank how many of these ranks are on its machine.
    comparison: the number of the replica sets to sample from. replicas: those sets, where they are new; they are
        compared before the save starts. round: the number of the next sample.
    differing: the numbers of sets whose replicas differ: the ranks look for the leaves, and no save starts.
    """

    folder: str = ""
    number: int = 0
    assignments: tuple[WriteAssignment, ...] = ()
    committed: bool = False
    claim: str = ""
    streamed: bool = False
    unreported: bool = False
    lease: int = 0
    lease_token: str = ""
    comparison: int = 0
    round: int = 0
    replicas: tuple[ReplicaSet, ...] = ()
    differing: tuple[int, ...] = ()
    ranks_here: tuple[int, ...] = ()
    digest: str = ""
    size_bytes: int = 0
    sequence: int = 0


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wrote and made durable. `identities` are those of the files as they were then, by which the storage
    tells another file under the same name, see `StorageFeatures.stamp`; empty where it does not."""

    files: tuple[FileRecord, ...]
    chunks: tuple[tuple[str, ChunkRecord], ...]
    identities: tuple[str, ...] = ()
