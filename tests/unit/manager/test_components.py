"""What the first save would refuse of a model or an optimizer is refused when the manager is built."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import UsageError
from tests.behaviour.test_subclasses import Opaque


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", tensor)
    return model


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"hook": print}

    def set_extra_state(self, state: Any) -> None:
        """Never called."""


class Sam(torch.optim.Optimizer):
    """Holds another optimizer, whose state its inherited `state_dict` leaves out."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups


def stray() -> dict[str, Any]:
    return {"model": nn.Linear(2, 2), "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(3))])}


def sam() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": Sam(model.parameters())}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a stray parameter": (stray, r"'optimizer'.*parameter 0 \(shape \[3\]\) belongs to no model"),
    "a hidden optimizer": (sam, r"'optimizer'.*'base_optimizer' is an optimizer"),
    "a subclass": (lambda: {"model": with_buffer(torch.ones(2).as_subclass(Opaque))}, r"model\.mask.*Opaque"),
    "a sparse tensor": (lambda: {"model": with_buffer(torch.eye(2).to_sparse())}, r"model\.mask.*sparse"),
    "a nested tensor": (
        lambda: {"model": with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))},
        r"model\.mask.*a nested tensor",
    ),
    "an expanded tensor": (lambda: {"model": with_buffer(torch.ones(1).expand(3))}, r"model\.mask.*share memory"),
    "an extra state": (lambda: {"model": nn.Sequential(Extra())}, r"model\.0\._extra_state\.hook"),
    "one of each rank": (
        lambda: {"model": nn.Linear(1, 1), "own": holdfast.PerRank(with_buffer(torch.eye(2).to_sparse()))},
        r"own\.mask.*sparse",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_saved_is_refused_when_the_manager_is_built(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        CheckpointManager(tmp_path / "run", make())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_saved_is_refused_when_it_is_attached(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    state = make()
    name = list(state)[-1]
    first = {key: value for key, value in state.items() if key != name} or {"other": nn.Linear(1, 1)}
    with CheckpointManager(tmp_path, first, rng=False) as manager:
        with pytest.raises(UsageError, match=message):
            manager.attach(name, state[name])
        manager.save(0, wait=True)


def test_an_optimizer_around_another_is_saved_when_both_are_components(tmp_path: Path) -> None:
    state = sam()
    with CheckpointManager(tmp_path, {**state, "base": state["optimizer"].base_optimizer}, rng=False) as manager:
        manager.save(0, wait=True)


def test_a_model_without_memory_yet_is_looked_at_when_it_is_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    lazy = nn.LazyLinear(2)
    with CheckpointManager(tmp_path, {"model": model, "lazy": lazy}, rng=False) as manager:
        with pytest.raises(UsageError, match=r"meta device"):
            manager.save(0, wait=True)
        model.to_empty(device="cpu")
        with pytest.raises(UsageError, match=r"lazy.*no shape yet"):
            manager.save(0, wait=True)
        lazy(torch.ones(1, 3))
        manager.save(0, wait=True)


@pytest.mark.guarantee("G10")
def test_building_a_manager_asks_only_models_and_optimizers(tmp_path: Path) -> None:
    class Counted:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: Any) -> None:
            """Takes nothing."""

    loader, model = Counted(), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer, "loader": loader}) as manager:
        assert loader.asked == 0
        assert not optimizer.state
        manager.save(0, wait=True)
    assert loader.asked == 1


def test_the_live_objects_can_be_looked_at_as_long_as_their_owner_is_held(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with CheckpointManager(tmp_path, {"model": model}, mode="sync", rng=False) as manager:
        live = manager._components.while_held()
        assert live() == {"model": model}
        other = nn.Linear(3, 3)
        manager.attach("other", other)
        assert live() == {"model": model, "other": other}
    del manager
    gc.collect()
    assert live() is None
