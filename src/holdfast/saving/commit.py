"""Make a save a checkpoint: its facts and every rank's receipt enter, the committed checkpoint leaves. Leader only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from holdfast.errors import KeyExistsError, SaveFailedError
from holdfast.ondisk.manifest import BLOCK_BYTES, ChunkRecord, Manifest, TensorRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lease import require_number
from holdfast.runs.run_record import open_run
from holdfast.saving.facts import Facts, Listing
from holdfast.saving.messages import Receipt


def commit(
    facts: Facts, listing: Listing, receipts: Sequence[Receipt], catalog: Catalog, *, same_tensors: bool = False
) -> Checkpoint:
    """Write the manifest, last. What the receipts do not fully cover is not committed. `same_tensors`: a manifest with
    this listing and these chunks, but for their digests, was committed before."""
    tensors = _tensors(facts, listing, receipts)
    ancestry = facts.ancestry
    manifest = Manifest(
        run_id=open_run(catalog),
        folder=facts.folder,
        step=facts.step,
        sequence=max(catalog.next_sequence(), ancestry.lineage.next_sequence),
        parent=ancestry.parent,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        world_size=len(receipts),
        meshes=facts.meshes,
        block_bytes=BLOCK_BYTES,
        files=tuple(file for receipt in receipts for file in receipt.files),
        tensors=tensors,
        trees=listing.trees,
        versions=facts.versions,
        line=ancestry.lineage.ranges,
        segments=ancestry.lineage.segments,
        segment=ancestry.segment,
        **msgspec.structs.asdict(facts.metadata),
    )
    require_number(catalog.storage, facts.lease, facts.lease_token)
    try:
        return catalog.add(manifest, same_tensors=same_tensors)
    except KeyExistsError:
        # A process that took the run over in between has closed this attempt.
        require_number(catalog.storage, facts.lease, facts.lease_token)
        raise


def _tensors(facts: Facts, listing: Listing, receipts: Sequence[Receipt]) -> tuple[TensorRecord, ...]:
    """Return the listed leaves with the chunks that the ranks wrote. What groups them is gone when the manifest, which
    may be as large, is encoded."""
    chunks: dict[str, list[ChunkRecord]] = {leaf.name: [] for leaf in listing.leaves}
    for receipt in receipts:
        for leaf, chunk in receipt.chunks:
            chunks[leaf].append(chunk)
    for name, written in chunks.items():
        if not written:
            raise SaveFailedError("no rank reported writing it", step=facts.step, leaf=name)
    return tuple(msgspec.structs.replace(leaf, chunks=tuple(chunks[leaf.name])) for leaf in listing.leaves)
