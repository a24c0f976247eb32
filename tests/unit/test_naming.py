"""The names of parameters are remembered, and found anew whenever the model is not what it was."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.naming import optimizer_names, parameter_names


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)


def swap_parts(model: Pair) -> None:
    model.first, model.second = model.second, model.first


def swap_parameters(model: Pair) -> None:
    model.first.weight, model.second.weight = model.second.weight, model.first.weight


def replace_a_parameter(model: Pair) -> None:
    model.first.weight = nn.Parameter(torch.ones(2, 2))


def rename_a_part(model: Pair) -> None:
    model._modules["third"] = model._modules.pop("second")


def rename_a_parameter(model: Pair) -> None:
    model.second._parameters["kernel"] = model.second._parameters.pop("weight")


def add_a_part(model: Pair) -> None:
    model.second.inner = nn.Linear(1, 1)


def tie(model: Pair) -> None:
    model.second.weight = model.first.weight


def leave_out_a_part(model: Pair) -> None:
    model.second = None  # type: ignore[assignment]


CHANGES = [
    swap_parts,
    swap_parameters,
    replace_a_parameter,
    rename_a_part,
    rename_a_parameter,
    add_a_part,
    tie,
    leave_out_a_part,
]


def names_from_scratch(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_has_its_new_names(change: Callable[[Pair], None]) -> None:
    model = Pair()
    before = parameter_names(model)
    assert before == names_from_scratch(model)
    change(model)
    assert parameter_names(model) == names_from_scratch(model)
    assert parameter_names(model) != before


def test_names_of_a_model_that_stayed_are_not_found_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pair()
    names = parameter_names(model)
    monkeypatch.setattr(model, "named_parameters", lambda: pytest.fail("they are looked for again"))
    assert parameter_names(model) is names


def test_an_optimizer_over_swapped_parameters_follows_them() -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters())
    components = {"model": model, "optimizer": optimizer}
    assert optimizer_names(optimizer, components, "optimizer") == ["first.weight", "second.weight"]
    swap_parameters(model)
    assert optimizer_names(optimizer, components, "optimizer") == ["second.weight", "first.weight"]


def test_a_part_that_takes_the_place_of_another_is_noticed_though_the_parts_are_the_same() -> None:
    model = Pair()
    model.third = model.second
    model.second = model.first
    before = parameter_names(model)
    model.second = model.third
    assert parameter_names(model) == names_from_scratch(model) != before
