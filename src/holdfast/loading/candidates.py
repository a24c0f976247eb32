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

from holdfast.errors import CorruptCheckpointError
from holdfast.loading.resolve import candidates
from holdfast.ranks.base import Ranks, on_leader
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Skipped
from holdfast.runs.readers import reading
from holdfast.runs.selector import Selector

logger = logging.getLogger("holdfast")

__all__ = ["Candidate", "Candidates"]


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
    deletes no checkpoint that is claimed. `rejected` are folders that were rejected before any was tried.
    """

    def __init__(self, selector: Selector, catalog: Catalog, ranks: Ranks) -> None:
        self.rejected: list[Skipped] = []
        self._selector = selector
        self._catalog = catalog
        self._ranks = ranks
        self._candidates: tuple[Candidate, ...] = ()
        self._claim = ExitStack()

    def __enter__(self) -> Self:
        try:
            choice = on_leader(self._ranks, "resolve", self._resolve, returns=_Choice)
        except BaseException:
            self._claim.close()
            raise
        self._candidates = choice.candidates
        self.rejected = [Skipped(*pair) for pair in choice.rejected]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claim.close()

    def __iter__(self) -> Iterator[Candidate]:
        for number, candidate in enumerate(self._candidates):
            # The first one was claimed by the agreement that chose it.
            if number:
                on_leader(self._ranks, "claim the next candidate", partial(self._hold, candidate), returns=None)
            yield candidate

    def _resolve(self) -> _Choice:
        """Choose, and claim the first one: no further agreement is needed for that."""
        found, rejected = candidates(self._catalog, self._selector)
        for skipped in rejected:
            logger.warning("rejected %s", skipped)
        choice = _Choice(
            tuple(Candidate(checkpoint.folder, checkpoint.digest) for checkpoint in found),
            tuple((skipped.folder, skipped.reason) for skipped in rejected),
        )
        if choice.candidates:
            self._hold(choice.candidates[0])
        return choice

    def _hold(self, candidate: Candidate) -> None:
        self._claim.close()
        self._claim.enter_context(reading(self._catalog.storage, candidate.folder))
