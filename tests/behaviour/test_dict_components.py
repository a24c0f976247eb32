"""Plain dicts as components: what a restore puts into them, and into whose memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StateMismatchError, UsageError


def opened(run: Path, state: dict[str, Any]) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, mode="sync", rng=False)


def save(run: Path, state: dict[str, Any]) -> None:
    with opened(run, state) as manager:
        manager.save(1)


def test_a_counter_becomes_what_was_saved_and_adds_nothing(tmp_path: Path) -> None:
    save(tmp_path, {"seen": Counter(a=5)})
    live = Counter(a=3)
    with opened(tmp_path, {"seen": live}) as manager:
        manager.restore()
    assert live == Counter(a=5)


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("nested", [False, True])
def test_a_learnable_tensor_of_a_dict_stays_the_one_that_its_optimizer_has(tmp_path: Path, nested: bool) -> None:
    def built() -> tuple[torch.Tensor, dict[str, Any], torch.optim.Optimizer]:
        temperature = torch.zeros(1, requires_grad=True)
        held = {"group": [temperature]} if nested else {"temperature": temperature}
        return temperature, held, torch.optim.Adam([temperature], lr=0.1)

    temperature, held, optimizer = built()
    (temperature * 3).sum().backward()
    optimizer.step()
    save(tmp_path, {"held": held, "optimizer": optimizer})
    again, held, optimizer = built()
    with opened(tmp_path, {"held": held, "optimizer": optimizer}) as manager:
        manager.restore()
    assert again.item() == temperature.item() != 0.0
    assert again.requires_grad
    (found,) = held["group"] if nested else held.values()
    assert found is again is optimizer.param_groups[0]["params"][0]


def test_the_state_dict_of_a_model_is_filled_in_the_memory_of_the_model(tmp_path: Path) -> None:
    saved, live = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save(tmp_path, {"weights": saved.state_dict()})
    with opened(tmp_path, {"weights": live.state_dict()}) as manager:
        manager.restore()
    assert torch.equal(live.weight, saved.weight)


def test_a_tensor_whose_memory_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, {"held": {"mask": torch.arange(3.0)}})
    held = {"mask": torch.zeros(1).expand(3)}
    with opened(tmp_path, {"held": held}) as manager:
        manager.restore()
    assert held["mask"].tolist() == [0.0, 1.0, 2.0]


def test_the_state_dict_of_an_optimizer_or_a_scheduler_is_refused_in_its_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for owner, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        with pytest.raises(UsageError, match=f"of the {owner}, a copy .* give the {owner} itself"):
            opened(tmp_path, {"model": model, "part": given.state_dict()})


@pytest.mark.parametrize(
    "live", [{"x": torch.zeros(2), "y": None}, {"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": 7}]
)
def test_an_excluded_leaf_that_has_no_live_tensor_is_not_taken(tmp_path: Path, live: dict[str, Any]) -> None:
    save(tmp_path, {"held": {"x": torch.ones(2), "y": torch.ones(2)}})
    before = dict(live)
    with opened(tmp_path, {"held": live}) as manager:
        with pytest.raises(StateMismatchError, match=r"held\.y: excluded, and there is no live tensor"):
            manager.restore(strategy=holdfast.LoadStrategy(exclude=("held.*",)))
    assert live == before


def test_a_loose_restore_of_another_optimizer_does_not_change_what_its_class_is(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    save(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)})
    adam = torch.optim.Adam(model.parameters())
    with opened(tmp_path, {"model": model, "optimizer": adam}) as manager:
        manager.restore(strategy=holdfast.LoadStrategy(strict=False))
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["decoupled_weight_decay"]) == (0.5, False)
