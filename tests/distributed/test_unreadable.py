"""One rank cannot read for a moment, or for good: all ranks end the same way, and none takes an older checkpoint."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StorageError
from holdfast.storage.local import LocalStorage
from holdfast.testing import FlakyStorage
from tests.distributed.scenes import Holder, Play, bits, caught, meet, run_scenes, the_same_error

RANKS = 2
READS = ["* */manifest.json*", "* */shared.json*", "read_into *", "open *.safetensors"]


def filled(value: float) -> dict[str, Any]:
    return {"weight": torch.full((64,), value), "seed": torch.arange(8) + int(value)}


def saved(rank: int, folder: Path) -> None:
    for step in (1, 2):
        with manager_of(LocalStorage(folder), Holder(**filled(float(step)))) as manager:
            manager.save(step)
    meet(f"{folder} saved")


def manager_of(storage: Any, holder: Any) -> holdfast.CheckpointManager:
    state = {"model": holdfast.Shared(holder)}
    return holdfast.CheckpointManager("run", state, storage=storage, mode="sync", rng=False, timeout=60.0)


def one_rank_fails_once(rank: int, folder: Path) -> Any:
    saved(rank, folder)
    seen = []
    for failing in range(RANKS):
        for name in READS:
            storage = FlakyStorage(LocalStorage(folder), name if rank == failing else None, errno=errno.ESTALE)
            holder = Holder(**filled(-1.0))
            with manager_of(storage, holder) as manager:
                result = manager.restore()
            seen.append((result.step, result.passed_over, bits(holder.state) == bits(filled(2.0))))
    return seen


def one_rank_fails_for_ever(rank: int, folder: Path) -> Any:
    saved(rank, folder)
    seen = []
    for failing in range(RANKS):
        for name in READS:
            flaky = FlakyStorage(
                LocalStorage(folder), name if rank == failing else None, times=None, errno=errno.EACCES
            )
            holder = Holder(**filled(-1.0))
            with manager_of(flaky, holder) as manager:
                error = caught(manager.restore)
            seen.append((error, bits(holder.state) == bits(filled(-1.0))))
    return seen


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(RANKS, [one_rank_fails_once, one_rank_fails_for_ever], tmp_path_factory.mktemp("unreadable"))


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G5")
def test_a_read_that_fails_once_on_one_rank_ends_in_the_newest_on_all(play: Play) -> None:
    for of_rank in play("one_rank_fails_once"):
        assert of_rank == [(2, (), True)] * (RANKS * len(READS))


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G7")
def test_a_read_that_fails_for_ever_on_one_rank_raises_the_same_on_all_and_changes_nothing(play: Play) -> None:
    for on_ranks in zip(*play("one_rank_fails_for_ever"), strict=True):
        error = the_same_error([error for error, _ in on_ranks])
        assert isinstance(error, StorageError)
        assert error.errno == errno.EACCES
        assert all(untouched for _, untouched in on_ranks)
