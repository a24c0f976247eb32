"""Load any Holdfast checkpoint through PyTorch's `StorageReader`. A planner's items enter; its tensors are filled."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast.errors import StateMismatchError, UsageError
from holdfast.formats.dcp.claims import Hold, claim_checkpoint
from holdfast.formats.dcp.contents import Contents
from holdfast.formats.dcp.options import is_location, refuse_options
from holdfast.loading.reader import CheckpointReader
from holdfast.loading.resolve import Location, resolve
from holdfast.loading.strategy import Verify, check_verify
from holdfast.state.tensors import torch_dtype

__all__ = ["HoldfastReader"]

_BATCH_BYTES = 1 << 30


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
        refuse_options(options, "HoldfastReader")
        self._run = run
        self._selector = selector
        self._verify = check_verify(verify)
        self.load_id = str(uuid.uuid4())
        self._contents: Contents | None = None
        self._hold: Hold | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another place: a run, `RUN@SELECTOR`, a checkpoint's folder, a link."""
        self._close()
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._run = checkpoint_id

    # No **kwargs: with them, PyTorch would take a failure for a checkpoint without an agreement between the ranks.
    def read_metadata(self) -> Metadata:
        self._close()
        checkpoint, hold = claim_checkpoint(resolve(self._run, self._selector))
        try:
            contents = Contents(CheckpointReader(checkpoint, verify=self._verify))
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
            _, self._hold = claim_checkpoint(self._opened().reader.checkpoint)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Raise all damage now: an error here is raised on every rank, and no rank has changed a tensor yet."""
        contents = self._opened()
        wanted = [contents.request(item, None) for item in plan.items if item.type == LoadItemType.TENSOR]
        contents.reader.check(wanted)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                contents.value(item.storage_index.fqn)
        return replace(plan, storage_data=contents.reader.checkpoint.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise StateMismatchError(
                f"'{self._selector}' is not the same checkpoint for all ranks: one was committed meanwhile",
                run=self._opened().reader.checkpoint.storage.url,
                advice="load again, or name the step",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        contents = self._opened()
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        try:
            for batch in _batches(tensors, contents):
                _read_batch(batch, planner, contents)
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
        """Return the place that the next load reads; None when it was given as a storage."""
        return self._run if isinstance(self._run, str | os.PathLike) else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_location(checkpoint_id)

    def _opened(self) -> Contents:
        if self._contents is None:
            raise UsageError("the checkpoint is not open", advice="PyTorch calls read_metadata() first; so must you")
        return self._contents

    def _close(self) -> None:
        """End the load: from here on retention may delete the checkpoint."""
        if self._hold is not None:
            self._hold.release()
        self._contents = self._hold = None


def _batches(items: Sequence[ReadItem], contents: Contents) -> Iterator[list[ReadItem]]:
    """Yield the items to read at a time: resolving a target may take memory, and not for all items at once."""
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


def _read_batch(items: Sequence[ReadItem], planner: LoadPlanner, contents: Contents) -> None:
    targets = [planner.resolve_tensor(item).detach() for item in items]
    requests = [
        contents.request(item, _like_stored(contents, item, target))
        for item, target in zip(items, targets, strict=True)
    ]
    contents.reader.fill(requests)
    for item, target, request in zip(items, targets, requests, strict=True):
        if request.target is not target:
            target.copy_(request.target)
        planner.commit_tensor(item, target)


def _like_stored(contents: Contents, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
    """Return the target or, where it is of another type, memory to read into before it is cast, as PyTorch does it."""
    leaf = contents.request(item, None).leaf
    if tuple(target.shape) != tuple(item.lengths):
        raise StateMismatchError(
            f"the plan wants {list(item.lengths)} of it and the planner gave a tensor of {list(target.shape)}",
            leaf=leaf.name,
        )
    dtype = torch_dtype(leaf.dtype)
    return target if target.dtype == dtype else torch.empty(target.shape, dtype=dtype)


def _saved(value: Any) -> io.BytesIO:
    """Return what the planner will unpickle: bytes that are made here, of a value that the codec decoded."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
