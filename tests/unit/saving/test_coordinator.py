"""What the leader makes of the ranks' digests from save to save."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.regions import whole
from holdfast.runs.catalog import Catalog
from holdfast.saving.coordinator import Coordinator
from holdfast.saving.messages import Inventory, PartEntry, Sample, StateSummary, TreeEntry
from holdfast.saving.request import SaveRequest
from holdfast.storage.local.local import LocalStorage

SAME = [(b"same",), (b"same",)]


def inventories() -> list[Inventory]:
    tree = TreeEntry("model", "module", "", "", msgspec.Raw(b"\xc0"))
    parts = tuple(PartEntry(0, path, "float32", (4,), whole((4,)), False) for path in ("a", "b"))
    return [Inventory((tree,), parts, ())] * 2


def summaries(*samples: tuple[Sample, ...], plan: int = 1, comparison: int = 1) -> list[StateSummary]:
    return [StateSummary("structure", (), (), plan, comparison=comparison, samples=own) for own in samples or ((), ())]


@pytest.fixture
def leader(tmp_path: Path) -> Coordinator:
    """A leader that has started one save, whose replicas were the same."""
    leader = Coordinator(Catalog(LocalStorage(tmp_path)), 2, claims=False, staging_limit_bytes=None, timeout_seconds=5)
    request = SaveRequest(1, {})
    assert leader.begin(request, summaries(plan=0, comparison=0)).number == 0
    planned = leader.plan(request, inventories())
    assert (planned.folder, planned.comparison, len(planned.replicas)) == ("", 1, 1)
    assert leader.compare(request, SAME).folder
    return leader


def test_a_plan_that_holds_needs_no_second_comparison(leader: Coordinator) -> None:
    later = leader.begin(SaveRequest(2, {}), summaries((Sample(1, 2, ((0, b"x"),)),), (Sample(1, 2, ((0, b"x"),)),)))
    assert later.folder
    assert later.round == 2


@pytest.mark.guarantee("G2")
def test_after_a_difference_everything_is_compared_before_the_next_save_starts(leader: Coordinator) -> None:
    # The sample is of the save before, as a device's is: the next one may be of other leaves, which are the same.
    found = leader.begin(SaveRequest(2, {}), summaries((Sample(1, 1, ((0, b"x"),)),), (Sample(1, 1, ((0, b"y"),)),)))
    assert found.differing == (0,)
    assert not found.folder
    with pytest.raises(UsageError, match="first seen at step 1") as caught:
        leader.raise_difference(found.differing, [((b"1", b"2"),), ((b"1", b"3"),)])
    assert caught.value.leaf == "model.b"
    for step in (3, 4):
        request = SaveRequest(step, {})
        assert leader.begin(request, summaries()).number == 0
        assert leader.plan(request, inventories()).replicas
        assert leader.compare(request, [(b"x",), (b"y",)]).differing == (0,)
    request = SaveRequest(5, {})
    assert leader.begin(request, summaries()).number == 0
    assert leader.plan(request, inventories()).replicas
    assert leader.compare(request, SAME).folder


def test_a_rank_that_has_no_sets_yet_gets_them_before_a_save_starts(leader: Coordinator) -> None:
    request = SaveRequest(2, {})
    assert leader.begin(request, [*summaries()[:1], *summaries(plan=0, comparison=0)[:1]]).number == 0
    assert leader.plan(request, inventories()).replicas


class CountingStorage(LocalStorage):
    """Counts how often it is asked who writes to the run; has no room for anything while `is_full`."""

    looks = 0
    is_full = False

    def entries(self, folder: str) -> Any:
        self.looks += folder == paths.LEASE
        return super().entries(folder)

    def free_bytes(self) -> int | None:
        return 0 if self.is_full else super().free_bytes()


def alone(storage: CountingStorage) -> Coordinator:
    return Coordinator(Catalog(storage), 1, claims=False, staging_limit_bytes=None, timeout_seconds=5)


def test_a_later_save_looks_once_who_writes_to_the_run(tmp_path: Path) -> None:
    storage = CountingStorage(tmp_path)
    leader = alone(storage)
    leader.begin(SaveRequest(1, {}), summaries(plan=0)[:1])
    leader.plan(SaveRequest(1, {}), inventories()[:1])
    storage.looks = 0
    assert leader.begin(SaveRequest(2, {}), summaries()[:1]).folder
    assert storage.looks == 1
    leader.release_run()


@pytest.mark.guarantee("G13")
def test_a_run_that_was_never_held_is_held_before_a_save_starts(tmp_path: Path) -> None:
    storage = CountingStorage(tmp_path)
    leader = alone(storage)
    leader.begin(SaveRequest(1, {}), summaries(plan=0)[:1])
    storage.is_full = True
    with pytest.raises(StorageError) as caught:
        leader.plan(SaveRequest(1, {}), inventories()[:1])
    assert caught.value.errno == errno.ENOSPC
    assert leader.lease == 0
    storage.is_full = False
    plan = leader.begin(SaveRequest(1, {}), summaries()[:1])
    assert plan.folder
    assert plan.lease == leader.lease == 1
    leader.release_run()
