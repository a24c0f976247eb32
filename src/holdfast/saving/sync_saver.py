"""Write and commit a save before the call returns, each rank from its tensors' own memory. An agreed save enters, its
outcome leaves."""

from __future__ import annotations

from functools import partial

from holdfast.ondisk import paths
from holdfast.ranks.base import Ranks, on_leader
from holdfast.runs.catalog import Catalog
from holdfast.runs.links import point_latest
from holdfast.runs.progress import Progress
from holdfast.saving.agreement import AgreedSave, Agreement
from holdfast.saving.commit import commit
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.files import plain_files, with_sources
from holdfast.saving.messages import Receipt
from holdfast.saving.outcome import Saved, discard_files, is_agreed_error, outcome_from_storage
from holdfast.saving.pending import PendingSave
from holdfast.saving.write import write

__all__ = ["SyncSaver"]


class SyncSaver:
    """The steps of a save that is written in the call."""

    def __init__(self, catalog: Catalog, ranks: Ranks, coordinator: Coordinator, agreement: Agreement) -> None:
        self._catalog = catalog
        self._ranks = ranks
        self._coordinator = coordinator
        self._agreement = agreement

    def write(self, agreed: AgreedSave, pending: PendingSave) -> list[Receipt]:
        """Write on every rank; return all receipts on the leader. If one rank cannot write, nothing can refer to what
        the others wrote, and all of it is removed."""
        created: list[str] = []
        receipts: list[Receipt] = []
        try:
            with pending.phase("write"):
                part = partial(self._write_part, agreed, pending, created)
                self._ranks.decide("write", part, receipts.extend, sends=Receipt, returns=None)
        except (Exception, KeyboardInterrupt):
            # Safe also when only this rank failed: the commit waits for every rank to have passed this agreement.
            names = [*created, paths.ATTEMPT] if self._ranks.rank == 0 else created
            discard_files(names, agreed.plan.folder, self._catalog)
            raise
        pending.emit("written", size_bytes=pending.size_bytes)
        return receipts

    def commit(self, agreed: AgreedSave, receipts: list[Receipt], pending: PendingSave) -> Saved:
        """Commit on the leader; return the outcome on every rank."""
        ranks = self._ranks
        with pending.phase("commit"):
            try:
                return on_leader(ranks, "commit", partial(self._commit, agreed, receipts), returns=Saved)
            except Exception as error:
                if ranks.size == 1 or is_agreed_error(error):
                    raise
                # The leader, or the connection to it, was lost in the very moment of the commit.
                folder = agreed.plan.folder
                return outcome_from_storage(error, self._catalog, folder, may_come_later=ranks.rank != 0)

    def _write_part(self, agreed: AgreedSave, pending: PendingSave, created: list[str]) -> Receipt:
        plan, rank = agreed.plan, self._ranks.rank
        if rank != 0:
            self._catalog.attempts.require_claim(plan.folder, plan.claim)
        own = self._agreement.rank_plan(agreed)
        tensors = with_sources(own.files, agreed.captured.memory)
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
        if facts.links:
            point_latest(self._catalog.storage, checkpoint.folder)
        return Saved.of(checkpoint)
