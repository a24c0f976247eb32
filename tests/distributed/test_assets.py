"""Assets of one save, and its path, with several ranks: rank 0's are stored, and what cannot be is an error on all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks


def outcome(save: Any) -> Any:
    try:
        return {name: asset.read() for name, asset in save().wait().assets.items()}
    except holdfast.HoldfastError as error:
        return type(error).__name__, error.problem


def save_assets(rank: int, folder: str, mode: Any) -> dict[str, Any]:
    logging.getLogger("holdfast").addHandler(said := Said())
    torch.manual_seed(0)
    seen: dict[str, Any] = {}
    own = Path(folder) / f"state-{rank}.json"
    own.write_text(f"of rank {rank}")
    dist.barrier()
    with holdfast.CheckpointManager(
        f"{folder}/run", {"model": torch.nn.Linear(2, 2)}, mode=mode, assets={"card": b"#"}, timeout=60
    ) as manager:
        handle = manager.save(0)
        seen["path"] = handle.path, handle.wait().path
        seen["rank 0 alone"] = outcome(lambda: manager.save(1, assets={"a": own} if rank == 0 else None))
        seen["all"] = outcome(lambda: manager.save(2, assets={"a": own}))
        seen["warned"] = [line for line in said.lines if "assets" in line]
        seen["others"] = outcome(lambda: manager.save(3, assets={"a": own} if rank == 0 else {"b": own}))
        seen["warned of others"] = [line for line in said.lines if "assets" in line]
        seen["rank 1 alone"] = outcome(lambda: manager.save(4, assets=None if rank == 0 else {"a": own}))
        seen["not there"] = outcome(lambda: manager.save(5, assets=["nowhere"] if rank == 0 else None))
        seen["not there on rank 1"] = outcome(lambda: manager.save(6, assets=[own if rank == 0 else "state-0.json"]))
        seen["bad name on rank 1"] = outcome(lambda: manager.save(7, assets={"../a" if rank else "a": own}))
        seen["taken"] = outcome(lambda: manager.save(8, assets={"card": b"##"} if rank == 0 else None))
        seen["steps"] = [found.step for found in manager.checkpoints()]
    return seen


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.slow
@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rank_0_gives_the_assets_and_all_ranks_get_the_same_outcome(tmp_path: Path, mode: str) -> None:
    first, second = values(run_ranks(2, save_assets, str(tmp_path), mode))
    assert (first.pop("warned"), second.pop("warned")) == ([], [])
    warned = first.pop("warned of others"), second.pop("warned of others")
    assert first == second
    stored = {"card": b"#", "a": b"of rank 0"}
    assert first.pop("rank 0 alone") == first.pop("all") == first.pop("others") == stored
    assert first.pop("not there on rank 1") == {"card": b"#", "state-0.json": b"of rank 0"}
    assert [len(lines) for lines in warned] == [1, 0]
    assert "assets on rank 1" in warned[0][0]
    assert first.pop("steps") == [6, 3, 2, 1, 0]
    assert first.pop("path") == (f"{tmp_path}/run/step-000000000",) * 2
    for case, words in {
        "rank 1 alone": "rank 1 gives assets and rank 0 gives none",
        "not there": "is not there",
        "bad name on rank 1": "'../a' cannot name an asset",
        "taken": "the save gives the asset 'card'",
    }.items():
        kind, problem = first.pop(case)
        assert kind == "UsageError", case
        assert words in problem, case
    assert not first
