"""Whose state is whose in an optimizer of another tool: numbers and names in the source, the shapes that state shows, and
models that are alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.formats.importing.importing import import_checkpoint, import_source
from tests.unit.formats.plain_source import PlainSource

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def square_layers() -> nn.Sequential:
    """Return layers of one shape, which only their order and their names tell apart."""
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def backwards(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)


def trained(model: nn.Module, make: MakeOptimizer, width: int = 4) -> torch.optim.Optimizer:
    optimizer = make(model)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, width, generator=torch.Generator().manual_seed(step))).pow(3).sum().backward()
        optimizer.step()
    return optimizer


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def source_of(tree: Any, tmp_path: Path) -> PlainSource:
    return PlainSource(tree, tmp_path / "tensors.bin")


def assert_restores(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, make: MakeOptimizer
) -> None:
    """Restore to a new optimizer, and compare the state of each parameter with the one that was saved."""
    restored = make(other)
    with holdfast.CheckpointManager(run, {"model": other, "optimizer": restored}, mode="sync") as manager:
        manager.restore()
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(before, after)
        assert optimizer.state[before].keys() == restored.state[after].keys() != set()
        for key, value in optimizer.state[before].items():
            assert torch.equal(value, restored.state[after][key]), key


# Numbers


@pytest.mark.parametrize("by", ["model", "names"])
def test_numbers_that_dcp_wrote_as_texts_are_numbers(tmp_path: Path, run: Path, by: str) -> None:
    model = square_layers()
    optimizer = trained(model, adamw)
    dcp.save(saved(model, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    given = model if by == "model" else [name for name, _ in model.named_parameters()]
    import_checkpoint(tmp_path / "dcp", run, step=2, parameters=given)
    assert_restores(run, model, optimizer, square_layers(), adamw)


def test_shapes_are_compared_where_numbers_are_texts(tmp_path: Path, run: Path) -> None:
    model = nn.Linear(4, 3)
    dcp.save(saved(model, trained(model, adamw)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UsageError, match=r"parameter 0 is 'bias' by parameters=, whose shape is \[3\], .* \[3, 4\]"):
        import_checkpoint(
            tmp_path / "dcp", run, step=2, components={"model": "net"}, parameters=["bias", "weight"]
        )


def test_groups_whose_numbers_are_texts_too_are_understood(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    optimizer = trained(model, adamw)
    tree = saved(model, optimizer)
    tree["optimizer"]["state"] = {str(key): value for key, value in tree["optimizer"]["state"].items()}
    tree["optimizer"]["param_groups"][0]["params"] = ["0", "1", "2"]
    import_source(source_of(tree, tmp_path), run, step=2)
    assert_restores(run, model, optimizer, square_layers(), adamw)


def test_parameters_that_are_called_by_digits_keep_their_names(tmp_path: Path, run: Path) -> None:
    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("0", nn.Parameter(torch.randn(4, 4)))
            self.register_parameter("1", nn.Parameter(torch.randn(4, 4)))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value @ self.get_parameter("1") @ self.get_parameter("0")

    model = Digits()
    optimizer = trained(model, adamw)
    tree = saved(model, optimizer)
    state = {"1": tree["optimizer"]["state"][1], "0": tree["optimizer"]["state"][0]}
    group = {**tree["optimizer"]["param_groups"][0], "params": ["1", "0"]}
    tree["optimizer"] = {"state": state, "param_groups": [group]}
    import_source(source_of(tree, tmp_path), run, step=2)
    assert_restores(run, model, optimizer, Digits(), adamw)


@pytest.mark.parametrize("key", [7, "7", "average", "0"])
def test_state_of_no_parameter_of_any_group_is_refused(tmp_path: Path, run: Path, key: Any) -> None:
    model = square_layers()
    tree = saved(model, trained(model, adamw))
    tree["optimizer"]["state"][key] = {"exp_avg": torch.ones(4, 4)}
    with pytest.raises(UsageError, match=rf"state .*{key}.*\n?.*skip="):
        import_source(source_of(tree, tmp_path), run, step=2)
    assert not run.exists() or not holdfast.checkpoints(run)


def test_state_by_name_of_no_parameter_of_any_group_is_refused(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    tree = saved(model, trained(model, adamw))
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    packed = tree["optimizer"]
    packed["state"] = {names[key]: value for key, value in packed["state"].items()}
    packed["param_groups"][0]["params"] = ["0.weight", "1.weight"]
    with pytest.raises(UsageError, match="'2.weight'"):
        import_source(source_of(tree, tmp_path), run, step=2)


# Shapes


def test_factors_of_adafactor_that_contradict_the_order_are_refused(tmp_path: Path, run: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(list(model.parameters())[::-1], lr=0.01)

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))

    model = layers()
    optimizer = trained(model, make)
    for given in (None, model):
        with pytest.raises(UsageError, match="no order of the model's tensors has the shapes of its state"):
            import_source(source_of(saved(model, optimizer), tmp_path), run, step=2, parameters=given)
    names = [name for name, _ in model.named_parameters()][::-1]
    import_source(source_of(saved(model, optimizer), tmp_path), run, step=2, parameters=names)
    assert_restores(run, model, optimizer, layers(), make)
