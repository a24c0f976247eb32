"""Keep a run in order behind the training: links for people, what to keep, what nobody will ever need again.

Only the run's writer does it, on the leader, in a thread of its own. A checkpoint that goes is first no checkpoint any
more, durably; then its bytes go, unless somebody reads them. A crash in between leaves debris, which the next writer
closes and clears away.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from holdfast.errors import CheckpointNotFoundError, HoldfastError, KeyMissingError, StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.runs.annotations import Note, parse_note_name
from holdfast.runs.attempts import AttemptRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan
from holdfast.runs.events import Event
from holdfast.runs.lease import Readers
from holdfast.runs.lineage import ancestry, start_of
from holdfast.runs.links import LinkTemplate
from holdfast.runs.policies import KeepPolicy, Record
from holdfast.runs.process_identity import Identity, is_alive
from holdfast.runs.retention import Decision, retain
from holdfast.runs.selection import best_of
from holdfast.runs.verify import verify
from holdfast.runs.worker import WorkerThread
from holdfast.storage.base import features_of

logger = logging.getLogger("holdfast")

__all__ = ["Housekeeper", "records_of"]

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._=+-]")


class Housekeeper:
    """Tidies one run, whenever it is asked to.

    keep: None keeps everything. links: whether there are links for people, and after which template one for each
    checkpoint; without them, those that are there stay as long as they lead somewhere. may_write: raises when this
    process is not the run's writer any more. in_use: digests of checkpoints that the training itself still needs.
    own_line: only the line that ends in the newest checkpoint is this training's to clean up. What belongs to another
    start, or to a line that somebody went back from, stays until it is pruned explicitly.
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
        tell: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._catalog = catalog
        self._keep = keep
        self._links = links
        self._own_line = own_line
        self._may_write = may_write
        self._in_use = in_use
        self._tell = tell
        self._readers = Readers(catalog.storage)
        self._worker = WorkerThread()
        self._doomed: dict[str, str] = {}
        self._cleared = False
        self._waiting = threading.Event()
        self._durable: set[str] = set()
        self._suspected: dict[Checkpoint, str] = {}
        self._lock = threading.Lock()
        self._said_unknown = False
        weakref.finalize(self, self._worker.stop)

    def tidy_behind(self) -> None:
        """Tidy in the background, if there is anything that tidying would change. What fails is logged, and tried again
        after the next save."""
        if self._keep is None and not isinstance(self._links, LinkTemplate) and self._cleared and not self._suspected:
            return
        # One that waits for its turn will see what happened until then.
        if not self._waiting.is_set():
            self._waiting.set()
            self._worker.submit(lambda: self._try(self._take_turn))

    def _take_turn(self) -> None:
        self._waiting.clear()
        self.tidy()

    def do_behind(self, work: Callable[[], object]) -> None:
        """Do something of the caller's in the same thread, in its turn."""
        self._worker.submit(lambda: self._try(work))

    def suspect(self, damaged: Mapping[Checkpoint, str]) -> None:
        """Have these looked at again when this process next tidies: what could not be read for a moment is not damaged.
        Of what is, it is written down: nobody shall count on it, nor remove it before somebody has looked at it."""
        self._suspected.update(damaged)

    def wait(self) -> None:
        """Return when everything that was asked for is done."""
        self._worker.wait()

    def close(self) -> None:
        self.wait()
        self._worker.stop()

    def plan(self) -> list[Decision]:
        """What would be kept and what would go, and why. Does nothing."""
        return self._plan(self._catalog.scan())

    def clear_behind(self) -> None:
        """Clear debris away in the background, and remove nothing that is a checkpoint."""
        self.do_behind(self.clear_debris)

    def clear_debris(self) -> None:
        """Remove what abandoned attempts and deletions that were cut short left behind, and notes on what is gone."""
        self._may_write()
        self._note_damage()
        self._readers.sweep()
        said = self._catalog.annotations.names()
        scan = self._catalog.scan()
        self._collect(scan)
        _remove_lost_notes(self._catalog, said, scan)
        for folder in list(self._doomed):
            self._clear(folder)
        self._cleared = True

    def tidy(self) -> list[Decision]:
        """Move the links, remove what is not kept, clear away debris."""
        self.clear_debris()
        while True:
            said = self._catalog.annotations.names()
            scan = self._catalog.scan()
            plan = self._plan(scan)
            gone = {decision.folder for decision in plan if not decision.keep}
            kept = [found for found in scan.checkpoints if found.folder not in gone]
            # The links first: none of ours may lead to what is about to go.
            self._point(kept)
            going = [found for found in reversed(scan.checkpoints) if found.folder in gone]
            if going:
                self._make_durable(kept)
            if all(self._remove(checkpoint, said) for checkpoint in going):
                self._unpoint_lost(scan)
                return plan

    def _make_durable(self, kept: Sequence[Checkpoint]) -> None:
        """What stays must be there after a power cut before anything else goes: whoever committed it may have been
        killed between the manifest and its sync."""
        for checkpoint in kept:
            if checkpoint.digest not in self._durable:
                self._catalog.storage.sync(checkpoint.folder)
                self._durable.add(checkpoint.digest)

    def note(self, checkpoint: Checkpoint, **said: Any) -> None:
        """Write something down about a checkpoint, but not while one is being removed. One that was is not found."""
        with self._lock:
            self._require(checkpoint)
            self._catalog.annotations.add(checkpoint, **said)

    def _require(self, checkpoint: Checkpoint) -> None:
        try:
            found = self._catalog.read(checkpoint.folder)
        except KeyMissingError:
            found = None
        if found != checkpoint:
            raise CheckpointNotFoundError(
                f"{checkpoint.folder} was removed meanwhile", run=self._catalog.storage.url, step=checkpoint.step
            )

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except ReferenceError:
            return  # the manager is gone
        except HoldfastError as error:
            logger.warning("the run could not be tidied up; it will be after the next save: %s", error)
        except BaseException:  # there is nobody behind this thread who could hear of it
            logger.exception("the run could not be tidied up; it will be after the next save")

    def _note_damage(self) -> None:
        while self._suspected:
            checkpoint, damage = next(iter(self._suspected.items()))
            # By one thread: the training goes on beside it.
            if not verify(checkpoint, threads=1).ok:
                self._catalog.annotations.add(checkpoint, damage=damage)
            del self._suspected[checkpoint]

    # What stays

    def _plan(self, scan: Scan) -> list[Decision]:
        if self._keep is None:
            return [Decision(found.folder, found.step, True, ("everything is kept",)) for found in scan.checkpoints]
        self._warn_of_unknown_metrics(scan)
        scan = replace(scan, checkpoints=tuple(self._as_found(found) for found in scan.checkpoints))
        records = records_of(
            scan,
            reading=self._readers.folders(),
            in_use=self._in_use(),
            own_line=self._own_line,
        )
        return retain(records, self._keep)

    def _as_found(self, checkpoint: Checkpoint) -> Checkpoint:
        """With the damage that is not written down yet."""
        damage = self._suspected.get(checkpoint)
        if damage is None:
            return checkpoint
        return replace(
            checkpoint, notes=(*checkpoint.notes, Note(checkpoint=checkpoint.digest, created="", damage=damage))
        )

    def _warn_of_unknown_metrics(self, scan: Scan) -> None:
        """Once: a metric that no checkpoint has may be one that is reported late, or one that is spelled wrong."""
        if self._said_unknown or self._keep is None or not scan.checkpoints:
            return
        known = {name for checkpoint in scan.checkpoints for name in checkpoint.metrics}
        unknown = sorted({metric for metric, _ in self._keep.metrics} - known)
        if unknown:
            self._said_unknown = True
            logger.warning(
                "no checkpoint has the metric '%s' that KeepBest ranks by (there are: %s); until one is saved or "
                "reported with it, all rank as the worst",
                unknown[0],
                ", ".join(sorted(known)) or "none",
            )

    # What goes

    def _remove(self, checkpoint: Checkpoint, said: Sequence[str]) -> bool:
        """False when something was said of the run's checkpoints since the plan was made: it may not hold any more."""
        begin = time.monotonic()
        self._may_write()
        with self._lock:
            if self._catalog.annotations.names() != said and not self._only_fewer(said):
                return False
            if checkpoint.folder in self._readers.folders() or checkpoint.digest in self._in_use():
                return True
            self._uncommit(checkpoint.folder)
        self._clear(checkpoint.folder)
        logger.info("removed step %d (%s)", checkpoint.step, checkpoint.folder)
        self._tell(
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
        """Let a checkpoint be one no more, and note that its bytes are to go. One that is still there when that failed
        is a checkpoint as before: the next plan decides about it, and may keep it."""
        self._doomed[folder] = self._claim_of(folder)
        try:
            self._catalog.uncommit(folder)
        except BaseException:
            if not self._catalog.attempts.is_open(folder):
                del self._doomed[folder]
            raise

    def _only_fewer(self, said: Sequence[str]) -> bool:
        """Whether nothing was said, and only notes on what was removed are gone."""
        return set(self._catalog.annotations.names()) <= set(said)

    def _clear(self, folder: str) -> None:
        """The bytes of what is no checkpoint any more; later, if somebody came to read it just before."""
        if self._claim_of(folder) != self._doomed[folder]:
            del self._doomed[folder]  # it is gone, and another attempt has its name
        elif folder not in self._readers.folders():
            # Again, because the first time may have failed; without it nothing may be removed.
            self._catalog.uncommit(folder)
            self._catalog.remove(folder)
            del self._doomed[folder]

    def _claim_of(self, folder: str) -> str:
        return self._catalog.attempts.record(folder).claim

    def _collect(self, scan: Scan) -> None:
        """Clear away attempts that were closed, and so can never be committed. The word that says so stays as long as
        their writer may live: without it he could."""
        reading = self._readers.folders() if scan.closed else set()
        for folder in scan.closed:
            # It may be a checkpoint whose deletion was cut short, and somebody may have begun to read it before that.
            if folder in reading:
                continue
            self._catalog.attempts.clear(folder)
            # Who has not even said who he is has written nothing, and looks whose run it is before he commits.
            unsaid = paths.ATTEMPT not in {entry.name for entry in self._catalog.storage.entries(folder)}
            if unsaid or _is_dead(self._catalog.attempts.record(folder)):
                self._catalog.remove(folder)

    # Links

    def _point(self, kept: Sequence[Checkpoint]) -> None:
        """Make the links that there shall be, and remove others that are made here, by their names."""
        links = features_of(self._catalog.storage).links
        if self._links is False or links is None:
            return
        wanted = self._wanted(kept)
        try:
            present = links.targets()
            for name, target in wanted.items():
                if present.get(name) != target:
                    links.point(name, target)
            for name, target in present.items():
                if name not in wanted and self._is_ours(name, target):
                    links.remove(name)
        except StorageError as error:
            logger.warning("the links could not be moved: %s", error)

    def _unpoint_lost(self, scan: Scan) -> None:
        """Remove links to what is no checkpoint any more: they were made for one, after whatever template, and lead
        nowhere. Not before it is gone: it may still stay, and the link be somebody's own."""
        links = features_of(self._catalog.storage).links
        if links is None:
            return
        try:
            for name, target in links.targets().items():
                if paths.parse_folder(target) is not None and self._is_lost(target, scan):
                    links.remove(name)
        except StorageError as error:
            logger.warning("links that lead nowhere could not be removed: %s", error)

    def _is_lost(self, folder: str, scan: Scan) -> bool:
        return folder in self._doomed or self._catalog.is_gone(folder, scan)

    def _wanted(self, kept: Sequence[Checkpoint]) -> dict[str, str]:
        """The links that there shall be, each with the folder that it leads to."""
        sound = [checkpoint for checkpoint in kept if not checkpoint.damage]
        wanted = {paths.LATEST_LINK: sound[0].folder} if sound else {}
        wanted |= self._best(sound)
        if isinstance(self._links, LinkTemplate):
            wanted |= self._named(kept, self._links)
        return wanted

    def _best(self, sound: Sequence[Checkpoint]) -> dict[str, str]:
        """`best`, and one for each metric when there are several. The first one that is kept by is `best`."""
        metrics = self._keep.metrics if self._keep is not None else ()
        found: dict[str, str] = {}
        for metric, mode in metrics:
            best = best_of(sound, metric, mode)
            if best is None:
                continue
            found.setdefault(paths.BEST_LINK, best.folder)
            if len(metrics) > 1:
                found[f"{paths.BEST_LINK}-{_NOT_IN_A_NAME.sub('_', metric)}"] = best.folder
        return found

    def _named(self, kept: Sequence[Checkpoint], template: LinkTemplate) -> dict[str, str]:
        found: dict[str, str] = {}
        for checkpoint in reversed(kept):
            try:
                found[template.format(_values(checkpoint))] = checkpoint.folder
            except (UsageError, HoldfastError) as error:
                logger.debug("no link for step %d: %s", checkpoint.step, error)
        return found

    def _is_ours(self, name: str, target: str) -> bool:
        """Whether a link that is not wanted is one that this made: of those that lead somewhere only they may go."""
        if paths.parse_folder(target) is None:
            return False
        if name == paths.BEST_LINK or name.startswith(f"{paths.BEST_LINK}-"):
            return True
        return isinstance(self._links, LinkTemplate) and _reads(self._links, name)


def _reads(template: LinkTemplate, name: str) -> bool:
    try:
        return template.parse(name) is not None
    except UsageError:
        return True  # it can be read in more than one way


def records_of(
    scan: Scan,
    *,
    reading: Set[str] = frozenset(),
    in_use: Set[str | None] = frozenset(),
    own_line: bool = False,
) -> list[Record]:
    """Return the checkpoints of a run as retention sees them. With `own_line` those that are not on the line of the
    newest are shielded."""
    newest = next((found for found in scan.checkpoints if not found.damage), None)
    line = {found.folder for found in ancestry(newest.digest, scan.checkpoints)} if newest is not None else set()
    start = start_of(newest) if own_line and newest is not None else None
    return [
        Record(
            folder=found.folder,
            step=found.step,
            sequence=found.sequence,
            created_seconds=_seconds(found),
            metrics=_metrics(found),
            tags=found.tags,
            on_line=found.folder in line,
            shield=_shield(found, reading, in_use) or _shield_of_line(found, line, start),
            counts=not found.damage,
        )
        for found in scan.checkpoints
    ]


def _shield(checkpoint: Checkpoint, reading: Set[str], in_use: Set[str | None]) -> str:
    if checkpoint.damage:
        return f"damaged, kept aside: {checkpoint.damage}"
    if checkpoint.unread_notes:
        return f"what was noted on it cannot be read: {checkpoint.unread_notes[0]}"
    if checkpoint.folder in reading:
        return "somebody reads it"
    if checkpoint.digest in in_use:
        return "this training continues from it"
    return ""


def _shield_of_line(checkpoint: Checkpoint, line: Set[str], start: tuple[int, str] | None) -> str:
    """Return why a checkpoint stays that the line of the newest does not have. `start`: the first checkpoint of that
    line; None where lines do not count."""
    if start is None or checkpoint.folder in line:
        return ""
    if start_of(checkpoint) not in (start, None):
        return "of another start of the run"
    return "newer than the checkpoint that the training went back to; `holdfast prune` removes it"


def _metrics(checkpoint: Checkpoint) -> Mapping[str, int | float]:
    """One checkpoint with a record that makes no sense must not keep a whole run from being tidied."""
    try:
        return _numbers(checkpoint.metrics)
    except HoldfastError as error:
        logger.warning("%s: its metrics cannot be read, and count as unknown: %s", checkpoint.folder, error)
        return {}


def _seconds(checkpoint: Checkpoint) -> float:
    try:
        return checkpoint.created.timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, int | float]:
    return MappingProxyType({name: value for name, value in metrics.items() if isinstance(value, int | float)})


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a link's name may say of a checkpoint: its numbers, its step and the name of its run."""
    name = checkpoint.storage.url.rstrip("/").rpartition("/")[2]
    return {
        **_numbers(checkpoint.progress),
        **_numbers(checkpoint.metrics),
        "step": checkpoint.step,
        "sequence": checkpoint.sequence,
        "name": name,
    }


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
    standing = {found.folder: found.digest for found in scan.checkpoints}
    for name in names:
        parsed = parse_note_name(name)
        if parsed is None:
            continue
        if parsed.folder in standing:
            lost = catalog.annotations.is_on_another(name, standing[parsed.folder])
        else:
            lost = catalog.is_gone(parsed.folder, scan)
        if lost:
            catalog.annotations.remove(name)
