"""What a load is asked and what it answers. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.ondisk.codec import Json
from holdfast.runs.checkpoint import Checkpoint, Skipped
from holdfast.runs.selector import Selector

__all__ = ["LoadRequest", "Loaded", "NothingToLoad"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to restore into which live objects. `globs_must_match`: an `exclude` that matches no leaf is an error.
    `defer_rng`: the random state is read and checked, and set later, by a call of its own. `spare_memory` returns
    memory of this process that nothing else uses during the restore, or None. `limit_bytes`: how much new host memory
    copies of this rank's state may take besides."""

    selector: Selector
    components: Mapping[str, Any]
    strategy: LoadStrategy
    guards: Mapping[str, Json] = field(default_factory=dict)
    pipeline_stage: int | None = None
    verify: Verify = "full"
    unwanted: Set[str] = frozenset()
    globs_must_match: bool = True
    defer_rng: bool = False
    spare_memory: Callable[[], memoryview | None] = lambda: None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was restored, from where, and what was not. `phases` are the seconds of each part, by name. `unclaimed` are
    the components of the checkpoint that no rank holds and that the strategy does not leave out. `accepted` are the
    differences that only a loose strategy lets pass, `renamed` and `cast` the leaves that have another name or type in
    the checkpoint. `deferred` are the components of the random state that are to be set later, on any rank, and
    `set_rng` sets those of this one."""

    checkpoint: Checkpoint
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]
    passed_over: tuple[Skipped, ...]
    damaged: Mapping[Checkpoint, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    unclaimed: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    set_rng: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class NothingToLoad:
    """There is no checkpoint; `passed_over` is what there is instead."""

    passed_over: tuple[Skipped, ...] = ()
