"""One rank cannot read for a moment, or for good: all ranks end the same way, and none takes an older checkpoint."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StorageError
from holdfast.storage.local.local import LocalStorage
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


def manager_of(storage: Any, holder: Any, mode: Any = "sync") -> holdfast.CheckpointManager:
    state = {"model": holdfast.Shared(holder)}
    return holdfast.CheckpointManager("run", state, storage=storage, mode=mode, rng=False, timeout=200.0)


def one_rank_fails_once(rank: int, folder: Path) -> Any:
    saved(rank, folder)
    seen = []
    for failing in range(RANKS):
        for name in READS:
            storage = FlakyStorage(LocalStorage(folder), name if rank == failing else None, errno=errno.ESTALE)
            holder = Holder(**filled(-1.0))
            with manager_of(storage, holder) as manager:
                result = manager.restore()
            seen.append((result.step, result.rejected, bits(holder.state) == bits(filled(2.0))))
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


class UnreadableOnceCommitted(FlakyStorage):
    """A storage that, where `fails` is set, reads no manifest of step 2 from the moment of its commit on."""

    fails = False

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        if self.fails and key == "step-000000002/manifest.json":
            self.fail_on = f"* {key}*"


def one_rank_cannot_read_what_was_committed(rank: int, folder: Path) -> Any:
    """Save, and save the same step again, with one rank that reads no manifest of it, and then ask for the outcome."""
    seen = []
    for mode in ("sync", "async"):
        for failing in range(RANKS):
            run = folder / f"{mode}-{failing}"
            storage = UnreadableOnceCommitted(LocalStorage(run), times=None, errno=errno.EACCES)
            storage.fails = rank == failing == 0
            with manager_of(storage, Holder(**filled(1.0)), mode) as manager:
                manager.save(1, wait=True)
                storage.fail_on = "* step-000000002/manifest.json*" if rank == failing == 1 else None
                written = manager.save(2, wait=True).wait()
                # The leader decides whether the step is there, so it has to be able to look.
                skipped = manager.save(2, metrics={"loss": 1.0}) if failing else None
                outcomes = [facts_of(one) for one in (written, skipped.wait() if skipped else written)]
                error = caught(lambda: written.manifest)  # noqa: B023
                storage.fail_on = None
                seen.append((outcomes, getattr(error, "errno", None), written.manifest.step))
    return seen


def facts_of(checkpoint: holdfast.Checkpoint) -> tuple[Any, ...]:
    return checkpoint.step, checkpoint.folder, checkpoint.digest, checkpoint.sequence, checkpoint.size_bytes


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    scenes = [one_rank_fails_once, one_rank_fails_for_ever, one_rank_cannot_read_what_was_committed]
    return run_scenes(RANKS, scenes, tmp_path_factory.mktemp("unreadable"))


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


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
def test_a_save_that_is_committed_is_committed_on_a_rank_that_cannot_read_its_manifest(play: Play) -> None:
    cases = list(zip(*play("one_rank_cannot_read_what_was_committed"), strict=True))
    assert len(cases) == 2 * RANKS
    for number, on_ranks in enumerate(cases):
        outcomes = [outcomes for outcomes, _, _ in on_ranks]
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][0] == outcomes[0][1]
        assert outcomes[0][0][:2] == (2, "step-000000002")
        failing = number % RANKS
        assert on_ranks[failing][1] == errno.EACCES, "only what is not known without the manifest is an error"
        assert on_ranks[1 - failing][1] is None
        assert [step for _, _, step in on_ranks] == [2, 2], "and it is read as soon as that is possible"
