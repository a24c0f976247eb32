"""What a restore wants of a checkpoint: boxes of leaves, the memory to put them into, and who takes them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.ondisk.manifest import TensorRecord
from holdfast.ondisk.regions import Box


@dataclass(frozen=True, slots=True)
class Request:
    """Fill `target`, a torch tensor, with a box of a leaf. `fresh`: nothing but this request knows the target yet.

    A request of which only the bytes are checked, not read, needs no target: it is None.
    """

    leaf: TensorRecord
    box: Box
    target: Any
    fresh: bool


@dataclass(slots=True)
class Fitted:
    """One component fitted to its saved state. `take_up` hands the state over once the requests are filled.

    `unused` are leaves of the checkpoint that this rank has no place for; another rank that takes from the same of
    the `trees` may have one. `accepted` are the differences that a loose restore lets pass. Of a model or an optimizer,
    `held` counts the leaves (an optimizer's parameters) on this rank, `stored` those in the checkpoint, and `common`
    those that both have and that are restored.
    """

    component: str
    kind: str
    skipped: str = ""
    trees: tuple[str, ...] = ()
    requests: list[Request] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    globs: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    held: int = 0
    stored: int = 0
    common: int = 0
    take_up: Callable[[], None] = lambda: None
