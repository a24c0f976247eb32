"""What happened to a save or a restore, as a value for those who watch. Machines read events, people read log lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

EventKind = Literal["started", "staged", "written", "committed", "failed", "restored", "pruned"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, on one rank.

    kind: "started", "staged" (the training may change its tensors again; not when all is written before `save`
        returns, as in sync mode or past the staging limit), "written" (this rank's part is durable),
        "committed" (the checkpoint exists), "failed", "restored", "pruned" (removed, as `keep` says; leader only).
    seconds: since the save or restore began. phases: how long each part of it took so far, by name. A save has "wait"
        (for the one before it), "capture", "agree", "stage", "copy" (from a device), "write" and "commit"; a restore
        has "wait", "resolve", "fit", "read" (which checks, too) and "restore" (what the components themselves take).
    size_bytes: what this rank staged or wrote; of the last four, the whole checkpoint.
    """

    kind: EventKind
    step: int
    rank: int
    seconds: float
    size_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    path: str = ""
    error: str = ""
