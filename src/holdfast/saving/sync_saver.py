"""Write and commit a save before the call returns, each rank from its own tensors. An agreed save enters, its outcome
leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.ondisk import paths
from holdfast.ranks.base import Ranks, on_leader
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.links import point_latest
from holdfast.runs.progress import Progress
from holdfast.saving.agreement import AgreedSave, Agreement
from holdfast.saving.commit import commit
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.files import plain_files, with_sources
from holdfast.saving.messages import Receipt
from holdfast.saving.outcome import Saved, discard_files, is_agreed_error, outcome_from_storage, settle_interrupted
from holdfast.saving.pending import PendingSave
from holdfast.saving.ring import Ring
from holdfast.saving.write import write

__all__ = ["SyncSaver", "announce", "commit_together", "write_together"]


class SyncSaver:
    """The steps of a save that is written in the call."""

    def __init__(
        self, catalog: Catalog, ranks: Ranks, coordinator: Coordinator, agreement: Agreement, ring: Ring
    ) -> None:
        self._catalog = catalog
        self._ranks = ranks
        self._coordinator = coordinator
        self._agreement = agreement
        self._ring = ring

    def write(self, agreed: AgreedSave, pending: PendingSave) -> list[Receipt]:
        """Write on every rank; return all receipts on the leader."""
        part = partial(self._write_part, agreed, pending)
        return write_together(part, agreed.plan.folder, pending, self._catalog, self._ranks)

    def commit(self, agreed: AgreedSave, receipts: list[Receipt], pending: PendingSave) -> Saved:
        """Commit on the leader; return the outcome on every rank."""
        work = partial(self._commit, agreed, receipts)
        return commit_together(work, agreed.plan.folder, pending, self._catalog, self._ranks)

    def _write_part(self, agreed: AgreedSave, pending: PendingSave, created: list[str]) -> Receipt:
        plan, rank = agreed.plan, self._ranks.rank
        if rank != 0:
            self._catalog.attempts.require_claim(plan.folder, plan.claim)
        own = self._agreement.rank_plan(agreed)
        tensors = with_sources(own.files, agreed.captured.memory, self._ring)
        plain = plain_files(agreed.captured, own.assignment, rank, self._coordinator.trees, agreed.request.assets)
        pending.size_bytes = sum(file.frame.size_bytes for file in tensors) + sum(file.size_bytes for file in plain)
        with Progress(f"saving step {agreed.request.step}", pending.size_bytes, shown=rank == 0) as progress:
            return write(
                plan.folder,
                tensors,
                plain,
                self._catalog.storage,
                on_bytes=progress.add,
                on_created=created.append,
            )

    def _commit(self, agreed: AgreedSave, receipts: list[Receipt]) -> Saved:
        facts = self._coordinator.facts(agreed.request, agreed.plan.folder)
        checkpoint = commit(facts, self._coordinator.listing, receipts, self._catalog)
        return announce(checkpoint, self._catalog, links=facts.links)


def write_together(
    part: Callable[[list[str]], Receipt], folder: str, pending: PendingSave, catalog: Catalog, ranks: Ranks
) -> list[Receipt]:
    """Call `part` on every rank with a list to which it adds each file that it has created; return all receipts on the
    leader. If one rank cannot write, nothing can refer to what the others wrote, and all of it is removed."""
    created: list[str] = []
    receipts: list[Receipt] = []
    pending.attempt = folder
    try:
        with pending.phase("write"):
            ranks.decide("write", partial(part, created), receipts.extend, sends=Receipt, returns=None)
    except (Exception, KeyboardInterrupt, SystemExit):
        # Safe also when only this rank failed: the commit waits for every rank to have passed this agreement.
        names = [*created, paths.ATTEMPT] if ranks.rank == 0 else created
        discard_files(names, folder, catalog)
        raise
    pending.emit("written", size_bytes=pending.size_bytes)
    return receipts


def commit_together(
    work: Callable[[], Saved], folder: str, pending: PendingSave, catalog: Catalog, ranks: Ranks
) -> Saved:
    """Do the work, which commits, on the leader; return the outcome on every rank. An interrupt after the commit is
    raised on the leader when the others have the outcome: all of them have to know that the checkpoint exists."""
    interrupts: list[BaseException] = []
    with pending.phase("commit"):
        try:
            hold = partial(_commit_and_hold, work, folder, catalog, interrupts)
            saved = on_leader(ranks, "commit", hold, returns=Saved)
        except Exception as error:
            if ranks.size == 1 or is_agreed_error(error):
                raise
            # The leader, or the connection to it, was lost in the very moment of the commit.
            saved = outcome_from_storage(error, catalog, folder, may_come_later=ranks.rank != 0)
    if interrupts:
        raise interrupts[0]
    return saved


def _commit_and_hold(
    work: Callable[[], Saved], folder: str, catalog: Catalog, interrupts: list[BaseException]
) -> Saved:
    """Do the work, which commits. An interrupt before the commit is raised; one after it is added to `interrupts`."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit) as interrupt:
        saved = settle_interrupted(catalog, folder)
        if saved is None:
            raise
        interrupts.append(interrupt)
        return saved


def announce(checkpoint: Checkpoint, catalog: Catalog, *, links: bool) -> Saved:
    """Return the outcome of a commit; `latest` leads to it then, if there are links."""
    if links:
        point_latest(catalog.storage, checkpoint.folder)
    return Saved.of(checkpoint)
