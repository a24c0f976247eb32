"""Commit what all ranks wrote, on the coordinator. Their write results enter, a checkpoint leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.errors import UsageError
from holdfast.formats.attempt import Attempt, facts_of, this_torch
from holdfast.formats.dcp.assignments import StoredTensor, StoredValue
from holdfast.formats.dcp.layout import LOOSE, NOTE, is_leaf, nested_items, trees_of
from holdfast.ondisk import paths
from holdfast.ondisk.codec import encode
from holdfast.ondisk.manifest import TensorRecord, TreeRecord, UserMetadata
from holdfast.ondisk.regions import Box, cover_exactly
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.saving.commit import commit
from holdfast.saving.facts import Listing
from holdfast.saving.files import values_file
from holdfast.saving.messages import Receipt
from holdfast.saving.write import write

__all__ = ["commit_results", "place_of"]


def commit_results(
    attempt: Attempt, save_id: str, key_paths: Any, results: list[list[WriteResult]], catalog: Catalog
) -> Checkpoint:
    loose = _one_loose_component(results)
    leaves = _whole_leaves([result.storage_data.leaf for result in _of(results, StoredTensor)])
    values = {result.index.fqn: result.storage_data.value for result in _of(results, StoredValue)}
    fqns = {result.index.fqn: result.storage_data for rank in results for result in rank}
    trees, flat = trees_of(nested_items(fqns, loose, key_paths), loose, values)
    receipts = [_receipt(rank) for rank in results]
    if trees:
        file = values_file(paths.SHARED_VALUES, trees)
        shared = write(attempt.folder, (), [file], catalog.storage)
        receipts[0] = msgspec.structs.replace(receipts[0], files=(*receipts[0].files, *shared.files))
    records = tuple(TreeRecord(component=name, kind="values", file=paths.SHARED_VALUES) for name in trees)
    note = {
        "loose": loose if loose in trees else None,
        "flat": flat,
        "whole": sorted(fqn for fqn, value in values.items() if not is_leaf(value)),
        "save_id": save_id,
    }
    metadata = UserMetadata(extra={NOTE: encode(note, path=NOTE, on_tensor=None)})
    facts = facts_of(attempt, metadata, this_torch())
    return commit(facts, Listing(tuple(leaves), records), receipts, catalog)


def _one_loose_component(results: list[list[WriteResult]]) -> str:
    """Return the component of the keys that name none, when all ranks used the same one."""
    names = {result.storage_data.loose for rank in results for result in rank}
    if len(names) > 1:
        raise UsageError(
            f"the plans of some ranks come from the planner's cache, those of others are new, and they store keys "
            f"without a component under different names: {', '.join(sorted(names))}",
            advice="save this state dict with enable_plan_caching=False",
        )
    return names.pop() if names else LOOSE


def _of(results: list[list[WriteResult]], kind: type) -> list[WriteResult]:
    return [result for rank in results for result in rank if isinstance(result.storage_data, kind)]


def _receipt(results: Sequence[WriteResult]) -> Receipt:
    stored = [result.storage_data for result in results if isinstance(result.storage_data, StoredTensor)]
    files = {one.file.name: one.file for one in stored}
    return Receipt(tuple(files.values()), tuple((one.leaf.name, one.leaf.chunks[0]) for one in stored))


def _whole_leaves(pieces: Sequence[TensorRecord]) -> list[TensorRecord]:
    """Return each leaf once, still without its chunks, when its pieces agree and make up all of it."""
    leaves: dict[str, TensorRecord] = {}
    boxes: dict[str, list[Box]] = {}
    for piece in pieces:
        bare = msgspec.structs.replace(piece, chunks=())
        if leaves.setdefault(piece.name, bare) != bare:
            raise UsageError("the ranks plan different types or shapes of it", leaf=piece.name)
        boxes.setdefault(piece.name, []).append(piece.chunks[0].box)
    for name, leaf in leaves.items():
        wrong = cover_exactly(boxes[name], leaf.shape)
        if wrong is not None:
            raise UsageError(f"the planner's items are not all of it: {wrong}", leaf=name)
    return list(leaves.values())


def place_of(result: WriteResult) -> _StorageInfo:
    """Return where an item is stored, as PyTorch's own storage describes it, relative to the checkpoint's folder."""
    stored = result.storage_data
    if isinstance(stored, StoredTensor):
        return _StorageInfo(stored.leaf.chunks[0].file, stored.leaf.chunks[0].start, stored.leaf.size_bytes)
    return _StorageInfo(paths.SHARED_VALUES, 0, 0)
