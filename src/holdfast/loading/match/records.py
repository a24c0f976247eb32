"""What enters a match and what leaves it. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.loading.requests import Request
from holdfast.ondisk.codec import Json
from holdfast.ondisk.manifest import TensorRecord, TreeRecord

__all__ = ["Fitted", "Place", "SavedState"]


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint holds, ready to be looked up: leaves by name, trees by component, values by tree. `same_torch`:
    the version of torch that wrote it is this one; another may know other options of an optimizer."""

    leaves: Mapping[str, TensorRecord]
    trees: Mapping[str, Sequence[TreeRecord]]
    values: Callable[[TreeRecord], Json]
    require_file: Callable[[str], None]
    world_size: int
    same_torch: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands."""

    rank: int
    size: int
    pipeline_stage: int | None


@dataclass(slots=True)
class Fitted:
    """One component fitted to its saved state. `take_up` hands the state over once the requests are filled; where it
    copies their memory to live tensors, `copied` has requests for the same content with these as targets.

    `unused` are leaves of the checkpoint that this rank has no place for; another rank that takes from the same of
    the `trees` may have one. `accepted` are the differences that a loose restore lets pass, `renamed` and `cast` the
    leaves that have another name or type in the checkpoint, and `rules` the entries of `rename` that matched a leaf of
    a model, with the model. Of a model or an optimizer,
    `held` counts the leaves (an optimizer's parameters) on this rank, `stored` those in the checkpoint, and `common`
    those that both have and that are restored.
    """

    component: str
    kind: str
    skipped: str = ""
    trees: tuple[str, ...] = ()
    requests: list[Request] = field(default_factory=list)
    copied: list[Request] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    rules: set[tuple[str, str]] = field(default_factory=set)
    globs: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    held: int = 0
    stored: int = 0
    common: int = 0
    take_up: Callable[[], None] = lambda: None
