"""The checkpoints of a run. Folders and manifests enter, `Checkpoint`s leave: the only place that makes one.

"Complete" has one definition, and it is here: a folder with a sound `manifest.json`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from holdfast.errors import (
    AttemptClosedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    KeyDamagedError,
    KeyExistsError,
    KeyMissingError,
    SaveFailedError,
    SaveUncertainError,
    StorageError,
    UnsupportedFormatError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_SEQUENCE,
    Body,
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
from holdfast.ondisk.manifest_body import decode_body, written_digest
from holdfast.runs.annotations import Annotations
from holdfast.runs.attempts import Attempts, linked_folders
from holdfast.runs.checkpoint import Checkpoint, Scan, Skipped, removed_since, without_tensors
from holdfast.runs.clock import timestamp
from holdfast.runs.selection import choose, not_found, require_selectable
from holdfast.runs.selector import Selector
from holdfast.storage.base import Storage, folder_names
from holdfast.storage.documents import read_document
from holdfast.storage.retrying import with_retries

logger = logging.getLogger("holdfast")

__all__ = ["Catalog", "settled"]

# How often a run is scanned again whose folders change meanwhile.
_MAX_RESCANS = 10
# How many checkpoints that are gone are remembered at least, so that not every commit goes through all of them.
_FORGOTTEN_LATER = 1000

_Head = TypeVar("_Head", bound=Body)


class Catalog:
    """The checkpoints of one run, with its `attempts` and its `annotations`.

    ranking: the metrics that `best` ranks by; where it is empty, those that the newest checkpoint states.
    """

    def __init__(self, storage: Storage, *, ranking: Ranking = ()) -> None:
        # Retries are added here, because everything that reads a run goes through its catalog.
        self.storage = with_retries(storage)
        self._ranking = ranking
        self.attempts = Attempts(self.storage)
        self.annotations = Annotations(self.storage)
        # By folder, each with the digest of its manifest's bytes: these are read each time, except by `survey_cached`,
        # because they alone are the truth, but a manifest is decoded only once; without its tensors, which would take
        # most of the memory. Copies are given out, because a checkpoint keeps its tensors once they are asked for.
        # Several threads may use one catalog: this is only ever iterated over as a copy.
        self._known: dict[str, tuple[str, Checkpoint]] = {}
        # What this catalog has committed last, whole, with the same digest: it is read once more after each commit.
        self._last_added: tuple[str, Checkpoint] | None = None
        # The folders whose manifests were read since `drop_cache`.
        self._fresh: set[str] = set()
        # The sequence number of each checkpoint that was read or committed so far, and the highest of them with its
        # folder: a number is not given again, also when its checkpoint is gone.
        self._sequences: dict[str, int] = {}
        self._highest = (0, "")
        self._counting = threading.Lock()

    def __repr__(self) -> str:
        return f"Catalog({self.storage.url!r})"

    def scan(self) -> Scan:
        """Return the content of the run. Foreign names are ignored; a folder that cannot be read now is an error:
        without it an older checkpoint would be taken for the latest."""
        scan = self.survey()
        scan.require_readable()
        return scan

    def scan_cached(self) -> Scan:
        """Return what `scan` returns, without reading again the manifests that were read since `drop_cache`."""
        scan = self.survey_cached()
        scan.require_readable()
        return scan

    def survey(self) -> Scan:
        """Return the content of the run, with the folders that cannot be read now."""
        return self._survey(self.read_head)

    def survey_cached(self) -> Scan:
        """Return what `survey` returns, without reading again the manifests that were read since `drop_cache`: a
        committed checkpoint never changes. One that was damaged since is still among the checkpoints."""
        return self._survey(self._read_head_cached)

    def drop_cache(self) -> None:
        """Have every manifest read again before it is relied on, once."""
        self._fresh = set()

    def _survey(self, read: Callable[[str], Checkpoint]) -> Scan:
        checkpoints, attempts, damaged, closed, unreadable = [], [], [], [], []
        notes = self.annotations.names_by_folder()
        linked = linked_folders(self.storage)
        for name in sorted({*_list_folders(self.storage).added, *linked}):
            try:
                found = self.read_head(name) if name in linked else read(name)
                checkpoints.append(_with_notes(self.annotations, found, notes))
            except AttemptClosedError:
                closed.append(name)
                attempts.append(name)
            except KeyMissingError:
                attempts.append(name)
            except StorageError as error:
                unreadable.append((name, error))
            except HoldfastError as error:
                # One damaged folder must not hide the others, whatever is wrong with it.
                damaged.append(Skipped(name, str(error), isinstance(error, UnsupportedFormatError)))
        present = {checkpoint.folder for checkpoint in checkpoints} | {folder for folder, _ in unreadable}
        self._known = {folder: known for folder, known in list(self._known.items()) if folder in present}
        self._fresh &= present
        checkpoints.sort(key=lambda checkpoint: (checkpoint.sequence, checkpoint.head.created), reverse=True)
        ranking = self._ranking or next(filter(None, (found.head.ranking for found in checkpoints)), ())
        return Scan(tuple(checkpoints), tuple(attempts), tuple(damaged), tuple(closed), ranking, tuple(unreadable))

    def read(self, folder: str) -> Checkpoint:
        """Return the checkpoint in a folder. A KeyMissingError when nothing was committed there, a
        CorruptCheckpointError when it is damaged, any other StorageError when it cannot be read now."""
        data, _, identity = _text_of(self.storage, folder)
        last = self._last_added
        if last is not None and last[0] == identity and last[1].folder == folder:
            return self._note_known(*last)
        head, digest = _decoded(self.storage, folder, lambda: decode_head(data))
        return self._note_known(identity, Checkpoint(head, digest, self.storage))

    def read_head(self, folder: str) -> Checkpoint:
        """Return what `read` returns, without its tensors: they are read when they are first used. For what is about
        many checkpoints."""
        data, written, identity = _text_of(self.storage, folder)
        known = self._known.get(folder)
        if known is not None and known[0] == identity:
            self._fresh.add(folder)
            return replace(known[1])
        body, digest = _decoded(self.storage, folder, lambda: decode_body(data, written))
        return self._note_known(identity, Checkpoint(body, digest, self.storage))

    def _read_head_cached(self, folder: str) -> Checkpoint:
        known = self._known.get(folder)
        return replace(known[1]) if known is not None and folder in self._fresh else self.read_head(folder)

    def _note_known(self, identity: str, checkpoint: Checkpoint) -> Checkpoint:
        known = self._known.get(checkpoint.folder)
        if known is None or known[0] != identity:
            self._known[checkpoint.folder] = identity, replace(without_tensors(checkpoint))
        self._fresh.add(checkpoint.folder)
        self._sequences[checkpoint.folder] = checkpoint.sequence
        with self._counting:
            self._highest = max(self._highest, (checkpoint.sequence, checkpoint.folder))
        return checkpoint

    def name_as_checkpoint(self) -> str:
        """Return the folder's name that the manifest in the root states, where the root is no run but a checkpoint that
        was copied or renamed; empty otherwise."""
        if any(paths.parse_folder(name) is not None for name in _names(self.storage)):
            return ""
        try:
            return decode_head(read_document(self.storage, paths.MANIFEST, MAX_MANIFEST_BYTES))[0].folder
        except HoldfastError:
            return ""

    def announced(self, folder: str, step: int, digest: str, *, sequence: int, size_bytes: int) -> Checkpoint:
        """Return a checkpoint that another process has committed and that cannot be read here now. Any other value of
        it is read at the first access, which raises while that is not possible."""
        head = _UnreadHead(self, folder, step, digest, sequence=sequence, size_bytes=size_bytes)
        return Checkpoint(cast(ManifestHead, head), digest, self.storage)

    def path_of(self, folder: str) -> str:
        """Return the path or the URL of a checkpoint's folder, whether or not it is committed by now."""
        return f"{self.storage.url}/{folder}"

    def annotated(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the notes that there are on it now."""
        return _with_notes(self.annotations, checkpoint, self.annotations.names_by_folder())

    def find(self, selector: Selector) -> Checkpoint:
        """Return the one checkpoint that a selector names. One that is not there is an error."""
        if selector.kind == "folder":
            return self._find_folder(selector.name)
        scan = settled(self, self.survey)
        require_selectable(scan, selector)
        found = choose(scan, selector)
        if found is None:
            raise not_found(self.storage, selector, scan)
        return found

    def _find_folder(self, folder: str) -> Checkpoint:
        try:
            return self.annotated(self.read(folder))
        except KeyMissingError:
            reason = "was never committed" if folder in _names(self.storage) else "is not there"
            raise CheckpointNotFoundError(f"{folder} {reason}", run=self.storage.url) from None

    def holds_something(self) -> bool:
        """Return whether the run has a committed checkpoint, sound or not. A run that cannot be read now is an error:
        it must not look like an empty one."""
        scan = self.survey()
        if not scan.checkpoints and not scan.damaged:
            scan.require_readable()
        return bool(scan.checkpoints or scan.damaged)

    def folders_since(self, known: Set[str]) -> tuple[list[str], bool]:
        """Return the folders of checkpoints and attempts beside those that are known, from one listing of the run, and
        whether all that are known are still there."""
        listed = _list_folders(self.storage, known)
        return listed.added, listed.known_count == len(known)

    def next_sequence(self) -> int:
        """Return the number of the next commit: one more than the highest. Only manifests that are new are read: a
        committed checkpoint never changes, so one that was read before counts as it was then."""
        listed = _list_folders(self.storage, self._sequences)
        for name in listed.added:
            try:
                self.read_head(name)
            except HoldfastError as error:
                # An attempt, or damage of any kind, which readers report. A manifest that cannot be read now is an
                # error: its number must not be given a second time.
                if isinstance(error, StorageError) and not isinstance(error, KeyMissingError):
                    raise
        if len(self._sequences) > 2 * len(listed.names) + _FORGOTTEN_LATER:
            self._sequences = _among(self._sequences, listed.names)
        highest, last = self._highest
        if highest >= MAX_SEQUENCE and last not in listed.names:
            # A number that no training gets to was moved out of the run, as the message below advises.
            self._sequences = _among(self._sequences, listed.names)
            self._highest = max(((number, name) for name, number in self._sequences.items()), default=(0, ""))
            highest, last = self._highest
        if highest >= MAX_SEQUENCE:
            raise SaveFailedError(
                f"{last} has the sequence number {highest}, after which there is none",
                run=self.storage.url,
                advice="no training gets that far: look where that checkpoint comes from, and move its folder out of "
                "the run",
            )
        return highest + 1

    def uncommit(self, folder: str) -> None:
        """Remove the manifest, durably: the folder is no checkpoint from here on, and its bytes are debris."""
        self.storage.delete(paths.key(folder, paths.MANIFEST))
        # Before any byte goes: a power cut must not bring the manifest back without them.
        self.storage.sync(folder)

    def remove(self, folder: str) -> None:
        """Remove an attempt and the notes on it."""
        self.attempts.clear(folder)
        self.annotations.remove_about(folder)
        self.attempts.remove_record(folder)

    def is_gone(self, folder: str, closed: Container[str]) -> bool:
        """Return whether a folder holds no checkpoint and never will: it is not there, or it is a closed attempt. Any
        other may be an attempt in progress, or a checkpoint that cannot be read now; a link may lead to one that was
        moved."""
        try:
            return folder in closed or not self.storage.entries(folder)
        except KeyDamagedError:
            return False

    def add(self, manifest: Manifest, *, same_tensors: bool = False) -> Checkpoint:
        """Commit a checkpoint: after this it exists. Every other byte of it must be durable before.

        `same_tensors`: apart from their digests they are those of a manifest that this catalog has committed.
        """
        data, digest = encode_manifest(manifest)
        # Decoding is checked before the commit: a manifest that no reader accepts must not become a checkpoint.
        require_readable(manifest, data, tensors=not same_tensors)
        try:
            _put_manifest(self.storage, manifest.folder, data)
            # Without it a power cut can keep the manifest's bytes and lose its name, after it was called committed.
            self.storage.sync(manifest.folder)
        except KeyExistsError:
            raise
        except Exception as error:
            _withdraw(self.storage, manifest.folder, error)
            raise
        # Of those that are added only the last is kept whole: a writer adds thousands, and reads none of them again.
        self._last_added = digest, Checkpoint(manifest, digest, self.storage)
        return self._note_known(*self._last_added)


def settled(catalog: Catalog, look: Callable[[], Scan]) -> Scan:
    """Return what a look at the run finds; look again as long as folders without a manifest come and go meanwhile. Each
    may have been a checkpoint when it was listed, which was removed for a later one: the scan has neither of them."""
    scan = look()
    for _ in range(_MAX_RESCANS):
        if not scan.attempts:
            break
        seen = {*scan.attempts, *(found.folder for found in scan.checkpoints)}
        seen |= {skipped.folder for skipped in scan.damaged} | {folder for folder, _ in scan.unreadable}
        listed = _list_folders(catalog.storage, seen)
        if not listed.added and set(scan.attempts) <= set(listed.names):
            break
        scan = look()
    return scan


class _Listed(NamedTuple):
    """The folders of a run. names: of all of them. added: of checkpoints and attempts that were not known.
    known_count: how many there are that were known."""

    names: list[str]
    added: list[str]
    known_count: int


def _list_folders(storage: Storage, known: Container[str] = ()) -> _Listed:
    """List the folders of a run. Nearly all of thousands are known: each name is looked up once, and only those that
    are not known are looked at."""
    names = list(folder_names(storage, ""))
    unknown = [name for name in names if name not in known]
    added = [name for name in unknown if paths.parse_folder(name) is not None]
    return _Listed(names, added, len(names) - len(unknown))


def _among(sequences: Mapping[str, int], present: Iterable[str]) -> dict[str, int]:
    return {name: sequences[name] for name in present if name in sequences}


def _text_of(storage: Storage, folder: str) -> tuple[bytearray, str, str]:
    """Return the text of a manifest, the digest of one as Holdfast writes it, and what tells it from any other."""
    where = paths.key(folder, paths.MANIFEST)
    try:
        data = read_document(storage, where, MAX_MANIFEST_BYTES)
    except KeyDamagedError as error:
        if (target := linked_folders(storage).get(folder)) is not None:
            raise _link_error(folder, target if target.startswith("/") else f"{storage.url}/{target}") from None
        raise CorruptCheckpointError(error.problem, file=where, advice=error.advice) from None
    if is_abandoned(data):
        raise AttemptClosedError("this attempt was given up", file=where)
    written = written_digest(data)
    return data, written, written or digest_of(data)


def _decoded(storage: Storage, folder: str, decode: Callable[[], tuple[_Head, str]]) -> tuple[_Head, str]:
    """Return what a manifest states, and its digest. One that belongs to another folder is damage."""
    try:
        head, digest = decode()
    except HoldfastError as error:
        raise error.at(run=storage.url, file=paths.key(folder, paths.MANIFEST)) from None
    if head.folder != folder:
        raise CorruptCheckpointError(
            f"the folder is a checkpoint under another name: its manifest belongs to {head.folder}",
            file=paths.key(folder, paths.MANIFEST),
            advice="give the folder that name again, or delete it if it is a copy",
        )
    return head, digest


def _put_manifest(storage: Storage, folder: str, data: bytes) -> None:
    """Create the manifest; a KeyExistsError when another process has closed the attempt."""
    try:
        storage.put(paths.key(folder, paths.MANIFEST), data)
    except KeyExistsError:
        # A storage that repeats a request whose answer was lost finds what it has written itself.
        if storage.read(paths.key(folder, paths.MANIFEST), MAX_MANIFEST_BYTES) != data:
            raise


def _withdraw(storage: Storage, folder: str, error: Exception) -> None:
    """Close an attempt whose commit failed half-way: no manifest may stay that a reader accepts, because the save
    is reported as failed. Raise a SaveUncertainError where that cannot be done.

    The ranks' files stay: if a power cut brings the manifest back, everything that it names is there.
    """
    key = paths.key(folder, paths.MANIFEST)
    try:
        if is_abandoned(storage.read(key, MAX_MANIFEST_BYTES)):
            return
        storage.delete(key)
        storage.put(key, encode_abandoned({"by": "commit", "at": timestamp()}))
        # A new change of the folder: its sync counts even if that of the manifest failed.
        storage.sync(folder)
    except KeyMissingError:
        return
    except Exception as trouble:
        raise SaveUncertainError(
            f"committing {folder} failed ({error}), and so did taking the manifest back ({trouble}): "
            "the checkpoint may be there or not",
            run=storage.url,
            advice="look with `holdfast ls` once the storage works again; its data files were not removed",
        ) from error


def _with_notes(annotations: Annotations, checkpoint: Checkpoint, names: Mapping[str, list[str]]) -> Checkpoint:
    if checkpoint.folder not in names:
        return checkpoint
    notes, undecodable = annotations.on(checkpoint, names)
    if not notes and not undecodable:
        return checkpoint
    return replace(checkpoint, notes=notes, unread_notes=undecodable)


def _names(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.entries("")]


def _link_error(folder: str, place: str) -> CorruptCheckpointError:
    """Return why a link in the place of a folder is not used. What it leads to can be named only under its own name."""
    advice = "move the folder back into the run"
    if place.rpartition("/")[2] == folder:
        advice += f", or name its place: {place}"
    return CorruptCheckpointError(
        f"the folder is a symbolic link to {place}, which is not followed", file=folder, advice=advice
    )


class _UnreadHead:
    """Stands for the head of a manifest that could not be read so far; reads it when another attribute is accessed."""

    def __init__(
        self, catalog: Catalog, folder: str, step: int, digest: str, *, sequence: int, size_bytes: int
    ) -> None:
        self.folder = folder
        self.step = step
        self.sequence = sequence
        self.size_bytes = size_bytes
        self._catalog = catalog
        self._digest = digest

    def opened(self) -> Manifest:
        return self._read().manifest

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read().head, name)

    def _read(self) -> Checkpoint:
        try:
            found = self._catalog.read(self.folder)
        except KeyMissingError as error:
            raise removed_since(self.folder).at(run=self._catalog.storage.url) from error
        if found.digest != self._digest:
            raise CorruptCheckpointError(
                "this manifest is not the one that was committed", file=paths.key(self.folder, paths.MANIFEST)
            )
        return found
