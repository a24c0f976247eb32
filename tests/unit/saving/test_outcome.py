"""What a save ends with: the error that its caller gets, and what the storage has of one that was cut off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, RankError, SaveFailedError, SaveUncertainError, StorageError
from holdfast.runs.catalog import Catalog
from holdfast.saving.outcome import as_save_error, discard_files, is_agreed_error, outcome_from_storage
from holdfast.testing import MemoryStorage


def saved() -> Catalog:
    storage = MemoryStorage()
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    with holdfast.CheckpointManager("run", state, storage=storage, mode="sync", rng=False) as manager:
        manager.save(1)
    return Catalog(storage)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyError("x"), SaveFailedError), (HoldfastError("x"), SaveFailedError), (StorageError("x"), StorageError)],
)
def test_every_failure_is_an_error_of_ours_that_names_the_step(error: Exception, kind: type) -> None:
    found = as_save_error(error, 7)
    assert type(found) is kind
    assert "step 7" in str(found)


def test_an_error_of_a_silent_leader_is_not_one_that_all_ranks_have() -> None:
    assert not is_agreed_error(RankError("no answer", ranks=(0,)))
    assert is_agreed_error(RankError("no answer", ranks=(1,)))
    assert not is_agreed_error(KeyError("x"))


def test_a_save_that_was_cut_off_after_its_commit_succeeded() -> None:
    found = outcome_from_storage(StorageError("lost"), saved(), "step-000000001", may_come_later=True)
    assert (found.folder, found.sequence) == ("step-000000001", 1)


@pytest.mark.parametrize(("may_come_later", "kind"), [(False, StorageError), (True, SaveUncertainError)])
def test_a_save_that_was_cut_off_before_its_commit_failed_or_is_uncertain(may_come_later: bool, kind: type) -> None:
    with pytest.raises(kind, match="lost"):
        outcome_from_storage(StorageError("lost"), saved(), "step-000000002", may_come_later=may_come_later)


def test_files_of_an_abandoned_attempt_are_removed_and_missing_ones_ignored() -> None:
    catalog = saved()
    catalog.storage.put("step-000000002/a", b"x")
    discard_files(["a", "b"], "step-000000002", catalog)
    assert not list(catalog.storage.entries("step-000000002"))


@pytest.mark.guarantee("G1")
def test_no_file_of_a_committed_checkpoint_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    catalog = saved()
    names = [entry.name for entry in catalog.storage.entries("step-000000001")]
    discard_files(names, "step-000000001", catalog)
    assert [entry.name for entry in catalog.storage.entries("step-000000001")] == names
    assert "was committed, so its files stay" in caplog.text
