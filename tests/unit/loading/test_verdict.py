"""The verdict over all ranks: what one rank has a place for fits, what none has does not, and nothing is no restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StateMismatchError, UsageError
from holdfast.loading.records import LoadRequest
from holdfast.loading.strategy import LoadStrategy
from holdfast.loading.verdict import MatchReport, Share, Verdict, judge, union
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.selector import parse_selector

SHARE = Share("model", "module", True, held=2, stored=2, common=1, missing=0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    state = {"model": torch.nn.Linear(1, 1), "counts": {"n": 1}}
    with holdfast.CheckpointManager(tmp_path, state, rng=False, mode="sync") as manager:
        manager.save(0)
    return holdfast.resolve(tmp_path)


def report(**fields: Any) -> MatchReport:
    return MatchReport(**{"trees": ("model",), "attached": ("model",), "shares": (SHARE,), **fields})


def verdict(checkpoint: Checkpoint, *reports: MatchReport, **strategy: Any) -> Verdict:
    request = LoadRequest(parse_selector("latest"), {}, LoadStrategy(**strategy))
    return judge(reports, request, checkpoint)


def test_a_leaf_that_one_rank_has_a_place_for_is_not_unexpected(checkpoint: Checkpoint) -> None:
    found = verdict(checkpoint, report(unused=("model.a",)), report())
    assert found.unexpected == ()
    with pytest.raises(StateMismatchError) as refused:
        verdict(checkpoint, report(unused=("model.a", "model.b")), report(unused=("model.a",)))
    assert refused.value.fields["unexpected"] == ("model.a",)


def test_a_rank_that_takes_nothing_of_a_tree_does_not_count_for_its_leaves(checkpoint: Checkpoint) -> None:
    other = report(trees=("counts",), shares=())
    with pytest.raises(StateMismatchError):
        verdict(checkpoint, report(unused=("model.a",)), other)


def test_all_that_does_not_fit_on_any_rank_is_named_at_once(checkpoint: Checkpoint) -> None:
    with pytest.raises(StateMismatchError) as refused:
        verdict(checkpoint, report(missing=("model.a",)), report(mismatched=("model.b: other",)))
    assert refused.value.fields["missing"] == ("model.a",)
    assert refused.value.fields["mismatched"] == ("model.b: other",)


def test_a_loose_restore_lists_what_only_one_side_has(checkpoint: Checkpoint) -> None:
    found = verdict(checkpoint, report(missing=("model.a",), unused=("model.b",)), strict=False)
    assert (found.missing, found.unexpected, found.unclaimed) == (("model.a",), ("model.b",), ("counts",))


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_of_which_nothing_is_restored_on_one_rank_is_an_error(checkpoint: Checkpoint, strict: bool) -> None:
    bare = report(shares=(Share("model", "module", True, held=2, stored=2, common=0, missing=2),))
    with pytest.raises(StateMismatchError, match="on rank 1"):
        verdict(checkpoint, report(), bare, strict=strict)


def test_a_glob_that_matches_on_no_rank_is_an_error(checkpoint: Checkpoint) -> None:
    assert verdict(checkpoint, report(globs=("model.*",)), report(), exclude=("model.*",)).damage == ()
    with pytest.raises(UsageError, match="matches no leaf"):
        verdict(checkpoint, report(), report(), exclude=("model.*",))


def test_texts_of_all_ranks_are_sorted_and_each_is_there_once() -> None:
    assert union([("b", "a"), (), ("a",)]) == ("a", "b")
