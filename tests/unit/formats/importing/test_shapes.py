"""Which shapes a parameter can have, by the state that an optimizer keeps for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.formats.importing.shapes import StateShapes
from holdfast.formats.source import TensorEntry
from holdfast.state.tensors import dtype_name


def shapes_of(**state: tuple[int, ...]) -> StateShapes:
    return StateShapes.of({key: TensorEntry(key, "float32", shape, ()) for key, shape in state.items()})


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.LBFGS,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 2, 3)], ids=str)
def test_state_of_every_optimizer_of_torch_fits_its_parameter_and_not_another(
    make: Any, shape: tuple[int, ...]
) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    options: dict[str, Any] = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make([parameter, nn.Parameter(torch.ones(5))], lr=0.1, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(one.square().sum() for group in optimizer.param_groups for one in group["params"])
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    optimizer.step(closure)
    state = {
        key: TensorEntry(key, dtype_name(value), tuple(value.shape), ())
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
    shapes = StateShapes.of(state)
    assert shapes.fits(shape)
    if shape and make is not torch.optim.LBFGS:
        assert not shapes.fits((*shape[:-1], shape[-1] + 4))
        assert not shapes.fits((shape[0] + 4, *shape[1:]))


@pytest.mark.parametrize(
    ("state", "fitting", "other"),
    [
        ({"row_var": (4, 1), "col_var": (1, 3)}, (4, 3), (3, 4)),
        ({"exp_avg_sq_row": (2, 4), "exp_avg_sq_col": (2, 3)}, (2, 4, 3), (2, 3, 4)),
        ({"exp_avg": (4, 3), "exp_avg_sq": (4, 3), "anything": (9, 9)}, (4, 3), (9, 9)),
        ({"state1": (4096,), "absmax1": (16,)}, (4096,), (16,)),
        ({"kept_for_it": (4, 3)}, (4, 3), (3, 4)),
        ({"reduced": (4, 1)}, (4, 3), (3, 4)),
        ({"precond_0": (4, 4), "precond_1": (3, 3)}, (4, 3), (4, 5)),
        ({"list_of_losses": (7,)}, (4, 3), (4,)),
    ],
    ids=str,
)
def test_shapes_of_state_decide(
    state: dict[str, tuple[int, ...]], fitting: tuple[int, ...], other: tuple[int, ...]
) -> None:
    shapes = shapes_of(**state)
    assert shapes.fits(fitting)
    assert not shapes.fits(other)


def test_own_shapes_that_differ_fit_nothing() -> None:
    shapes = shapes_of(exp_avg=(4, 3), exp_avg_sq=(3, 4))
    assert not shapes.fits((4, 3))
    assert not shapes.fits((3, 4))


def test_what_is_no_dict_of_tensors_fits_everything() -> None:
    assert StateShapes.of([1, 2]).fits((3,))
    assert StateShapes.of({"step": 3}).fits((4, 3))
