"""Choose the checkpoints to try, on the leader, and claim the one that is tried. A selector enters; candidates
leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    KeyMissingError,
    StorageError,
)
from holdfast.loading.resolve import candidates
from holdfast.ranks.base import Ranks, on_leader
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Skipped
from holdfast.runs.interrupts import finish
from holdfast.runs.readers import reading
from holdfast.runs.selector import Selector

logger = logging.getLogger("holdfast")

__all__ = ["Candidate", "Candidates"]

# How many candidates in a row may be gone. One takes a save and its cleanup between the listing of a run and the claim.
_MAX_REMOVALS = 10


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint to try, by its folder and the digest of its manifest."""

    folder: str
    digest: str

    def open(self, catalog: Catalog) -> Checkpoint:
        """Read the checkpoint on this rank; it must be the one that the leader chose."""
        try:
            checkpoint = catalog.read(self.folder)
        except FileNotFoundError:
            raise CorruptCheckpointError("the manifest was removed", file=self.folder) from None
        if checkpoint.digest != self.digest:
            raise CorruptCheckpointError("this rank sees another manifest than the leader", file=self.folder)
        return catalog.annotated(checkpoint)


class _Choice(msgspec.Struct, frozen=True, array_like=True):
    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[str, str], ...]


class Candidates:
    """The checkpoints to try, in order, the same on all ranks.

    The leader claims the one that is tried, for all ranks, before any of them reads its manifest again: retention
    deletes no checkpoint that is claimed. One may have been removed before that, for a later one: then the run is
    listed again. `rejected` are folders that were rejected before any was tried.
    """

    def __init__(self, selector: Selector, catalog: Catalog, ranks: Ranks) -> None:
        self.rejected: list[Skipped] = []
        self._selector = selector
        self._catalog = catalog
        self._ranks = ranks
        self._candidates: list[Candidate] = []
        self._claim = ExitStack()
        # On the leader alone: how many in a row were gone, those that were damaged, and what was logged.
        self._removals = 0
        self._damaged: set[Candidate] = set()
        self._logged: set[Skipped] = set()

    def __enter__(self) -> Self:
        try:
            self._take(on_leader(self._ranks, "resolve", self._resolve, returns=_Choice))
        except BaseException:
            finish(self._claim.close)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self._claim.close)

    def __iter__(self) -> Iterator[Candidate]:
        """Return the candidates, each of which is claimed. Call `give_up` before the next one is taken."""
        while self._candidates:
            yield self._candidates.pop(0)

    def give_up(self, candidate: Candidate) -> bool:
        """Claim the one to try after a candidate that could not be used. Return whether that one is damaged; it is not
        if it was removed since the run was listed, which is done again then."""
        after_removal = on_leader(
            self._ranks, "claim the next candidate", partial(self._go_on, candidate), returns=_Choice | None
        )
        if after_removal is not None:
            self._take(after_removal)
        return after_removal is None

    def _take(self, choice: _Choice) -> None:
        self._candidates = list(choice.candidates)
        self.rejected = [Skipped(*pair) for pair in choice.rejected]

    def _resolve(self) -> _Choice:
        """Choose, and claim the first one: no further agreement is needed for that."""
        found, rejected = candidates(self._catalog, self._selector)
        for skipped in rejected:
            if skipped not in self._logged:
                logger.warning("rejected %s", skipped)
        self._logged.update(rejected)
        named = [Candidate(checkpoint.folder, checkpoint.digest) for checkpoint in found]
        choice = _Choice(
            tuple(candidate for candidate in named if candidate not in self._damaged),
            tuple((skipped.folder, skipped.reason) for skipped in rejected),
        )
        if choice.candidates:
            self._hold(choice.candidates[0])
        return choice

    def _go_on(self, candidate: Candidate) -> _Choice | None:
        """Return what to try instead of a candidate that was removed; for one that is damaged claim the next one."""
        if self._was_removed(candidate):
            return self._resolve_again(candidate)
        self._damaged.add(candidate)
        self._removals = 0
        if self._candidates:
            self._hold(self._candidates[0])
        return None

    def _was_removed(self, candidate: Candidate) -> bool:
        """Return whether a checkpoint is not there any more, or another one has its folder. What the leader sees
        counts: a rank that sees less has a damaged view of it."""
        try:
            return self._catalog.read_head(candidate.folder).digest != candidate.digest
        except KeyMissingError:
            return True
        except StorageError:
            raise
        except HoldfastError:
            return False

    def _resolve_again(self, removed: Candidate) -> _Choice:
        """Choose once more after a removal. A run in which nothing is left is an error, because it held something."""
        self._removals += 1
        logger.info("%s was removed since the run was listed", removed.folder)
        gone = f"'{self._selector}' found {removed.folder}, which was removed before it was read"
        url = self._catalog.storage.url
        if self._removals == _MAX_REMOVALS:
            advice = "checkpoints are removed faster than they are read; let keep= keep more of them"
            raise CheckpointNotFoundError(f"{gone}, and so were {_MAX_REMOVALS - 1} before it", run=url, advice=advice)
        # The manifests that were read before may be gone, though their folders are still there.
        self._catalog.drop_cache()
        try:
            choice = self._resolve()
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(gone, run=url, advice=error.advice) from error
        if not choice.candidates and not self._damaged:
            raise CheckpointNotFoundError(f"{gone}, and no other checkpoint is there", run=url)
        return choice

    def _hold(self, candidate: Candidate) -> None:
        self._claim.close()
        self._claim.enter_context(reading(self._catalog.storage, candidate.folder))
