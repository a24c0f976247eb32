"""Building blocks for those who need no manager: look at a run, verify it, take and give back state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from holdfast.catalog import Checkpoint
from holdfast.records.report import Report
from holdfast.stages import resolve as resolving
from holdfast.stages import verify as verifying
from holdfast.stages.resolve import Location


def resolve(run: Location, selector: str | int = "latest") -> Checkpoint:
    """The checkpoint that is meant: a run and a selector, or the path of a checkpoint, a manifest or a link."""
    return resolving.resolve(run, selector)


def peek(run: Location, selector: str | int = "latest") -> Checkpoint | None:
    """The checkpoint that is meant, or None where `latest` finds nothing. Loads nothing."""
    catalog, chosen = resolving.locate(run, selector)
    if chosen.kind == "latest" and not catalog.holds_something():
        return None
    return catalog.find(chosen)


def is_restart(run: Location) -> bool:
    """Whether the run has a checkpoint to resume from. A damaged one counts: such a run must not start afresh."""
    catalog, _ = resolving.locate(run)
    return catalog.holds_something()


def checkpoints(run: Location) -> list[Checkpoint]:
    """The run's committed checkpoints, the latest first. Loads nothing."""
    catalog, _ = resolving.locate(run)
    return list(catalog.scan().checkpoints)


def verify(
    run: Location,
    selector: str | int = "latest",
    depth: Literal["full", "quick"] = "full",
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> Report:
    """Check a checkpoint against its manifest and name every damage: file, leaf and byte range."""
    return verifying.verify(resolving.resolve(run, selector), depth, on_bytes=on_bytes)


def build_train_state(components: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every component as nested dicts, tensors still the live ones, in the form that is stored."""
    from holdfast.live import component_state

    return {name: component_state(name, component, components) for name, component in components.items()}


def restore_train_state(components: Mapping[str, Any], train_state: Mapping[str, Any]) -> None:
    """Give state that `build_train_state` took back to the components, all of it or, on a mismatch, none of it."""
    from holdfast.live import restore_state

    restore_state(components, train_state)
