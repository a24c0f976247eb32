"""Live objects that share memory: a restore fills all of them with what was saved, or changes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateMismatchError

Verify = Literal["full", "quick", "off"]


def opened(run: Path, components: dict[str, Any], verify: Verify = "full") -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, components, mode="sync", rng=False, verify=verify)


def save(run: Path, components: dict[str, Any]) -> None:
    with opened(run, components) as manager:
        manager.save(1)


def linear(value: float) -> nn.Linear:
    model = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def trained(value: float) -> tuple[nn.Linear, torch.optim.SGD]:
    model = linear(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    return model, optimizer


def refused(run: Path, components: dict[str, Any], verify: Verify = "full") -> str:
    with opened(run, components, verify) as manager, pytest.raises(StateMismatchError) as caught:
        manager.restore()
    return str(caught.value)


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("verify", ["full", "quick", "off"])
def test_the_best_weights_that_are_the_models_own_memory_now_are_refused(tmp_path: Path, verify: Verify) -> None:
    save(tmp_path, {"model": linear(9.0), "best": {"weights": linear(1.0).state_dict()}})
    model = linear(0.0)
    message = refused(tmp_path, {"model": model, "best": {"weights": model.state_dict()}}, verify)
    assert "model.weight and best.weights.weight share memory now, and differed when saved" in message
    assert ".clone()" in message
    assert torch.equal(model.weight, torch.zeros(2, 3)), "nothing was changed"


@pytest.mark.guarantee("G7")
def test_a_student_and_a_teacher_of_one_parameter_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"student": linear(1.0), "teacher": linear(2.0)})
    student, teacher = linear(0.0), linear(0.0)
    teacher.weight = student.weight
    message = refused(tmp_path, {"student": student, "teacher": teacher})
    assert "student.weight and teacher.weight share memory now" in message
    assert torch.equal(student.weight, torch.zeros(2, 3))


@pytest.mark.guarantee("G7")
def test_a_momentum_buffer_in_the_memory_of_its_weight_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(5.0)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    model, optimizer = trained(0.0)
    before = model.weight.detach().clone()
    optimizer.state[model.weight]["momentum_buffer"] = model.weight.data
    message = refused(tmp_path, {"model": model, "optimizer": optimizer})
    assert "share memory now" in message
    assert torch.equal(model.weight, before)


@pytest.mark.guarantee("G7")
def test_entries_of_one_dict_that_overlap_now_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"held": {"x": torch.ones(3), "y": [torch.full((3,), 2.0)]}})
    flat = torch.zeros(4)
    assert "held.x and held.y.0 share memory" in refused(tmp_path, {"held": {"x": flat[:3], "y": [flat[1:]]}})
    assert torch.equal(flat, torch.zeros(4))


def test_what_shares_memory_and_had_the_same_content_is_restored(tmp_path: Path) -> None:
    saved = linear(4.0)
    save(tmp_path, {"model": saved, "best": {"weights": saved.state_dict()}})
    model = linear(0.0)
    with opened(tmp_path, {"model": model, "best": {"weights": model.state_dict()}}) as manager:
        assert manager.restore().restored == ("model", "best")
    assert torch.equal(model.weight, saved.weight)


def test_overlapping_views_with_consistent_content_are_restored(tmp_path: Path) -> None:
    saved = torch.arange(24.0)
    save(tmp_path, {"held": {"all": saved, "first": saved[:10], "even": saved[::2], "odd": saved[1::2]}})
    flat = torch.zeros(24)
    with opened(tmp_path, {"held": {"all": flat, "first": flat[:10], "even": flat[::2], "odd": flat[1::2]}}) as manager:
        manager.restore()
    assert torch.equal(flat, saved)


def test_a_dict_takes_what_was_saved_in_place_of_tensors_that_it_cannot_fill(tmp_path: Path) -> None:
    save(tmp_path, {"held": {"x": torch.arange(3.0), "y": torch.ones(1), "z": torch.ones(3)}})
    one = torch.zeros(1)
    with torch.inference_mode():
        made = torch.zeros(3)
    live: dict[str, Any] = {"x": one.expand(3), "y": one, "z": made}
    with opened(tmp_path, {"held": live}) as manager:
        manager.restore()
    assert torch.equal(live["x"], torch.arange(3.0))
    assert torch.equal(one, torch.ones(1))
    assert torch.equal(live["z"], torch.ones(3))


def test_a_sparse_tensor_in_a_dict_of_each_rank_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, {"held": holdfast.PerRank({"s": torch.eye(2)})})
    live = {"s": torch.zeros(2, 2).to_sparse()}
    with opened(tmp_path, {"held": holdfast.PerRank(live)}) as manager:
        manager.restore()
    assert torch.equal(live["s"].to_dense(), torch.eye(2))


def test_leaving_one_of_two_out_is_the_way_through(tmp_path: Path) -> None:
    save(tmp_path, {"model": linear(9.0), "best": {"weights": linear(1.0).state_dict()}})
    model = linear(0.0)
    with opened(tmp_path, {"model": model, "best": {"weights": model.state_dict()}}) as manager:
        manager.restore(strategy=holdfast.LoadStrategy(skip=("best",)))
    assert torch.equal(model.weight, linear(9.0).weight)
