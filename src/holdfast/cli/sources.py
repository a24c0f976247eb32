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
    not `known`, unknown, because the storage cannot be read now."""

    folder: str
    reason: str
    newer: bool
    known: bool = True


def open_source(source: str, selector: str = "latest") -> tuple[Catalog, Selector]:
    """Return the run and the selector that a source names."""
    try:
        return locate(source, selector)
    except HoldfastError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # A loop of links, a name that is too long, a folder above it that may not be entered: words, no traceback.
        raise UsageError(f"{source} cannot be opened: {error}", advice="check the path") from error


def find(catalog: Catalog, selector: Selector) -> tuple[Checkpoint, list[Unreadable]]:
    """Return the selected checkpoint, and the folders that `latest` rejected because they cannot be read."""
    rejected = unreadable(catalog, catalog.survey()) if selector.may_fall_back else []
    return catalog.find(selector), rejected


def print_rejected(rejected: list[Unreadable]) -> None:
    """Print which checkpoints were rejected: a damaged one must not be replaced by an older one silently."""
    for one in rejected:
        print_note(f"{one.folder} is rejected: {one.reason}")


def open_run(run: str) -> Catalog:
    """Return the run that a source names. A checkpoint is refused: to take its run instead would be a guess."""
    catalog, selector = open_source(run)
    if selector.kind != "latest":
        raise UsageError(f"{run} names one checkpoint, not a run", advice=f"the run is {catalog.storage.url}")
    return catalog


def scan_run(catalog: Catalog) -> Scan:
    """Return what a run holds, and raise if there is no run: an empty run and a wrong path must not look alike."""
    scan = catalog.survey()
    if any((scan.checkpoints, scan.attempts, scan.damaged, scan.unreadable)):
        return scan
    names = [entry.name for entry in catalog.storage.entries("")]
    if names and paths.RUN_KEY not in names:
        shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        raise UsageError(f"{catalog.storage.url} is no run of Holdfast's", advice=f"the folder holds {shown}")
    if not names and not _is_folder(catalog):
        raise CheckpointNotFoundError(f"{catalog.storage.url} is not there", advice="check the path")
    return scan


def unreadable(catalog: Catalog, scan: Scan) -> list[Unreadable]:
    """Return the folders whose manifests cannot be used, and why."""
    return [
        *(Unreadable(folder, reason_of(error), newer=False, known=False) for folder, error in scan.unreadable),
        *(_why(catalog, skipped) for skipped in scan.damaged),
    ]


def exit_code_of(found: list[Unreadable]) -> int:
    """Return 1 for damage. A newer format is not damage, nor is what cannot be read now: it may be sound."""
    if any(one.known and not one.newer for one in found):
        return DAMAGED
    return REFUSED if found else SOUND


def reason_of(error: HoldfastError) -> str:
    """Return what is wrong and what to do, without the place, which the caller names."""
    return f"{error.problem}; {error.advice}" if error.advice else error.problem


def local_time(created: str) -> str:
    """Return the time of a manifest in the local time zone. Text that is no time is returned as it is."""
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
    """Return whether the run is a folder of a file system; only those can be empty and exist."""
    return Path(catalog.storage.url).is_dir()
