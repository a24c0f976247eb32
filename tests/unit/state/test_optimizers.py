"""An optimizer takes its state up bit for bit, and in a time that does not grow with the square of its parameters."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.state.optimizers import load_optimizer, optimizer_state


class CountedNumber(int):
    """A parameter's number that counts how often it was compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedNumber.compared += 1
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))


def optimizer_of(count: int, seed: int) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(count)]
    half = count // 2
    optimizer = torch.optim.AdamW([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.5}])
    for parameter in parameters:
        parameter.grad = torch.randn(3)
    optimizer.step()
    return parameters, optimizer


def packed(optimizer: torch.optim.Optimizer, number: Any) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    state = optimizer.state_dict()
    groups = [{**group, "params": [number(one) for one in group["params"]]} for group in state["param_groups"]]
    return {number(key): value for key, value in state["state"].items()}, groups


def test_very_many_parameters_are_not_each_looked_for_in_a_list() -> None:
    count = 400
    _, saved = optimizer_of(count, 0)
    _, live = optimizer_of(count, 1)
    states, groups = packed(saved, CountedNumber)
    CountedNumber.compared = 0
    load_optimizer(live, states, groups, {})
    assert CountedNumber.compared <= 20 * count


def test_the_state_and_the_groups_are_those_that_were_given() -> None:
    _, saved = optimizer_of(6, 0)
    names = [f"p{number}" for number in range(6)]
    _, live = optimizer_of(6, 1)
    states, groups = packed(saved, int)
    load_optimizer(live, states, groups, {})
    one, other = optimizer_state("o", saved, names), optimizer_state("o", live, names)
    assert one["param_groups"] == other["param_groups"]
    for name in names:
        for key, value in one["state"][name].items():
            assert torch.equal(value, other["state"][name][key])
    assert all(type(group["params"]) is list for group in live.param_groups)
    assert [type(group["params"]) for group in groups] == [list, list], "what was given is as it was"
