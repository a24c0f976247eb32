"""From what a person wrote to a run and what can be read of it, for every command. Imports no torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from holdfast.cli.output import DAMAGED, REFUSED, SOUND, print_note
from holdfast.errors import CheckpointNotFoundError, HoldfastError, UnsupportedFormatError, UsageError
from holdfast.loading.resolve import locate
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan, Skipped
from holdfast.runs.selector import Selector

_SHOWN_NAMES = 5


class Unreadable(NamedTuple):
    """A folder whose manifest cannot be used: damaged, `newer`, of a format that this version does not know, or, where
    not `known`, one of which nothing can be told, because the storage cannot be read now."""

    folder: str
    reason: str
    newer: bool
    known: bool = True


def open_source(source: str, selector: str = "latest") -> tuple[Catalog, Selector]:
    """The run and the selector that are meant."""
    try:
        return locate(source, selector)
    except HoldfastError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # A loop of links, a name that is too long, a folder above it that may not be entered: words, no traceback.
        raise UsageError(f"{source} cannot be opened: {error}", advice="check the path") from error


def find(catalog: Catalog, selector: Selector) -> tuple[Checkpoint, list[Unreadable]]:
    """The one checkpoint that is meant, and the folders that `latest` rejected because they cannot be read."""
    rejected = unreadable(catalog, catalog.survey()) if selector.may_fall_back else []
    return catalog.find(selector), rejected


def print_rejected(rejected: list[Unreadable]) -> None:
    """Say so: a newest checkpoint that is damaged must not be replaced by an older one without a word."""
    for one in rejected:
        print_note(f"{one.folder} is rejected: {one.reason}")


def open_run(run: str) -> Catalog:
    """The run that is meant. One of its checkpoints is no run: to take its run instead would be a guess."""
    catalog, selector = open_source(run)
    if selector.kind != "latest":
        raise UsageError(f"{run} names one checkpoint, not a run", advice=f"the run is {catalog.storage.url}")
    return catalog


def scan_run(catalog: Catalog) -> Scan:
    """What a run holds, or an error where there is no run: an empty one and a wrong path must not look alike."""
    scan = catalog.survey()
    if any((scan.checkpoints, scan.attempts, scan.damaged, scan.unreadable)):
        return scan
    names = [entry.name for entry in catalog.storage.entries("")]
    if names and paths.RUN_KEY not in names:
        shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        raise UsageError(f"{catalog.storage.url} is no run of Holdfast's", advice=f"it holds {shown}")
    if not names and not _is_folder(catalog):
        raise CheckpointNotFoundError(f"{catalog.storage.url} is not there", advice="check the path")
    return scan


def unreadable(catalog: Catalog, scan: Scan) -> list[Unreadable]:
    """The folders whose manifests cannot be used, and why."""
    return [
        *(Unreadable(folder, reason_of(error), newer=False, known=False) for folder, error in scan.unreadable),
        *(_why(catalog, skipped) for skipped in scan.damaged),
    ]


def exit_code_of(found: list[Unreadable]) -> int:
    """Damage is 1. A newer format is none, and neither is what cannot be read now: the checkpoint may be sound."""
    if any(one.known and not one.newer for one in found):
        return DAMAGED
    return REFUSED if found else SOUND


def reason_of(error: HoldfastError) -> str:
    """What is wrong and what to do, without the place, which the caller names."""
    return f"{error.problem}; {error.advice}" if error.advice else error.problem


def local_time(created: str) -> str:
    """A manifest's time for people here. It is only text in a file: one that is no time is shown as it is."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError):
        return created


def _why(catalog: Catalog, skipped: Skipped) -> Unreadable:
    # Read again, because a scan keeps the message alone, and a newer format must not count as damage.
    try:
        catalog.read(skipped.folder)
    except UnsupportedFormatError as error:
        return Unreadable(skipped.folder, reason_of(error), newer=True)
    except HoldfastError as error:
        return Unreadable(skipped.folder, reason_of(error), newer=False)
    return Unreadable(skipped.folder, skipped.reason, newer=False)


def _is_folder(catalog: Catalog) -> bool:
    """Only a file system has empty folders; elsewhere nothing below a name means that it is not there."""
    return Path(catalog.storage.url).is_dir()
