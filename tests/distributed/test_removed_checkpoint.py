"""A save that was skipped because its step is committed, and whose checkpoint goes before every rank has asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing import values
from tests.distributed.scenes import Holder, caught, meet
from tests.ranks import run_ranks


def skip_a_save(rank: int, run: str, mode: Any, early: int) -> list[Any]:
    """Save a committed step again and remove its checkpoint when one rank has waited for the save, the other not."""
    seen: list[Any] = []
    with holdfast.CheckpointManager(run, {"tracker": Holder(a=1)}, mode=mode, rng=False) as manager:
        for step in (1, 2):
            manager.save(step, wait=True)
        handle = manager.save(1)
        seen.append(handle.skipped)
        if rank == early:
            seen.append(handle.wait())
        meet("one has waited")
        if rank == 0:
            shutil.rmtree(Path(run) / handle.wait().folder)
        meet("removed")
        if rank != early:
            seen.append(handle.wait())
        meet("both have waited")
        found = seen.pop()
        error = caught(lambda: found.progress) if rank != early and rank != 0 else "not asked"
        return [*seen, found.step, found.folder, found.digest, found.size_bytes, found.sequence, error]


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(("mode", "early"), [("sync", 0), ("async", 0), ("async", 1)])
def test_a_skipped_save_has_the_same_outcome_on_all_ranks_though_its_checkpoint_is_removed(
    mode: str, early: int, tmp_path: Path
) -> None:
    first, second = values(run_ranks(2, skip_a_save, str(tmp_path / "run"), mode, early))
    assert first[:-1] == second[:-1]
    assert first[:3] == [True, 1, "step-000000001"]
    if early == 0:
        assert isinstance(second[-1], holdfast.CheckpointNotFoundError)
        assert "removed since" in str(second[-1])
