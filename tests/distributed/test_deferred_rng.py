"""The random state that is set later, with several ranks: also on another number of them, and where some have none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks

ADAPT = holdfast.LoadStrategy(on_world_change="adapt")


def drawn() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def tried(call: Any) -> Any:
    try:
        return call()
    except holdfast.HoldfastError as error:
        return type(error).__name__, error.problem


def state() -> dict[str, Any]:
    return {"model": holdfast.Shared(torch.nn.Linear(2, 2))}


def save(rank: int, folder: str) -> tuple[float, float]:
    random.seed(rank)
    torch.manual_seed(rank)
    with holdfast.CheckpointManager(folder, state(), mode="sync", timeout=60) as manager:
        manager.save(0)
    return drawn()


def restore(rank: int, folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with holdfast.CheckpointManager(folder, state(), mode="sync", timeout=60) as manager:
        manager.restore(strategy=ADAPT)
        seen["now"] = drawn()
        seen["deferred"] = manager.restore(strategy=ADAPT, rng="later").deferred
        drawn()
        seen["set"] = manager.restore_rng(), manager.restore_rng()
        seen["later"] = drawn()
        seen["disagree"] = tried(lambda: manager.restore(strategy=ADAPT, rng="later" if rank else "now"))
        manager.restore(strategy=ADAPT, rng="later")
        seen["save"] = tried(lambda: manager.save(1))
        seen["step"] = tried(lambda: manager.step(1))
        seen["set again"] = manager.restore_rng()
        seen["saved"] = manager.save(1).wait().step
    return seen


def check(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["now"] == one["later"]
        assert one["deferred"] == ("rng",)
        assert (one["set"], one["set again"], one["saved"]) == ((True, False), True, 1)
        assert one["disagree"] == ("UsageError", seen[0]["disagree"][1])
        assert "the ranks disagree in rng of restore: now on rank 0 and later on rank 1" in one["disagree"][1]
        for call in ("save", "step"):
            assert one[call][0] == "UsageError"
            assert "was restored with rng='later' and is not set" in one[call][1]
    assert len({one["later"] for one in seen}) == len(seen), "no two ranks draw the same"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_its_own_also_on_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    expected = values(run_ranks(2, save, str(tmp_path)))
    seen = values(run_ranks(ranks, restore, str(tmp_path)))
    check(seen)
    assert [one["later"] for one in seen[:2]] == expected


class Dice(holdfast.RNGState):
    """A random state that a rank may fail to set."""

    fails = False

    def load_state_dict(self, state: Any) -> None:
        if self.fails:
            raise ZeroDivisionError("no dice")
        super().load_state_dict(state)


def some_ranks(rank: int, folder: str) -> dict[str, Any]:
    """Only rank 1 has a component for the random state."""
    torch.manual_seed(rank)
    dice = Dice()
    parts = {**state(), "dice": holdfast.PerRank(dice)} if rank == 1 else state()
    seen: dict[str, Any] = {}
    with holdfast.CheckpointManager(folder, parts, mode="sync", rng=False, timeout=60) as manager:
        manager.save(0)
        expected = drawn()
        seen["deferred"] = manager.restore(rng="later").deferred
        dice.fails = True
        seen["failed"] = tried(manager.restore_rng)
        seen["save"] = tried(lambda: manager.save(1))
        dice.fails = False
        seen["set"] = manager.restore_rng()
        seen["exact"] = drawn() == expected
    return seen


def test_ranks_without_a_random_state_take_part_and_a_failure_is_one_on_all(tmp_path: Path) -> None:
    first, second = values(run_ranks(2, some_ranks, str(tmp_path)))
    assert (first.pop("exact"), second.pop("exact")) == (False, True)
    assert first == second
    assert first["deferred"] == ("dice",)
    assert first["failed"][0] == "StateMismatchError"
    assert "ZeroDivisionError: no dice" in first["failed"][1]
    assert first["save"][0] == "UsageError"
    assert first["set"] is True


class OtherState(holdfast.RNGState):
    """What is saved is no random state."""

    def state_dict(self) -> dict[str, Any]:
        return {"dice": 6}


def save_other(rank: int, folder: str) -> None:
    parts = {**state(), "dice": holdfast.PerRank(OtherState())}
    with holdfast.CheckpointManager(folder, parts, mode="sync", rng=False, timeout=60) as manager:
        manager.save(0)


@pytest.mark.slow
@pytest.mark.parametrize("rng", ["now", "later"])
def test_what_is_no_random_state_is_refused_before_anything_changes_on_another_number_of_ranks(
    tmp_path: Path, rng: Any
) -> None:
    values(run_ranks(2, save_other, str(tmp_path)))
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    parts = {"model": holdfast.Shared(model), "dice": holdfast.PerRank(holdfast.RNGState())}
    with holdfast.CheckpointManager(tmp_path, parts, mode="sync", rng=False) as manager:
        with pytest.raises(holdfast.StateMismatchError, match="this is no random state"):
            manager.restore(strategy=ADAPT, rng=rng)
        assert manager.restore_rng() is False
    assert torch.equal(model.weight, before)
