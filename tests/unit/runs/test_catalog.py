"""The catalog lists what is committed, numbers commits, and stands for one that it cannot read yet."""

from __future__ import annotations

import pytest

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, KeyMissingError
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import Run, folder


@pytest.fixture
def trained() -> Run:
    run = Run(MemoryStorage())
    for step in (2, 1):
        run.save(step)
    return run


def test_the_latest_is_what_was_committed_last_whatever_its_step(trained: Run) -> None:
    scan = Catalog(trained.storage).scan()
    assert [found.step for found in scan.checkpoints] == [1, 2]
    assert (scan.attempts, scan.damaged, scan.unreadable) == ((), (), ())


def test_the_next_commit_has_the_next_number_also_for_a_catalog_that_has_read_nothing(trained: Run) -> None:
    assert trained.catalog.next_sequence() == Catalog(trained.storage).next_sequence() == 3


def test_a_checkpoint_without_its_manifest_is_an_attempt(trained: Run) -> None:
    trained.catalog.uncommit(folder(1))
    assert trained.catalog.scan().attempts == (folder(1),)
    with pytest.raises(KeyMissingError):
        trained.catalog.read(folder(1))
    assert trained.catalog.holds_something()


def test_a_checkpoint_that_was_announced_is_read_when_more_of_it_is_asked_for(trained: Run) -> None:
    found = trained.catalog.read(folder(1))
    key = paths.key(folder(1), paths.MANIFEST)
    data = trained.storage.read(key, 1 << 20)
    trained.storage.delete(key)
    announced = Catalog(trained.storage).announced(folder(1), 1, found.digest, sequence=2, size_bytes=found.size_bytes)
    assert (announced.step, announced.sequence, announced) == (1, 2, found)
    with pytest.raises(CheckpointNotFoundError, match="which was removed since"):
        _ = announced.world_size
    trained.storage.put(key, data)
    assert announced.world_size == 1
    assert announced.manifest == found.manifest


def test_another_checkpoint_in_the_folder_is_not_the_one_that_was_announced(trained: Run) -> None:
    announced = Catalog(trained.storage).announced(folder(1), 1, "another digest", sequence=2, size_bytes=0)
    with pytest.raises(CorruptCheckpointError, match="not the one that was committed"):
        _ = announced.world_size
