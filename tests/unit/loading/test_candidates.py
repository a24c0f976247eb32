"""The candidates of a restore: the same for all ranks, and claimed while they are tried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.loading.candidates import Candidates
from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.readers import Readers
from holdfast.runs.selector import parse_selector
from holdfast.storage.registry import open_storage
from holdfast.testing import simulate_ranks


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
            folders = [candidate.folder for candidate in candidates]
            return folders, len(claimed(catalog))

    first, second = simulate_ranks(2, choose)
    assert first[0] == second[0]
    assert max(first[1], second[1]) == 1
