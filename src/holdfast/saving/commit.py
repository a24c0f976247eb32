"""Make a save a checkpoint: its facts and every rank's receipt enter, the committed checkpoint leaves. Leader only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from holdfast.errors import DamagedRecordError, KeyExistsError, KeyMissingError, SaveFailedError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import ChunkRecord, Manifest, TensorRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lease import require_number
from holdfast.runs.run_record import open_run
from holdfast.saving.facts import Facts, Listing
from holdfast.saving.messages import Receipt
from holdfast.storage.base import features_of


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
        block_bytes=facts.block_bytes,
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
    _require_attempt(facts, catalog)
    _require_files(facts, receipts, catalog)
    try:
        return catalog.add(manifest, same_tensors=same_tensors)
    except KeyExistsError:
        # A process that took the run over in between has closed this attempt.
        require_number(catalog.storage, facts.lease, facts.lease_token)
        raise


def _require_attempt(facts: Facts, catalog: Catalog) -> None:
    """Raise if the folder of the attempt was removed meanwhile, as by hand: the manifest would make it again, and be a
    checkpoint without its files, for which retention removes the one before."""
    try:
        catalog.attempts.read(facts.folder)
    except KeyMissingError as error:
        raise SaveFailedError(
            f"the folder {facts.folder} was removed while the save was written to it",
            step=facts.step,
            run=catalog.storage.url,
            advice="save again, and leave the folder of a save that is under way alone",
        ) from error
    except DamagedRecordError:
        pass  # it is there


def _require_files(facts: Facts, receipts: Sequence[Receipt], catalog: Catalog) -> None:
    """Raise if a file of any rank was removed, replaced or cut short meanwhile, as by hand: the checkpoint would be
    damaged from its first moment, and retention removes the one before for it. Each name is looked up once, and not
    before its rank has said that it is there: a network file system may remember for long that a name was not."""
    stamp = features_of(catalog.storage).stamp
    if stamp is None:
        return
    # Of this machine's files alone: another one may number the files of the same disk in another way.
    own = dict(zip([file.name for file in receipts[0].files], receipts[0].identities, strict=False))
    for rank, receipt in enumerate(receipts):
        for file in receipt.files:
            try:
                size_bytes, identity = stamp(paths.key(facts.folder, file.name))
            except KeyMissingError:
                problem = "is not there any more: it was removed, or that rank writes to another disk"
            else:
                if size_bytes == file.size_bytes and identity == (own.get(file.name) or identity):
                    continue
                problem = "was changed after it was written"
            # A process that took the run over in between has closed this attempt, and removed its files.
            require_number(catalog.storage, facts.lease, facts.lease_token)
            raise SaveFailedError(
                f"{paths.key(facts.folder, file.name)} of rank {rank} {problem}",
                step=facts.step,
                run=catalog.storage.url,
                advice="save again, and leave the folder of a save that is under way alone; give all ranks the same "
                "run, on storage that all of them share",
            )


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
