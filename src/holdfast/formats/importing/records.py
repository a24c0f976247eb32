"""A training checkpoint of another tool, taken apart. Values only; tensors are entries of their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.formats.source import Asset, Source
from holdfast.state.trees import TreeKind

__all__ = ["Part", "Training"]


@dataclass(frozen=True, slots=True)
class Part:
    """One tree of the new checkpoint.

    origin: where it stands in the source, for people. value: nested dicts, lists and plain values, with a `TensorEntry`
    of `source` in the place of each tensor. scope: the rank whose state it is; empty for all. model: the component that
    has the parameters of an optimizer.
    """

    component: str
    kind: TreeKind
    value: Any
    source: Source
    origin: str
    scope: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Training:
    """All of a training checkpoint.

    steps_done: how many steps the source states to be done; None where it does not say. epochs_done: the same of whole
    epochs. changes: what was renamed or reordered. left: what is not taken over, each with the reason. ranks: how many
    ranks have a state of their own in it.
    """

    layout: str
    parts: tuple[Part, ...]
    steps_done: int | None = None
    epochs_done: int | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None
    assets: Mapping[str, Asset] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    ranks: int = 1
