"""PyTorch's own checkpoint API over Holdfast's files. A planner's items enter, a committed checkpoint leaves, and back.

    dcp.save(state, storage_writer=HoldfastWriter("runs/tiny"))
    dcp.load(state, storage_reader=HoldfastReader("runs/tiny"))

PyTorch's planner decides who writes and reads what, and PyTorch carries every agreement between the ranks; the files,
the manifest and the order in which they become durable are those of any other checkpoint.

Names. PyTorch flattens a state dict to dotted keys. The part of a key before its first dot is the component when it can
be one, and the key is the leaf's name: `model.layers.0.weight` is a leaf of `model`. Every other key, such as `epoch`,
goes into one more component, `state`, as the leaf `state.epoch`. A component's values are nested as they were in the
state dict. The manifest's `extra` has a note, `dcp`: `loose` is that one more component, `flat` are the components that
were no dict of their own, but the front of dotted keys, `whole` are the keys whose value is a dict or a list that the
planner did not flatten, and `save_id` is the id of the save as PyTorch has it.

The lease. PyTorch calls no method of a writer when a save fails elsewhere: on another rank, in the planner, by an
interrupt. So a thread of the coordinator looks whether the call that the save is part of still runs, and releases the
run when it has ended. Releasing it too early would be safe: the lease's number fences, so a save is committed only if
no other writer came.

The claim of a reader. Each rank claims the checkpoint that it loads, so that retention does not delete it: from
`read_metadata()` to the end of its `read_data()`, or of the call that failed, which is watched in the same way.
Metadata that is read outside of a load is claimed only while it is read.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast._version import __version__
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    StateMismatchError,
    StorageError,
    UsageError,
)
from holdfast.loading.files import check_sizes
from holdfast.loading.read import check_bytes, read
from holdfast.loading.requests import Request
from holdfast.loading.resolve import Location, resolve
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, Subclass, decode, encode, subclass_of
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.dtypes import ELEMENT_TYPES
from holdfast.ondisk.files import TensorFile
from holdfast.ondisk.manifest import BLOCK_BYTES, MAX_VALUES_BYTES, ChunkRecord, FileRecord, TensorRecord, TreeRecord
from holdfast.ondisk.regions import Box, cover_exactly
from holdfast.ondisk.safetensors import FramedChunk, frame
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lease import Lease
from holdfast.runs.lineage import Lineage, ancestry, draw_segment
from holdfast.runs.links import point_latest
from holdfast.runs.readers import reading
from holdfast.runs.report import Problem
from holdfast.runs.run_record import open_run
from holdfast.runs.selector import Selector
from holdfast.saving.commit import commit
from holdfast.saving.facts import Facts, Listing
from holdfast.saving.files import split, values_file
from holdfast.saving.write import write
from holdfast.state.records import Receipt
from holdfast.state.tensors import check_storable, host_pieces, tensor_class, torch_dtype, unflattened
from holdfast.storage.documents import read_document
from holdfast.storage.registry import open_storage

logger = logging.getLogger("holdfast")

__all__ = ["HoldfastReader", "HoldfastWriter"]

Verify = Literal["full", "quick", "off"]
Path = tuple[str | int, ...]

_NOTE = "dcp"
_LOOSE = "state"
_PIECE_BYTES = 32 * BLOCK_BYTES
_BATCH_BYTES = 1 << 30
_FUNCTION_OF_SAVE = "_save_state_dict"
_FUNCTION_OF_LOAD = "_load_state_dict"
_LOOK_SECONDS = 0.25


# The writer

_NO_OPTION = {
    "single_file_per_rank": "a rank writes one file, and another only for a tensor that it has several pieces of",
    "sync_files": "a checkpoint is committed only after its files are durable",
    "thread_count": "one thread of each rank writes, past the page cache where the storage can",
    "per_thread_copy_ahead": "a tensor is copied from its device in pieces, as it is written",
    "cache_staged_state_dict": "give async_save an async_stager, which keeps its buffers",
    "overwrite": "a committed checkpoint never changes; a save adds one, and a reader takes the latest",
    "serialization_format": "tensors are stored as safetensors, values by the typed codec",
    "_extensions": "tensor files stay safetensors that other programs can read, so they are not transformed",
    "_extension_registry": "tensor files stay safetensors that other programs can read, so they are not transformed",
}


def _refuse_options(options: Mapping[str, Any], kind: str) -> None:
    for name in options:
        if name not in _NO_OPTION:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
        raise UsageError(f"{kind} has no option {name}: {_NO_OPTION[name]}", advice="leave it out")


class _Hold:
    """The lease of a save or the claim of a load. Released at the latest when PyTorch's call of it ends."""

    def __init__(self, release: Callable[[], None], function: str) -> None:
        self._release = _Once(release)
        call = _frame_of(function)
        self.is_watched = call is not None
        if call is not None:
            watched = (call, threading.get_ident(), self._release)
            threading.Thread(target=_release_after, args=watched, name="holdfast-dcp", daemon=True).start()
        # For a caller that is not PyTorch, and drops the writer or the reader on the way.
        weakref.finalize(self, self._release)

    def release(self) -> None:
        self._release()


class _Once:
    """A function of which only the first call, from whatever thread, does something."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self.called = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            is_first = not self.called.is_set()
            self.called.set()
        if is_first:
            self._function()


def _frame_of(function: str) -> FrameType | None:
    """Return the frame of PyTorch's function that carries this thread's save or load through from beginning to end."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame


def _release_after(call: FrameType, thread: int, release: _Once) -> None:
    """Release what a call needed when it has ended. An exception that is kept keeps the frame, not its place on the
    stack."""
    while not release.called.wait(_LOOK_SECONDS):
        if not _runs(call, thread):
            release()


def _runs(call: FrameType, thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True)
class _Duty:
    """What the coordinator tells one rank, in its plan's `storage_data`."""

    folder: str
    claim: str
    rank: int
    size: int
    step: int
    loose: str

    def __reduce__(self) -> Any:
        return _received, (self.folder, self.claim, self.rank, self.size, self.step, self.loose)


class _Call(threading.local):
    """The duty of the save that this thread is in."""

    duty: Callable[[], _Duty | None] = staticmethod(lambda: None)


_call = _Call()


def _received(folder: str, claim: str, rank: int, size: int, step: int, loose: str) -> _Duty:
    """Rebuild the duty that the coordinator sent. A planner that caches plans drops what it came in, so it is noted."""
    duty = _Duty(folder, claim, rank, size, step, loose)
    _call.duty = weakref.ref(duty)
    return duty


def _duty_of(plan: SavePlan) -> _Duty:
    """Return the duty of this save. A plan from a planner's cache has that of the save for which it was made."""
    found = plan.storage_data
    sent = _call.duty()
    if not isinstance(found, _Duty):
        raise UsageError(
            f"the plan was made for another storage writer, with {type(found).__name__} as its storage_data",
            advice="let a planner with enable_plan_caching=True save through one kind of writer only",
        )
    return found if sent is None or sent is found else replace(sent, loose=found.loose)


class _StoredTensor(msgspec.Struct, frozen=True):
    """One tensor item as its rank wrote it: the leaf with this one chunk, and the file that holds it."""

    leaf: TensorRecord
    file: FileRecord
    loose: str


class _StoredValue(msgspec.Struct, frozen=True):
    """One item that is no tensor, encoded. The coordinator writes it: an item is small, and a tree is one file's."""

    value: Any
    loose: str


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What the coordinator decided about the save that is under way."""

    folder: str
    claim: str
    step: int
    parent: str | None
    lineage: Lineage
    segment: str
    lease: int
    lease_token: str
    save_id: str


class HoldfastWriter(StorageWriter):  # type: ignore[misc]
    """A `StorageWriter` that commits a Holdfast checkpoint.

    run: the folder or URL of the run. step: the training step; None takes one more than the latest checkpoint's, or 0.
    The checkpoint continues the latest one; a step which that line has committed is refused. Values that are no
    tensors are stored by the typed codec, never pickled, so the planner must be able to look up the object itself.
    The run is leased for the time of a save, also of one that fails.
    """

    def __init__(self, run: Location, *, step: int | None = None, **options: Any) -> None:
        _refuse_options(options, "HoldfastWriter")
        self._run = run
        self._given_step = self._step = None if step is None else paths.check_step(step)
        self.save_id = str(uuid.uuid4())
        self._attempt: _Attempt | None = None
        self._hold: _Hold | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the save that is under way: it is this process's."""
        kept = ("_run", "_given_step", "_step", "save_id")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attempt = None
        self._hold = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another run, or, of a path such as `RUN/step-000000500`, another run and a step."""
        self._give_up()
        self.save_id = str(uuid.uuid4())
        if checkpoint_id is None:
            return
        head, _, tail = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
        parsed = paths.parse_folder(tail)
        self._run = (head or ".") if parsed else checkpoint_id
        self._step = parsed.step if parsed else self._given_step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False", advice="a checkpoint is one for all ranks, who must agree on it")
        self._give_up()
        self._catalog = Catalog(open_storage(self._run))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide the folder. Nothing is touched before the plans are known to be ones that can be written."""
        plans = _without_empty_pieces(plans)
        loose = _loose_component([item.index.fqn for plan in plans for item in plan.items])
        attempt = self._attempt = self._claim(len(plans))
        duties = [
            _Duty(attempt.folder, attempt.claim, rank, len(plans), attempt.step, loose) for rank in range(len(plans))
        ]
        # Where there is one process alone, nothing is sent.
        _call.duty = weakref.ref(duties[0])
        return [replace(plan, storage_data=duty) for plan, duty in zip(plans, duties, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors. What cannot be stored is found before the first byte, as far as it can be."""
        duty = _duty_of(plan)
        try:
            self._catalog.attempts.require_claim(duty.folder, duty.claim)
            results = _write_items(plan.items, planner, duty, self._catalog)
        except HoldfastError as error:
            self._give_up()
            raise error.at(step=duty.step, rank=duty.rank) from error
        except BaseException:
            self._give_up()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator: every rank's tensors are durable, the values follow, the manifest is last."""
        if self._attempt is None:
            raise UsageError("finish() came before prepare_global_plan()")
        try:
            checkpoint = _commit(self._attempt, metadata.planner_data, results, self._catalog)
            logger.info(
                "committed step %d: %.1f MiB to %s", checkpoint.step, checkpoint.size_bytes / 2**20, checkpoint.path
            )
            _committed_last[checkpoint.head.run_id] = checkpoint.digest
            point_latest(self._catalog.storage, checkpoint.folder)
        finally:
            self._give_up()
        metadata.storage_data = {result.index: _place_of(result) for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The run that the next save goes to; None when it was given as a storage."""
        return self._run if isinstance(self._run, str | os.PathLike) else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_location(checkpoint_id)

    def _give_up(self) -> None:
        """Release the run, if this writer has it: the save is over, in one way or another."""
        if self._hold is not None:
            self._hold.release()
        self._attempt = self._hold = None

    def _claim(self, size: int) -> _Attempt:
        scan = self._catalog.scan()
        latest = scan.checkpoints[0] if scan.checkpoints else None
        step = self._step
        if step is None:
            step = paths.check_step(latest.step + 1 if latest else 0)
        parent = latest.digest if latest else None
        line = ancestry(parent, scan.checkpoints)
        if any(checkpoint.step == step for checkpoint in line):
            raise UsageError(
                f"step {step} is committed already",
                run=self._catalog.storage.url,
                step=step,
                advice="a committed checkpoint never changes; save another step",
            )
        open_run(self._catalog)
        lease = Lease.acquire(self._catalog.storage, close_attempts=self._catalog.attempts.close_older)
        self._hold = _Hold(lease.release, _FUNCTION_OF_SAVE)
        try:
            first = lease.floor.first_attempt(step)
            folder, claim = self._catalog.attempts.claim(step, size, lease=lease.number, first=first)
        except BaseException:
            self._give_up()
            raise
        segment = _segment_after(latest)
        return _Attempt(
            folder, claim, step, parent, Lineage.through(line), segment, lease.number, lease.token, self.save_id
        )


# By run, what this process committed last. `dcp.save` is often given a new writer each time.
_committed_last: dict[str, str] = {}


def _segment_after(latest: Checkpoint | None) -> str:
    """Return the segment of the next checkpoint: that of the latest one if this process has just committed it."""
    if latest is not None and latest.head.segment and _committed_last.get(latest.head.run_id) == latest.digest:
        return latest.head.segment
    return draw_segment()


def _without_empty_pieces(plans: list[SavePlan]) -> list[SavePlan]:
    """A rank that got nothing of an uneven cut writes nothing; of a tensor that is all empty, one piece stays."""
    seen: set[str] = set()

    def wanted(item: WriteItem) -> bool:
        if item.type == WriteItemType.BYTE_IO or 0 not in item.tensor_data.chunk.sizes:
            return True
        first = 0 in item.tensor_data.size and item.index.fqn not in seen
        seen.add(item.index.fqn)
        return first

    return [replace(plan, items=[item for item in plan.items if wanted(item)]) for plan in plans]


def _component_of(fqn: str) -> str | None:
    """The component that a key names itself, or None."""
    front, _, rest = fqn.partition(".")
    try:
        return paths.check_component_name(front) if rest else None
    except UsageError:
        return None


def _loose_component(fqns: Sequence[str]) -> str:
    """The component for keys that name none: `state`, or, when keys name that one, the next free name like it."""
    for fqn in fqns:
        if len(fqn) + len("state_00000.") > paths.MAX_NAME_CHARACTERS:
            raise UsageError(f"a leaf's name has {len(fqn)} characters", leaf=fqn[:80])
    taken = {_component_of(fqn) for fqn in fqns}
    name, number = _LOOSE, 2
    while name in taken:
        name, number = f"{_LOOSE}_{number}", number + 1
    return name


def _leaf_name(fqn: str, loose: str) -> str:
    return fqn if _component_of(fqn) else paths.leaf_name(loose, fqn)


def _write_items(items: Sequence[WriteItem], planner: SavePlanner, duty: _Duty, catalog: Catalog) -> list[WriteResult]:
    values = [
        (item, _StoredValue(_encoded(item, planner), duty.loose))
        for item in items
        if item.type == WriteItemType.BYTE_IO
    ]
    tensors = {_chunk_of(item, duty.loose): item for item in items if item.type != WriteItemType.BYTE_IO}
    files = _tensor_files(tensors, planner, duty.rank)
    created: list[str] = []
    try:
        receipt = write(duty.folder, files, (), catalog.storage, on_created=created.append)
    except BaseException:
        _discard(created, duty, catalog)
        raise
    results = [WriteResult(item.index, 0, stored) for item, stored in values]
    records = {file.name: file for file in receipt.files}
    by_place = {(chunk.leaf, chunk.box): item for chunk, item in tensors.items()}
    for leaf, record in receipt.chunks:
        item = by_place[leaf, record.box]
        stored = _StoredTensor(_record_of(leaf, item, record), records[record.file], duty.loose)
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
    leaf = _leaf_name(item.index.fqn, loose)
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


def _tensor_files(tensors: Mapping[FramedChunk, WriteItem], planner: SavePlanner, rank: int) -> list[TensorFile]:
    files = []
    for number, group in enumerate(split(_one_of_each_leaf_first(tensors))):
        framed = frame(group)
        sources = [partial(_pieces, tensors[chunk], chunk, planner) for chunk in framed.chunks]
        files.append(TensorFile(paths.tensor_file(rank, number), framed, sources))
    return files


def _one_of_each_leaf_first(chunks: Iterable[FramedChunk]) -> list[FramedChunk]:
    """The first chunk of every leaf, then every second one: a file has no leaf twice, and files should be few."""
    seen: dict[str, int] = {}
    numbered = []
    for chunk in chunks:
        number = seen[chunk.leaf] = seen.get(chunk.leaf, 0) + 1
        numbered.append((number, chunk))
    return [chunk for _, chunk in sorted(numbered, key=lambda pair: pair[0])]


def _pieces(item: WriteItem, chunk: FramedChunk, planner: SavePlanner) -> Iterator[memoryview]:
    """The bytes of one item. It is resolved only now, because resolving may take memory."""
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
    yield from host_pieces(tensor, _PIECE_BYTES)


def _discard(names: Iterable[str], duty: _Duty, catalog: Catalog) -> None:
    """Give back the room. The claim stays while other ranks may still write below the name that it holds."""
    for name in [*names, paths.ATTEMPT] if duty.size == 1 else names:
        try:
            catalog.storage.delete(paths.key(duty.folder, name))
        except StorageError as error:
            logger.debug("could not remove %s of an abandoned attempt: %s", name, error)


def _commit(attempt: _Attempt, key_paths: Any, results: list[list[WriteResult]], catalog: Catalog) -> Checkpoint:
    loose = _one_loose_component(results)
    leaves = _whole_leaves([result.storage_data.leaf for result in _of(results, _StoredTensor)])
    values = {result.index.fqn: result.storage_data.value for result in _of(results, _StoredValue)}
    fqns = {result.index.fqn: result.storage_data for rank in results for result in rank}
    trees, flat = _trees_of(_nested_items(fqns, loose, key_paths), loose, values)
    receipts = [_receipt(rank) for rank in results]
    if trees:
        file = values_file(paths.SHARED_VALUES, trees)
        shared = write(attempt.folder, (), [file], catalog.storage)
        receipts[0] = Receipt((*receipts[0].files, *shared.files), receipts[0].chunks)
    records = tuple(TreeRecord(component=name, kind="values", file=paths.SHARED_VALUES) for name in trees)
    note = {
        "loose": loose if loose in trees else None,
        "flat": flat,
        "whole": sorted(fqn for fqn, value in values.items() if not _is_leaf(value)),
        "save_id": attempt.save_id,
    }
    return commit(_facts(attempt, note), Listing(tuple(leaves), records), receipts, catalog)


def _one_loose_component(results: list[list[WriteResult]]) -> str:
    """Return the component of the keys that name none, when all ranks used the same one."""
    names = {result.storage_data.loose for rank in results for result in rank}
    if len(names) > 1:
        raise UsageError(
            f"the plans of some ranks come from the planner's cache, those of others are new, and they store keys "
            f"without a component under different names: {', '.join(sorted(names))}",
            advice="save this state dict with enable_plan_caching=False",
        )
    return names.pop() if names else _LOOSE


def _place_of(result: WriteResult) -> _StorageInfo:
    """Return where an item lies, as PyTorch's own storage describes it, relative to the checkpoint's folder."""
    stored = result.storage_data
    if isinstance(stored, _StoredTensor):
        return _StorageInfo(stored.leaf.chunks[0].file, stored.leaf.chunks[0].start, stored.leaf.size_bytes)
    return _StorageInfo(paths.SHARED_VALUES, 0, 0)


def _of(results: list[list[WriteResult]], kind: type) -> list[WriteResult]:
    return [result for rank in results for result in rank if isinstance(result.storage_data, kind)]


def _receipt(results: Sequence[WriteResult]) -> Receipt:
    stored = [result.storage_data for result in results if isinstance(result.storage_data, _StoredTensor)]
    files = {one.file.name: one.file for one in stored}
    return Receipt(tuple(files.values()), tuple((one.leaf.name, one.leaf.chunks[0]) for one in stored))


def _whole_leaves(pieces: Sequence[TensorRecord]) -> list[TensorRecord]:
    """Each leaf once, still without its chunks, when its pieces agree and make up all of it."""
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


def _facts(attempt: _Attempt, note: Mapping[str, Any]) -> Facts:
    return Facts(
        folder=attempt.folder,
        step=attempt.step,
        parent=attempt.parent,
        meshes=(),
        metrics={},
        progress={},
        extra={_NOTE: encode(note, path=_NOTE, on_tensor=None)},
        config=None,
        guards={},
        tags=(),
        versions={"holdfast": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        lineage=attempt.lineage,
        segment=attempt.segment,
        lease=attempt.lease,
        lease_token=attempt.lease_token,
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """One key of the state dict: its component, its path in the component's values, whether it was cut to get them."""

    fqn: str
    component: str
    path: Path
    flat: bool


def _nested_items(fqns: Iterable[str], loose: str, key_paths: Any) -> Iterator[_Item]:
    """Where each key stood in the state dict. A planner that does not say it gives keys of one piece."""
    for fqn in fqns:
        known = key_paths.get(fqn) if isinstance(key_paths, Mapping) else None
        path: Path = tuple(known) if known and ".".join(map(str, known)) == fqn else (fqn,)
        component = _component_of(fqn)
        if component is None:
            yield _Item(fqn, loose, path, flat=False)
        elif path[0] == component:
            yield _Item(fqn, component, path[1:], flat=False)
        else:
            yield _Item(fqn, component, (str(path[0])[len(component) + 1 :], *path[1:]), flat=True)


class _Branch(dict[str | int, Any]):
    """A dict or, with numbers as keys, a list of the state dict. A value may be a dict too, hence a type of its own."""


def _trees_of(items: Iterable[_Item], loose: str, values: Mapping[str, Json]) -> tuple[dict[str, Json], list[str]]:
    """Every component's values as one nested tree, tensors by reference; and the components that were only fronts."""
    roots: dict[str, _Branch] = {}
    flat: dict[str, bool] = {}
    for item in items:
        branch = roots.setdefault(item.component, _Branch())
        for part in item.path[:-1]:
            branch = branch.setdefault(part, _Branch())
        reference = item.fqn if item.component == loose else item.fqn[len(item.component) + 1 :]
        branch[item.path[-1]] = values.get(item.fqn, {"$tensor": reference})
        flat[item.component] = flat.get(item.component, True) and item.flat
    return {name: _json(root) for name, root in roots.items()}, sorted(name for name in flat if flat[name])


def _json(node: Any) -> Json:
    if not isinstance(node, _Branch):
        return node  # type: ignore[no-any-return]
    if all(isinstance(key, int) for key in node):
        return [_json(node.get(index)) for index in range(max(int(key) for key in node) + 1)]
    keys = [encode(str(key), path="", on_tensor=None) for key in node]
    if all(isinstance(key, str) and not key.startswith("$") for key in keys):
        return {str(key): _json(value) for key, value in node.items()}
    return {"$dict": [[key, _json(value)] for key, value in zip(keys, node.values(), strict=True)]}


def _is_location(checkpoint_id: object) -> bool:
    if not isinstance(checkpoint_id, str | os.PathLike) or not os.fspath(checkpoint_id):
        return False
    try:
        open_storage(checkpoint_id)
    except HoldfastError:
        return False
    return True


# The reader


class HoldfastReader(StorageReader):  # type: ignore[misc]
    """A `StorageReader` of any Holdfast checkpoint, written by `HoldfastWriter` or by a `CheckpointManager`.

    run, selector: which checkpoint, as everywhere. verify: "full" checks the digest of every byte that is needed, on
    every rank, before the first tensor is changed; "quick" checks then that the files are there and have their sizes;
    "off" finds a missing file when it is read.

    The keys are those of the flattened state dict: `model.layers.0.weight`, `optimizer.state.layers.0.weight.exp_avg`,
    `optimizer.param_groups.0.lr`. Tied tensors are there under each of their names. What a component keeps per rank has
    the scope in its key: `rng@rank-00000.torch`. Values are decoded by the typed codec; the bytes that PyTorch's
    planner wants to unpickle are made here, in memory, from what was decoded.
    """

    def __init__(
        self, run: Location, selector: str | int = "latest", *, verify: Verify = "full", **options: Any
    ) -> None:
        _refuse_options(options, "HoldfastReader")
        if verify not in ("full", "quick", "off"):
            raise UsageError(f"verify={verify!r}", advice="use 'full', 'quick' or 'off'")
        self._run = run
        self._selector = selector
        self._verify = verify
        self.load_id = str(uuid.uuid4())
        self._contents: _Contents | None = None
        self._hold: _Hold | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another place: a run, `RUN@SELECTOR`, a checkpoint's folder, a link."""
        self._close()
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._run = checkpoint_id

    # No **kwargs: with them, PyTorch would take a failure for a checkpoint without an agreement between the ranks.
    def read_metadata(self) -> Metadata:
        self._close()
        checkpoint, hold = _claimed(resolve(self._run, self._selector))
        try:
            contents = _Contents(checkpoint, checked=self._verify == "full")
            metadata = contents.metadata()
        except BaseException:
            hold.release()
            raise
        self._contents = contents
        if hold.is_watched:
            self._hold = hold
        else:
            hold.release()
        metadata.storage_meta = StorageMeta(self.checkpoint_id, contents.save_id, self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._contents is None:
            self.read_metadata()
        if self._hold is None:
            _, self._hold = _claimed(self._opened().checkpoint)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Meet all damage now: an error here is everybody's, and no rank has changed a tensor yet."""
        contents = self._opened()
        wanted = [contents.request(item, None) for item in plan.items if item.type == LoadItemType.TENSOR]
        if self._verify == "full":
            _refuse_damage(check_bytes(contents.checkpoint, wanted), contents.checkpoint)
        elif self._verify == "quick":
            _refuse_damage(check_sizes(contents.checkpoint, wanted), contents.checkpoint)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                contents.value(item.storage_index.fqn)
        return replace(plan, storage_data=contents.checkpoint.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise StateMismatchError(
                f"'{self._selector}' is not the same checkpoint for all ranks: one was committed meanwhile",
                run=self._opened().checkpoint.storage.url,
                advice="load again, or name the step",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        contents = self._opened()
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        try:
            for batch in _batches(tensors, contents):
                _read_batch(batch, planner, contents, checked=self._verify == "full")
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _saved(contents.value(item.storage_index.fqn)))
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The place that the next load reads; None when it was given as a storage."""
        return self._run if isinstance(self._run, str | os.PathLike) else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_location(checkpoint_id)

    def _opened(self) -> _Contents:
        if self._contents is None:
            raise UsageError("the checkpoint is not open", advice="PyTorch calls read_metadata() first; so must you")
        return self._contents

    def _close(self) -> None:
        """End the load: from here on retention may delete the checkpoint."""
        if self._hold is not None:
            self._hold.release()
        self._contents = self._hold = None


def _claimed(meant: Checkpoint) -> tuple[Checkpoint, _Hold]:
    """Claim a checkpoint for a load, and return it with the claim. A checkpoint that was deleted just before the claim
    is an error; from here on it stays."""
    claim = ExitStack()
    claim.enter_context(reading(meant.storage, meant.folder))
    hold = _Hold(claim.close, _FUNCTION_OF_LOAD)
    try:
        found = Catalog(meant.storage).find(Selector("folder", name=meant.folder))
        if found.digest != meant.digest:
            raise CheckpointNotFoundError(
                "another checkpoint has taken the place of the one to load",
                run=meant.storage.url,
                step=meant.step,
                advice="load again",
            )
    except BaseException:
        hold.release()
        raise
    return found, hold


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that is no tensor, still encoded, and the tree that it is part of."""

    tree: TreeRecord
    stored: Json


class _Listing(dict[str, Any]):
    """What a checkpoint has by key. Also knows the second spelling of an optimizer's options, without listing it:
    whoever loads all that is listed should not load them twice."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        super().__init__()
        self.aliases = aliases

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.aliases

    def __missing__(self, key: str) -> Any:
        return self[self.aliases[key]]


@dataclass(slots=True)
class _Contents:
    """One checkpoint by PyTorch's keys: what each key is, and where in the state dict it stands."""

    checkpoint: Checkpoint
    checked: bool
    entries: dict[str, TensorRecord | _Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    decoded: dict[str, Any] = field(default_factory=dict)
    save_id: str = ""

    def __post_init__(self) -> None:
        manifest = self.checkpoint.manifest
        leaves = {leaf.name: leaf for leaf in manifest.tensors}
        note = _read_note(manifest.extra.get(_NOTE))
        self.save_id = note.save_id or self.checkpoint.digest
        files: dict[str, dict[str, Json]] = {}
        for tree in manifest.trees:
            if tree.file not in files:
                files[tree.file] = _read_values(self.checkpoint, tree.file, checked=self.checked)
            if tree.name not in files[tree.file]:
                raise CorruptCheckpointError(f"it has no values of '{tree.name}'", file=tree.file)
            stored = files[tree.file][tree.name]
            for path, value in _flattened(stored, tree, note):
                self._add(path, value, tree, leaves)
            self._add_aliases(stored, tree)

    def metadata(self) -> Metadata:
        listing = _Listing(self.aliases)
        places: dict[MetadataIndex, _StorageInfo] = {}
        for key, entry in self.entries.items():
            if isinstance(entry, _Value):
                listing[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = _StorageInfo(entry.tree.file, 0, 0)
                continue
            listing[key] = _tensor_metadata(entry)
            for index, chunk in enumerate(entry.chunks):
                place = _StorageInfo(chunk.file, chunk.start, chunk.box.volume * entry.item_bytes)
                places[MetadataIndex(key, chunk.offsets, index)] = place
        return Metadata(listing, dict(self.paths), places, version=CURRENT_DCP_VERSION)

    def request(self, item: ReadItem, target: Any) -> Request:
        """The box of a leaf that an item wants."""
        leaf = self._entry(item.storage_index.fqn)
        if not isinstance(leaf, TensorRecord):
            raise UsageError(
                "the plan asks for a tensor that the checkpoint does not have", leaf=item.storage_index.fqn
            )
        start = item.storage_index.offset or (0,) * len(leaf.shape)
        offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
        box = Box(offsets, tuple(item.lengths))
        if not box.within(leaf.shape):
            raise UsageError(f"the plan asks for {box} of a tensor of shape {list(leaf.shape)}", leaf=leaf.name)
        return Request(leaf, box, target, fresh=False)

    def value(self, key: str) -> Any:
        """A value that is no tensor, decoded once. Tensors inside of it, as in a tuple, are read with it."""
        entry = self._entry(key)
        if not isinstance(entry, _Value):
            raise UsageError("the plan asks for a value where the checkpoint has a tensor, or nothing", leaf=key)
        if key not in self.decoded:
            tree = entry.tree
            self.decoded[key] = decode(
                entry.stored,
                path=key,
                tensor=partial(self._read_whole, tree),
                subclass=partial(self._read_subclass, tree),
            )
        return self.decoded[key]

    def _entry(self, key: str) -> TensorRecord | _Value | None:
        return self.entries.get(key) or self.entries.get(self.aliases.get(key, key))

    def _add(self, path: Path, value: Json, tree: TreeRecord, leaves: Mapping[str, TensorRecord]) -> None:
        key = ".".join(map(str, path))
        # Two values whose keys spell the same dotted name: PyTorch can ask for neither, so the first may have it.
        if key in self.entries:
            return
        reference = _reference(value)
        name = paths.leaf_name(tree.name, reference or "")
        if reference is not None and name not in leaves:
            raise CorruptCheckpointError("its values name a tensor that is not listed", leaf=name, file=tree.file)
        self.entries[key] = _Value(tree, value) if reference is None else leaves[name]
        self.paths[key] = path

    def _add_aliases(self, stored: Json, tree: TreeRecord) -> None:
        """An optimizer's options by parameter, as `flatten_optimizer_state_dict` spells them."""
        groups = stored.get("param_groups") if tree.kind == "optimizer" and isinstance(stored, dict) else None
        for index, group in enumerate(groups if isinstance(groups, list) else ()):
            options = group if isinstance(group, dict) else {}
            names = options.get("params")
            for name in names if isinstance(names, list) else ():
                for option in options:
                    key = f"{tree.name}.param_groups.{index}.{option}"
                    if key in self.entries:
                        self.aliases[f"{tree.name}.param_groups.{name}.{option}"] = key

    def _read_subclass(self, tree: TreeRecord, place: str, saved: Subclass) -> torch.Tensor:
        """A tensor of a wrapper subclass that the program knows, made anew."""
        kind = tensor_class(saved.name)
        if kind is None:
            raise StateMismatchError(
                f"the checkpoint has a tensor of class '{saved.name}', which is not registered",
                leaf=place,
                advice="register its class with holdfast.register_type, or restore it with a CheckpointManager",
            )
        inner: dict[str, torch.Tensor] = {}
        for name, value in saved.tensors.items():
            nested = subclass_of(value)
            inner[name] = (
                self._read_whole(tree, _reference(value) or "")
                if nested is None
                else self._read_subclass(tree, f"{place}.{name}", nested)
            )
        return unflattened(kind, inner, decode(saved.context, path=place, tensor=None), saved, place, None)

    def _read_whole(self, tree: TreeRecord, reference: str) -> torch.Tensor:
        name = paths.leaf_name(tree.name, reference)
        leaf = next((leaf for leaf in self.checkpoint.manifest.tensors if leaf.name == name), None)
        if leaf is None:
            raise CorruptCheckpointError("its values name a tensor that is not listed", leaf=name, file=tree.file)
        target = torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
        request = Request(leaf, Box((0,) * len(leaf.shape), leaf.shape), target, fresh=True)
        _refuse_damage(read(self.checkpoint, [request], checked=self.checked), self.checkpoint)
        return target


class _Note(NamedTuple):
    """What `HoldfastWriter` noted about a state dict; nothing where it wrote no note."""

    loose: str | None
    flat: frozenset[str]
    whole: frozenset[str]
    save_id: str


def _read_note(stored: Any) -> _Note:
    note = stored if isinstance(stored, dict) else {}
    loose, save_id = note.get("loose"), note.get("save_id")
    flat, whole = (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
        for names in (note.get("flat"), note.get("whole"))
    )
    return _Note(loose if isinstance(loose, str) else None, flat, whole, save_id if isinstance(save_id, str) else "")


def _read_values(checkpoint: Checkpoint, name: str, *, checked: bool) -> dict[str, Json]:
    record = next(file for file in checkpoint.manifest.files if file.name == name)
    data = read_document(checkpoint.storage, checkpoint.key(name), min(record.size_bytes, MAX_VALUES_BYTES))
    where: dict[str, Any] = {"run": checkpoint.storage.url, "step": checkpoint.step, "file": name}
    if len(data) != record.size_bytes:
        raise CorruptCheckpointError(f"has {len(data)} bytes, the manifest says {record.size_bytes}", **where)
    if checked and blake3(data).hexdigest() != record.digest:
        raise CorruptCheckpointError("the bytes do not have their digest", byte_range=(0, len(data)), **where)
    try:
        return from_json(data, dict[str, dict[str, Any]])["trees"]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KeyError) as error:
        raise CorruptCheckpointError(f"it is no file of values: {error}", **where) from None


def _outer_path(tree: TreeRecord, path: Path, note: _Note) -> Path:
    """Where a value of a tree stood in the state dict that was saved."""
    if tree.name == note.loose and path:
        return path
    if tree.name in note.flat and path:
        return (f"{tree.name}.{path[0]}", *path[1:])
    return (tree.name, *path)


def _flattened(stored: Json, tree: TreeRecord, note: _Note) -> list[tuple[Path, Json]]:
    """A tree's values, still encoded, by the paths that PyTorch's own flattening of the state dict gave."""
    found: list[tuple[Path, Json]] = []

    def is_whole(path: Path) -> bool:
        return bool(path) and ".".join(map(str, _outer_path(tree, path, note))) in note.whole

    try:
        _flatten(stored, (), lambda path, value: found.append((path, value)), is_whole if note.whole else None)
    except RecursionError:
        raise CorruptCheckpointError("the values are nested too deep", file=tree.file) from None
    return [(_outer_path(tree, path, note), value) for path, value in found]


def _flatten(
    value: Json, path: Path, visit: Callable[[Path, Json], None], is_whole: Callable[[Path], bool] | None
) -> None:
    pairs = _pairs_of(value)
    if is_whole is not None and is_whole(path):
        visit(path, value)
    elif pairs is not None:
        for key, inner in pairs:
            _flatten(inner, (*path, key), visit, is_whole)
    elif isinstance(value, list) and not _is_terminal(value):
        for index, inner in enumerate(value):
            _flatten(inner, (*path, index), visit, is_whole)
    else:
        visit(path, value)


def _is_leaf(value: Json) -> bool:
    """Whether flattening keeps this as one value."""
    return _pairs_of(value) is None and not (isinstance(value, list) and not _is_terminal(value))


def _is_terminal(values: list[Json]) -> bool:
    """PyTorch goes into a list only when there is a tensor or a dict in it; a tuple is always one value."""
    return not any(
        _pairs_of(value) is not None
        or _reference(value) is not None
        or (isinstance(value, list) and not _is_terminal(value))
        for value in values
    )


def _pairs_of(value: Json) -> list[tuple[str, Json]] | None:
    """The items of what will be decoded to a mapping, its keys as PyTorch spells them; None for everything else."""
    if not isinstance(value, dict):
        return None
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return list(value.items())
    items: Any = value[tag]
    if tag in ("$ordereddict", "$defaultdict") and isinstance(items, dict):
        items = items.get("items")
    elif tag not in ("$dict", "$counter"):
        return None
    try:
        return [(str(decode(key, path="", tensor=None)), inner) for key, inner in items]
    except (HoldfastError, TypeError, ValueError):
        # Malformed, or with keys of a type that is not registered here: one value, whose decoding says what is wrong.
        return None


def _reference(value: Json) -> str | None:
    reference = value.get("$tensor") if isinstance(value, dict) else None
    return reference if isinstance(reference, str) else None


def _tensor_metadata(leaf: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(leaf.dtype)),
        size=torch.Size(leaf.shape),
        chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in leaf.chunks],
    )


def _batches(items: Sequence[ReadItem], contents: _Contents) -> Iterator[list[ReadItem]]:
    """Items to read at a time: resolving a target may take memory, which should not be taken for all at once."""
    batch: list[ReadItem] = []
    size = 0
    for item in items:
        request = contents.request(item, None)
        batch.append(item)
        size += request.box.volume * request.leaf.item_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(items: Sequence[ReadItem], planner: LoadPlanner, contents: _Contents, *, checked: bool) -> None:
    targets = [planner.resolve_tensor(item).detach() for item in items]
    requests = [
        contents.request(item, _like_stored(contents, item, target))
        for item, target in zip(items, targets, strict=True)
    ]
    _refuse_damage(read(contents.checkpoint, requests, checked=checked), contents.checkpoint)
    for item, target, request in zip(items, targets, requests, strict=True):
        if request.target is not target:
            target.copy_(request.target)
        planner.commit_tensor(item, target)


def _like_stored(contents: _Contents, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
    """The target itself or, where it is of another type, memory to read into before it is cast, as PyTorch does it."""
    leaf = contents.request(item, None).leaf
    if tuple(target.shape) != tuple(item.lengths):
        raise StateMismatchError(
            f"the plan wants {list(item.lengths)} of it and the planner gave a tensor of {list(target.shape)}",
            leaf=leaf.name,
        )
    dtype = torch_dtype(leaf.dtype)
    return target if target.dtype == dtype else torch.empty(target.shape, dtype=dtype)


def _refuse_damage(problems: Sequence[Problem], checkpoint: Checkpoint) -> None:
    if problems:
        first = problems[0]
        raise CorruptCheckpointError(
            first.what,
            run=checkpoint.storage.url,
            step=checkpoint.step,
            file=first.file,
            leaf=first.leaf,
            byte_range=first.byte_range,
            problems=[str(problem) for problem in problems[1:]],
            advice="load another checkpoint",
        )


def _saved(value: Any) -> io.BytesIO:
    """What the planner will unpickle: bytes of our own making, of a value that the codec decoded."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
