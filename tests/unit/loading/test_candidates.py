"""The candidates of a restore: the same for all ranks, and claimed while they are tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError
from holdfast.loading.candidates import _MAX_REMOVALS, Candidates
from holdfast.loading.pipeline import load
from holdfast.loading.records import Loaded, LoadRequest, NothingToLoad
from holdfast.loading.strategy import LoadStrategy
from holdfast.ondisk import paths
from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.readers import Readers
from holdfast.runs.retention import KeepLast
from holdfast.runs.selector import parse_selector
from holdfast.storage.base import Source
from holdfast.storage.registry import open_storage
from holdfast.testing import MemoryStorage, simulate_ranks
from holdfast.testing.storages import _Wrapper
from tests.unit.runs.scene import Part, Run, folder, rot


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(1, 1)}, rng=False, mode="sync") as manager:
        for step in (1, 2):
            manager.save(step)
    return Catalog(open_storage(tmp_path))


def claimed(catalog: Catalog) -> set[str]:
    return Readers(catalog.storage).folders()


def test_the_candidate_that_is_tried_is_claimed_and_no_other(catalog: Catalog) -> None:
    tried = []
    with Candidates(parse_selector("latest"), catalog, Alone()) as candidates:
        for candidate in candidates:
            assert claimed(catalog) == {candidate.folder}
            assert candidate.open(catalog).folder == candidate.folder
            tried.append(candidate.folder)
            assert candidates.give_up(candidate), "it is there, so it counts as damaged"
    assert tried == sorted(tried, reverse=True)
    assert len(tried) == 2
    assert claimed(catalog) == set()


def test_the_claim_ends_with_an_error(catalog: Catalog) -> None:
    with pytest.raises(KeyboardInterrupt), Candidates(parse_selector("latest"), catalog, Alone()):
        raise KeyboardInterrupt
    assert claimed(catalog) == set()


def test_every_rank_has_the_same_candidates_and_the_leader_claims_for_all(catalog: Catalog) -> None:
    def choose(ranks: Ranks) -> tuple[list[str], int]:
        with Candidates(parse_selector("latest"), catalog, ranks) as candidates:
            folders = [candidate.folder for candidate in candidates if candidates.give_up(candidate)]
            return folders, len(claimed(catalog))

    first, second = simulate_ranks(2, choose)
    assert first[0] == second[0]
    assert max(first[1], second[1]) == 1


class Busy(_Wrapper):
    """A run as a reader sees it while a training saves. Each of `before_claims` is called right before a claim of the
    reader, and each of `before_reads` right before the key that starts and ends so is opened."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.before_claims: list[Callable[[], object]] = []
        self.before_reads: list[tuple[str, str, Callable[[], object]]] = []

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(f"{paths.READERS}/") and self.before_claims:
            self.before_claims.pop(0)()
        super().put(key, data)

    def open(self, key: str) -> Source:
        if self.before_reads and key.startswith(self.before_reads[0][0]) and key.endswith(self.before_reads[0][1]):
            self.before_reads.pop(0)[2]()
        return super().open(key)


class Training:
    """A run of which each save removes all earlier checkpoints but tagged ones."""

    def __init__(self, *steps: int) -> None:
        self.run = Run(MemoryStorage(), KeepLast(1))
        self.storage = Busy(self.run.storage)
        for step in steps:
            self.save(step)

    def save(self, step: int, **content: Any) -> None:
        self.run.save(step, **content)
        self.run.keeper.clean_up()

    def remove(self, step: int) -> None:
        """Remove a checkpoint, as a person does."""
        for key in [key for key in self.run.storage._values if key.startswith(f"{folder(step)}/")]:
            self.run.storage.delete(key)

    def restore(self, selector: str | int = "latest", ranks: Ranks | None = None) -> Loaded | NothingToLoad:
        request = LoadRequest(parse_selector(selector), {"part": Part()}, LoadStrategy())
        return load(request, Catalog(self.storage), ranks or Alone())


def step_of(loaded: Loaded | NothingToLoad) -> int:
    assert isinstance(loaded, Loaded), "a checkpoint is there at every moment"
    assert (loaded.passed_over, dict(loaded.damaged)) == ((), {}), "a checkpoint that was removed is not damaged"
    return loaded.checkpoint.step


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("times", [1, 2, _MAX_REMOVALS - 1])
def test_a_checkpoint_that_retention_removes_before_it_is_claimed_is_not_damaged(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(1)
    training.storage.before_claims = [partial(training.save, step) for step in range(2, 2 + times)]
    with caplog.at_level(logging.WARNING):
        assert step_of(training.restore()) == 1 + times
    assert caplog.messages == []


def test_checkpoints_that_are_removed_again_and_again_are_an_error_in_the_end() -> None:
    training = Training(1)
    training.storage.before_claims = [partial(training.save, step) for step in range(2, 100)]
    with pytest.raises(CheckpointNotFoundError, match=f"and so were {_MAX_REMOVALS - 1} before it"):
        training.restore()
    assert claimed(Catalog(training.run.storage)) == set()


def test_the_newest_is_restored_and_not_an_older_one_that_was_listed_with_those_that_are_gone() -> None:
    training = Training()
    training.save(1, tags=("gold",))
    training.save(2)
    training.storage.before_claims = [lambda: training.save(3)]
    assert step_of(training.restore()) == 3


def test_a_checkpoint_whose_files_go_while_it_is_read_without_a_claim_is_not_damaged() -> None:
    training = Training(1)

    def replace_it() -> None:
        training.run.save(2)
        training.remove(1)

    training.storage.before_reads = [(folder(1), ".safetensors", replace_it)]
    assert step_of(training.restore()) == 2


@pytest.mark.parametrize("tagged", [True, False])
def test_checkpoints_that_go_between_their_listing_and_their_reading_do_not_hide_the_newest(tagged: bool) -> None:
    training = Training()
    training.save(1, tags=("gold",) if tagged else ())
    training.save(2)
    training.storage.before_reads = [(folder(2), paths.MANIFEST, lambda: training.save(3))]
    assert step_of(training.restore()) == 3
    training.storage.before_reads = [(folder(3), paths.MANIFEST, lambda: training.save(4))]
    assert holdfast.resolve(training.storage).step == 4


def test_every_rank_goes_on_with_the_checkpoint_that_the_leader_found_after_a_removal() -> None:
    training = Training(1)
    training.storage.before_claims = [lambda: training.save(2)]
    assert simulate_ranks(2, lambda ranks: step_of(training.restore(ranks=ranks))) == [2, 2]


@pytest.mark.parametrize("selector", [2, folder(2), "gold", "best:loss"])
def test_a_checkpoint_that_was_asked_for_and_is_gone_is_reported_as_removed(selector: str | int) -> None:
    training = Training()
    training.save(1)
    training.save(2, tags=("gold",), loss=1.0)
    training.storage.before_claims = [lambda: training.remove(2)]
    with pytest.raises(CheckpointNotFoundError, match=f"found {folder(2)}, which was removed before it was read"):
        training.restore(selector)


def test_a_run_of_which_the_last_checkpoint_goes_is_not_taken_for_a_new_one() -> None:
    training = Training(1)
    training.storage.before_claims = [lambda: training.remove(1)]
    with pytest.raises(CheckpointNotFoundError, match="no other checkpoint is there"):
        training.restore()


def test_those_that_are_damaged_are_reported_and_not_the_one_that_was_removed() -> None:
    training = Training(1)
    first = training.run.save(2)
    rot(first)
    training.storage.before_claims = [lambda: None, lambda: training.remove(1)]
    with pytest.raises(CorruptCheckpointError, match="no sound checkpoint is left") as caught:
        training.restore()
    assert folder(2) in str(caught.value)
    assert folder(1) not in str(caught.value)


def test_one_that_was_found_damaged_is_not_tried_again_after_a_removal() -> None:
    training = Training(1)
    rot(training.run.save(2))
    rot(training.run.save(3))
    claims: list[str] = []
    gone = [lambda: claims.append("3"), lambda: claims.append("2"), lambda: training.remove(1)]
    training.storage.before_claims = [*gone, lambda: claims.append("a damaged one again")]
    with pytest.raises(CorruptCheckpointError, match="no sound checkpoint is left"):
        training.restore()
    assert claims == ["3", "2"]


def test_a_checkpoint_that_lost_its_manifest_alone_is_not_chosen_again() -> None:
    training = Training()
    training.save(1, tags=("gold",))
    training.save(2)
    training.storage.before_claims = [lambda: training.run.catalog.uncommit(folder(2))]
    loaded = training.restore()
    assert isinstance(loaded, Loaded)
    assert loaded.checkpoint.step == 1
    assert [str(skipped) for skipped in loaded.passed_over] == [f"{folder(2)}: was never committed"]
