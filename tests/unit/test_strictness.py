"""What a restore accepts, strictly and loosely: no model that stays as it was counts as a resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import LoadStrategy, StateMismatchError


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


def test_a_model_without_any_state_is_restored_as_nothing(tmp_path: Path) -> None:
    state = {"model": net(1), "loss": torch.nn.Identity()}
    with holdfast.CheckpointManager(tmp_path, state, mode="sync") as manager:
        try:
            manager.save(5)
        except holdfast.HoldfastError:
            pytest.skip("models without state cannot be saved")
        assert manager.restore().resumed


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
