"""Hand restored state over to the live objects, in the one right order. Fitted components enter; nothing leaves.

Components with their own `load_state_dict` come first: that is code of the user, which may raise, and until then
no tensor has changed. Then models and optimizers. The random state comes last: taking up the others may draw from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import HoldfastError, StateMismatchError
from holdfast.loading.match import Fitted
from holdfast.state.loaders import shield_random_state
from holdfast.state.names import is_stateful_loader, unwrap
from holdfast.state.rng import RNGState, random_state_kept

_TENSORS_CHANGED = "the live tensors had been filled before; restore another checkpoint before you go on"


def restore_values(fitted: Sequence[Fitted], components: Mapping[str, Any]) -> None:
    """Take up what goes through a component's own `load_state_dict`."""
    done: list[str] = []
    for one in fitted:
        if one.kind == "values" and not _is_random_state(one, components):
            # A loader may build an iterator, which draws; the random state need not be restored after it.
            loads = is_stateful_loader(unwrap(components[one.component]))
            with random_state_kept() if loads else nullcontext():
                _take_up(one, _before(done))
            shield_random_state(unwrap(components[one.component]))
            done.append(one.component)


def restore_tensors(fitted: Sequence[Fitted], components: Mapping[str, Any]) -> None:
    """Take up models and optimizers, whose memory is filled by now."""
    for one in fitted:
        if one.kind != "values":
            _take_up(one, _TENSORS_CHANGED)
    _carry_learning_rates([one.component for one in fitted], components)


def restore_random_state(fitted: Sequence[Fitted], components: Mapping[str, Any]) -> None:
    """Take up the random state, after everything else."""
    for one in fitted:
        if _is_random_state(one, components):
            _take_up(one, _TENSORS_CHANGED)


def _is_random_state(fitted: Fitted, components: Mapping[str, Any]) -> bool:
    return isinstance(unwrap(components[fitted.component]), RNGState)


def _before(done: Sequence[str]) -> str:
    return f"{', '.join(done)} had been restored before" if done else "nothing had been restored before"


def _take_up(fitted: Fitted, before: str) -> None:
    try:
        fitted.take_up()
    except HoldfastError:
        raise
    except Exception as error:
        raise StateMismatchError(
            f"load_state_dict raised {type(error).__name__}: {error} ({before})", component=fitted.component
        ) from error


def _carry_learning_rates(restored: Sequence[str], components: Mapping[str, Any]) -> None:
    """Give an optimizer the learning rates of a scheduler that was restored without it, not those of step 0."""
    optimizers = [unwrap(components[name]) for name in restored]
    for name in restored:
        scheduler = unwrap(components[name])
        if not isinstance(scheduler, LRScheduler) or any(scheduler.optimizer is one for one in optimizers):
            continue
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
