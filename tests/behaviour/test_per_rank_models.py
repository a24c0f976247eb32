"""A model or an optimizer of each rank is fitted by names, as any other: nothing changes before all of it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import LoadStrategy, PerRank, StateMismatchError, UsageError


def net(value: float, names: str = "ab", size: int = 1) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, size, bias=False) for name in names})
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def weights(model: torch.nn.Module) -> list[float]:
    return [float(parameter.detach().flatten()[0]) for parameter in model.parameters()]


def saved(run: Path, state: dict[str, Any], step: int = 1) -> holdfast.Checkpoint:
    with holdfast.CheckpointManager(run, state, rng=False, mode="sync") as manager:
        return manager.save(step).wait()


def restored(run: Path, state: dict[str, Any], **options: Any) -> holdfast.RestoreResult:
    with holdfast.CheckpointManager(run, state, rng=False, mode="sync") as manager:
        return manager.restore(strategy=LoadStrategy(**options))


def trained(model: torch.nn.ModuleDict, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    """An optimizer with one step, and another gradient for each parameter."""
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 10.0**index)
    optimizer.step()
    return optimizer


class _Stateful:
    """The state of an object as its own `state_dict` gives it: how older versions stored every PerRank component."""

    def __init__(self, inner: Any) -> None:
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict


class _ByNumber:
    def state_dict(self) -> dict[Any, Any]:
        return {0: torch.zeros(1), 1: 2}

    def load_state_dict(self, state: dict[Any, Any]) -> None: ...


# What was saved as something else


def per_rank_optimizer(model: torch.nn.ModuleDict) -> Any:
    return PerRank(trained(model))


def per_rank_optimizer_of_an_older_version(model: torch.nn.ModuleDict) -> Any:
    return PerRank(_Stateful(trained(model)))


def object_with_keys_that_are_no_text(model: torch.nn.ModuleDict) -> Any:
    return _ByNumber()


STORED = [per_rank_optimizer, per_rank_optimizer_of_an_older_version, object_with_keys_that_are_no_text]


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("stored", STORED)
def test_state_of_another_kind_is_a_mismatch_and_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path, stored: Callable[[torch.nn.ModuleDict], Any]
) -> None:
    model = net(1.0)
    saved(tmp_path, {"model": model, "optimizer": trained(model)}, 1)
    saved(tmp_path, {"model": model, "optimizer": stored(model)}, 2)
    other = net(7.0)
    with pytest.raises(StateMismatchError, match=r"component 'optimizer'.*was saved .*skip=\('optimizer',\)"):
        restored(tmp_path, {"model": other, "optimizer": torch.optim.Adam(other.parameters())})
    assert weights(other) == [7.0, 7.0]


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("wrap", [PerRank, lambda model: PerRank(_Stateful(model)), lambda model: _ByNumber()])
def test_a_model_that_was_saved_in_another_way_is_a_mismatch(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    saved(tmp_path, {"model": wrap(net(1.0))})
    other = net(7.0)
    with pytest.raises(StateMismatchError, match=r"component 'model'.*was saved "):
        restored(tmp_path, {"model": other})
    assert weights(other) == [7.0, 7.0]


# By names


def test_a_model_and_an_optimizer_per_rank_are_stored_by_their_names(tmp_path: Path) -> None:
    model = net(1.0)
    trees = saved(tmp_path, {"model": PerRank(model), "optimizer": trained(model)}).manifest.trees
    assert [(tree.name, tree.kind) for tree in trees] == [
        ("model@rank-00000", "module"),
        ("optimizer@rank-00000", "optimizer"),
    ]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("wrapped", ["model", "optimizer"])
def test_the_moments_of_a_model_per_rank_follow_the_names_of_its_parameters(tmp_path: Path, wrapped: str) -> None:
    def state(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
        return {**parts, wrapped: PerRank(parts[wrapped])}

    model, other = net(1.0, "ab"), net(7.0, "ba")
    optimizer, second = trained(model), torch.optim.Adam(other.parameters())
    saved(tmp_path, state(model, optimizer))
    restored(tmp_path, state(other, second))
    for name in "ab":
        before, after = optimizer.state[model[name].weight], second.state[other[name].weight]
        assert torch.equal(before["exp_avg"], after["exp_avg"])
        assert torch.equal(model[name].weight, other[name].weight)


@pytest.mark.guarantee("G7")
def test_state_of_another_class_of_optimizer_is_a_mismatch_also_per_rank(tmp_path: Path) -> None:
    model, other = net(1.0), net(7.0)
    saved(tmp_path, {"model": PerRank(model), "optimizer": trained(model, torch.optim.Adam)})
    with pytest.raises(StateMismatchError, match="state of Adam in the checkpoint, AdamW now"):
        restored(tmp_path, {"model": PerRank(other), "optimizer": torch.optim.AdamW(other.parameters())})
    assert weights(other) == [7.0, 7.0]


def test_an_optimizer_per_rank_over_parameters_of_no_model_goes_by_numbers(tmp_path: Path) -> None:
    loose = torch.nn.ModuleDict({"x": torch.nn.Linear(1, 1, bias=False)})
    optimizer = trained(loose)
    saved(tmp_path, {"model": net(1.0), "optimizer": PerRank(optimizer)})
    fresh = net(0.0, "x")
    second = torch.optim.Adam(fresh.parameters())
    restored(tmp_path, {"model": net(7.0), "optimizer": PerRank(second)})
    assert torch.equal(second.state[fresh["x"].weight]["exp_avg"], optimizer.state[loose["x"].weight]["exp_avg"])


# exclude=


def test_exclude_keeps_leaves_of_a_model_and_an_optimizer_per_rank(tmp_path: Path) -> None:
    model, other = net(1.0), net(7.0)
    optimizer, second = trained(model), torch.optim.Adam(other.parameters())
    expected = weights(model)
    saved(tmp_path, {"model": PerRank(model), "optimizer": optimizer})
    skipped = restored(tmp_path, {"model": PerRank(other), "optimizer": second}, exclude=("*.a.weight*",)).skipped
    assert weights(other) == [7.0, expected[1]]
    assert other["a"].weight not in second.state
    assert other["b"].weight in second.state
    assert any(text.startswith("model@rank-00000.a.weight:") for text in skipped)


def test_exclude_keeps_the_tensors_of_any_other_component_per_rank(tmp_path: Path) -> None:
    class Buffer:
        def __init__(self, value: float) -> None:
            self.state = {"kept": torch.tensor([value]), "taken": torch.tensor([value])}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved(tmp_path, {"model": net(1.0), "own": PerRank(Buffer(1.0))})
    other = Buffer(7.0)
    restored(tmp_path, {"model": net(7.0), "own": PerRank(other)}, exclude=("own@*.kept",))
    assert {key: float(value) for key, value in other.state.items()} == {"kept": 7.0, "taken": 1.0}


# Nothing changes before all of it fits


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(("names", "size"), [("ac", 1), ("a", 1), ("abc", 1), ("ab", 2)])
def test_a_model_per_rank_with_other_leaves_is_a_mismatch_before_any_of_it_changes(
    tmp_path: Path, names: str, size: int
) -> None:
    saved(tmp_path, {"model": PerRank(net(1.0))})
    other = net(7.0, names, size)
    with pytest.raises(StateMismatchError, match=r"model@rank-00000\."):
        restored(tmp_path, {"model": PerRank(other)})
    assert weights(other) == [7.0] * len(names)


def test_a_loose_restore_takes_what_a_model_per_rank_and_the_checkpoint_share(tmp_path: Path) -> None:
    saved(tmp_path, {"model": PerRank(net(1.0, "ab"))})
    other = net(7.0, "ac")
    restored(tmp_path, {"model": PerRank(other)}, strict=False)
    assert weights(other) == [1.0, 7.0]


@pytest.mark.guarantee("G7")
def test_another_number_of_groups_is_a_mismatch_before_the_model_changes(tmp_path: Path) -> None:
    model, other = net(1.0), net(7.0)
    saved(tmp_path, {"model": PerRank(model), "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    groups = [{"params": list(part.parameters())} for part in other.values()]
    with pytest.raises(StateMismatchError, match=r"optimizer@rank-00000\.param_groups: 1 in the checkpoint, 2 now"):
        restored(tmp_path, {"model": PerRank(other), "optimizer": torch.optim.SGD(groups, 0.1)})
    assert weights(other) == [7.0, 7.0]


def test_every_model_per_rank_missing_is_an_error_also_when_missing_ones_are_skipped(tmp_path: Path) -> None:
    saved(tmp_path, {"count": {"a": 1}, "other": net(1.0)})
    with pytest.raises(StateMismatchError, match="nothing of model would be restored"):
        restored(tmp_path, {"count": {"a": 2}, "model": PerRank(net(7.0))}, on_missing="skip")


# Between versions and ways to keep a model


@pytest.mark.guarantee("G12")
def test_a_model_and_an_optimizer_per_rank_of_an_older_version_are_restored_by_load_state_dict(tmp_path: Path) -> None:
    model, other = net(1.0), net(7.0)
    optimizer, second = trained(model), torch.optim.Adam(other.parameters())
    state = {"model": PerRank(_Stateful(model)), "optimizer": PerRank(_Stateful(optimizer))}
    trees = saved(tmp_path, state).manifest.trees
    assert {tree.kind for tree in trees} == {"values"}
    assert restored(tmp_path, {"model": PerRank(other), "optimizer": second}).restored == ("model", "optimizer")
    assert weights(other) == weights(model)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], second.state[two]["exp_avg"])


def test_a_model_of_all_ranks_can_begin_models_of_each_rank(tmp_path: Path) -> None:
    model, other = net(1.0), net(7.0)
    saved(tmp_path, {"model": model, "optimizer": trained(model)})
    restored(tmp_path, {"model": PerRank(other), "optimizer": torch.optim.Adam(other.parameters())})
    assert weights(other) == weights(model)


def test_a_key_that_is_no_name_is_refused_in_a_model_per_rank_as_in_any_other(tmp_path: Path) -> None:
    class Odd(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {0: self.weight.detach()}

    for wrap in (lambda model: model, PerRank):
        with pytest.raises(UsageError, match="which is no name"):
            holdfast.CheckpointManager(tmp_path, {"model": wrap(Odd(1, 1))})
