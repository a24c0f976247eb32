"""The checkpoints of a run. Folders and manifests enter, `Checkpoint`s leave: the only place that makes one.

"Complete" has one definition, and it is here: a folder with a sound `manifest.json`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

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
from holdfast.runs.annotations import Annotations
from holdfast.runs.attempts import Attempts, linked_folders
from holdfast.runs.checkpoint import Checkpoint, Scan, Skipped
from holdfast.runs.clock import timestamp
from holdfast.runs.selection import choose, not_found, require_selectable
from holdfast.runs.selector import Selector
from holdfast.storage.base import Storage
from holdfast.storage.documents import read_document
from holdfast.storage.retrying import with_retries

logger = logging.getLogger("holdfast")

__all__ = ["Catalog"]


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
        # Checkpoints by the digest of their manifest's bytes: these are read each time, because they alone are the
        # truth, but a manifest of many thousand tensors is decoded only once. Several threads may use one catalog: this
        # is only ever iterated over as a copy.
        self._known: dict[str, Checkpoint] = {}

    def __repr__(self) -> str:
        return f"Catalog({self.storage.url!r})"

    def scan(self) -> Scan:
        """Return the content of the run. Foreign names are ignored; a folder that cannot be read now is an error:
        without it an older checkpoint would be taken for the latest."""
        scan = self.survey()
        scan.require_readable()
        return scan

    def survey(self) -> Scan:
        """Return the content of the run, with the folders that cannot be read now."""
        checkpoints, attempts, damaged, closed, unreadable = [], [], [], [], []
        notes = self.annotations.names_by_folder()
        folders = [entry.name for entry in self.storage.entries("") if entry.is_folder]
        for name in sorted({*folders, *linked_folders(self.storage)}):
            if paths.parse_folder(name) is None:
                continue
            try:
                checkpoints.append(self._with_notes(self.read(name), notes))
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
            if (target := linked_folders(self.storage).get(folder)) is not None:
                place = target if target.startswith("/") else f"{self.storage.url}/{target}"
                raise _link_error(folder, place) from None
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
                f"the folder is a checkpoint under another name: its manifest belongs to {head.folder}",
                file=paths.key(folder, paths.MANIFEST),
                advice="give the folder that name again, or delete it if it is a copy",
            )
        checkpoint = self._known[identity] = Checkpoint(head, digest, self.storage)
        return checkpoint

    def name_as_checkpoint(self) -> str:
        """Return the folder's name that the manifest in the root states, where the root is no run but a checkpoint that
        was copied or renamed; empty otherwise."""
        if any(paths.parse_folder(name) is not None for name in self._names()):
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
        return self._with_notes(checkpoint, self.annotations.names_by_folder())

    def _with_notes(self, checkpoint: Checkpoint, names: Mapping[str, list[str]]) -> Checkpoint:
        notes, undecodable = self.annotations.on(checkpoint, names)
        if not notes and not undecodable:
            return checkpoint
        return replace(checkpoint, notes=notes, unread_notes=undecodable)

    def find(self, selector: Selector) -> Checkpoint:
        """Return the one checkpoint that a selector names. One that is not there is an error."""
        if selector.kind == "folder":
            return self._find_folder(selector.name)
        scan = self.survey()
        require_selectable(scan, selector)
        found = choose(scan, selector)
        if found is None:
            raise not_found(self.storage, selector, scan)
        return found

    def _find_folder(self, folder: str) -> Checkpoint:
        try:
            return self.annotated(self.read(folder))
        except KeyMissingError:
            reason = "was never committed" if folder in self._names() else "is not there"
            raise CheckpointNotFoundError(f"{folder} {reason}", run=self.storage.url) from None

    def holds_something(self) -> bool:
        """Return whether the run has a committed checkpoint, sound or not. A run that cannot be read now is an error:
        it must not look like an empty one."""
        scan = self.survey()
        if not scan.checkpoints and not scan.damaged:
            scan.require_readable()
        return bool(scan.checkpoints or scan.damaged)

    def next_sequence(self) -> int:
        """Return the number of the next commit: one more than the highest. Only manifests that are new are read."""
        known = {checkpoint.folder: checkpoint for checkpoint in list(self._known.values())}
        highest, last = 0, ""
        for name in self._names():
            if paths.parse_folder(name) is None:
                continue
            try:
                # A committed checkpoint never changes, so one that was read before counts as it was then.
                highest, last = max((highest, last), ((known.get(name) or self.read(name)).sequence, name))
            except HoldfastError as error:
                # An attempt, or damage of any kind, which readers report. A manifest that cannot be read now is an
                # error: its number must not be given a second time.
                if isinstance(error, StorageError) and not isinstance(error, KeyMissingError):
                    raise
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

    def is_gone(self, folder: str, scan: Scan) -> bool:
        """Return whether a folder holds no checkpoint and never will: it is not there, or was closed. Any other may be
        an attempt in progress, or a checkpoint that cannot be read now; a link may lead to one that was moved."""
        try:
            return folder in scan.closed or not self.storage.entries(folder)
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
        """Close an attempt whose commit failed half-way: no manifest may stay that a reader accepts, because the save
        is reported as failed. Raise a SaveUncertainError where that cannot be done.

        The ranks' files stay: if a power cut brings the manifest back, everything that it names is there.
        """
        key = paths.key(folder, paths.MANIFEST)
        try:
            if is_abandoned(self.storage.read(key, MAX_MANIFEST_BYTES)):
                return
            self.storage.delete(key)
            self.storage.put(key, encode_abandoned({"by": "commit", "at": timestamp()}))
            # A new change of the folder: its sync counts even if that of the manifest failed.
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

    def _names(self) -> list[str]:
        return [entry.name for entry in self.storage.entries("")]


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
            raise CheckpointNotFoundError(
                f"the checkpoint was committed in {self.folder}, which was removed since",
                run=self._catalog.storage.url,
                advice="retention or another process removed it; save a step that keep= keeps, or tag it",
            ) from error
        if found.digest != self._digest:
            raise CorruptCheckpointError(
                "this manifest is not the one that was committed", file=paths.key(self.folder, paths.MANIFEST)
            )
        return found
