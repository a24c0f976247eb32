"""Optimizers whose state dict has a layout of their own, or more in it than PyTorch's have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import StateMismatchError, UsageError
from holdfast.saving.staging.step_hooks import changes_in_step_alone
from tests.containers import FlatContainer


class Lookahead(Optimizer):
    """Keeps slow weights beside another optimizer, in a layout of its own. Never calls Optimizer.__init__."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.slow = [p.detach().clone().float() for group in base.param_groups for p in group["params"]]
        self.counts = (0, 0.5)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
            slow.lerp_(fast.detach().float(), 0.5)
        self.counts = (self.counts[0] + 1, self.counts[1])

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "counts": self.counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict.pop("base"))
        self.slow, self.counts = list(state_dict["slow"]), state_dict["counts"]


class Several(Optimizer):
    """One optimizer for matrices and one for the rest, as with Muon; the state is a list."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        self.parts: list[Optimizer] = [
            torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.1, momentum=0.9),
            torch.optim.AdamW([p for p in parameters if p.dim() < 2], lr=0.1),
        ]
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> Any:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state_dict: Any) -> None:
        for part, state in zip(self.parts, state_dict, strict=True):
            part.load_state_dict(state)


class ByName(torch.optim.SGD):
    """Names its parameters itself."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        state = {f"p{key}": value for key, value in packed["state"].items()}
        groups = [{**group, "params": [f"p{key}" for key in group["params"]]} for group in packed["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {int(key[1:]): value for key, value in state_dict["state"].items()}
        groups = [
            {**group, "params": [int(key[1:]) for key in group["params"]]} for group in state_dict["param_groups"]
        ]
        super().load_state_dict({"state": state, "param_groups": groups})


class MasterWeights(torch.optim.AdamW):
    """PyTorch's layout and a list of wider weights beside it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.masters = [p.detach().clone().double() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for master in self.masters:
            master.add_(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": self.masters, "scale": (1, 2.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["scale"] == (1, 2.0)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for master, saved in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(saved)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "a wrapper": lambda parameters: Lookahead(torch.optim.AdamW(parameters, lr=0.1)),
    "several": Several,
    "by name": lambda parameters: ByName(parameters, lr=0.1, momentum=0.9),
    "more keys": MasterWeights,
}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(dtype)


def trained(model: nn.Module, optimizer: Optimizer, steps: int) -> list[Any]:
    for step in range(steps):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 / (index + step + 3))
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("wrapper", ["bare", "Shared", "PerRank"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_with_a_layout_of_its_own_resumes_exactly(
    tmp_path: Path, case: str, mode: Any, wrapper: str
) -> None:
    def parts() -> tuple[nn.Module, Optimizer, dict[str, Any]]:
        model = model_of()
        optimizer = OPTIMIZERS[case](model.parameters())
        wrapped = optimizer if wrapper == "bare" else getattr(holdfast, wrapper)(optimizer)
        return model, optimizer, {"model": model, "optimizer": wrapped}

    model, optimizer, state = parts()
    with CheckpointManager(tmp_path, state, rng=False, mode=mode) as manager:
        trained(model, optimizer, 2)
        manager.save(0)
        trained(model, optimizer, 2)
        manager.save(1, wait=True)
    expected = trained(model, optimizer, 3)
    second, its_optimizer, state = parts()
    with CheckpointManager(tmp_path, state, rng=False) as manager:
        manager.restore()
    for one, other in zip(expected, trained(second, its_optimizer, 3), strict=True):
        assert torch.equal(one, other)


def test_a_layout_of_its_own_comes_back_with_its_types(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Module, Any]:
        model = model_of(torch.bfloat16)
        return model, Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1))

    model, optimizer = parts()
    trained(model, optimizer, 1)
    for state in optimizer.base.state.values():
        state["exp_avg"] = torch.randn_like(state["exp_avg"], dtype=torch.float32)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, rng=False) as manager:
        manager.save(0, wait=True)
    second, its_optimizer = parts()
    with CheckpointManager(tmp_path, {"model": second, "optimizer": its_optimizer}, rng=False) as manager:
        manager.restore()
    assert its_optimizer.counts == (1, 0.5)
    for one, other in zip(optimizer.base.state.values(), its_optimizer.base.state.values(), strict=True):
        assert other["exp_avg"].dtype == torch.float32
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


@pytest.mark.guarantee("G7")
def test_state_of_another_optimizer_with_a_layout_of_its_own_is_refused(tmp_path: Path) -> None:
    model = model_of()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, rng=False) as manager:
        manager.save(0, wait=True)
    for other in (Several(model.parameters()), torch.optim.AdamW(model.parameters())):
        with (
            CheckpointManager(tmp_path, {"model": model, "optimizer": other}, rng=False) as manager,
            pytest.raises(StateMismatchError, match=r"state of Lookahead in the checkpoint"),
        ):
            manager.restore()


def test_a_state_dict_that_raises_names_the_component_and_the_error(tmp_path: Path) -> None:
    class NotReady(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not consolidated")

    model = model_of()
    with pytest.raises(UsageError, match=r"'optimizer'.*RuntimeError: not consolidated"):
        CheckpointManager(tmp_path, {"model": model, "optimizer": NotReady(model.parameters())})


@pytest.mark.guarantee("G8")
def test_a_train_state_of_such_an_optimizer_comes_back() -> None:
    def parts() -> tuple[nn.Module, Optimizer]:
        model = model_of()
        return model, Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1))

    model, optimizer = parts()
    trained(model, optimizer, 2)
    state = copy.deepcopy(holdfast.build_train_state({"model": model, "optimizer": optimizer}))
    second, its_optimizer = parts()
    holdfast.restore_train_state({"model": second, "optimizer": its_optimizer}, state)
    expected = trained(model, optimizer, 2)
    for one, other in zip(expected, trained(second, its_optimizer, 2), strict=True):
        assert torch.equal(one, other)


def test_what_can_change_outside_of_a_hooked_step_is_not_left_to_the_hooks() -> None:
    class TwoSteps(torch.optim.SGD):
        def first_step(self) -> None:
            """Changes the weights, as SAM's does."""

    class Quiet(torch.optim.AdamW):
        def _scale(self) -> None:
            """Private: only its own step calls it."""

    parameters = list(model_of().parameters())
    assert changes_in_step_alone(torch.optim.AdamW(parameters))
    assert changes_in_step_alone(Quiet(parameters))
    assert not changes_in_step_alone(TwoSteps(parameters))
    assert not changes_in_step_alone(Lookahead(torch.optim.AdamW(parameters)))
    assert not changes_in_step_alone(Several(parameters))


def losses(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        loss = model(torch.full((2, 3), step + 1.0)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_manager_and_a_save_leave_a_container_without_state_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torchtitan's makes its state by a step when it is asked for it, which Adam would count."""
    expected = losses(model := model_of(), FlatContainer(model), 3)
    model = model_of()
    optimizer = FlatContainer(model)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        assert [len(one.state) for one in optimizer.optimizers] == [0, 0]
        assert all(parameter.grad is None for parameter in model.parameters())
        assert "made one by a step" not in caplog.text
        manager.save(0, wait=True)
        assert "made one by a step" in caplog.text
        caplog.clear()
        assert losses(model, optimizer, 3) == expected
        manager.save(3)
    assert "made one by a step" not in caplog.text


def test_a_refused_restore_leaves_a_container_without_state(tmp_path: Path) -> None:
    model = model_of()
    optimizer = FlatContainer(model)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        losses(model, optimizer, 2)
        manager.save(2)
    other = nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 2))
    its_optimizer = FlatContainer(other)
    with CheckpointManager(tmp_path, {"model": other, "optimizer": its_optimizer}) as manager:
        with pytest.raises(StateMismatchError):
            manager.restore()
    assert [len(one.state) for one in its_optimizer.optimizers] == [0, 0]


class WideMoments(Optimizer):
    """Keeps its moments in a wider type than its parameters have."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                    state["moment"] += parameter.grad.float() / 3


def test_the_optimizers_in_a_container_keep_the_types_of_their_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def parts() -> tuple[nn.Module, FlatContainer]:
        model = model_of(torch.bfloat16)
        return model, FlatContainer(model, WideMoments)

    model, optimizer = parts()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
    second, its_optimizer = parts()
    with CheckpointManager(tmp_path, {"model": second, "optimizer": its_optimizer}) as manager:
        manager.restore()
    for key, value in optimizer.state_dict().items():
        found = its_optimizer.state_dict()[key]
        assert torch.equal(found, value) and found.dtype == value.dtype if torch.is_tensor(value) else found == value
    assert "lost precision" not in caplog.text


def test_state_that_an_optimizer_does_not_take_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = FlatContainer(model)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        losses(model, optimizer, 2)
        manager.save(2)
    second = model_of()
    its_optimizer = FlatContainer(second)
    # With a gradient it makes no state, and then takes none: in the middle of an accumulation.
    second(torch.ones(2, 3)).sum().backward()
    with CheckpointManager(tmp_path, {"model": second, "optimizer": its_optimizer}) as manager:
        manager.restore()
    assert "did not take" in caplog.text
    assert "state.0.weight.exp_avg" in caplog.text or "state.0.weight.step" in caplog.text
