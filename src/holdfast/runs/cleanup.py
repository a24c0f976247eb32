"""Keep a run in order: links, retention, and the debris of attempts that were given up.

Only the run's writer does it, on the leader, in a worker thread. A checkpoint that is removed loses its manifest first,
durably; then its bytes go, unless a process reads them. A crash in between leaves debris, which the next writer closes
and removes.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from holdfast.errors import CheckpointNotFoundError, DamagedRecordError, HoldfastError, KeyMissingError
from holdfast.runs.annotations import Note, parse_note_name
from holdfast.runs.attempts import AttemptRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan, numbers_of
from holdfast.runs.events import Event
from holdfast.runs.lineage import ancestry, start_of
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.links import Links
from holdfast.runs.process_identity import Identity, is_alive
from holdfast.runs.readers import Readers
from holdfast.runs.retention import Decision, KeepPolicy, Record, retain
from holdfast.runs.retention_state import RetentionState, added_since, are_unchanged
from holdfast.runs.selection import first_names, metric_names
from holdfast.runs.verify import verify
from holdfast.runs.worker import WorkerThread

logger = logging.getLogger("holdfast")

__all__ = ["Housekeeper", "records_of"]

_CLEANUP_FAILED = "cleanup failed and will be retried after the next save"


class Housekeeper:
    """Cleans up one run, whenever it is asked to.

    keep: None keeps everything. links: False makes none; a template adds one for each checkpoint. Links that exist stay
    as long as they lead to a checkpoint. may_write: raises when this process is not the run's writer any more. in_use:
    digests of checkpoints that the training itself still needs. own_line: only checkpoints in the lineage of the newest
    one may be removed; those of another start of the run, or that the training went back from, stay until they are
    pruned explicitly. emit: is called with an event for each checkpoint that was removed.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        keep: KeepPolicy | None,
        links: bool | LinkTemplate = True,
        may_write: Callable[[], None] = lambda: None,
        in_use: Callable[[], set[str | None]] = set,
        own_line: bool = False,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._catalog = catalog
        self._keep = keep
        self._updates_links = links is not False
        self._template = links if isinstance(links, LinkTemplate) else None
        self._links = Links(catalog, template=self._template, ranking=keep.metrics if keep is not None else ())
        self._own_line = own_line
        self._may_write = may_write
        self._in_use = in_use
        self._emit = emit
        self._readers = Readers(catalog.storage)
        self._worker = WorkerThread()
        self.refuse_own_thread = self._worker.refuse_current
        self._doomed: dict[str, str] = {}
        self._cleared = False
        self._is_waiting = False
        self._durable: set[str] = set()
        # What the last cleanup decided, and what of it has to be synced before anything is removed.
        self._state: RetentionState | None = None
        self._unsynced: list[Checkpoint] = []
        self._suspected: dict[Checkpoint, str] = {}
        # The folders of checkpoints that a note is still to be written on: kept until its writer takes them out.
        self.awaiting_notes: set[str] = set()
        self._lock = threading.Lock()
        self._warned_of_metrics = False
        weakref.finalize(self, self._worker.stop)

    def clean_up_in_background(self) -> None:
        """Run `clean_up` in the worker thread if it would change anything. A failure is logged, and `clean_up` is run
        again after the next save."""
        if self._keep is None and self._template is None and self._cleared and not self._suspected:
            return
        # One that waits for its turn will see all changes until then.
        if not self._is_waiting:
            self._is_waiting = True
            try:
                self._worker.submit(lambda: _log_failure(self._take_turn, _CLEANUP_FAILED, self._report_failure))
            except BaseException:
                # Such as an interrupt: a cleanup that is taken for waiting and is not would be the last one.
                self._is_waiting = False
                raise

    def _report_failure(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        self._emit(Event("retention_failed", None, 0, error=text))

    def _take_turn(self) -> None:
        self._is_waiting = False
        if not self._decide_about_new():
            self._clean_up(self._catalog.scan_cached if self._cleared else self._catalog.scan)

    def clear_debris_in_background(self) -> None:
        """Run `clear_debris` in the worker thread. A failure is logged; the next cleanup does it again."""
        self._worker.submit(lambda: _log_failure(self.clear_debris, _CLEANUP_FAILED, self._report_failure))

    def run_in_background(self, work: Callable[[], object]) -> None:
        """Run a function of the caller in the worker thread, in its turn. A failure is logged."""
        self._worker.submit(lambda: _log_failure(work, "work on the run in the background failed"))

    def suspect(self, damaged: Mapping[Checkpoint, str]) -> None:
        """Have these checkpoints verified by the next cleanup: a read error may have been temporary. Damage that is
        confirmed is noted on the checkpoint, which then counts for nothing and is not removed."""
        self._suspected.update(damaged)

    def wait(self) -> None:
        """Return when everything that was submitted is done."""
        self._worker.wait()

    def close(self) -> None:
        self.wait()
        self._worker.close()

    def plan(self) -> list[Decision]:
        """Return what a cleanup would keep and remove, and why. Changes nothing."""
        return self._plan(self._catalog.scan())[1]

    def clear_debris(self, look: Callable[[], Scan] | None = None) -> None:
        """Remove the bytes of closed attempts and of interrupted deletions, and notes on checkpoints that are gone.
        look: how the run is scanned; by default every manifest is read."""
        self._may_write()
        self._note_damage()
        self._readers.sweep()
        notes = self._catalog.annotations.names()
        scan = look() if look is not None else self._catalog.scan()
        self._collect(scan)
        _remove_lost_notes(self._catalog, notes, scan)
        for folder in list(self._doomed):
            self._clear(folder)
        self._cleared = True

    def clean_up(self) -> list[Decision]:
        """Clear debris, move the links and remove what is not kept; return what was decided."""
        return self._clean_up(self._catalog.scan)

    def _clean_up(self, look: Callable[[], Scan]) -> list[Decision]:
        """Do what `clean_up` does. look: how the run is scanned; manifests that were read before need not be read
        again, because those on which a removal depends are."""
        self._state = None
        self.clear_debris(look)
        while True:
            notes = self._catalog.annotations.names()
            scan = look()
            records, plan = self._plan(scan)
            gone = {decision.folder for decision in plan if not decision.keep}
            kept = [found for found in scan.checkpoints if found.folder not in gone]
            if self._updates_links:
                # The links first: none of them may lead to what is about to be removed.
                self._links.update(kept)
            going = [found for found in reversed(scan.checkpoints) if found.folder in gone]
            # Also what nothing takes the place of now: the next cleanup may remove, and looks only at what is new.
            self._unsynced = kept
            if going:
                self._make_durable()
            state = None
            if self._keep is not None:
                state = RetentionState(self._keep, scan, records, notes, gone=gone)
            read_again = state.to_read_again(going) if state is not None else going
            if not are_unchanged(read_again, self._catalog):
                look = self._catalog.scan
            elif all(self._remove(checkpoint, notes) for checkpoint in going):
                self._links.remove_dangling(scan.closed, self._doomed.keys())
                self._keep_state(state, going)
                return plan

    def _decide_about_new(self) -> bool:
        """Decide about the checkpoints that were added since the last cleanup, if nothing else has changed, and remove
        what is not kept any more. Return False where the whole run has to be looked at."""
        state, self._state = self._state, None
        if state is None or self._suspected or self._doomed:
            return False
        self._may_write()
        notes = self._catalog.annotations.names()
        added = added_since(state, notes, self._catalog)
        if added is None or not state.is_continued_by(added):
            return False
        self._readers.sweep()
        going = state.add(added, notes, self._records)
        self._unsynced += added
        if self._updates_links and not self._links.add(added, going):
            return False
        if going:
            self._make_durable()
        if not are_unchanged(state.to_read_again(going), self._catalog):
            return False
        if not all(self._remove(checkpoint, notes) for checkpoint in going):
            return False
        if going:
            # No attempt is closed now: after one that is, the whole run is looked at.
            self._links.remove_dangling((), self._doomed.keys())
        self._keep_state(state, going)
        return True

    def _keep_state(self, state: RetentionState | None, removed: Sequence[Checkpoint]) -> None:
        """Keep what was decided for the next cleanup, unless what was removed changes it."""
        self._state = state if state is not None and state.is_valid_without(removed) else None

    def _make_durable(self) -> None:
        """Sync what stays before anything is removed: a process that committed it may have been killed between the
        manifest and its sync."""
        for checkpoint in self._unsynced:
            if checkpoint.digest not in self._durable:
                self._catalog.storage.sync(checkpoint.folder)
                self._durable.add(checkpoint.digest)
        self._unsynced = []

    def annotate(self, checkpoint: Checkpoint, **content: Any) -> None:
        """Write a note on a checkpoint, but not while one is being removed; a CheckpointNotFoundError when it was."""
        with self._lock:
            _require_committed(checkpoint, self._catalog)
            self._catalog.annotations.add(checkpoint, **content)

    def _note_damage(self) -> None:
        while self._suspected:
            checkpoint, damage = next(iter(self._suspected.items()))
            # By one thread: the training runs at the same time.
            if not verify(checkpoint, threads=1).ok:
                self._catalog.annotations.add(checkpoint, damage=damage)
            del self._suspected[checkpoint]

    def _plan(self, scan: Scan) -> tuple[list[Record], list[Decision]]:
        """Return the checkpoints as retention sees them, and what it decides."""
        if self._keep is None:
            kept = [Decision(found.folder, found.step, True, ("everything is kept",)) for found in scan.checkpoints]
            return [], kept
        if not self._warned_of_metrics:
            self._warned_of_metrics = _warn_of_unknown_metrics(self._keep, scan)
        records = self._records([_with_damage(found, self._suspected.get(found)) for found in scan.checkpoints])
        return records, retain(records, self._keep)

    def _records(self, checkpoints: Sequence[Checkpoint]) -> list[Record]:
        return records_of(
            Scan(tuple(checkpoints), (), ()),
            held=_held(self._readers, self.awaiting_notes),
            in_use=self._in_use(),
            own_line=self._own_line,
        )

    def _remove(self, checkpoint: Checkpoint, notes: Sequence[str]) -> bool:
        """Remove a checkpoint unless it is in use. Return False when a note was written since the plan was made, which
        may not hold any more. `notes`: the names before the plan."""
        begin = time.monotonic()
        self._may_write()
        with self._lock:
            # Fewer are no reason: notes on what was removed are gone.
            if not set(self._catalog.annotations.names()) <= set(notes):
                return False
            if checkpoint.folder in _held(self._readers, self.awaiting_notes) or checkpoint.digest in self._in_use():
                return True
            self._uncommit(checkpoint.folder)
        self._durable.discard(checkpoint.digest)
        self._clear(checkpoint.folder)
        logger.info("removed step %d (%s)", checkpoint.step, checkpoint.folder)
        self._emit(
            Event(
                "pruned",
                checkpoint.step,
                0,
                time.monotonic() - begin,
                size_bytes=checkpoint.size_bytes,
                path=checkpoint.path,
            )
        )
        return True

    def _uncommit(self, folder: str) -> None:
        """Remove the manifest and remember that the bytes are to go. When that fails and the manifest is still there,
        it is a checkpoint as before: the next plan decides about it, and may keep it."""
        self._doomed[folder] = self._claim_of(folder)
        try:
            self._catalog.uncommit(folder)
        except BaseException:
            if not self._catalog.attempts.is_open(folder):
                del self._doomed[folder]
            raise

    def _clear(self, folder: str) -> None:
        """Remove the bytes of what is no checkpoint any more; later, if a process has just begun to read them."""
        if self._claim_of(folder) != self._doomed[folder]:
            del self._doomed[folder]  # gone, and another attempt has its name
        elif folder not in self._readers.folders():
            # Again, because the first time may have failed: no byte may go while there is a manifest.
            self._catalog.uncommit(folder)
            self._catalog.remove(folder)
            del self._doomed[folder]

    def _claim_of(self, folder: str) -> str:
        return self._catalog.attempts.record(folder).claim

    def _collect(self, scan: Scan) -> None:
        """Remove attempts that were closed. The marker that closes them stays as long as their writer may live: without
        it that process could commit."""
        reading = self._readers.folders() if scan.closed else set()
        for folder in scan.closed:
            # It may be a checkpoint whose deletion was interrupted and that a process began to read before that.
            if folder in reading:
                continue
            self._catalog.attempts.clear(folder)
            if _writer_is_gone(self._catalog, folder):
                self._catalog.remove(folder)


def _held(readers: Readers, awaiting_notes: Set[str]) -> dict[str, str]:
    """Return the folders that may not be removed now, each with the reason."""
    awaited = dict.fromkeys(list(awaiting_notes), "metrics that were reported of it are not written yet")
    return {**awaited, **dict.fromkeys(readers.folders(), "a process is reading it")}


def _require_committed(checkpoint: Checkpoint, catalog: Catalog) -> None:
    try:
        found = catalog.read_head(checkpoint.folder)
    except KeyMissingError:
        found = None
    if found != checkpoint:
        raise CheckpointNotFoundError(
            f"{checkpoint.folder} was removed meanwhile", run=catalog.storage.url, step=checkpoint.step
        )


def _with_damage(checkpoint: Checkpoint, damage: str | None) -> Checkpoint:
    """Return the checkpoint with damage that is suspected and not noted yet."""
    if damage is None:
        return checkpoint
    return replace(checkpoint, notes=(*checkpoint.notes, Note(checkpoint=checkpoint.digest, created="", damage=damage)))


def _warn_of_unknown_metrics(keep: KeepPolicy, scan: Scan) -> bool:
    """Log a metric that no checkpoint has, and return whether there is one: it may be reported later, or be
    misspelled."""
    known = metric_names(scan.checkpoints)
    unknown = sorted({metric for metric, _ in keep.metrics} - known)
    if not unknown or not scan.checkpoints:
        return False
    logger.warning(
        "no checkpoint has the metric '%s' that KeepBest ranks by (there are: %s); until one is saved or "
        "reported with it, all rank as the worst",
        unknown[0],
        first_names(known) or "none",
    )
    return True


def _writer_is_gone(catalog: Catalog, folder: str) -> bool:
    """Return whether no process is left that could commit a closed attempt once its marker is removed."""
    try:
        return _is_dead(catalog.attempts.read(folder))
    except KeyMissingError:
        # A process that has not written its record has written nothing, and checks its lease before it commits.
        return True
    except DamagedRecordError:
        # Also a link or a special file in its place, which no listing shows: the writer is unknown, and may live.
        return False


def _log_failure(
    work: Callable[[], object], message: str, report: Callable[[BaseException], None] = lambda error: None
) -> None:
    """Run a function of the worker thread; log and report what it raises, because no caller would see it."""
    try:
        work()
    except ReferenceError:
        return  # the manager is gone
    except HoldfastError as error:
        logger.warning("%s: %s", message, error)
        report(error)
    except BaseException as error:
        logger.exception("%s", message)
        report(error)


def records_of(
    scan: Scan,
    *,
    held: Mapping[str, str] = MappingProxyType({}),
    in_use: Set[str | None] = frozenset(),
    own_line: bool = False,
) -> list[Record]:
    """Return the checkpoints of a run as retention sees them. held: the folders that stay for now, each with the
    reason. With `own_line` those outside of the lineage of the newest are shielded."""
    newest = next((found for found in scan.checkpoints if not found.damage), None)
    line = {found.folder for found in ancestry(newest.digest, scan.checkpoints)} if newest is not None else set()
    start = start_of(newest) if own_line and newest is not None else None
    replaced = _replaced(found for found in scan.checkpoints if found.folder in line and not found.damage)
    return [
        Record(
            folder=found.folder,
            step=found.step,
            sequence=found.sequence,
            created_seconds=_seconds(found),
            metrics=numbers_of(found.known_metrics),
            tags=found.tags,
            on_line=found.folder in line,
            shield=shield,
            shield_lasts=lasts,
            counts=not found.damage,
            replaced=found.folder in replaced,
        )
        for found in scan.checkpoints
        for shield, lasts in (_shield(found, held, in_use, line, start),)
    ]


def _replaced(line: Iterable[Checkpoint]) -> set[str]:
    """Return the folders of those of a line, the latest first, after which there is a later one of the same step."""
    seen: set[int] = set()
    folders = set()
    for checkpoint in line:
        if checkpoint.step in seen:
            folders.add(checkpoint.folder)
        seen.add(checkpoint.step)
    return folders


def _shield(
    checkpoint: Checkpoint,
    held: Mapping[str, str],
    in_use: Set[str | None],
    line: Set[str],
    start: tuple[int, str] | None,
) -> tuple[str, bool]:
    """Return why a checkpoint stays whatever the policy chooses, and whether that lasts, however the line goes on."""
    if checkpoint.damage:
        return f"damaged, kept for inspection: {checkpoint.damage}", True
    if checkpoint.unread_notes:
        return f"what was noted on it cannot be read: {checkpoint.unread_notes[0]}", False
    if checkpoint.folder in held:
        return held[checkpoint.folder], False
    if checkpoint.digest in in_use:
        return "this training continues from it", False
    return _shield_of_line(checkpoint, line, start), True


def _shield_of_line(checkpoint: Checkpoint, line: Set[str], start: tuple[int, str] | None) -> str:
    """Return why a checkpoint stays that is not in the lineage of the newest. `start`: the first checkpoint of that
    lineage; None where lineages do not matter."""
    if start is None or checkpoint.folder in line:
        return ""
    if start_of(checkpoint) not in (start, None):
        return "of another start of the run"
    return "newer than the checkpoint that the training went back to; `holdfast prune` removes it"


def _seconds(checkpoint: Checkpoint) -> float:
    try:
        return checkpoint.created.timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _is_dead(record: AttemptRecord) -> bool:
    """Return whether the process that began an attempt, and the trainer that it worked for, are seen to be gone."""
    writer = record.writer
    if writer is None or writer.birth is None or is_alive(writer) is not False:
        return False
    if record.trainer is None:
        return True
    return is_alive(Identity(writer.host, writer.machine, record.trainer, record.trainer_birth)) is False


def _remove_lost_notes(catalog: Catalog, names: Sequence[str], scan: Scan) -> None:
    """Remove those of these notes whose checkpoint is gone. They must have been listed before the scan: a checkpoint is
    committed before any note on it, so one that the scan does not find was removed, and will not come back."""
    digests = {found.folder: found.digest for found in scan.checkpoints}
    for name in names:
        parsed = parse_note_name(name)
        if parsed is None:
            continue
        if parsed.folder in digests:
            lost = catalog.annotations.is_on_another(name, digests[parsed.folder])
        else:
            lost = catalog.is_gone(parsed.folder, scan.closed)
        if lost:
            catalog.annotations.remove(name)
