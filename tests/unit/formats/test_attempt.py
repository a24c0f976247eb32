"""A checkpoint outside of a training is begun after the latest one that is there once the run is leased."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import holdfast
from holdfast.errors import UsageError
from holdfast.formats.attempt import begin
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.runs.lease import holder
from holdfast.testing import MemoryStorage


class Overtaken(MemoryStorage):
    """Calls `then`, once, when a claim of the lease is about to be put."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] | None = None

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(f"{paths.LEASE}/") and self.then is not None:
            then, self.then = self.then, None
            then()
        super().put(key, data)


def save(storage: MemoryStorage, step: int) -> None:
    with holdfast.CheckpointManager("run", {"model": torch.nn.Linear(2, 2)}, storage=storage, mode="sync") as manager:
        manager.restore()
        manager.save(step).wait()


@pytest.fixture
def storage() -> Overtaken:
    made = Overtaken()
    save(made, 1)
    made.then = lambda: save(made, 5)
    return made


def test_a_checkpoint_committed_before_the_lease_was_taken_is_continued(storage: Overtaken) -> None:
    catalog = Catalog(storage)
    attempt = begin(catalog, None, 1)
    attempt.lease.release()
    latest = catalog.scan().checkpoints[0]
    assert latest.step == 5
    assert attempt.step == 6
    assert attempt.ancestry.parent == latest.digest


def test_a_step_committed_before_the_lease_was_taken_is_refused(storage: Overtaken) -> None:
    with pytest.raises(UsageError, match="step 5 is committed already"):
        begin(Catalog(storage), 5, 1)
    assert holder(storage) is None


def test_a_step_that_is_committed_makes_no_writer() -> None:
    storage = MemoryStorage()
    save(storage, 1)
    before = storage.entries(paths.LEASE)
    with pytest.raises(UsageError, match="step 1 is committed already"):
        begin(Catalog(storage), 1, 1)
    assert storage.entries(paths.LEASE) == before


def test_a_step_that_is_committed_can_be_saved_again_on_request() -> None:
    storage = MemoryStorage()
    save(storage, 1)
    catalog = Catalog(storage)
    attempt = begin(catalog, 1, 1, resave=True)
    attempt.lease.release()
    assert (attempt.step, attempt.folder) == (1, "step-000000001.2")
    assert attempt.ancestry.parent == catalog.scan().checkpoints[0].digest
