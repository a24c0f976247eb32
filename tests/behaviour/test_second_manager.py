"""A second manager of a process that opens a run finds what the first one has staged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, Every
from holdfast.errors import UsageError


def model(value: float) -> torch.nn.Linear:
    made = torch.nn.Linear(1000, 1000)
    torch.nn.init.constant_(made.weight, value)
    return made


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("saves", [None, Every(steps=1)], ids=["reads", "writes"])
def test_a_save_that_another_manager_of_the_process_has_staged_is_committed_and_found(
    tmp_path: Path, saves: Every | None
) -> None:
    first = CheckpointManager(tmp_path, {"model": model(1.0)}, mode="async")
    handle = first.save(0)
    again = model(2.0)
    with CheckpointManager(tmp_path, {"model": again}, mode="async", save=saves) as second:
        start = second.restore()
        assert (start.resumed, start.next_step) == (True, 1)
        assert float(again.weight[0, 0]) == 1.0
        second.save(1, wait=True)
    assert handle.wait().step == 0
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]
    first.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ["metrics", "progress", "extra", "guards"])
def test_a_key_that_is_no_text_is_refused_at_once(tmp_path: Path, name: str, mode: str) -> None:
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}, mode=mode) as manager:  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no valid Unicode text"):
            manager.save(0, **{name: {"\udcff": 1}})  # type: ignore[arg-type]
        assert manager.save(0, wait=True).wait().step == 0


class Shampoo(torch.optim.Optimizer):
    """Keeps a matrix for each dimension of a parameter."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for dimension, size in enumerate(parameter.shape):
                    self.state[parameter].setdefault(f"left{dimension}", torch.eye(size)).mul_(2.0)


@pytest.mark.guarantee("G8")
def test_state_with_other_shapes_than_its_parameter_comes_back_into_a_fresh_optimizer(tmp_path: Path) -> None:
    first = torch.nn.Linear(6, 8)
    optimizer = Shampoo(first.parameters())
    optimizer.step()
    with CheckpointManager(tmp_path, {"model": first, "optimizer": optimizer}, mode="sync") as manager:
        manager.save(0)
    second = torch.nn.Linear(6, 8)
    fresh = Shampoo(second.parameters())
    with CheckpointManager(tmp_path, {"model": second, "optimizer": fresh}, mode="sync") as manager:
        manager.restore()
    assert torch.equal(fresh.state[second.weight]["left1"], 2.0 * torch.eye(6))
