"""A committed checkpoint, and what looking through a run finds. Values only: made by the catalog, read by everything.

Only `Catalog` makes a `Checkpoint`: whatever holds one may count on all of its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    KeyDamagedError,
    KeyMissingError,
    StorageError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.codec import decode
from holdfast.ondisk.inline import tensor_of_text
from holdfast.ondisk.manifest import (
    MAX_MANIFEST_BYTES,
    STATE_DICT_NOTE,
    Body,
    Manifest,
    ManifestHead,
    Ranking,
    decode_manifest,
)
from holdfast.ondisk.manifest_body import body_of
from holdfast.runs.annotations import Note, Notes, sum_up
from holdfast.runs.assets import Assets, stored_assets
from holdfast.storage.base import Storage
from holdfast.storage.documents import read_document

logger = logging.getLogger("holdfast")

__all__ = ["Checkpoint", "Scan", "Skipped", "first_unreadable", "numbers_of", "removed_since", "without_tensors"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A committed checkpoint. It exists completely, and it never changes.

    `progress`, `extra` and `config` are decoded at each access: what a caller changes in them is the caller's own.
    """

    # A plain `Body` is all but the tensors: the manifest is read again for them.
    head: Body = field(repr=False)
    digest: str
    storage: Storage = field(repr=False)
    notes: tuple[Note, ...] = field(repr=False, default=())
    # Notes that cannot be decoded: the checkpoint may have a tag that is not known.
    unread_notes: tuple[str, ...] = field(repr=False, default=())

    @cached_property
    def manifest(self) -> Manifest:
        """Return the whole commit record; a HoldfastError when it has its digest and cannot be decoded, or has to be
        read again and is not there any more."""
        if isinstance(self.head, Manifest):
            return self.head
        try:
            opened = _read_again(self) if type(self.head) is Body else cast(ManifestHead, self.head).opened()
        except HoldfastError as error:
            raise error.at(run=self.storage.url, file=paths.key(self.folder, paths.MANIFEST)) from None
        # It replaces the text of the manifest, which is not needed any more and is as large as the file.
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
        """Return the number of the commit. It grows with every commit of the run: the highest is the latest."""
        return self.head.sequence

    @property
    def parent(self) -> str | None:
        """Return the digest of the checkpoint that the training continued from."""
        return self.head.parent

    @property
    def epoch(self) -> int | None:
        """Return the number of completed epochs; None when the save did not state it."""
        return self.head.epoch

    @cached_property
    def created(self) -> datetime:
        return datetime.fromisoformat(self.head.created)

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the save and those that were reported later."""
        saved = self._each_decoded("metrics", self.head.metrics)
        try:
            return MappingProxyType({**saved, **self._each_decoded("metrics", self._noted.metrics)})
        except HoldfastError as error:
            logger.warning(
                "%s: metrics that were reported later cannot be decoded and are skipped: %s", self.folder, error
            )
            return saved

    @cached_property
    def known_metrics(self) -> Mapping[str, Any]:
        """Return the metrics for a comparison of several checkpoints: none, with a warning, where they
        cannot be decoded. One checkpoint that makes no sense must not stop what is about all of them."""
        try:
            return self.metrics
        except HoldfastError as error:
            logger.warning("%s: its metrics cannot be decoded, and count as unknown: %s", self.folder, error)
            return MappingProxyType({})

    @property
    def progress(self) -> Mapping[str, Any]:
        return self._each_decoded("progress", self.head.progress)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return the `extra` of the save, without the entry that describes the layout of a plain state dict."""
        given = {key: value for key, value in self.head.extra.items() if key != STATE_DICT_NOTE}
        return self._each_decoded("extra", given, tensor_of_text)

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
        """Return the damage that a restore found in its bytes; empty when none is known."""
        return self._noted.damage

    @cached_property
    def _noted(self) -> Notes:
        return sum_up(self.notes, self.head.tags)

    @property
    def path(self) -> str:
        """Return the path or the URL of the checkpoint's folder."""
        return f"{self.storage.url}/{self.folder}"

    @cached_property
    def assets(self) -> Assets:
        """Return the files that were stored beside the weights, by name. Each is read, and verified, when it is
        opened."""
        return stored_assets(self.storage, self.folder, self.head.files)

    def key(self, name: str) -> str:
        return paths.key(self.folder, name)

    def _decoded(self, name: str, value: Any, tensor: Callable[[str], Any] | None = None) -> Any:
        return decode(value, path=name, tensor=tensor)

    def _each_decoded(
        self, name: str, values: Mapping[str, Any], tensor: Callable[[str], Any] | None = None
    ) -> Mapping[str, Any]:
        """Decode value by value: the keys are the user's and are not interpreted."""
        return MappingProxyType({key: self._decoded(f"{name}.{key}", value, tensor) for key, value in values.items()})

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, sequence={self.sequence}, path={self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def without_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without its tensors, which take most of its memory, and without notes. They are read again
    when they are used."""
    if type(checkpoint.head) is Body:
        return checkpoint
    return Checkpoint(body_of(checkpoint.head), checkpoint.digest, checkpoint.storage)


def _read_again(checkpoint: Checkpoint) -> Manifest:
    try:
        data = read_document(checkpoint.storage, checkpoint.key(paths.MANIFEST), MAX_MANIFEST_BYTES)
    except KeyMissingError as error:
        raise removed_since(checkpoint.folder) from error
    except KeyDamagedError as error:
        raise CorruptCheckpointError(error.problem, advice=error.advice) from None
    manifest, digest = decode_manifest(data)
    if digest != checkpoint.digest or body_of(manifest) != checkpoint.head:
        raise CorruptCheckpointError("this manifest is not the one that was committed")
    return manifest


def removed_since(folder: str) -> CheckpointNotFoundError:
    """Return the error for a checkpoint that was seen and whose manifest is gone when it is needed."""
    return CheckpointNotFoundError(
        f"the checkpoint was committed in {folder}, which was removed since",
        advice="retention or another process removed it; save a step that keep= keeps, or tag it",
    )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A folder that holds no usable checkpoint, and why. `newer`: not damaged, but of a newer format."""

    folder: str
    reason: str
    newer: bool = False

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Scan:
    """The content of a run.

    checkpoints: the latest first. attempts: folders without a commit. closed: those of them that can never be
    committed. damaged: manifests that cannot be used. ranking: the metrics that `best` ranks by. unreadable: folders
    that cannot be read now, each with the error; any of them may hold the latest checkpoint.
    """

    checkpoints: tuple[Checkpoint, ...]
    attempts: tuple[str, ...]
    damaged: tuple[Skipped, ...]
    closed: tuple[str, ...] = ()
    ranking: Ranking = ()
    unreadable: tuple[tuple[str, StorageError], ...] = ()

    def require_readable(self) -> None:
        """Raise if a folder cannot be read now: nothing may be concluded from the others alone."""
        if self.unreadable:
            raise first_unreadable(self.unreadable)


def first_unreadable(found: Sequence[tuple[str, StorageError]]) -> HoldfastError:
    """Return the first of these errors, with how many there are. It keeps its type and names its file."""
    error = found[0][1]
    if len(found) == 1:
        return error
    return error.changed(problem=f"{error.problem} (and {len(found) - 1} more folders)")


def encoded_metrics(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the metrics of the save and those that were reported later, as the manifest stores them."""
    return {**checkpoint.head.metrics, **sum_up(checkpoint.notes, ()).metrics}


def numbers_of(values: Mapping[str, Any]) -> Mapping[str, int | float]:
    """Return those of these values that are numbers."""
    return MappingProxyType({name: value for name, value in values.items() if isinstance(value, int | float)})
