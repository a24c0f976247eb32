"""What a restore accepts, strictly and loosely: no model that stays as it was counts as a resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import holdfast
from holdfast import LoadStrategy, StateMismatchError
from holdfast.loading.match import Place, SavedState, match


def net(seed: int, names: str = "ab") -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in names})


def saved(run: Path, state: dict[str, Any]) -> None:
    with holdfast.CheckpointManager(run, state, mode="sync") as manager:
        manager.save(5)


def restored(run: Path, state: dict[str, Any], **options: Any) -> holdfast.RestoreResult:
    with holdfast.CheckpointManager(run, state, mode="sync") as manager:
        return manager.restore(strategy=LoadStrategy(**options))


def refused(run: Path, state: dict[str, Any], **options: Any) -> StateMismatchError:
    """The error of a restore that must leave every model in the state as it was."""
    models = [part for part in state.values() if isinstance(part, torch.nn.Module)]
    before = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
    with pytest.raises(StateMismatchError) as caught:
        restored(run, state, **options)
    for model, was in zip(models, before, strict=True):
        assert all(torch.equal(value, was[key]) for key, value in model.state_dict().items())
    return caught.value


# Nothing in common


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_that_shares_no_tensor_with_the_checkpoint_is_an_error_in_every_strictness(
    tmp_path: Path, strict: bool
) -> None:
    saved(tmp_path, {"model": net(1, "ab")})
    error = refused(tmp_path, {"model": net(2, "cd")}, strict=strict)
    assert "model.c.weight" in str(error)


@pytest.mark.parametrize("pattern", ["*", "model.*"])
def test_an_exclude_that_leaves_nothing_of_a_model_is_an_error(tmp_path: Path, pattern: str) -> None:
    saved(tmp_path, {"model": net(1)})
    error = refused(tmp_path, {"model": net(2)}, exclude=[pattern])
    assert "skip=" in str(error)


def test_a_second_model_that_shares_nothing_is_an_error_though_the_first_one_fits(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1), "ema": net(1, "ab")})
    error = refused(tmp_path, {"model": net(2), "ema": net(2, "xy")}, strict=False)
    assert "'ema'" in str(error)


def test_a_restore_that_skips_every_missing_component_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, {"net": net(1)})
    error = refused(tmp_path, {"model": net(2)}, on_missing="skip")
    assert "the checkpoint has net, rng" in str(error)


def test_only_one_missing_model_skipped_beside_one_that_is_restored_is_accepted(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1)})
    result = restored(tmp_path, {"model": net(2), "ema": net(2)}, on_missing="skip")
    assert result.restored == ("model", "rng")
    assert result.missing == ("ema",)


def test_a_model_that_is_asked_for_by_name_and_missing_is_an_error_however_it_is_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, {"other": net(1)})
    refused(tmp_path, {"model": net(2)}, only=("model",))
    refused(tmp_path, {"model": net(2)}, only=("model",), on_missing="skip", strict=False)


def test_a_shape_that_differs_is_an_error_loosely_too(tmp_path: Path) -> None:
    saved(tmp_path, {"model": torch.nn.Linear(3, 2)})
    error = refused(tmp_path, {"model": torch.nn.Linear(4, 2)}, strict=False)
    assert "[2, 3] in the checkpoint" in str(error)


def test_an_optimizer_of_which_no_parameter_has_state_in_the_checkpoint_is_an_error_loosely_too(
    tmp_path: Path,
) -> None:
    first, second = net(1, "ab"), net(1, "xy")
    saved(tmp_path, {"first": first, "second": second, "optimizer": torch.optim.AdamW(first.parameters())})
    first, second = net(2, "ab"), net(2, "xy")
    state = {"first": first, "second": second, "optimizer": torch.optim.AdamW(second.parameters())}
    error = refused(tmp_path, state, strict=False)
    assert "'optimizer'" in str(error)


@pytest.mark.parametrize("key", ["0", "a.weights"])
def test_state_of_an_optimizer_that_belongs_to_no_parameter_is_unexpected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(1, 3)).sum() for layer in model.values()).backward()
    optimizer.step()
    optimizer.state[key] = dict(optimizer.state[model["a"].weight])
    saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = net(1)
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    assert f"optimizer.state.{key}" in str(refused(tmp_path, state))
    assert restored(tmp_path, state, strict=False).resumed
    assert any(f"not used (optimizer.state.{key})" in text for text in warnings(caplog))
    assert key not in state["optimizer"].state
    assert restored(tmp_path, state, exclude=[f"optimizer.state.{key}"]).resumed


def test_state_that_an_optimizer_keeps_for_all_parameters_together_comes_back_to_a_new_one(tmp_path: Path) -> None:
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["shared"] = {"seen": torch.arange(3), "count": 4}
    optimizer.state["rounds"] = 7
    saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = net(1)
    again = torch.optim.SGD(other.parameters(), lr=0.1)
    restored(tmp_path, {"model": other, "optimizer": again})
    assert torch.equal(again.state["shared"]["seen"], torch.arange(3))
    assert again.state["shared"]["count"] == 4
    assert again.state["rounds"] == 7


def test_a_model_without_any_state_is_restored_as_nothing(tmp_path: Path) -> None:
    state = {"model": net(1), "loss": torch.nn.Identity()}
    with holdfast.CheckpointManager(tmp_path, state, mode="sync") as manager:
        try:
            manager.save(5)
        except holdfast.HoldfastError:
            pytest.skip("models without state cannot be saved")
        assert manager.restore().resumed


# What an error advises


def test_the_advice_for_another_shape_alone_does_not_name_strict(tmp_path: Path) -> None:
    saved(tmp_path, {"model": torch.nn.Linear(3, 2)})
    for strict in (True, False):
        error = refused(tmp_path, {"model": torch.nn.Linear(4, 2)}, strict=strict)
        assert "strict=False" not in str(error)
        assert "exclude= leaves single leaves as they are" in str(error)


def test_the_advice_of_a_loose_restore_does_not_name_strict(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1, "abc"), "head": torch.nn.Linear(3, 2)})
    error = refused(tmp_path, {"model": net(2, "bcd"), "head": torch.nn.Linear(4, 2)}, strict=False)
    assert "strict=False" not in str(error)
    assert not error.missing  # type: ignore[attr-defined]


def test_the_advice_for_leaves_of_one_side_names_strict_and_what_it_does_not_accept(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1, "abc"), "head": torch.nn.Linear(3, 2)})
    error = refused(tmp_path, {"model": net(2, "bcd"), "head": torch.nn.Linear(3, 2)})
    assert "strict=False) accepts leaves that only one side has" in str(error)
    assert "no other shape or type" not in str(error)
    error = refused(tmp_path, {"model": net(2, "bcd"), "head": torch.nn.Linear(4, 2)})
    assert "strict=False) accepts leaves that only one side has, but no other shape or type" in str(error)


def test_parameters_that_were_in_groups_with_other_options_name_a_way_through(tmp_path: Path) -> None:
    first = trained(1, groups=2)
    first["optimizer"].param_groups[1]["lr"] = 0.7
    saved(tmp_path, first)
    error = refused(tmp_path, trained(2, groups=1), strict=False)
    assert "exclude=('optimizer.param_groups*',) keeps the live options" in str(error)
    assert restored(tmp_path, trained(2, groups=1), exclude=("optimizer.param_groups*",)).resumed


@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_a_restore_into_a_model_without_memory_says_what_to_do_before_the_restore(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, {"model": torch.nn.Linear(3, 2)})
    model = torch.nn.Linear(3, 2, device="meta") if kind == "meta" else torch.nn.LazyLinear(2)
    with pytest.raises(StateMismatchError) as caught:
        restored(tmp_path, {"model": model})
    assert "'model.weight'" in str(caught.value)
    assert "cannot be stored" not in str(caught.value)
    assert {"meta": "to_empty", "lazy": "before the restore"}[kind] in str(caught.value)


def test_a_restore_into_a_dict_with_a_tensor_without_memory_says_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1), "book": {"x": {"y": torch.zeros(3)}}})
    with pytest.raises(StateMismatchError, match=r"'book\.x\.y'.*meta device"):
        restored(tmp_path, {"model": net(2), "book": {"x": {"y": torch.zeros(3, device="meta")}}})


def test_a_restore_into_an_optimizer_over_parameters_without_memory_says_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, trained(1))
    model = net(2).to("meta")
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(StateMismatchError, match="meta device"):
        restored(tmp_path, state, only=("optimizer",))


# What a loose restore says


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_loose_restore_logs_one_line_with_the_numbers_and_first_names_of_what_only_one_side_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"model": net(1, "abc")})
    with caplog.at_level(logging.INFO, logger="holdfast"):
        assert restored(tmp_path, {"model": net(2, "bcd")}, strict=False).resumed
    (line,) = [text for text in warnings(caplog) if "strict=False" in text]
    assert "2 leaves are missing in the checkpoint (model.d.bias, model.d.weight)" in line
    assert "2 leaves of the checkpoint were not used (model.a.bias, model.a.weight)" in line


def test_a_loose_restore_in_which_all_fits_says_so_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"model": net(1)})
    with caplog.at_level(logging.INFO, logger="holdfast"):
        restored(tmp_path, {"model": net(2)}, strict=False)
    assert not warnings(caplog)
    assert any("strict=False" in text and "nothing is missing" in text for text in caplog.messages)


def test_a_loose_restore_logs_another_number_of_parameter_groups_and_other_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, trained(1, groups=1))
    state = trained(2, groups=2)
    state["optimizer"].param_groups[0]["layer_decay"] = 0.5
    result = restored(tmp_path, state, strict=False)
    expected = (
        "optimizer.param_groups.0: 'layer_decay' is only in the live optimizer",
        "optimizer.param_groups: 1 in the checkpoint, 2 now",
    )
    (line,) = [text for text in warnings(caplog) if "strict=False" in text]
    assert f"2 differences were accepted ({'; '.join(expected)})" in line
    assert result.accepted == expected


def test_a_loose_restore_logs_another_class_of_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, trained(1, torch.optim.Adam))
    result = restored(tmp_path, trained(2, torch.optim.AdamW), strict=False)
    (line,) = [text for text in warnings(caplog) if "strict=False" in text]
    assert "1 difference was accepted (optimizer: state of Adam in the checkpoint, AdamW now)" in line
    assert result.accepted == ("optimizer: state of Adam in the checkpoint, AdamW now",)


def test_a_loose_restore_logs_another_class_of_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, scheduled(1, "StepLR"))
    result = restored(tmp_path, scheduled(2, "CosineAnnealingLR"), strict=False)
    (line,) = [text for text in warnings(caplog) if "strict=False" in text]
    assert "1 difference was accepted (scheduler: state of StepLR in the checkpoint, CosineAnnealingLR now)" in line
    assert result.accepted == ("scheduler: state of StepLR in the checkpoint, CosineAnnealingLR now",)


def test_a_strict_restore_accepts_no_difference(tmp_path: Path) -> None:
    saved(tmp_path, trained(1))
    assert restored(tmp_path, trained(2)).accepted == ()


def test_a_component_that_only_the_checkpoint_has_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"model": net(1), "ema": net(1), "scaler": torch.nn.Linear(1, 1)})
    result = restored(tmp_path, {"model": net(2)})
    (line,) = warnings(caplog)
    assert "ema, scaler" in line
    assert "attach" in line
    assert "skip=" in line
    assert "ema: no such component is attached" in result.skipped


@pytest.mark.parametrize("options", [{"skip": ("ema",)}, {"only": ("model", "rng")}])
def test_a_component_that_the_strategy_leaves_out_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    saved(tmp_path, {"model": net(1), "ema": net(1)})
    assert restored(tmp_path, {"model": net(2)}, **options).resumed
    assert not warnings(caplog)


def test_a_random_state_that_the_manager_does_without_on_purpose_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"model": net(1)})
    with holdfast.CheckpointManager(tmp_path, {"model": net(2)}, rng=False, mode="sync") as manager:
        manager.restore()
    assert not warnings(caplog)


# Optimizers


def trained(
    seed: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, groups: int = 1, **options: Any
) -> dict[str, Any]:
    """A model and an optimizer that has made a step, with its parameters in so many groups."""
    model = net(seed)
    parameters = list(model.parameters())
    size = len(parameters) // groups
    parts = [{"params": parameters[index * size : (index + 1) * size]} for index in range(groups)]
    optimizer = kind(parts, lr=0.1 * seed, **options)  # type: ignore[call-arg]
    sum(part(torch.ones(1, 3)).sum() for part in model.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (4, 2)])
def test_another_number_of_parameter_groups_is_a_mismatch(tmp_path: Path, before: int, now: int) -> None:
    saved(tmp_path, trained(1, groups=before))
    error = refused(tmp_path, trained(2, groups=now))
    assert f"optimizer.param_groups: {before} in the checkpoint, {now} now" in str(error)
    assert "exclude=" in str(error)


@pytest.mark.parametrize("options", [{"strict": False}, {"exclude": ("optimizer.param_groups*",)}])
def test_another_number_of_parameter_groups_has_a_way_through(tmp_path: Path, options: dict[str, Any]) -> None:
    first = trained(1, groups=1)
    saved(tmp_path, first)
    state = trained(2, groups=2)
    assert restored(tmp_path, state, **options).resumed
    rate = 0.1 if "strict" in options else 0.2
    assert [group["lr"] for group in state["optimizer"].param_groups] == [rate, rate]
    moments = [[one["exp_avg"] for one in parts["optimizer"].state.values()] for parts in (first, state)]
    assert all(torch.equal(one, other) for one, other in zip(*moments, strict=True))


def test_excluding_tensors_of_an_optimizer_leaves_its_options_to_the_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, trained(1))
    state = trained(2)
    restored(tmp_path, state, exclude=("optimizer.*.a.*",))
    assert state["optimizer"].param_groups[0]["lr"] == 0.1


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("pattern", ["optimizer.state.*", "optimizer.*", "optimizer.*.exp_avg"])
def test_an_exclude_that_leaves_every_parameter_of_an_optimizer_without_its_state_is_an_error(
    tmp_path: Path, pattern: str
) -> None:
    saved(tmp_path, trained(1))
    error = refused(tmp_path, trained(2), exclude=(pattern,))
    assert "'optimizer' would stay as it is: no parameter" in str(error)
    assert "skip=('optimizer',)" in str(error)


def test_an_optimizer_that_was_saved_before_its_first_step_is_restored_as_it_was(tmp_path: Path) -> None:
    model = net(1)
    saved(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.3)})
    state = trained(2)
    restored(tmp_path, state, exclude=("model.a.*",))
    assert state["optimizer"].param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("side", ["saved", "live"])
def test_an_option_that_only_one_side_has_is_a_mismatch(tmp_path: Path, side: str) -> None:
    first, second = trained(1), trained(2)
    (first if side == "saved" else second)["optimizer"].param_groups[0]["layer_decay"] = 0.5
    saved(tmp_path, first)
    error = refused(tmp_path, second)
    assert "optimizer.param_groups.0: 'layer_decay'" in str(error)
    assert restored(tmp_path, second, strict=False).resumed
    assert second["optimizer"].param_groups[0]["layer_decay"] == 0.5
    second["optimizer"].step()


def test_the_options_that_a_scheduler_adds_to_a_group_are_no_mismatch(tmp_path: Path) -> None:
    first = trained(1)
    torch.optim.lr_scheduler.OneCycleLR(first["optimizer"], max_lr=1.0, total_steps=10)
    saved(tmp_path, first)
    assert restored(tmp_path, trained(2)).resumed


def test_an_optimizer_with_state_that_another_class_cannot_use_fails_before_anything_is_filled(tmp_path: Path) -> None:
    saved(tmp_path, trained(1, torch.optim.SGD, momentum=0.9))
    for other in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        state = trained(2, other)
        state["optimizer"] = other(state["model"].parameters(), lr=0.3)  # type: ignore[call-arg]
        error = refused(tmp_path, state, strict=False)
        assert f"state of SGD in the checkpoint, {other.__name__} now" in str(error)
        assert "skip=" in str(error)
        assert not any("momentum_buffer" in one for one in state["optimizer"].state.values())
        assert state["optimizer"].param_groups[0]["lr"] == 0.3
        assert restored(tmp_path, state, skip=("optimizer",)).resumed


def test_the_moments_of_adam_can_be_given_to_adamw_loosely(tmp_path: Path) -> None:
    first = trained(1, torch.optim.Adam)
    saved(tmp_path, first)
    refused(tmp_path, trained(2, torch.optim.AdamW))
    model = net(3)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.3)}
    assert restored(tmp_path, state, strict=False).resumed
    assert all(
        torch.equal(one["exp_avg"], other["exp_avg"])
        for one, other in zip(first["optimizer"].state.values(), state["optimizer"].state.values(), strict=True)
    )
    assert state["optimizer"].param_groups[0]["decoupled_weight_decay"]


# Which model an optimizer belongs to


class OwnLayout(torch.optim.Adam):
    """An optimizer with its state under another key."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["inner"])


def pair(seed: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam, swapped: bool = False) -> dict[str, Any]:
    """Two models of the same shape, each with an optimizer that has made a step, `swapped` or not."""
    models = {"g": net(seed), "d": net(seed + 100)}
    optimizers = []
    for model in models.values():
        optimizers.append(kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]
        sum(part(torch.ones(1, 3)).sum() for part in model.values()).backward()  # type: ignore[union-attr]
        optimizers[-1].step()
    first, second = reversed(optimizers) if swapped else optimizers
    return {**models, "opt_g": first, "opt_d": second}


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnLayout])
def test_optimizers_that_are_swapped_between_models_of_one_shape_are_a_mismatch(tmp_path: Path, kind: Any) -> None:
    saved(tmp_path, pair(1, kind))
    assert restored(tmp_path, pair(2, kind)).accepted == ()
    error = refused(tmp_path, pair(3, kind, swapped=True))
    assert "opt_g: state of the parameters of 'g' in the checkpoint, of 'd' now" in str(error)
    assert "opt_d: state of the parameters of 'd' in the checkpoint, of 'g' now" in str(error)
    assert "skip=('opt_g',)" in str(error)
    result = restored(tmp_path, pair(3, kind, swapped=True), strict=False)
    assert result.accepted[1] == "opt_g: state of the parameters of 'g' in the checkpoint, of 'd' now"


def test_a_model_that_is_two_components_owns_its_optimizer_under_either_name(tmp_path: Path) -> None:
    def parts(seed: int, names: tuple[str, str]) -> dict[str, Any]:
        model = net(seed)
        return {**dict.fromkeys(names, model), "optimizer": torch.optim.Adam(model.parameters())}

    saved(tmp_path, parts(1, ("model", "alias")))
    assert restored(tmp_path, parts(2, ("alias", "model"))).accepted == ()


def test_the_state_of_an_optimizer_follows_the_names_of_parameters_that_it_has_in_another_order(
    tmp_path: Path,
) -> None:
    first = trained(1)
    saved(tmp_path, first)
    model = net(2)
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    assert restored(tmp_path, {"model": model, "optimizer": optimizer}).resumed
    for before, now in zip(first["model"].parameters(), model.parameters(), strict=True):
        moments = [
            one.state[parameter]["exp_avg"] for one, parameter in ((first["optimizer"], before), (optimizer, now))
        ]
        assert torch.equal(*moments)


# Other classes


def scheduled(seed: int, kind: str) -> dict[str, Any]:
    parts = trained(seed)
    kinds: dict[str, Any] = {
        "StepLR": lambda: torch.optim.lr_scheduler.StepLR(parts["optimizer"], 3),
        "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(parts["optimizer"], 9),
        "MyStepLR": lambda: MyStepLR(parts["optimizer"], 3),
    }
    return {**parts, "scheduler": kinds[kind]()}


class MyStepLR(torch.optim.lr_scheduler.StepLR):
    pass


@pytest.mark.guarantee("G7")
def test_another_class_of_scheduler_is_a_mismatch_before_anything_changes(tmp_path: Path) -> None:
    saved(tmp_path, scheduled(1, "StepLR"))
    state = scheduled(2, "CosineAnnealingLR")
    before = dict(state["scheduler"].state_dict())
    error = refused(tmp_path, state)
    assert "scheduler: state of StepLR in the checkpoint, CosineAnnealingLR now" in str(error)
    assert state["scheduler"].state_dict() == before
    assert restored(tmp_path, state, skip=("scheduler",)).resumed
    assert restored(tmp_path, state, strict=False).resumed


def test_a_subclass_takes_the_state_of_the_class_that_it_derives_from(tmp_path: Path) -> None:
    saved(tmp_path, scheduled(1, "StepLR"))
    assert restored(tmp_path, scheduled(2, "MyStepLR")).resumed
    refused_run = tmp_path / "other"
    saved(refused_run, scheduled(1, "MyStepLR"))
    assert "MyStepLR in the checkpoint, StepLR now" in str(refused(refused_run, scheduled(2, "StepLR")))


def composed(seed: int, kind: str, inner: str) -> dict[str, Any]:
    schedulers, parts = torch.optim.lr_scheduler, trained(seed)
    optimizer = parts["optimizer"]
    inner_kinds: dict[str, Any] = {
        "ExponentialLR": lambda: schedulers.ExponentialLR(optimizer, 0.9),
        "StepLR": lambda: schedulers.StepLR(optimizer, 1, gamma=0.1),
        "MyStepLR": lambda: MyStepLR(optimizer, 1, gamma=0.1),
    }
    both = [schedulers.ConstantLR(optimizer, 1.0, 2), inner_kinds[inner]()]
    sequential = kind == "SequentialLR"
    scheduler: Any = schedulers.SequentialLR(optimizer, both, [2]) if sequential else schedulers.ChainedScheduler(both)
    if kind == "nested":
        scheduler = schedulers.ChainedScheduler([scheduler, schedulers.ConstantLR(optimizer, 1.0, 2)])
    return {**parts, "scheduler": scheduler}


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("kind", ["SequentialLR", "ChainedScheduler", "nested"])
def test_other_classes_of_the_schedulers_inside_of_one_are_a_mismatch(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, composed(1, kind, "ExponentialLR"))
    state = composed(2, kind, "StepLR")
    error = refused(tmp_path, state)
    assert "(ConstantLR,ExponentialLR)" in str(error)
    assert "(ConstantLR,StepLR)" in str(error)
    assert restored(tmp_path, composed(2, kind, "ExponentialLR")).resumed
    assert restored(tmp_path, state, strict=False).resumed
    derived = tmp_path / "derived"
    saved(derived, composed(1, kind, "StepLR"))
    assert restored(derived, composed(2, kind, "MyStepLR")).resumed


class Tally:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"count": 1}


class RenamedTally(Tally):
    pass


def test_a_class_of_ones_own_decides_for_itself_whose_state_it_takes(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1), "tally": RenamedTally()})
    assert restored(tmp_path, {"model": net(2), "tally": Tally()}).resumed


# How much work it is


class CountedLeaves(Mapping[str, Any]):
    """The leaves of a checkpoint, which count how often somebody walks through all of them."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self.leaves = leaves
        self.walks = 0

    def __getitem__(self, name: str) -> Any:
        return self.leaves[name]

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return iter(self.leaves)


@dataclass(frozen=True, kw_only=True)
class CountedStrategy(LoadStrategy):
    """A strategy that counts which leaves it is asked about."""

    asked: list[str] = field(default_factory=list)

    def excluding(self, leaf: str) -> str | None:
        self.asked.append(leaf)
        return super().excluding(leaf)


def test_exclude_asks_once_about_each_leaf_and_never_walks_through_all_of_them_for_one(tmp_path: Path) -> None:
    def parts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(40)])
        optimizer = torch.optim.AdamW(model.parameters())
        sum(model).sum().backward()  # type: ignore[union-attr]
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved(tmp_path, parts(1))
    checkpoint = holdfast.resolve(tmp_path)
    manifest = checkpoint.manifest
    values = json.loads(Path(checkpoint.path, "shared.json").read_text())["trees"]
    leaves = CountedLeaves({leaf.name: leaf for leaf in manifest.tensors})
    strategy = CountedStrategy(exclude=("model.3", "optimizer.state.7.*", "optimizer.state.9.exp_avg"))
    saved_state = SavedState(
        leaves,
        {tree.component: [tree] for tree in manifest.trees},
        lambda tree: values[tree.name],
        lambda name: None,
        manifest.world_size,
    )
    live = parts(2)
    left_out: set[str] = set()
    for name in ("model", "optimizer"):
        left_out |= match(name, live, saved_state, strategy, Place(0, 1, None)).left_out
    assert leaves.walks <= 2
    assert len(strategy.asked) == len(set(strategy.asked))
    assert len(strategy.asked) <= len(leaves.leaves)
    assert left_out == {
        "model.3",
        "optimizer.state.7.step",
        "optimizer.state.7.exp_avg",
        "optimizer.state.7.exp_avg_sq",
        "optimizer.state.9.exp_avg",
    }


# Plain dicts

VALUES_OF_ANOTHER_FORM: dict[str, tuple[Any, Any, str]] = {
    "shape": (torch.zeros(3), torch.zeros(4), "book.x: float32 [3] in the checkpoint, float32 [4] now"),
    "dtype": (torch.zeros(3).double(), torch.zeros(3), "book.x: float64 [3] in the checkpoint, float32 [3] now"),
    "tensor for a number": (torch.zeros(()), 1.5, "book.x: float32 [] in the checkpoint, a plain value now"),
    "number for a tensor": (1.5, torch.zeros(2), "book.x: a plain value in the checkpoint, float32 [2] now"),
    "list for a dict": ([1], {"a": 1}, "book.x: a list in the checkpoint, a dict now"),
    "number for a list": (3, [1], "book.x: a plain value in the checkpoint, a list now"),
    "nested": (
        {"w": torch.zeros(2)},
        {"w": torch.zeros(5)},
        "book.x.w: float32 [2] in the checkpoint, float32 [5] now",
    ),
    "in a list": ([1, torch.zeros(2)], [1, torch.zeros(5)], "book.x.1: float32 [2] in the checkpoint, float32 [5]"),
    "array": (numpy.zeros(2), numpy.zeros(3), "book.x: array float64 [2] in the checkpoint, array float64 [3] now"),
    "array for a tensor": (numpy.zeros(2), torch.zeros(2), "book.x: array float64 [2] in the checkpoint, float32 [2]"),
}


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("case", VALUES_OF_ANOTHER_FORM)
def test_a_value_of_a_dict_that_was_saved_in_another_form_is_a_mismatch_with_a_way_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    before, now, expected = VALUES_OF_ANOTHER_FORM[case]
    saved(tmp_path, {"model": net(1), "book": {"x": before, "epoch": 3}})
    book = {"x": now, "epoch": 0}
    error = refused(tmp_path, {"model": net(2), "book": book})
    assert expected in str(error)
    assert "skip=('book',)" in str(error)
    assert book["x"] is now
    assert book["epoch"] == 0
    assert restored(tmp_path, {"model": net(2), "book": book}, skip=("book",)).accepted == ()
    result = restored(tmp_path, {"model": net(2), "book": book}, strict=False)
    assert expected in result.accepted[0]
    assert any("1 difference was accepted" in text and expected in text for text in warnings(caplog))
    assert type(book["x"]) is type(before)
    assert book["epoch"] == 3


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.zeros(3), None),
        (None, torch.zeros(3)),
        (None, 1.0),
        (0.5, 7),
        ("best", 7),
        (True, None),
        ([1, torch.zeros(2), 3], [torch.zeros(5)]),
        ([], [1, 2]),
        ((1, 2), [1, 2]),
        ({"a": 1, "b": torch.zeros(2)}, {"a": 2.5, "c": torch.zeros(3)}),
        (torch.ones(3), torch.zeros(3)),
    ],
)
def test_plain_values_of_a_dict_and_what_is_not_there_yet_may_change_their_type(
    tmp_path: Path, before: Any, now: Any
) -> None:
    saved(tmp_path, {"model": net(1), "book": {"x": before}})
    book = {"x": now}
    assert restored(tmp_path, {"model": net(2), "book": book}).resumed
    assert type(book["x"]) is type(before)


def test_a_tensor_of_a_dict_that_is_excluded_may_have_another_shape(tmp_path: Path) -> None:
    saved(tmp_path, {"model": net(1), "book": {"x": torch.zeros(3), "epoch": 3}})
    book = {"x": torch.ones(4), "epoch": 0}
    restored(tmp_path, {"model": net(2), "book": book}, exclude=("book.x",))
    assert book["x"].tolist() == [1.0] * 4  # type: ignore[attr-defined]
    assert book["epoch"] == 3


def test_a_value_of_another_form_is_not_given_to_a_dict_without_a_manager() -> None:
    state = holdfast.build_train_state({"model": net(1), "book": {"x": torch.zeros(3)}})
    model, book = net(2), {"x": torch.zeros(4)}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"book\.x: float32 \[3\] in the state, float32 \[4\] now"):
        holdfast.restore_train_state({"model": model, "book": book}, state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert book["x"].shape == (4,)


@pytest.mark.parametrize("groups", [1, 2])
def test_state_of_an_optimizer_with_other_parameters_or_groups_is_not_given_back(groups: int) -> None:
    first = trained(1, groups=1)
    state = holdfast.build_train_state(first)
    other = trained(2, groups=groups)
    if groups == 1:
        other["optimizer"] = torch.optim.AdamW(other["model"]["a"].parameters())
    before = {key: value.clone() for key, value in other["model"].state_dict().items()}
    with pytest.raises(StateMismatchError, match="state and optimizer do not fit together"):
        holdfast.restore_train_state(other, state)
    assert all(torch.equal(value, before[key]) for key, value in other["model"].state_dict().items())


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adamax, torch.optim.Adagrad])
@pytest.mark.parametrize("stepped", [True, False])
def test_state_of_another_class_of_optimizer_is_not_given_back_without_a_manager(other: Any, stepped: bool) -> None:
    first = trained(1)
    if not stepped:
        first["optimizer"] = torch.optim.AdamW(first["model"].parameters())
    second = {"model": net(2), "optimizer": None}
    second["optimizer"] = other(second["model"].parameters(), lr=0.1)  # type: ignore[union-attr]
    before = {key: value.clone() for key, value in second["model"].state_dict().items()}  # type: ignore[union-attr]
    if not stepped and other is torch.optim.Adamax:
        return  # without state, and with options that AdamW has, too, there is nothing to tell them apart by
    with pytest.raises(StateMismatchError, match=f"another class.*{other.__name__}"):
        holdfast.restore_train_state(second, holdfast.build_train_state(first))
    assert all(torch.equal(value, before[key]) for key, value in second["model"].state_dict().items())  # type: ignore[union-attr]


def test_the_state_of_adam_is_given_back_to_adamw_without_a_manager() -> None:
    first, model = trained(1), net(2)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    holdfast.restore_train_state({"model": model, "optimizer": optimizer}, holdfast.build_train_state(first))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_options_that_are_kept_and_want_more_state_than_was_saved_are_a_mismatch(
    tmp_path: Path, strict: bool, stepped: bool
) -> None:
    saved(tmp_path, trained(1))
    model = net(2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    error = refused(tmp_path, state, strict=strict, exclude=("optimizer.param_groups*",))
    assert "max_exp_avg_sq" in str(error)
    assert "amsgrad" in str(error)


def test_options_that_are_kept_and_want_no_other_state_are_no_mismatch(tmp_path: Path) -> None:
    saved(tmp_path, trained(1))
    model = net(2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)}
    restored(tmp_path, state, exclude=("optimizer.param_groups*",))
    assert state["optimizer"].param_groups[0]["lr"] == 0.25
