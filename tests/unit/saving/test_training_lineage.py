"""Where a training stands in its run, from save to save and over a restore."""

from __future__ import annotations

from typing import Any

import torch

import holdfast
from holdfast.runs.catalog import Catalog
from holdfast.runs.lineage import Lineage
from holdfast.saving.training_lineage import TrainingLineage
from holdfast.testing import MemoryStorage


def test_a_new_training_goes_back_to_nothing() -> None:
    lineage = TrainingLineage()
    ancestry = lineage.next_ancestry()
    assert (ancestry.parent, ancestry.lineage, lineage.own) == (None, Lineage(), None)
    assert ancestry.segment != TrainingLineage().next_ancestry().segment


def test_a_commit_is_part_of_what_the_next_save_goes_back_to() -> None:
    lineage = TrainingLineage()
    segment = lineage.next_ancestry().segment
    lineage.append(1, segment, "a")
    lineage.append(2, segment, "b")
    assert lineage.next_ancestry().lineage == lineage.own == Lineage(((1, 2),), (segment,))
    lineage.start(lineage.own)
    assert lineage.next_ancestry().lineage == Lineage()
    assert lineage.own == Lineage(((1, 2),), (segment,))


def test_a_restored_checkpoint_is_the_parent_of_the_next_save() -> None:
    storage = MemoryStorage()
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    with holdfast.CheckpointManager("run", state, storage=storage, mode="sync", rng=False) as manager:
        manager.save(1)
        manager.save(2)
    catalog = Catalog(storage)
    checkpoint = catalog.read("step-000000002")
    lineage = TrainingLineage()
    lineage.continue_from(checkpoint, catalog)
    ancestry = lineage.next_ancestry()
    assert ancestry.parent == checkpoint.digest
    assert ancestry.lineage.next_sequence == 3
    assert ancestry.segment != checkpoint.head.segment
