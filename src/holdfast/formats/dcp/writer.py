"""Commit a Holdfast checkpoint through PyTorch's `StorageWriter`. The planner's items enter, a checkpoint leaves."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.errors import HoldfastError, UsageError
from holdfast.formats.dcp.assignments import WriteAssignment, assign, assignment_of
from holdfast.formats.dcp.claims import FUNCTION_OF_SAVE, Hold
from holdfast.formats.dcp.commit import Attempt, commit_results, place_of
from holdfast.formats.dcp.items import without_empty_pieces, write_items
from holdfast.formats.dcp.layout import loose_component
from holdfast.formats.dcp.options import is_location, refuse_options
from holdfast.loading.resolve import Location
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lease import Lease
from holdfast.runs.lineage import Lineage, ancestry, draw_segment
from holdfast.runs.links import point_latest
from holdfast.runs.run_record import open_run
from holdfast.storage.registry import open_storage

logger = logging.getLogger("holdfast")

__all__ = ["HoldfastWriter"]


class HoldfastWriter(StorageWriter):  # type: ignore[misc]
    """A `StorageWriter` that commits a Holdfast checkpoint.

    run: the folder or URL of the run. step: the training step; None takes one more than the latest checkpoint's, or 0.
    The checkpoint continues the latest one; a step which that line has committed is refused. Values that are no
    tensors are stored by the typed codec, never pickled, so the planner must be able to look up the object itself.
    The run is leased for the time of a save, also of one that fails.
    """

    def __init__(self, run: Location, *, step: int | None = None, **options: Any) -> None:
        refuse_options(options, "HoldfastWriter")
        self._run = run
        self._given_step = self._step = None if step is None else paths.check_step(step)
        self.save_id = str(uuid.uuid4())
        self._attempt: Attempt | None = None
        self._hold: Hold | None = None

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
        plans = without_empty_pieces(plans)
        loose = loose_component([item.index.fqn for plan in plans for item in plan.items])
        attempt = self._attempt = self._claim(len(plans))
        return assign(
            plans,
            [
                WriteAssignment(attempt.folder, attempt.claim, rank, len(plans), attempt.step, loose)
                for rank in range(len(plans))
            ],
        )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors. What cannot be stored is found before the first byte, as far as it can be."""
        assignment = assignment_of(plan)
        try:
            self._catalog.attempts.require_claim(assignment.folder, assignment.claim)
            results = write_items(plan.items, planner, assignment, self._catalog)
        except HoldfastError as error:
            self._give_up()
            raise error.at(step=assignment.step, rank=assignment.rank) from error
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
            checkpoint = commit_results(self._attempt, metadata.planner_data, results, self._catalog)
            logger.info(
                "committed step %d: %.1f MiB to %s", checkpoint.step, checkpoint.size_bytes / 2**20, checkpoint.path
            )
            _committed_last[checkpoint.head.run_id] = checkpoint.digest
            point_latest(self._catalog.storage, checkpoint.folder)
        finally:
            self._give_up()
        metadata.storage_data = {result.index: place_of(result) for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Return the run that the next save goes to; None when it was given as a storage."""
        return self._run if isinstance(self._run, str | os.PathLike) else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_location(checkpoint_id)

    def _give_up(self) -> None:
        """Release the run, if this writer has it: the save is over, in one way or another."""
        if self._hold is not None:
            self._hold.release()
        self._attempt = self._hold = None

    def _claim(self, size: int) -> Attempt:
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
        self._hold = Hold(lease.release, FUNCTION_OF_SAVE)
        try:
            first = lease.floor.first_attempt(step)
            folder, claim = self._catalog.attempts.claim(step, size, lease=lease.number, first=first)
        except BaseException:
            self._give_up()
            raise
        segment = _segment_after(latest)
        return Attempt(
            folder, claim, step, parent, Lineage.through(line), segment, lease.number, lease.token, self.save_id
        )


# By run, what this process committed last. `dcp.save` is often given a new writer each time.
_committed_last: dict[str, str] = {}


def _segment_after(latest: Checkpoint | None) -> str:
    """Return the segment of the next checkpoint: that of the latest one if this process has just committed it."""
    if latest is not None and latest.head.segment and _committed_last.get(latest.head.run_id) == latest.digest:
        return latest.head.segment
    return draw_segment()
