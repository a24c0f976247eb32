"""Choose a checkpoint of a run: a scan and a `Selector` enter, a checkpoint or the reason for none leaves."""

from __future__ import annotations

import difflib
from collections.abc import Sequence, Set

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, HoldfastError, UnsupportedFormatError
from holdfast.ondisk import paths
from holdfast.runs.checkpoint import Checkpoint, Scan, Skipped, first_unreadable
from holdfast.runs.lineage import Lineage
from holdfast.runs.selector import Selector
from holdfast.storage.base import Storage

__all__ = [
    "best_of",
    "choose",
    "choose_own",
    "first_names",
    "known_damaged",
    "metric_names",
    "not_found",
    "require_selectable",
]

_SHOWN_NAMES = 10


def choose(scan: Scan, selector: Selector) -> Checkpoint | None:
    """Return the checkpoint that a selector names among those of a scan."""
    if selector.kind == "step":
        return next((found for found in scan.checkpoints if found.step == selector.step), None)
    if selector.kind == "tag":
        return next((found for found in scan.checkpoints if selector.name in found.tags), None)
    if selector.kind == "folder":
        return next((found for found in scan.checkpoints if found.folder == selector.name), None)
    if selector.kind == "best":
        return _best(scan, selector)
    return next((found for found in scan.checkpoints if not found.damage), None)


def choose_own(scan: Scan, step: int, own: Lineage) -> Checkpoint | None:
    """Return the newest checkpoint of a step that is part of a lineage."""
    return next((found for found in scan.checkpoints if found.step == step and found in own), None)


def best_of(among: Sequence[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """Return the best by a stored metric. NaN ranks worst and ties go to the newer one."""
    ranked = [found for found in among if isinstance(found.known_metrics.get(metric), int | float)]
    numbers = [found for found in ranked if found.metrics[metric] == found.metrics[metric]]
    # As they are: converting a large int to a float would make neighbours equal.
    if mode == "max":
        best = max(numbers, key=lambda found: (found.metrics[metric], found.sequence), default=None)
    else:
        best = min(numbers, key=lambda found: (found.metrics[metric], -found.sequence), default=None)
    return best or max(ranked, key=lambda found: found.sequence, default=None)


def metric_names(checkpoints: Sequence[Checkpoint]) -> set[str]:
    """Return the names of all metrics that any of these has."""
    return {name for checkpoint in checkpoints for name in checkpoint.known_metrics}


def first_names(names: Set[str]) -> str:
    """Return the first of these names for a message, and how many there are where not all are shown."""
    shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
    return f"{shown}, ... ({len(names):,} in all)" if len(names) > _SHOWN_NAMES else shown


def require_selectable(scan: Scan, selector: Selector) -> None:
    """Raise if a selector may name a folder that cannot be read now. Only a step excludes folders by their names."""
    candidates = scan.unreadable
    if selector.kind == "step":
        named = ((paths.parse_folder(folder), folder, error) for folder, error in scan.unreadable)
        candidates = tuple((folder, error) for at, folder, error in named if at and at.step == selector.step)
    if candidates:
        raise first_unreadable(candidates)


def known_damaged(scan: Scan) -> list[Skipped]:
    """Return the checkpoints whose bytes were found to be damaged."""
    return [
        Skipped(found.folder, f"was found damaged before: {found.damage}") for found in scan.checkpoints if found.damage
    ]


def not_found(storage: Storage, selector: Selector, scan: Scan) -> HoldfastError:
    """Return why a selector found nothing: damage when there was something, absence when there was not."""
    unusable = _unusable((*scan.damaged, *known_damaged(scan)), selector)
    if unusable and all(skipped.newer for skipped in unusable):
        return UnsupportedFormatError(
            f"'{selector}' finds only {unusable[0]}",
            run=storage.url,
            advice="use a newer version of Holdfast",
        )
    if unusable:
        return CorruptCheckpointError(
            f"'{selector}' finds no sound checkpoint",
            run=storage.url,
            problems=[str(skipped) for skipped in unusable],
        )
    advice = _what_exists(storage, selector, scan)
    return CheckpointNotFoundError(f"'{selector}' finds no checkpoint", run=storage.url, advice=advice)


def _best(scan: Scan, selector: Selector) -> Checkpoint | None:
    sound = [found for found in scan.checkpoints if not found.damage]
    metric = selector.name or _only_metric(scan)
    return best_of(sound, metric, selector.mode or dict(scan.ranking).get(metric, "min"))


def _only_metric(scan: Scan) -> str:
    """Return the metric that `best` ranks by where it names none: the first of the run's ranking, or the only one."""
    if scan.ranking:
        return scan.ranking[0][0]
    names = metric_names(scan.checkpoints)
    if len(names) > 1:
        raise CheckpointNotFoundError(
            f"'best' does not say by which metric; there are {first_names(names)}",
            advice="say best:METRIC, or best:METRIC:max",
        )
    return next(iter(names), "")


def _unusable(damaged: tuple[Skipped, ...], selector: Selector) -> list[Skipped]:
    """Return the damaged folders that a selector may name."""
    if selector.kind == "latest":
        return list(damaged)
    if selector.kind != "step":
        return []
    names = ((paths.parse_folder(skipped.folder), skipped) for skipped in damaged)
    return [skipped for parsed, skipped in names if parsed is not None and parsed.step == selector.step]


def _what_exists(storage: Storage, selector: Selector, scan: Scan) -> str:
    """Return what a person may have meant instead."""
    if scan.checkpoints:
        return _what_checkpoints_exist(selector, scan)
    if scan.attempts:
        return f"there are only attempts that were never committed: {', '.join(scan.attempts[:5])}"
    names = [entry.name for entry in storage.entries("")]
    if not names:
        return "nothing is there; check the path"
    foreign = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"the folder holds no checkpoint of Holdfast's, but: {foreign}"


def _what_checkpoints_exist(selector: Selector, scan: Scan) -> str:
    steps = dict.fromkeys(str(checkpoint.step) for checkpoint in scan.checkpoints)
    advice = f"the newest steps there are {', '.join(list(steps)[:5])}"
    tags = dict.fromkeys(tag for checkpoint in scan.checkpoints for tag in checkpoint.tags)
    near = difflib.get_close_matches(str(selector), ["latest", "best", *tags], 1)
    if near:
        advice += f"; did you mean '{near[0]}'?"
    if selector.kind == "best":
        metrics = metric_names(scan.checkpoints)
        advice = f"the metrics there are {first_names(metrics)}" if metrics else "no checkpoint has a metric"
    if scan.damaged:
        advice += f"; {len(scan.damaged)} folders cannot be read: {scan.damaged[0]}"
    return advice
