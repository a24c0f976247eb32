"""What the ranks say with a save: rank 0's is stored, and what another one says differently is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import UsageError
from tests.ranks import run_ranks


class Kept(logging.Handler):
    """The warnings of one process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def saves(rank: int, folder: str) -> Any:
    """Return, by scene, the warnings about arguments and what is stored."""
    kept = Kept()
    logging.getLogger("holdfast").addHandler(kept)
    seen: dict[str, Any] = {}
    scenes: dict[str, list[dict[str, Any]]] = {
        "same": [{"metrics": {"loss": float(rank)}, "progress": {"seen": 1}, "epoch": 1}] * 2,
        "metrics": [{"metrics": {"loss": 1.0} if rank else None}] * 3,
        "several": [{"progress": {"seen": rank}, "extra": {"a": [rank]}, "guards": {"g": rank}, "epoch": rank}],
        "only rank 0": [{"metrics": {"loss": 1.0}, "tag": "good"} if rank == 0 else {}],
        "again": [{}, {"metrics": {"loss": 1.0} if rank else None}],
        "tag": [{"tag": "good" if rank else None}],
    }
    for name, calls in scenes.items():
        kept.texts.clear()
        torch.manual_seed(0)
        with holdfast.CheckpointManager(
            Path(folder) / name, {"model": torch.nn.Linear(2, 2)}, mode="sync", timeout=30
        ) as manager:
            try:
                for step, call in enumerate(calls):
                    manager.save(0 if name == "again" else step, **call)
                error = None
            except UsageError as caught:
                error = str(caught)
            stored = [(dict(one.metrics), dict(one.progress), one.epoch, one.tags) for one in manager.checkpoints()]
        seen[name] = ([text for text in kept.texts if "rank 0's are stored" in text], stored, error)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("said"))
    played = run_ranks(2, saves, folder, timeout_seconds=120)
    assert all(one.value is not None for one in played), [one.traceback_text for one in played]
    return [one.value for one in played]


def test_what_all_ranks_say_alike_is_no_warning_whatever_the_values_of_the_metrics(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["same"] == ([], [({"loss": 0.0}, {"seen": 1}, 1, ())] * 2, None)


@pytest.mark.guarantee("G6")
def test_metrics_that_only_another_rank_gives_are_one_warning_of_the_manager(seen: list[dict[str, Any]]) -> None:
    warnings, stored, _ = seen[0]["metrics"]
    assert len(warnings) == 1
    assert "metrics on rank 1" in warnings[0]
    assert [metrics for metrics, *_ in stored] == [{}, {}, {}]
    assert seen[1]["metrics"][0] == [], "the leader's log is enough"


def test_every_argument_that_differs_is_named(seen: list[dict[str, Any]]) -> None:
    (warning,), stored, _ = seen[0]["several"]
    assert "progress, extra, guards, epoch on rank 1" in warning
    assert stored == [({}, {"seen": 0}, 0, ())]


def test_what_rank_0_alone_says_is_stored_without_a_warning(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["only rank 0"] == ([], [({"loss": 1.0}, {}, None, ("good",))], None)


def test_metrics_that_one_rank_alone_adds_to_a_committed_step_keep_no_rank_waiting(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        _, stored, error = one["again"]
        assert (stored, error) == ([({}, {}, None, ())], None)


def test_a_tag_that_rank_0_does_not_give_is_an_error_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        _, stored, error = one["tag"]
        assert stored == []
        assert error is not None
        assert "tag" in error
        assert "rank 1" in error
