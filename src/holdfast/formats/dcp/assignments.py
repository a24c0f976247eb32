"""What the coordinator sends to each rank before a save, and what each rank sends back. Values only.

PyTorch carries them: the assignments in the plans' `storage_data`, the results in that of a `WriteResult`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch.distributed.checkpoint.planner import SavePlan

from holdfast.errors import UsageError
from holdfast.ondisk.manifest import FileRecord, TensorRecord

__all__ = ["StoredTensor", "StoredValue", "WriteAssignment", "assign", "assignment_of"]


@dataclass(frozen=True)
class WriteAssignment:
    """What one rank writes, and where to."""

    folder: str
    claim: str
    rank: int
    size: int
    step: int
    loose: str

    def __reduce__(self) -> Any:
        return _received, (self.folder, self.claim, self.rank, self.size, self.step, self.loose)


class _Call(threading.local):
    """The assignment of the save that this thread is in."""

    assignment: Callable[[], WriteAssignment | None] = staticmethod(lambda: None)


_call = _Call()


def _received(folder: str, claim: str, rank: int, size: int, step: int, loose: str) -> WriteAssignment:
    """Return the assignment that the coordinator sent. It is kept: a planner that caches plans drops its plan."""
    assignment = WriteAssignment(folder, claim, rank, size, step, loose)
    _call.assignment = weakref.ref(assignment)
    return assignment


def assign(plans: list[SavePlan], assignments: list[WriteAssignment]) -> list[SavePlan]:
    """Return the plans, each with the assignment of its rank."""
    # Where there is one process alone, nothing is sent.
    _call.assignment = weakref.ref(assignments[0])
    return [replace(plan, storage_data=one) for plan, one in zip(plans, assignments, strict=True)]


def assignment_of(plan: SavePlan) -> WriteAssignment:
    """Return the assignment of this save. A plan from a planner's cache has that of the save for which it was made."""
    found = plan.storage_data
    sent = _call.assignment()
    if not isinstance(found, WriteAssignment):
        raise UsageError(
            f"the plan was made for another storage writer, with {type(found).__name__} as its storage_data",
            advice="let a planner with enable_plan_caching=True save through one kind of writer only",
        )
    return found if sent is None or sent is found else replace(sent, loose=found.loose)


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor item as its rank wrote it: the leaf with this one chunk, and the file that holds it."""

    leaf: TensorRecord
    file: FileRecord
    loose: str


class StoredValue(msgspec.Struct, frozen=True):
    """One item that is no tensor, encoded. The coordinator writes it: an item is small, and a tree is one file's."""

    value: Any
    loose: str
