"""A component that only some ranks give: said when it is saved, and the same error on all ranks when it is restored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.testing import values
from tests.distributed.scenes import caught, the_same_error
from tests.ranks import run_ranks


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saved_by_one_rank(rank: int, run: Path) -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    state = {"model": model, **({"counter": Counter(3)} if rank == 0 else {})}
    with holdfast.CheckpointManager(run, state, mode="sync", rng=False, timeout=60) as manager:
        manager.save(0)
    errors = []
    counters = []
    for on_world_change in ("error", "skip"):
        counter = Counter(0)
        with holdfast.CheckpointManager(run, {"model": model, "counter": counter}, rng=False, timeout=60) as manager:
            strategy = holdfast.LoadStrategy(on_world_change=on_world_change)
            errors.append(caught(lambda: manager.restore(strategy=strategy)))  # noqa: B023
            skipped = manager.restore(strategy=holdfast.LoadStrategy(skip=("counter",)))
            counters.append((counter.count, skipped.resumed))
    return [line for line in lines if "alone" in line], errors, counters


def test_a_component_of_one_rank_is_said_and_never_restored_on_some_ranks_alone(tmp_path: Path) -> None:
    results = values(run_ranks(2, saved_by_one_rank, tmp_path / "run"))
    (line,) = results[0][0]
    assert "the component 'counter' is given on rank 0 alone" in line
    for errors in zip(*(errors for _, errors, _ in results), strict=True):
        error = the_same_error(errors)
        assert isinstance(error, StateMismatchError)
        assert "only rank 0 had the component" in str(error)
        assert "on_world_change" not in str(error)
    assert all(counters == [(0, True), (0, True)] for _, _, counters in results)
