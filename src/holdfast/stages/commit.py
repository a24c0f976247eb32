"""Make a save a checkpoint: the plan and every rank's receipt enter, the committed checkpoint leaves. Leader only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from holdfast.catalog import Catalog, Checkpoint
from holdfast.errors import SaveFailedError
from holdfast.records.codec import Json
from holdfast.records.manifest import BLOCK_BYTES, ChunkRecord, Manifest, MeshRecord, TensorRecord, TreeRecord
from holdfast.records.state import Receipt


@dataclass(frozen=True, slots=True)
class Facts:
    """What a manifest says besides its files: all of it already encoded."""

    run_id: str
    folder: str
    step: int
    sequence: int
    parent: str | None
    meshes: Sequence[MeshRecord]
    metrics: Mapping[str, Json]
    progress: Mapping[str, Json]
    extra: Mapping[str, Json]
    config: Json
    guards: Mapping[str, Json]
    tags: Sequence[str]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Listing:
    """The leaves and trees that the plan promised; the leaves still without their chunks."""

    leaves: Sequence[TensorRecord]
    trees: Sequence[TreeRecord]


def commit(facts: Facts, listing: Listing, receipts: Sequence[Receipt], catalog: Catalog) -> Checkpoint:
    """Write the manifest, last. What the receipts do not fully cover is not committed."""
    chunks: dict[str, list[ChunkRecord]] = {leaf.name: [] for leaf in listing.leaves}
    for receipt in receipts:
        for leaf, chunk in receipt.chunks:
            chunks[leaf].append(chunk)
    for name, written in chunks.items():
        if not written:
            raise SaveFailedError("no rank wrote it", step=facts.step, leaf=name)
    manifest = Manifest(
        run_id=facts.run_id,
        folder=facts.folder,
        step=facts.step,
        sequence=facts.sequence,
        parent=facts.parent,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        world_size=len(receipts),
        meshes=tuple(facts.meshes),
        block_bytes=BLOCK_BYTES,
        files=tuple(file for receipt in receipts for file in receipt.files),
        tensors=tuple(msgspec.structs.replace(leaf, chunks=tuple(chunks[leaf.name])) for leaf in listing.leaves),
        trees=tuple(listing.trees),
        metrics=dict(facts.metrics),
        progress=dict(facts.progress),
        extra=dict(facts.extra),
        config=facts.config,
        guards=dict(facts.guards),
        tags=tuple(facts.tags),
        versions=dict(facts.versions),
    )
    return catalog.add(manifest)


__all__ = ["Facts", "Listing", "commit"]
