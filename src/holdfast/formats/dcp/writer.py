"""Commit a Holdfast checkpoint through PyTorch's `StorageWriter`. The planner's items enter, a checkpoint leaves."""

from __future__ import annotations

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
from holdfast.formats.attempt import Attempt, begin, finish
from holdfast.formats.dcp.assignments import WriteAssignment, assign, assignment_of
from holdfast.formats.dcp.claims import FUNCTION_OF_SAVE, Hold
from holdfast.formats.dcp.commit import commit_results, place_of
from holdfast.formats.dcp.items import without_empty_pieces, write_items
from holdfast.formats.dcp.layout import loose_component
from holdfast.formats.dcp.options import is_location, refuse_options
from holdfast.loading.resolve import Location
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.storage.registry import open_storage

__all__ = ["HoldfastWriter"]


class HoldfastWriter(StorageWriter):  # type: ignore[misc]
    """A `StorageWriter` that commits a Holdfast checkpoint.

    run: the folder or URL of the run. step: the training step; None takes one more than the latest checkpoint's, or 0.
    resave: write a step that the line has committed once more, as a later checkpoint of the same step; it is refused
    otherwise. The checkpoint continues the latest one. Values that are no tensors are stored by the typed codec, never
    pickled, so the planner must be able to look up the object itself. The run is leased for the time of a save, also of
    one that fails.
    """

    def __init__(self, run: Location, *, step: int | None = None, resave: bool = False, **options: Any) -> None:
        refuse_options(options, "HoldfastWriter")
        if not isinstance(resave, bool):
            raise UsageError(f"resave={resave!r:.100}", advice="use True or False")
        self._run = run
        self._resave = resave
        self._given_step = self._step = None if step is None else paths.check_step(step)
        self.save_id = str(uuid.uuid4())
        self._attempt: Attempt | None = None
        self._hold: Hold | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the save that is under way: it is this process's."""
        kept = ("_run", "_resave", "_given_step", "_step", "save_id")
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
            finish(commit_results(self._attempt, self.save_id, metadata.planner_data, results, self._catalog))
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
        attempt = begin(self._catalog, self._step, size, resave=self._resave)
        self._hold = Hold(attempt.lease.release, FUNCTION_OF_SAVE)
        return attempt
