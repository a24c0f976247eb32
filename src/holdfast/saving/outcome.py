"""How a save ended: the committed checkpoint, or the error that the caller gets. Knows no torch.

Finds out, from the storage alone, how a save ended that was cut off, and removes the files of an abandoned one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.errors import (
    HoldfastError,
    KeyMissingError,
    RankError,
    SaveFailedError,
    SaveUncertainError,
    StorageError,
)
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint

__all__ = [
    "InterruptedSaveError",
    "Saved",
    "as_save_error",
    "discard_files",
    "find_committed",
    "is_agreed_error",
    "outcome_from_storage",
    "settle_interrupted",
]

logger = logging.getLogger("holdfast")


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """Where the checkpoint is. `skipped` when the step was committed already and nothing was written. `error` when the
    commit itself failed: it may have been done or not, so no rank may remove anything."""

    folder: str
    digest: str
    skipped: bool = False
    size_bytes: int = 0
    sequence: int = 0
    segment: str = ""
    error: dict[str, Any] | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Saved:
        """Return the outcome of a save that is committed."""
        return cls(
            checkpoint.folder,
            checkpoint.digest,
            size_bytes=checkpoint.size_bytes,
            sequence=checkpoint.sequence,
            segment=checkpoint.head.segment,
        )


_MORE_THREADS = "raise the limit of processes and threads (ulimit -u, pids.max of the container)"


class InterruptedSaveError(SaveFailedError):
    """The failure of a save that an interrupt ended, in its events and its handle. The caller gets the interrupt."""


def as_save_error(error: BaseException, step: int) -> HoldfastError:
    """Return any failure of a save as the error that the caller gets."""
    if isinstance(error, HoldfastError):
        if type(error) is HoldfastError:  # what some rank's own code raised, passed on by its name
            return SaveFailedError(**{**error.fields, "step": step})
        return error.at(step=step)
    kind = SaveFailedError if isinstance(error, Exception) else InterruptedSaveError
    advice = _MORE_THREADS if isinstance(error, RuntimeError) and "start new thread" in str(error) else ""
    return kind(f"{type(error).__name__}: {error}", step=step, advice=advice)


def is_agreed_error(error: BaseException) -> bool:
    """Return whether all ranks have this error from the leader. Otherwise the leader, or the way to it, was lost."""
    silent = isinstance(error, RankError) and tuple(getattr(error, "ranks", ())) == (0,)
    return isinstance(error, HoldfastError) and not silent


def find_committed(catalog: Catalog, folder: str) -> Saved | None:
    """Return what another process has committed in this folder; None when nothing is committed."""
    try:
        checkpoint = catalog.read(folder)
    except KeyMissingError:
        return None
    catalog.storage.sync(folder)
    return Saved.of(checkpoint)


def outcome_from_storage(error: Exception, catalog: Catalog, folder: str, *, may_come_later: bool) -> Saved:
    """Return what the storage has of a save that was cut off by `error` before its outcome was known; raise if it has
    nothing. `may_come_later`: another process may still be about to commit the save."""
    try:
        found = find_committed(catalog, folder)
    except BaseException as trouble:
        raise SaveUncertainError(
            f"{_one_line(error)}; whether the save is committed cannot be seen either: {_one_line(trouble)}",
            advice="look with `holdfast ls` once the storage works again; nothing of the checkpoint was removed",
        ) from error
    if found is not None:
        logger.warning("%s is committed, though its save was cut off: %s", found.folder, _one_line(error))
        return found
    if not may_come_later:
        raise error
    later = "the save is not committed so far, and may still be: look with `holdfast ls`"
    if isinstance(error, RankError):
        raise RankError(**{**error.fields, "advice": f"{error.advice}; {later}"}) from error
    raise SaveUncertainError(f"the save was cut off: {_one_line(error)}", advice=later) from error


def settle_interrupted(catalog: Catalog, folder: str) -> Saved | None:
    """Return what is committed in the folder of an interrupted save of this process. Where nothing is, close the
    attempt, so that nothing will be, and remove what was written. Can be repeated after another interrupt."""
    try:
        if not catalog.attempts.is_taken(folder):
            return None
        # The name of the manifest decides: a request to create it may still be on its way to the storage.
        if not catalog.attempts.close(folder, by="interrupt"):
            found = find_committed(catalog, folder)
            if found is not None:
                return found
        catalog.attempts.clear(folder)
        # Without a record of its writer, the next cleanup removes the folder.
        catalog.storage.delete(paths.key(folder, paths.ATTEMPT))
    except HoldfastError as error:
        logger.warning("%s, whose save was interrupted, could not be cleaned up: %s", folder, _one_line(error))
    return None


def discard_files(names: Sequence[str], folder: str, catalog: Catalog) -> None:
    """Remove files of an abandoned attempt. What stays is debris. Nothing of a folder with a manifest is removed: it is
    a checkpoint, whatever is known of its save."""
    try:
        if any(entry.name == paths.MANIFEST for entry in catalog.storage.entries(folder)):
            logger.warning("%s was committed, so its files stay", folder)
            return
    except StorageError as error:
        logger.debug("%s cannot be listed, so its files stay: %s", folder, error)
        return
    for name in names:
        try:
            catalog.storage.delete(paths.key(folder, name))
        except StorageError as error:
            logger.debug("could not remove %s of an abandoned attempt: %s", name, error)


def _one_line(error: BaseException) -> str:
    return str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
