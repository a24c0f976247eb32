"""Write the items of one rank's plan: tensors to files, values encoded for the coordinator. Results leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.errors import UsageError
from holdfast.formats.dcp.assignments import StoredTensor, StoredValue, WriteAssignment
from holdfast.formats.dcp.layout import leaf_name
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, encode
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.manifest import BLOCK_BYTES, ChunkRecord, TensorRecord
from holdfast.ondisk.regions import Box
from holdfast.ondisk.safetensors import FramedChunk
from holdfast.runs.catalog import Catalog
from holdfast.saving.files import streamed_files
from holdfast.saving.outcome import discard_files
from holdfast.saving.write import write
from holdfast.state.tensors import check_storable, host_pieces

__all__ = ["without_empty_pieces", "write_items"]


def without_empty_pieces(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans without empty pieces of an uneven cut; of a tensor that is all empty, one piece stays."""
    seen: set[str] = set()

    def wanted(item: WriteItem) -> bool:
        if item.type == WriteItemType.BYTE_IO or 0 not in item.tensor_data.chunk.sizes:
            return True
        first = 0 in item.tensor_data.size and item.index.fqn not in seen
        seen.add(item.index.fqn)
        return first

    return [replace(plan, items=[item for item in plan.items if wanted(item)]) for plan in plans]


def write_items(
    items: Sequence[WriteItem], planner: SavePlanner, assignment: WriteAssignment, catalog: Catalog
) -> list[WriteResult]:
    values = [
        (item, StoredValue(_encoded(item, planner), assignment.loose))
        for item in items
        if item.type == WriteItemType.BYTE_IO
    ]
    tensors = {_chunk_of(item, assignment.loose): item for item in items if item.type != WriteItemType.BYTE_IO}
    sources = {chunk: partial(_pieces, tensors[chunk], chunk, planner) for chunk in _one_of_each_leaf_first(tensors)}
    files = streamed_files(sources, rank=assignment.rank, block_bytes=BLOCK_BYTES)
    created: list[str] = []
    try:
        receipt = write(assignment.folder, files, (), catalog.storage, on_created=created.append)
    except BaseException:
        # The claim stays while other ranks may still write below the name that it holds.
        discard_files([*created, paths.ATTEMPT] if assignment.size == 1 else created, assignment.folder, catalog)
        raise
    results = [WriteResult(item.index, 0, stored) for item, stored in values]
    records = {file.name: file for file in receipt.files}
    by_place = {(chunk.leaf, chunk.box): item for chunk, item in tensors.items()}
    for leaf, record in receipt.chunks:
        item = by_place[leaf, record.box]
        stored = StoredTensor(_record_of(leaf, item, record), records[record.file], assignment.loose)
        results.append(WriteResult(item.index, stored.leaf.size_bytes, stored))
    return results


def _encoded(item: WriteItem, planner: SavePlanner) -> Json:
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise UsageError(
            f"the planner {type(planner).__name__} has no lookup_object(), and gives values only as pickled bytes",
            leaf=item.index.fqn,
            advice="derive it from DefaultSavePlanner; a Holdfast checkpoint holds no pickle",
        )
    return encode(look_up(item.index), path=item.index.fqn, on_tensor=None)


def _chunk_of(item: WriteItem, loose: str) -> FramedChunk:
    leaf = leaf_name(item.index.fqn, loose)
    data = item.tensor_data
    dtype = _dtype_name(data.properties.dtype, leaf)
    if 0 in data.size:
        return FramedChunk.of(leaf, dtype, Box((0,) * len(data.size), tuple(data.size)))
    return FramedChunk.of(leaf, dtype, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))


def _dtype_name(dtype: torch.dtype, leaf: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_TYPES:
        raise UsageError(f"a tensor of {dtype} cannot be stored", leaf=leaf, advice="turn it into another type")
    return name


def _record_of(leaf: str, item: WriteItem, chunk: ChunkRecord) -> TensorRecord:
    return TensorRecord(
        name=leaf,
        dtype=_dtype_name(item.tensor_data.properties.dtype, leaf),
        shape=tuple(item.tensor_data.size),
        chunks=(chunk,),
        sharded=item.type == WriteItemType.SHARD,
    )


def _one_of_each_leaf_first(chunks: Iterable[FramedChunk]) -> list[FramedChunk]:
    """Return the first chunk of every leaf, then the second ones: a file has no leaf twice, and files should be few."""
    seen: dict[str, int] = {}
    numbered = []
    for chunk in chunks:
        number = seen[chunk.leaf] = seen.get(chunk.leaf, 0) + 1
        numbered.append((number, chunk))
    return [chunk for _, chunk in sorted(numbered, key=lambda pair: pair[0])]


def _pieces(item: WriteItem, chunk: FramedChunk, planner: SavePlanner) -> Iterator[memoryview]:
    """Yield the bytes of one item. It is resolved only now, because resolving may take memory."""
    tensor = planner.resolve_data(item).detach()
    component = chunk.leaf.partition(".")[0]
    check_storable(tensor, component=component, leaf=chunk.leaf)
    # Not the box: of an empty tensor that has parts on several ranks, one part stands for all of it.
    planned = tuple(item.tensor_data.chunk.sizes)
    if tuple(tensor.shape) != planned or _dtype_name(tensor.dtype, chunk.leaf) != chunk.kind.name:
        raise UsageError(
            f"the planner planned {chunk.kind.name} {list(planned)} and gave {tensor.dtype} {list(tensor.shape)}",
            leaf=chunk.leaf,
            advice="change the item's tensor_data in create_local_plan() as resolve_data() changes the tensor",
        )
    yield from host_pieces(tensor)
