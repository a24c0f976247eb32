"""A selector finds the checkpoint that it names, or the reason why there is none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.runs.selection import best_of, choose, not_found
from holdfast.runs.selector import Selector, parse_selector
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import Run, folder


@pytest.fixture
def trained() -> Run:
    run = Run(MemoryStorage())
    for step, loss in ((1, 0.5), (2, 0.25), (3, math.nan)):
        run.save(step, tags=("gold",) if step == 1 else (), loss=loss)
    return run


@pytest.mark.parametrize(
    ("text", "step"),
    [("latest", 3), ("2", 2), ("gold", 1), ("best", 2), ("best:loss:max", 1), (folder(1), 1), ("7", None)],
)
def test_each_kind_of_selector_names_one_checkpoint(trained: Run, text: str, step: int | None) -> None:
    found = choose(trained.catalog.scan(), parse_selector(text))
    assert (found.step if found is not None else None) == step


def test_damage_hides_a_checkpoint_from_latest_and_best_alone(trained: Run) -> None:
    for step in (2, 3):
        trained.catalog.annotations.add(trained.catalog.read(folder(step)), damage="it rots")
    scan = trained.catalog.scan()
    steps = [found.step for text in ("latest", "best:loss", "2") if (found := choose(scan, parse_selector(text)))]
    assert steps == [1, 1, 2]


def test_a_metric_that_is_no_number_ranks_worst(trained: Run) -> None:
    newest, middle, oldest = trained.catalog.scan().checkpoints
    assert [best_of([newest, oldest], "loss", mode) for mode in ("min", "max")] == [oldest, oldest]
    assert best_of([newest], "loss", "min") == newest
    assert best_of([middle], "accuracy", "min") is None


@pytest.mark.parametrize(
    ("text", "advice"),
    [("9", "the newest steps there are 3, 2, 1"), ("best:accuracy", "the metrics there are loss")],
)
def test_a_selector_that_finds_nothing_is_answered_with_what_there_is(trained: Run, text: str, advice: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=advice):
        trained.catalog.find(parse_selector(text))


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ({}, "nothing is there; check the path"),
        ({"notes.txt": b""}, "the folder holds no checkpoint of Holdfast's, but: notes.txt"),
        ({f"{folder(4)}/rank-00000.safetensors": b""}, "there are only attempts that were never committed"),
    ],
)
def test_a_run_without_a_checkpoint_is_answered_with_what_is_in_its_place(files: dict[str, Any], advice: str) -> None:
    storage = MemoryStorage()
    for key, data in files.items():
        storage.put(key, data)
    scan = Catalog(storage).scan()
    assert advice in str(not_found(storage, Selector("latest"), scan))


def test_a_damaged_manifest_is_damage_and_not_absence(trained: Run) -> None:
    for step in (1, 2, 3):
        key = paths.key(folder(step), paths.MANIFEST)
        trained.storage.delete(key)
        trained.storage.put(key, b"{")
    with pytest.raises(CorruptCheckpointError, match="'latest' finds no sound checkpoint"):
        Catalog(trained.storage).find(Selector("latest"))
