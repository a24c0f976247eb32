"""Hold the parts of a manager that its calls work on, as one record. Checked arguments enter; connected parts leave.

The saver does not know the housekeeper, nor the housekeeper the saver: what each needs of the other is passed here, by
a weak reference, so that a manager that is dropped without being closed is gone at once, with its writer process.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

from holdfast.manager.components import Components
from holdfast.manager.deferred_rng import DeferredRNG
from holdfast.manager.reports import Reports
from holdfast.manager.schedule import Pace
from holdfast.ranks.base import Ranks
from holdfast.runs.catalog import Catalog
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.retention import KeepPolicy
from holdfast.saving.pipeline import Saver

__all__ = ["OpenRun"]


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that one manager has opened, and what it saves to it and restores from it with."""

    catalog: Catalog
    ranks: Ranks
    components: Components
    pace: Pace
    saver: Saver
    housekeeper: Housekeeper
    reports: Reports
    deferred_rng: DeferredRNG

    @classmethod
    def connect(
        cls,
        saver: Saver,
        catalog: Catalog,
        ranks: Ranks,
        components: Components,
        pace: Pace,
        *,
        keep: KeepPolicy | None,
        links: bool | LinkTemplate,
    ) -> OpenRun:
        """Add the cleanup and the reported metrics to a saver."""
        weak_saver, needed = weakref.proxy(saver), components.needed
        housekeeper = Housekeeper(
            catalog,
            keep=keep,
            links=links,
            may_write=lambda: weak_saver.hold_run(),
            in_use=lambda: {weak_saver.lineage.head, *needed},
            own_line=True,
            emit=saver.events.emit,
        )
        reports = Reports(catalog, housekeeper, own=lambda: weak_saver.lineage.own)
        saver.on_commit = partial(_after_commit, reports, housekeeper)
        return cls(catalog, ranks, components, pace, saver, housekeeper, reports, DeferredRNG(ranks))

    def become_writer(self) -> None:
        """Claim the run, and remove what a crash left in it. For the leader alone. Done when a manager that will save
        is built: the first save, an hour later, is late to find that another process writes to the run."""
        self.saver.hold_run()
        # No checkpoint goes before the first new one is committed: until then it is not known whether the newest is
        # sound.
        self.housekeeper.clear_debris_in_background()


def _after_commit(reports: Reports, housekeeper: Housekeeper) -> None:
    reports.note_commit()
    housekeeper.clean_up_in_background()
