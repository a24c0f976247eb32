"""Annotate checkpoints that are committed: metrics that are reported later, and tags. Called on all ranks, in the same
order; the leader writes.

A selector or a step and what is to be noted enter; a note on the checkpoint leaves. Only a run's writer cleans up after
it: a process that only annotates does not become the writer by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import CheckpointNotFoundError
from holdfast.manager.arguments import on_every_rank, plain_step, reported_metrics
from holdfast.manager.open_run import OpenRun
from holdfast.ondisk.paths import check_step
from holdfast.ranks.base import on_leader
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.selection import choose_own
from holdfast.runs.selector import Selector, check_tag, parse_selector
from holdfast.saving.pending import PendingSave

__all__ = ["Annotator"]


class Annotator:
    """Writes the notes of one manager."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run

    def report(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Add metrics to the checkpoint of a step, or keep them until the pending save of that step is committed.
        Return False when there is no such checkpoint."""
        step = plain_step(step)
        checked = on_every_rank(
            self._run.ranks, "report", lambda: (check_step(step), reported_metrics(metrics))[1], same=repr(step)
        )
        return on_leader(self._run.ranks, f"report of step {step}", lambda: self._report(step, checked), returns=bool)

    def annotate(self, selector: str | int, *, tag: str = "", untag: str = "") -> None:
        """Add a tag to the checkpoint that a selector names, or remove one that it has."""
        self._run.saver.drain()
        on_every_rank(self._run.ranks, "annotate", lambda: check_tag(tag or untag), same=repr((selector, tag, untag)))

        def work() -> None:
            found = self._find(parse_selector(selector))
            if untag and untag not in found.tags:
                raise CheckpointNotFoundError(f"'{selector}' has no tag '{untag}'", run=self._run.catalog.storage.url)
            self._note_and_clean_up(found, tag=tag, untag=untag)

        on_leader(self._run.ranks, "annotate", work, returns=None)

    def add_to_committed(self, pending: PendingSave, *, metrics: dict[str, Any], tag: str) -> bool:
        """Add metrics and a tag to the checkpoint that a skipped save found. All ranks call it, whatever each of them
        has to add. Return False, on all of them, if the checkpoint has been removed."""

        def work() -> bool:
            try:
                found = self._run.catalog.find(Selector("folder", name=pending.folder))
                if metrics or tag:
                    self._note_and_clean_up(found, metrics=metrics, tag=tag)
            except CheckpointNotFoundError:
                return False
            return True

        return on_leader(self._run.ranks, "annotate", work, returns=bool)

    def settle_reports(self) -> None:
        """Raise that reported metrics could not be written. With several ranks the next save or report does, on all."""
        if self._run.ranks.size == 1:
            self._run.reports.settle()

    def _report(self, step: int, metrics: dict[str, Any]) -> bool:
        self._run.reports.settle()
        pending = self._run.saver.pending
        if pending is not None and pending.step == step and not pending.done():
            self._run.reports.add(pending, metrics)
            return True
        written = self._run.reports.write_now(step, metrics)
        if written:
            self._clean_up_as_writer()
        return written

    def _note_and_clean_up(self, checkpoint: Checkpoint, **note: Any) -> None:
        self._run.housekeeper.annotate(checkpoint, **note)
        self._clean_up_as_writer()

    def _clean_up_as_writer(self) -> None:
        if self._run.saver.lease:
            self._run.housekeeper.clean_up_in_background()

    def _find(self, selector: Selector) -> Checkpoint:
        """Return the checkpoint that a selector names: of several of one step, the one on this manager's line."""
        found, own = self._run.catalog.find(selector), self._run.saver.lineage.own
        if selector.kind != "step" or own is None:
            return found
        return choose_own(self._run.catalog.survey(), selector.step, own) or found
