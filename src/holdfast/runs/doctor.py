"""Examine the records of a run, and repair what is safe to repair. A catalog enters, findings leave. Knows no torch.

No checkpoint is ever changed or removed here, and no checkpoint's files are read but its manifest: `verify` does that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.errors import DamagedRecordError, KeyMissingError, StorageError, UnsupportedFormatError
from holdfast.ondisk import paths
from holdfast.runs.annotations import parse_note_name
from holdfast.runs.attempts import MAX_PLAUSIBLE_LEASE_NUMBER, AttemptRecord, linked_folders
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan
from holdfast.runs.claims import claim_names, foreign_claims, read_claim
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.lease import Lease, require_free
from holdfast.runs.process_identity import is_alive
from holdfast.runs.readers import reader_claims
from holdfast.runs.run_record import open_run, read_run_id
from holdfast.storage.base import features_of
from holdfast.storage.displacing import obstruction_of, remove_or_set_aside, set_aside

__all__ = ["Finding", "Kind", "examine", "mend"]

Kind = Literal["checkpoint", "run", "attempt", "note", "lease", "reader", "link", "orphan"]

_SHOWN_RANKS = 8
_OWN_NAMES = {paths.RUN_KEY, paths.LEASE, paths.READERS, paths.NOTES}
_RENAMED = "is renamed to set-aside-...: nothing in it is lost"
# How long the writer of an attempt that was given up, of which nothing is known, may still be about to commit it.
_WRITER_MAY_LIVE_SECONDS = 24 * 3600
_KEPT_RECORD = "is removed a day after the attempt was given up: until then its writer, which is unknown, may live"
_RECEIPT_END = ".receipt.json"
_RANK_FILE = re.compile(r"rank-([0-9]{5})\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run. `damage`: bytes are wrong, and not only left over. `mendable`: `mend` repairs it; otherwise
    `remedy` states what a person can do. `mended`: it was repaired."""

    kind: Kind
    path: str
    problem: str
    remedy: str = ""
    damage: bool = False
    mendable: bool = False
    mended: bool = False


def examine(catalog: Catalog) -> list[Finding]:
    """Return everything that is damaged, unfinished or left over in a run. Changes nothing."""
    scan = catalog.scan()
    return [
        *_checkpoints(catalog, scan),
        *_run(catalog, scan),
        *_lease(catalog),
        *_attempts(catalog, scan),
        *_notes(catalog, scan),
        *_readers(catalog),
        *_links(catalog, scan),
        *_orphans(catalog, scan),
    ]


def mend(catalog: Catalog) -> list[Finding]:
    """Repair what is safe to repair and return every finding, those that are gone marked as `mended`.

    Raise a `RunInUseError` while a live process writes to the run.
    """
    before = examine(catalog)
    _remove_obstacles(catalog, before)
    lease = Lease.acquire(catalog.storage, from_this_process=False, close_attempts=catalog.attempts.close_older)
    try:
        _mend_run(catalog, before)
        # It removes the bytes of attempts that can never be committed, claims of readers that are gone, and notes on
        # checkpoints that are gone. While the notes cannot be listed, their checkpoints are unknown.
        if obstruction_of(catalog.storage, paths.NOTES) is None:
            Housekeeper(catalog, keep=None, links=False, may_write=lease.require).clear_debris()
        _mend_links(catalog, before)
        _remove_damaged_claims(catalog, lease.number)
    finally:
        lease.release()
    left = {(finding.kind, finding.path) for finding in examine(catalog)}
    return [replace(finding, mended=(finding.kind, finding.path) not in left) for finding in before]


# What is found


def _checkpoints(catalog: Catalog, scan: Scan) -> Iterator[Finding]:
    linked = linked_folders(catalog.storage) if scan.damaged else {}
    for skipped in scan.damaged:
        path = paths.key(skipped.folder, paths.MANIFEST)
        remedy = "restore the file from a copy, or delete the folder"
        if skipped.folder in linked:
            path, remedy = skipped.folder, "move the folder back into the run, or remove the link"
        if skipped.newer:
            remedy = "use a newer version of Holdfast"
        yield Finding("checkpoint", path, skipped.reason, remedy, damage=not skipped.newer)


def _run(catalog: Catalog, scan: Scan) -> Iterator[Finding]:
    remedy = "is written again with the id that the newest checkpoint states"
    try:
        run_id = read_run_id(catalog.storage)
    except DamagedRecordError as error:
        yield Finding("run", paths.RUN_KEY, error.problem, remedy, damage=True, mendable=True)
    except UnsupportedFormatError as error:
        # A version that writes a newer format writes newer manifests, too.
        if scan.checkpoints and not any(skipped.newer for skipped in scan.damaged):
            problem = f"{error.problem}, but every checkpoint is of a format that is known"
            yield Finding("run", paths.RUN_KEY, problem, remedy, damage=True, mendable=True)
        else:
            yield Finding("run", paths.RUN_KEY, error.problem, "use a newer version of Holdfast")
    else:
        if run_id is None and scan.checkpoints:
            yield Finding("run", paths.RUN_KEY, "the record of the run is missing", remedy, mendable=True)


def _lease(catalog: Catalog) -> Iterator[Finding]:
    if (obstruction := obstruction_of(catalog.storage, paths.LEASE)) is not None:
        yield Finding("lease", paths.LEASE, obstruction.problem, _RENAMED, damage=True, mendable=True)
        return
    for name in foreign_claims(catalog.storage):
        path = paths.key(paths.LEASE, name)
        yield Finding(
            "lease", path, "no writer has counted up to this number", "is removed", damage=True, mendable=True
        )
    for number in claim_names(catalog.storage):
        try:
            read_claim(catalog.storage, number)
        except DamagedRecordError as error:
            remedy = "is removed if its holder adds no heartbeat for a minute"
            yield Finding("lease", _claim_path(number), error.problem, remedy, damage=True, mendable=True)


def _attempts(catalog: Catalog, scan: Scan) -> Iterator[Finding]:
    for folder in scan.attempts:
        record = catalog.attempts.record(folder)
        state = "was given up" if folder in scan.closed else "was never committed"
        problem = f"{state}; {_who(record)}; {_missing(catalog, folder, record)}"
        yield Finding("attempt", folder, problem, "is cleared when its writer is seen to be gone", mendable=True)
    attempts = set(scan.attempts)
    remedy = "is removed: no checkpoint needs the record"
    for folder in (*scan.attempts, *(found.folder for found in scan.checkpoints)):
        path = paths.key(folder, paths.ATTEMPT)
        try:
            record = catalog.attempts.read(folder)
        except KeyMissingError:
            continue
        except DamagedRecordError as error:
            # Its writer may live: what closes the attempt must stay while that writer may still commit.
            needed = folder in attempts and catalog.attempts.seconds_since_closed(folder) < _WRITER_MAY_LIVE_SECONDS
            yield Finding(
                "attempt", path, error.problem, _KEPT_RECORD if needed else remedy, damage=True, mendable=not needed
            )
            continue
        if record.lease > MAX_PLAUSIBLE_LEASE_NUMBER:
            problem = f"no writer has counted up to lease number {record.lease}"
            yield Finding("attempt", path, problem, remedy, damage=True, mendable=True)


def _who(record: AttemptRecord) -> str:
    writer = record.writer
    if writer is None:
        return "the writer is unknown"
    seen = {True: "lives", False: "is gone", None: "cannot be seen from here"}[is_alive(writer)]
    return f"{writer}, which began it, {seen}"


def _missing(catalog: Catalog, folder: str, record: AttemptRecord) -> str:
    names = {entry.name for entry in catalog.storage.entries(folder)}
    ranks = {int(match[1]) for match in map(_RANK_FILE.match, names) if match}
    absent = record.world_size - len({rank for rank in ranks if rank < record.world_size})
    missing = [name for name in (paths.MANIFEST, paths.ATTEMPT) if name not in names]
    if absent > 0:
        # Not all of them: a damaged record can state any number of ranks.
        first = (rank for rank in range(record.world_size) if rank not in ranks)
        shown = [str(rank) for rank, _ in zip(first, range(min(absent, _SHOWN_RANKS)), strict=False)]
        missing.append(f"the files of {absent} of {record.world_size} ranks ({', '.join(shown)})")
    return f"missing: {', '.join(missing)}" if missing else "nothing is missing"


def _notes(catalog: Catalog, scan: Scan) -> Iterator[Finding]:
    if (obstruction := obstruction_of(catalog.storage, paths.NOTES)) is not None:
        remedy = "move it away by hand: tags are unknown until then, and retention keeps every checkpoint"
        yield Finding("note", paths.NOTES, obstruction.problem, remedy, damage=True)
        return
    for name in catalog.annotations.names():
        parsed, path = parse_note_name(name), paths.key(paths.NOTES, name)
        if parsed is None:
            continue
        try:
            catalog.annotations.read(name)
        except DamagedRecordError as error:
            remedy = f"delete it if {parsed.folder} needs no tag: retention keeps that checkpoint until then"
            yield Finding("note", path, error.problem, remedy, damage=True)
        else:
            if catalog.is_gone(parsed.folder, scan.closed):
                yield Finding("orphan", path, f"{parsed.folder} is gone", "is removed", mendable=True)


def _readers(catalog: Catalog) -> Iterator[Finding]:
    if (obstruction := obstruction_of(catalog.storage, paths.READERS)) is not None:
        yield Finding("reader", paths.READERS, obstruction.problem, _RENAMED, damage=True, mendable=True)
        return
    for name, claim in reader_claims(catalog.storage):
        path = paths.key(paths.READERS, name)
        if isinstance(claim, DamagedRecordError):
            remedy = "a training removes it after a minute without a heartbeat of its reader"
            yield Finding("reader", path, claim.problem, remedy, damage=True)
        elif claim is not None and is_alive(claim.holder) is False:
            yield Finding("reader", path, f"{claim.holder}, which read it, is gone", "is removed", mendable=True)


def _links(catalog: Catalog, scan: Scan) -> Iterator[Finding]:
    links = features_of(catalog.storage).links
    for name, target in links.targets().items() if links is not None else ():
        if paths.parse_folder(name) is not None:
            continue  # it is found with the checkpoints
        if paths.parse_folder(target) is not None and catalog.is_gone(target, scan.closed):
            yield Finding("link", name, f"points to {target}, which is gone", "is removed", mendable=True)


def _orphans(catalog: Catalog, scan: Scan) -> Iterator[Finding]:
    remedy = "not Holdfast's: nothing is done about it"
    for entry in catalog.storage.entries(""):
        if entry.name not in _OWN_NAMES and not (entry.is_folder and paths.parse_folder(entry.name)):
            yield Finding("orphan", entry.name, "is no part of the run", remedy)
    for checkpoint in scan.checkpoints:
        for name in _unlisted(catalog, checkpoint):
            path = checkpoint.key(name)
            yield Finding("orphan", path, "is not listed in the manifest", "delete it if you do not know it")


def _unlisted(catalog: Catalog, checkpoint: Checkpoint) -> list[str]:
    listed = {file.name.partition("/")[0] for file in checkpoint.head.files} | {paths.MANIFEST, paths.ATTEMPT}
    names = (entry.name for entry in catalog.storage.entries(checkpoint.folder))
    return [name for name in names if name not in listed and not name.endswith(_RECEIPT_END)]


# What is done about it


def _remove_obstacles(catalog: Catalog, findings: Sequence[Finding]) -> None:
    """Remove what makes the lease impossible to acquire; without a lease, therefore, but not while the run is held."""
    for path in {finding.path for finding in findings if finding.path in (paths.LEASE, paths.READERS)}:
        set_aside(catalog.storage, path)
    foreign = {paths.key(paths.LEASE, name) for name in foreign_claims(catalog.storage)}
    attempts = {found.path for found in _of_kind(findings, "attempt") if found.damage and found.mendable}
    if foreign or attempts:
        # A live process may have counted on from such a number.
        require_free(catalog.storage)
    for path in sorted(foreign | attempts):
        remove_or_set_aside(catalog.storage, path)


def _mend_run(catalog: Catalog, findings: Sequence[Finding]) -> None:
    found = _of_kind(findings, "run")
    if not any(finding.mendable for finding in found):
        return
    if any(finding.damage for finding in found):
        remove_or_set_aside(catalog.storage, paths.RUN_KEY)
    open_run(catalog)


def _mend_links(catalog: Catalog, findings: Sequence[Finding]) -> None:
    links = features_of(catalog.storage).links
    if links is None:
        return
    for finding in _of_kind(findings, "link"):
        with contextlib.suppress(KeyMissingError):  # removed by another process
            links.remove(finding.path)


def _remove_damaged_claims(catalog: Catalog, number: int) -> None:
    """Remove what cannot be decoded below the number that this process holds: its holder, if there is one, has lost the
    run and finds that out by the higher number."""
    for older in claim_names(catalog.storage):
        if older >= number:
            continue
        try:
            read_claim(catalog.storage, older)
        except DamagedRecordError:
            with contextlib.suppress(StorageError):  # found again afterwards, and so not reported as mended
                remove_or_set_aside(catalog.storage, _claim_path(older))


def _of_kind(findings: Iterable[Finding], kind: Kind) -> list[Finding]:
    return [finding for finding in findings if finding.kind == kind]


def _claim_path(number: int) -> str:
    return paths.key(paths.LEASE, f"{number:09d}.json")
