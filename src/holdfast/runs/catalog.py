"""What is committed. Folders and manifests enter, `Checkpoint`s leave: the only place that makes one.

"Complete" has one definition, and it is here: a folder with a sound `manifest.json`.
"""

from __future__ import annotations

import errno
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated, Any, cast

import msgspec

from holdfast.errors import (
    AttemptClosedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DamagedRecordError,
    HoldfastError,
    KeyDamagedError,
    KeyExistsError,
    KeyMissingError,
    SaveFailedError,
    SaveUncertainError,
    StorageError,
    UnsupportedFormatError,
    UsageError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.codec import decode
from holdfast.ondisk.decoding import MAX_RECORD_BYTES, encode_record, read_record
from holdfast.ondisk.inline import tensor_of_text
from holdfast.ondisk.manifest import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    MAX_SEQUENCE,
    STATE_DICT_NOTE,
    Manifest,
    ManifestHead,
    Ranking,
    decode_head,
    digest_of,
    encode_abandoned,
    encode_manifest,
    is_abandoned,
    require_readable,
)
from holdfast.runs.annotations import (
    MAX_NOTE_NUMBER,
    Note,
    Notes,
    encode_note,
    note_key,
    parse_note_name,
    read_note,
    sum_up,
)
from holdfast.runs.attempts import AttemptRecord, encode_attempt, read_attempt
from holdfast.runs.lineage import Lineage
from holdfast.runs.process_identity import this_process
from holdfast.runs.selector import Selector
from holdfast.storage.base import Storage, features_of
from holdfast.storage.displacing import remove_or_set_aside
from holdfast.storage.documents import read_document
from holdfast.storage.retrying import with_retries

logger = logging.getLogger("holdfast")

# The record of a run is looked for again when another process creates or mends it at the same time: a file server may
# remember for a while that it was not there.
_RUN_PAUSES_SECONDS = (0.0, 0.0, 0.05, 0.2, 0.8, 3.2)


class _UnreadHead:
    """Stands for the head of a manifest that could not be read so far; reads it when anything else is asked for."""

    def __init__(self, folder: str, step: int, sequence: int, size_bytes: int, read: Callable[[], Checkpoint]) -> None:
        self.folder = folder
        self.step = step
        self.sequence = sequence
        self.size_bytes = size_bytes
        self._read = read

    def opened(self) -> Manifest:
        return self._read().manifest

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read().head, name)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A committed checkpoint. It exists completely, and it never changes.

    `progress`, `extra` and `config` are decoded at each access: what a caller changes in them is the caller's own.
    """

    head: Manifest | ManifestHead = field(repr=False)
    digest: str
    storage: Storage = field(repr=False)
    notes: tuple[Note, ...] = field(repr=False, default=())
    # Notes that cannot be read: what they say is unknown, so the checkpoint may have a tag that nobody sees.
    unread_notes: tuple[str, ...] = field(repr=False, default=())

    @cached_property
    def manifest(self) -> Manifest:
        """The whole commit record. One that makes no sense, though it has its digest, is damage that is found here."""
        if isinstance(self.head, Manifest):
            return self.head
        try:
            opened = self.head.opened()
        except HoldfastError as error:
            raise error.at(run=self.storage.url, file=paths.key(self.folder, paths.MANIFEST)) from None
        # In the place of the text, which nobody needs any more and which is as large as the file.
        object.__setattr__(self, "head", opened)
        return opened

    @property
    def folder(self) -> str:
        return self.head.folder

    @property
    def step(self) -> int:
        return self.head.step

    @property
    def sequence(self) -> int:
        """Grows with every commit of the run: the highest is the latest, whatever its step."""
        return self.head.sequence

    @property
    def parent(self) -> str | None:
        """The digest of the checkpoint that the training continued from."""
        return self.head.parent

    @property
    def epoch(self) -> int | None:
        """How many epochs were done, where the training said so."""
        return self.head.epoch

    @cached_property
    def created(self) -> datetime:
        return datetime.fromisoformat(self.head.created)

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """Those of the save, and those that were reported later."""
        saved = self._each_decoded("metrics", self.head.metrics)
        try:
            return MappingProxyType({**saved, **self._each_decoded("metrics", self._noted.metrics)})
        except HoldfastError as error:
            logger.warning(
                "%s: metrics that were reported later cannot be decoded and are skipped: %s", self.folder, error
            )
            return saved

    @property
    def progress(self) -> Mapping[str, Any]:
        return self._each_decoded("progress", self.head.progress)

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the save said. How a plain state dict was laid out is noted beside it, and no user's."""
        said = {key: value for key, value in self.head.extra.items() if key != STATE_DICT_NOTE}
        return self._each_decoded("extra", said, tensor_of_text)

    @property
    def config(self) -> Any:
        return self._decoded("config", self.head.config)

    @property
    def world_size(self) -> int:
        return self.head.world_size

    @property
    def size_bytes(self) -> int:
        return self.head.size_bytes

    @property
    def tags(self) -> tuple[str, ...]:
        return self._noted.tags

    @property
    def damage(self) -> str:
        """What was found to be wrong with its bytes, when a restore passed it over; empty when nothing is known."""
        return self._noted.damage

    @cached_property
    def _noted(self) -> Notes:
        return sum_up(self.notes, self.head.tags)

    @property
    def path(self) -> str:
        """Where the checkpoint's folder is: a path or a URL."""
        return f"{self.storage.url}/{self.folder}"

    def key(self, name: str) -> str:
        return paths.key(self.folder, name)

    def _decoded(self, name: str, value: Any, tensor: Callable[[str], Any] | None = None) -> Any:
        return decode(value, path=name, tensor=tensor)

    def _each_decoded(
        self, name: str, values: Mapping[str, Any], tensor: Callable[[str], Any] | None = None
    ) -> Mapping[str, Any]:
        """Value by value: the keys are the user's own, whatever they look like."""
        return MappingProxyType({key: self._decoded(f"{name}.{key}", value, tensor) for key, value in values.items()})

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, sequence={self.sequence}, path={self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A folder that is no checkpoint that can be used, and why. `newer`: not damaged, but of a newer format."""

    folder: str
    reason: str
    newer: bool = False

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Scan:
    """What a run holds: its checkpoints, the latest first; attempts that nothing committed, and, of these, those that
    were closed for good; damaged manifests; what `best` means in it; and the folders that cannot be read now, each with
    the error: they may hold anything, also the latest checkpoint."""

    checkpoints: tuple[Checkpoint, ...]
    attempts: tuple[str, ...]
    damaged: tuple[Skipped, ...]
    closed: tuple[str, ...] = ()
    ranking: Ranking = ()
    unreadable: tuple[tuple[str, StorageError], ...] = ()

    def require_readable(self) -> None:
        """Raise if there is a folder that cannot be read now: nothing may be concluded from the others alone."""
        if self.unreadable:
            raise _unreadable_error(self.unreadable)


class _RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    holdfast_format: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    run_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    created: str


class Catalog:
    """The checkpoints of one run.

    ranking: what `best` means, where that is known better than by the newest checkpoint that says it.
    """

    def __init__(self, storage: Storage, *, ranking: Ranking = ()) -> None:
        # Here, because everything that reads a run goes through its catalog.
        self.storage = with_retries(storage)
        self._ranking = ranking
        # What a manifest's bytes mean, by their digest: they are read each time, because they alone are the truth, but
        # a manifest of many thousand tensors is taken apart only once. Several threads may use one catalog: these are
        # only ever looked through as a list made at once.
        self._known: dict[str, Checkpoint] = {}
        self._known_notes: dict[str, Note] = {}
        self._unread_notes: set[str] = set()

    def __repr__(self) -> str:
        return f"Catalog({self.storage.url!r})"

    def scan(self) -> Scan:
        """Look at every folder of the run. Foreign names are passed over; a folder that cannot be read now is an error:
        without it an older checkpoint would be taken for the latest."""
        scan = self.survey()
        scan.require_readable()
        return scan

    def survey(self) -> Scan:
        """Look at every folder of the run, and list those that cannot be read now."""
        checkpoints, attempts, damaged, closed, unreadable = [], [], [], [], []
        notes = self._notes_by_folder()
        for entry in self.storage.entries(""):
            if not entry.is_folder or paths.parse_folder(entry.name) is None:
                continue
            try:
                checkpoints.append(self._annotated(self.read(entry.name), notes))
            except AttemptClosedError:
                closed.append(entry.name)
                attempts.append(entry.name)
            except KeyMissingError:
                attempts.append(entry.name)
            except StorageError as error:
                unreadable.append((entry.name, error))
            except HoldfastError as error:
                # One damaged folder must not hide the others, whatever is wrong with it.
                damaged.append(Skipped(entry.name, str(error), isinstance(error, UnsupportedFormatError)))
        present = {checkpoint.digest for checkpoint in checkpoints}
        missed = {folder for folder, _ in unreadable}
        self._known = {
            key: found for key, found in list(self._known.items()) if found.digest in present or found.folder in missed
        }
        checkpoints.sort(key=lambda checkpoint: (checkpoint.sequence, checkpoint.head.created), reverse=True)
        ranking = self._ranking or next(filter(None, (found.head.ranking for found in checkpoints)), ())
        return Scan(tuple(checkpoints), tuple(attempts), tuple(damaged), tuple(closed), ranking, tuple(unreadable))

    def read(self, folder: str) -> Checkpoint:
        """Return the checkpoint in a folder. A KeyMissingError when nothing was committed there, a
        CorruptCheckpointError when it is damaged, any other StorageError when it cannot be read now."""
        try:
            data = read_document(self.storage, paths.key(folder, paths.MANIFEST), MAX_MANIFEST_BYTES)
        except KeyDamagedError as error:
            where = paths.key(folder, paths.MANIFEST)
            raise CorruptCheckpointError(error.problem, file=where, advice=error.advice) from None
        if is_abandoned(data):
            raise AttemptClosedError("this attempt was given up", file=paths.key(folder, paths.MANIFEST))
        identity = digest_of(data)
        known = self._known.get(identity)
        if known is not None and known.folder == folder:
            return known
        try:
            head, digest = decode_head(data)
        except HoldfastError as error:
            raise error.at(run=self.storage.url, file=paths.key(folder, paths.MANIFEST)) from None
        if head.folder != folder:
            raise CorruptCheckpointError(
                f"its manifest belongs to {head.folder}", file=paths.key(folder, paths.MANIFEST)
            )
        checkpoint = self._known[identity] = Checkpoint(head, digest, self.storage)
        return checkpoint

    def announced(self, folder: str, step: int, digest: str, *, sequence: int, size_bytes: int) -> Checkpoint:
        """Return a checkpoint that another process has committed and that cannot be read here now. What is asked of it
        beyond these values is read then, and raises as long as it cannot be."""
        head = _UnreadHead(folder, step, sequence, size_bytes, partial(self._read_announced, folder, digest))
        return Checkpoint(cast(ManifestHead, head), digest, self.storage)

    def _read_announced(self, folder: str, digest: str) -> Checkpoint:
        found = self.read(folder)
        if found.digest != digest:
            raise CorruptCheckpointError(
                "this manifest is not the one that was committed", file=paths.key(folder, paths.MANIFEST)
            )
        return found

    def find(self, selector: Selector) -> Checkpoint:
        """The one checkpoint that a selector names. One that is not there is an error."""
        if selector.kind == "folder":
            return self._find_folder(selector.name)
        scan = self.survey()
        _require_readable(scan, selector)
        found = choose(scan, selector)
        if found is None:
            raise self.not_found(selector, scan)
        return found

    def not_found(self, selector: Selector, scan: Scan) -> HoldfastError:
        """Why a selector found nothing: damage when there was something, absence when there was not."""
        unreadable = _unreadable((*scan.damaged, *set_aside(scan)), selector)
        if unreadable and all(skipped.newer for skipped in unreadable):
            return UnsupportedFormatError(
                f"'{selector}' finds only {unreadable[0]}",
                run=self.storage.url,
                advice="use a newer version of Holdfast",
            )
        if unreadable:
            return CorruptCheckpointError(
                f"'{selector}' finds no sound checkpoint",
                run=self.storage.url,
                problems=[str(skipped) for skipped in unreadable],
            )
        steps = ", ".join(str(checkpoint.step) for checkpoint in scan.checkpoints[:5])
        if scan.checkpoints:
            advice = f"the newest steps there are {steps}"
            if selector.kind == "best":
                metrics = sorted({name for checkpoint in scan.checkpoints for name in checkpoint.metrics})
                advice = f"the metrics there are {', '.join(metrics[:10])}" if metrics else "no checkpoint has a metric"
            if scan.damaged:
                advice += f"; {len(scan.damaged)} folders cannot be read: {scan.damaged[0]}"
        elif scan.attempts:
            advice = f"there are only attempts that were never committed: {', '.join(scan.attempts[:5])}"
        else:
            advice = self._what_is_there_instead()
        return CheckpointNotFoundError(f"'{selector}' finds no checkpoint", run=self.storage.url, advice=advice)

    def holds_something(self) -> bool:
        """Return whether anything was ever committed here that is still there, sound or not. A run of which that cannot
        be told, because it cannot be read now, is an error: it must not look like an empty one."""
        scan = self.survey()
        if not scan.checkpoints and not scan.damaged:
            scan.require_readable()
        return bool(scan.checkpoints or scan.damaged)

    def next_sequence(self) -> int:
        """The number of the next commit: one more than any that is there. Only what is new is read."""
        known = {checkpoint.folder: checkpoint for checkpoint in list(self._known.values())}
        highest, last = 0, ""
        for name in self._names():
            if paths.parse_folder(name) is None:
                continue
            try:
                # A committed checkpoint never changes, so one that was read before counts as it was then.
                highest, last = max((highest, last), ((known.get(name) or self.read(name)).sequence, name))
            except (KeyMissingError, CorruptCheckpointError, UnsupportedFormatError):
                # An attempt, or damage, which is for readers to report. What only cannot be read now is an error: its
                # number must not be given a second time.
                continue
        if highest >= MAX_SEQUENCE:
            raise SaveFailedError(
                f"{last} has the sequence number {highest}, after which there is none",
                run=self.storage.url,
                advice="no training gets that far: look where that checkpoint comes from, and move its folder out of "
                "the run",
            )
        return highest + 1

    def open_run(self) -> str:
        """Return the run's id. The record is created by the first process that comes; the others read it. One that is
        damaged, or was lost, is written again with the id that the newest checkpoint has."""
        for pause in _RUN_PAUSES_SECONDS:
            try:
                existing = self.read_run()
            except DamagedRecordError as error:
                logger.warning("the record of the run is damaged and is written again: %s", error)
                self._remove_damaged_run(error)
                existing = None
            if existing is not None:
                return existing
            record = _RunRecord(holdfast_format=FORMAT, run_id=self._known_run_id() or uuid.uuid4().hex, created=_now())
            try:
                self.storage.put(paths.RUN_KEY, encode_record(record))
            except KeyExistsError:
                time.sleep(pause)  # another process was faster
                continue
            self.storage.sync("")
            return record.run_id
        raise StorageError(
            "the record of the run exists, but reading it finds nothing",
            run=self.storage.url,
            file=paths.RUN_KEY,
            advice="save again; if this goes on, look at the storage",
        )

    def _remove_damaged_run(self, damage: DamagedRecordError) -> None:
        try:
            remove_or_set_aside(self.storage, paths.RUN_KEY)
        except StorageError as error:
            raise damage.at(
                run=self.storage.url, advice=f"move it away by hand, because it cannot be removed: {error}"
            ) from None

    def _known_run_id(self) -> str:
        """Return the run's id as the newest sound checkpoint states it; empty where there is none."""
        return next((found.head.run_id for found in self.scan().checkpoints if found.head.run_id), "")

    def claim(self, step: int, world_size: int, *, lease: int = 0, first: int = 1) -> tuple[str, str]:
        """Take the next free name for an attempt at a step, and the claim that is laid down in it. Two that try at once
        get two names. `first`: the lowest number that the attempt may have."""
        attempt = max(self.attempts().get(step, 0) + 1, first)
        while True:
            folder = paths.folder_name(step, attempt)
            try:
                return folder, self.claim_folder(folder, world_size, lease=lease)
            except KeyExistsError:
                attempt += 1

    def attempts(self) -> dict[int, int]:
        """The highest number that an attempt at each step has so far."""
        found: dict[int, int] = {}
        for name in self._names():
            parsed = paths.parse_folder(name)
            if parsed is not None and parsed.attempt <= paths.MAX_COUNTED_ATTEMPT:
                found[parsed.step] = max(parsed.attempt, found.get(parsed.step, 0))
        return found

    def open_attempts(self) -> list[str]:
        """The folders in which nothing is committed, found without reading a manifest."""
        folders = [entry.name for entry in self.storage.entries("") if entry.is_folder]
        names = [name for name in folders if paths.parse_folder(name) is not None]
        return [name for name in names if not self.is_committed(name)]

    def is_committed(self, folder: str) -> bool:
        """Whether the manifest's name is taken: by one, or by the word that there will never be one."""
        return any(entry.name == paths.MANIFEST for entry in self.storage.entries(folder))

    def close_attempts(self, number: int) -> None:
        """Make sure that no attempt of an earlier writer than this one can be committed any more: whoever comes first
        to the manifest's name has it."""
        for folder in self.open_attempts():
            if self.attempt(folder).lease >= number:
                continue
            why = {"by": number, "at": _now()}
            try:
                self.storage.put(paths.key(folder, paths.MANIFEST), encode_abandoned(why))
            except KeyExistsError:
                continue
            self.storage.sync(folder)

    def attempt(self, folder: str) -> AttemptRecord:
        """Return who began an attempt; a record without content where there is none or it is damaged. One that cannot
        be read now is a `StorageError`: its writer may live, and must not be taken for an unknown one."""
        try:
            return self.read_attempt(folder)
        except (KeyMissingError, DamagedRecordError):
            return AttemptRecord()

    def attempt_record(self, folder: str) -> dict[str, Any]:
        """Return the same as plain values."""
        return dict(msgspec.to_builtins(self.attempt(folder)))

    def read_attempt(self, folder: str) -> AttemptRecord:
        """Return the record of an attempt; a `DamagedRecordError` for one that cannot be decoded."""
        key = paths.key(folder, paths.ATTEMPT)
        return read_attempt(partial(self.storage.read, key), key)

    def uncommit(self, folder: str) -> None:
        """Let a checkpoint be one no more. Its bytes are debris from here on."""
        self.storage.delete(paths.key(folder, paths.MANIFEST))
        # Before any byte goes: a power cut must not bring the manifest back without them.
        self.storage.sync(folder)

    def clear(self, folder: str) -> None:
        """Remove the bytes of an attempt. Who began it, and the word that it was given up, stay."""
        self._clear(folder, {paths.ATTEMPT, paths.MANIFEST})

    def remove(self, folder: str) -> None:
        """Remove an attempt and the notes on it. Who began it goes last: until then one can see whose it is."""
        self.clear(folder)
        for name in self.note_names():
            parsed = parse_note_name(name)
            if parsed is not None and parsed.folder == folder:
                self.storage.delete(paths.key(paths.NOTES, name))
        self.storage.delete(paths.key(folder, paths.MANIFEST))
        self.storage.delete(paths.key(folder, paths.ATTEMPT))
        self.storage.sync("")

    def _clear(self, folder: str, keep: set[str]) -> None:
        for entry in self.storage.entries(folder):
            if entry.is_folder:
                self._clear(paths.key(folder, entry.name), set())
            elif entry.name not in keep:
                self.storage.delete(paths.key(folder, entry.name))

    # Notes

    def note(self, checkpoint: Checkpoint, **said: Any) -> None:
        """Write down something about a checkpoint: `metrics` (encoded), `tag`, `untag` or `damage`."""
        note = Note(checkpoint=checkpoint.digest, created=_now(), **said)
        numbers = [parsed.number for parsed in map(parse_note_name, self.note_names()) if parsed is not None]
        number = max(numbers, default=0) + 1
        data = encode_note(note)
        if len(data) > MAX_RECORD_BYTES:
            raise UsageError(
                f"a note of {len(data):,} bytes is over the limit of {MAX_RECORD_BYTES:,}", run=self.storage.url
            )
        while True:
            if number > MAX_NOTE_NUMBER:
                raise StorageError(
                    f"a note has the highest number that there is, {MAX_NOTE_NUMBER}",
                    run=self.storage.url,
                    file=paths.NOTES,
                    advice="remove that file, which no writer made",
                )
            try:
                self.storage.put(note_key(checkpoint.folder, number), data)
                break
            except KeyExistsError:
                number += 1
        self.storage.sync(paths.NOTES)

    def annotated(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with what is said of it by now."""
        return self._annotated(checkpoint, self._notes_by_folder())

    def note_names(self) -> list[str]:
        return [entry.name for entry in self.storage.entries(paths.NOTES)]

    def remove_lost_notes(self, names: Sequence[str], scan: Scan) -> None:
        """Remove those of these notes whose checkpoint is gone. They must have been listed before the scan: what a note
        is about was committed before it, so what the scan does not find then was removed, and will not come back."""
        standing = {found.folder: found.digest for found in scan.checkpoints}
        for name in names:
            parsed = parse_note_name(name)
            if parsed is None:
                continue
            if parsed.folder in standing:
                note = self._known_notes.get(name)  # as the scan has found it
                lost = note is not None and note.checkpoint != standing[parsed.folder]
            else:
                lost = self.is_gone(parsed.folder, scan)
            if lost:
                self.storage.delete(paths.key(paths.NOTES, name))

    def is_gone(self, folder: str, scan: Scan) -> bool:
        """Whether a folder holds no checkpoint and never will: it is not there, or was closed for good. What holds
        anything else may be under way, or only cannot be read now."""
        return folder in scan.closed or not self.storage.entries(folder)

    def _notes_by_folder(self) -> dict[str, list[str]]:
        """The names of all notes by the folder that they are about, in order."""
        found: dict[str, list[str]] = {}
        try:
            names = self.note_names()
        except StorageError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            # Something else has the place of the folder: what was noted is unknown for every checkpoint.
            return {name: [paths.NOTES] for name in self._names()}
        parsed = [(name, parse_note_name(name)) for name in names]
        for name, told in sorted(((n, p) for n, p in parsed if p is not None), key=lambda pair: pair[1].number):
            found.setdefault(told.folder, []).append(name)
        present = set(names)
        self._known_notes = {name: note for name, note in list(self._known_notes.items()) if name in present}
        return found

    def _annotated(self, checkpoint: Checkpoint, names: Mapping[str, list[str]]) -> Checkpoint:
        notes, unread = [], []
        for name in names.get(checkpoint.folder, ()):
            try:
                note = self._note_on(checkpoint, name)
            except DamagedRecordError as error:
                self._warn_of_note(name, error)
                unread.append(name)
                continue
            if note is not None:
                notes.append(note)
        if not notes and not unread:
            return checkpoint
        return replace(checkpoint, notes=tuple(notes), unread_notes=tuple(unread))

    def _warn_of_note(self, name: str, error: DamagedRecordError) -> None:
        """Once for each note and catalog: a run is scanned after every save."""
        if name not in self._unread_notes:
            self._unread_notes.add(name)
            logger.warning("the note %s is damaged and is skipped; its checkpoint is kept: %s", name, error)

    def _note_on(self, checkpoint: Checkpoint, name: str) -> Note | None:
        """A note, if it is on this checkpoint. One on another may since have gone, and its name been given again."""
        note = self._known_notes.get(name)
        if note is None or note.checkpoint != checkpoint.digest:
            self._known_notes.pop(name, None)
            note = self.read_note(name)
        if note is None:
            return None
        self._known_notes[name] = note
        return note if note.checkpoint == checkpoint.digest else None

    def read_note(self, name: str) -> Note | None:
        """Return a note, None when it is gone; a `DamagedRecordError` for one that cannot be decoded. One that cannot
        be read now is a `StorageError`: it may hold a tag, without which its checkpoint would be deleted."""
        key = paths.key(paths.NOTES, name)
        try:
            return read_note(partial(self.storage.read, key), key)
        except KeyMissingError:
            return None

    def claim_folder(self, folder: str, world_size: int, **more: Any) -> str:
        """Take this name for an attempt, and give the claim; a KeyExistsError when somebody has it."""
        claim = uuid.uuid4().hex
        who = AttemptRecord(
            claim=claim,
            **msgspec.to_builtins(this_process()),
            started=_now(),
            world_size=world_size,
            **more,
        )
        self.storage.put(paths.key(folder, paths.ATTEMPT), encode_attempt(who))
        return claim

    def require_claim(self, folder: str, claim: str) -> None:
        """Make sure that this rank sees what the leader sees. A path may be a disk of its own on every machine, and
        ranks may have been given different runs: each would write its part of the checkpoint to another place."""
        try:
            found = self.read_attempt(folder)
        except (KeyMissingError, DamagedRecordError):
            found = AttemptRecord()
        if found.claim != claim:
            raise UsageError(
                f"this rank does not see the folder {folder} that the leader has just made",
                run=self.storage.url,
                advice="give all ranks the same run, on storage that all of them share",
            )

    def add(self, manifest: Manifest, *, same_tensors: bool = False) -> Checkpoint:
        """Commit: after this the checkpoint exists. Every other byte of it must be durable before.

        `same_tensors`: but for their digests they are those of a manifest that this catalog has committed.
        """
        data, digest = encode_manifest(manifest)
        # The way back is checked before the commit: a manifest that no reader would take must not become a checkpoint.
        require_readable(manifest, data, tensors=not same_tensors)
        try:
            self._put_manifest(manifest.folder, data)
            # Without it a power cut can keep the manifest's bytes and lose its name, after it was called committed.
            self.storage.sync(manifest.folder)
        except KeyExistsError:
            raise
        except Exception as error:
            self._withdraw(manifest.folder, error)
            raise
        checkpoint = self._known[digest_of(data)] = Checkpoint(manifest, digest, self.storage)
        return checkpoint

    def _put_manifest(self, folder: str, data: bytes) -> None:
        """Create the manifest; a KeyExistsError when another process has closed the attempt."""
        try:
            self.storage.put(paths.key(folder, paths.MANIFEST), data)
        except KeyExistsError:
            # A storage that repeats a request whose answer was lost finds what it has written itself.
            if self.storage.read(paths.key(folder, paths.MANIFEST), MAX_MANIFEST_BYTES) != data:
                raise

    def _withdraw(self, folder: str, error: Exception) -> None:
        """Close an attempt whose commit failed half-way: no manifest may stay that a reader would take, for the save is
        reported as failed. Raise a SaveUncertainError where that cannot be done.

        What the ranks wrote stays: should a power cut bring the manifest back, then with all that it names.
        """
        key = paths.key(folder, paths.MANIFEST)
        try:
            if is_abandoned(self.storage.read(key, MAX_MANIFEST_BYTES)):
                return
            self.storage.delete(key)
            self.storage.put(key, encode_abandoned({"by": "commit", "at": _now()}))
            # It is another change of the folder than the one whose sync may have failed, so its success counts.
            self.storage.sync(folder)
        except KeyMissingError:
            return
        except Exception as trouble:
            raise SaveUncertainError(
                f"committing {folder} failed ({error}), and so did taking the manifest back ({trouble}): "
                "the checkpoint may be there or not",
                run=self.storage.url,
                advice="look with `holdfast ls` once the storage works again; its data files were not removed",
            ) from error

    def point_latest(self, folder: str) -> None:
        """Move the `latest` link where the storage has links. It is for people; no reader of ours looks at it."""
        links = features_of(self.storage).links
        if links is None:
            return
        try:
            links.point(paths.LATEST_LINK, folder)
        except Exception as error:
            logger.warning("committed, but the link 'latest' could not be moved: %s", error)

    def _names(self) -> list[str]:
        return [entry.name for entry in self.storage.entries("")]

    def _find_folder(self, folder: str) -> Checkpoint:
        try:
            return self.annotated(self.read(folder))
        except KeyMissingError:
            reason = "was never committed" if folder in self._names() else "is not there"
            raise CheckpointNotFoundError(f"{folder} {reason}", run=self.storage.url) from None

    def read_run(self) -> str | None:
        """Return the run's id as its record states it, None where there is no record; a `DamagedRecordError` for one
        that cannot be decoded."""
        try:
            record = read_record(
                partial(self.storage.read, paths.RUN_KEY),
                _RunRecord,
                what="the record of the run",
                file=paths.RUN_KEY,
            )
        except KeyMissingError:
            return None
        except DamagedRecordError as error:
            raise error.at(run=self.storage.url) from None
        if record.holdfast_format > FORMAT:
            raise UnsupportedFormatError(
                f"the run is of format {record.holdfast_format}; this version knows formats up to {FORMAT}",
                run=self.storage.url,
                advice="use a newer version of Holdfast; if none ever wrote here, run.json is damaged, and "
                "`holdfast doctor RUN --fix` writes it again",
            )
        return record.run_id

    def _what_is_there_instead(self) -> str:
        names = self._names()
        if not names:
            return "nothing is there; check the path"
        foreign = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return f"the folder holds no checkpoint of Holdfast's, but: {foreign}"


def choose(scan: Scan, selector: Selector) -> Checkpoint | None:
    """The checkpoint that a selector means among those of a scan."""
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


def set_aside(scan: Scan) -> list[Skipped]:
    """The checkpoints whose bytes were found to be damaged."""
    return [
        Skipped(found.folder, f"was found damaged before: {found.damage}") for found in scan.checkpoints if found.damage
    ]


def _best(scan: Scan, selector: Selector) -> Checkpoint | None:
    sound = [found for found in scan.checkpoints if not found.damage]
    metric = selector.name or _only_metric(scan)
    return best_of(sound, metric, selector.mode or dict(scan.ranking).get(metric, "min"))


def best_of(among: Sequence[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """The best by a stored metric. NaN ranks worst and ties go to the newer one."""
    ranked = [found for found in among if isinstance(found.metrics.get(metric), int | float)]
    numbers = [found for found in ranked if found.metrics[metric] == found.metrics[metric]]
    # As they are: to turn a large int into a float would make neighbours equal.
    if mode == "max":
        best = max(numbers, key=lambda found: (found.metrics[metric], found.sequence), default=None)
    else:
        best = min(numbers, key=lambda found: (found.metrics[metric], -found.sequence), default=None)
    return best or max(ranked, key=lambda found: found.sequence, default=None)


def _only_metric(scan: Scan) -> str:
    """The metric that `best` goes by where it names none: the first that the training keeps by, or the only one."""
    if scan.ranking:
        return scan.ranking[0][0]
    names = {name for checkpoint in scan.checkpoints for name in checkpoint.metrics}
    if len(names) > 1:
        raise CheckpointNotFoundError(
            f"'best' does not say by which metric; there are {', '.join(sorted(names))}",
            advice="say best:METRIC, or best:METRIC:max",
        )
    return next(iter(names), "")


def _require_readable(scan: Scan, selector: Selector) -> None:
    """Raise if a selector may mean a folder that cannot be read now. Only a step says itself which ones it may not."""
    meant = scan.unreadable
    if selector.kind == "step":
        named = ((paths.parse_folder(folder), folder, error) for folder, error in scan.unreadable)
        meant = tuple((folder, error) for parsed, folder, error in named if parsed and parsed.step == selector.step)
    if meant:
        raise _unreadable_error(meant)


def _unreadable_error(found: Sequence[tuple[str, StorageError]]) -> HoldfastError:
    """Return the first error, with how many there are. It keeps its type and names its file."""
    error = found[0][1]
    if len(found) == 1:
        return error
    return error.changed(problem=f"{error.problem} (and {len(found) - 1} more folders)")


def _unreadable(damaged: tuple[Skipped, ...], selector: Selector) -> list[Skipped]:
    """The damaged folders that a selector may have meant."""
    if selector.kind == "latest":
        return list(damaged)
    if selector.kind != "step":
        return []
    names = ((paths.parse_folder(skipped.folder), skipped) for skipped in damaged)
    return [skipped for parsed, skipped in names if parsed is not None and parsed.step == selector.step]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
