"""What the leader makes of the ranks' digests from save to save."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.errors import UsageError
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
