"""The hooks by which an optimizer's step waits for copies."""

from __future__ import annotations

import torch

from holdfast.saving.staging.step_hooks import StepHooks, owned_places


class Copies:
    def __init__(self) -> None:
        self.waits = 0

    def wait_for_staging(self) -> None:
        self.waits += 1


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


def test_each_step_waits_once_until_the_hooks_are_removed() -> None:
    copies, sgd = Copies(), optimizer()
    hooks = StepHooks(copies)
    hooks.install([sgd])
    hooks.install([sgd])
    sgd.step()
    assert copies.waits == 1
    hooks.remove()
    sgd.step()
    assert copies.waits == 1


def test_a_hook_keeps_nothing_alive() -> None:
    copies, sgd = Copies(), optimizer()
    hooks = StepHooks(copies)
    hooks.install([sgd])
    del copies
    sgd.step()
    hooks.remove()


def test_an_optimizer_owns_its_parameters_and_its_state() -> None:
    sgd = optimizer()
    sgd.step()
    (group,) = sgd.param_groups
    (parameter,) = group["params"]
    momentum = sgd.state[parameter]["momentum_buffer"]
    assert owned_places([sgd]) == {(one.data_ptr(), one.nbytes) for one in (parameter, momentum)}
