"""Describe training loaders by what a position in their data depends on, and name what changed since a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["changes_of_loaders", "described_loaders"]

_OF_SAMPLERS = ("shuffle", "seed", "replacement", "num_samples", "num_replicas")


def described_loaders(loaders: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a description of each loader, of plain values."""
    return [_described(loader) for loader in loaders]


def changes_of_loaders(before: Sequence[Mapping[str, Any]], loaders: Sequence[Any]) -> list[str]:
    """Return what is another than in the descriptions, one sentence each."""
    now = described_loaders(loaders)
    if len(before) != len(now):
        return [f"{len(before)} training loaders became {len(now)}"]
    found = []
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        where = f"loader {number}: " if len(now) > 1 else ""
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if "sampler" in names:
            # The attributes of two kinds of samplers say nothing more.
            names = [name for name in names if not name.startswith("sampler ")]
        found += [f"{where}{name} was {old.get(name)} and is {new.get(name)}" for name in names]
    return found


def _described(loader: Any) -> dict[str, Any]:
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    size = getattr(loader, "batch_size", None)
    described = {
        "batch size": _plain(getattr(batch_sampler, "batch_size", None) if size is None else size),
        "number of batches": _length(loader),
        "sampler": None if sampler is None else type(sampler).__name__,
        "batch sampler": None if batch_sampler is None else type(batch_sampler).__name__,
    }
    for name in _OF_SAMPLERS:
        if (value := _attribute(sampler, name)) is not None:
            described[f"sampler {name}"] = value
    return described


def _attribute(sampler: Any, name: str) -> bool | int | None:
    try:
        return _plain(getattr(sampler, name, None))
    except (TypeError, NotImplementedError):
        # A property that needs the length of a dataset without one.
        return None


def _plain(value: Any) -> bool | int | None:
    return value if isinstance(value, bool | int) else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
