"""Let the next step of an optimizer wait for the copies of what it changes. Knows torch and its optimizers.

What an optimizer owns, and what only its step changes, need not be cloned before it is copied: the step waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from holdfast.state.optimizers import inner_optimizers
from holdfast.state.tensors import is_sharded, plain_parts

__all__ = ["Place", "StepHooks", "changes_in_step_alone", "owned_places"]

Place = tuple[int, int]


class Copier(Protocol):
    """Copies that still read what an optimizer is about to change."""

    def wait_for_staging(self) -> None: ...


class StepHooks:
    """One hook for each optimizer, installed once for all saves."""

    def __init__(self, copier: Copier) -> None:
        self._copier = weakref.ref(copier)
        self._hooks: dict[int, Any] = {}

    def install(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the next step of each optimizer wait, on the device, for the copies."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(partial(_before_step, self._copier))

    def remove(self) -> None:
        """Remove all hooks."""
        hooks, self._hooks = self._hooks, {}
        for hook in hooks.values():
            hook.remove()


def _before_step(copier: weakref.ref[Copier], *_: Any) -> None:
    # Weak: a hook outlives a saver that was never closed, and must not keep its arena.
    found = copier()
    if found is not None:
        found.wait_for_staging()


def changes_in_step_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether nothing but `step`, which runs the hooks that wait for copies, can change what the optimizer owns.

    One that never called `Optimizer.__init__` runs no hooks. One with public methods of its own may change its tensors
    in them, as the first step of SAM and `train()` and `eval()` of schedule-free optimizers do. One around others
    shares its parameters with them, and each can step alone. What these own is cloned, or copied in the order of the
    training's stream.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not getattr(type(optimizer).step, "hooked", False):
        return False
    if inner_optimizers(optimizer):
        return False
    own = [kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
    return names <= set(dir(torch.optim.Optimizer))


def owned_places(optimizers: Iterable[torch.optim.Optimizer]) -> set[Place]:
    """Return where the tensors lie that only an optimizer's step changes: its parameters and its state."""
    tensors: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    if not _PLAIN.issuperset(map(type, tensors)):
        tensors = [part for tensor in tensors for _, part in plain_parts(tensor)]
        tensors = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]
    # A tensor's memory. Its beginning alone would take a longer tensor over the same memory for this one.
    return set(zip(map(torch.Tensor.data_ptr, tensors), map(_SIZE, tensors), strict=True))


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_SIZE = attrgetter("nbytes")
