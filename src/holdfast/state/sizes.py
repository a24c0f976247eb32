"""Estimate how much of a state a rank will store, without calling any code of the components. Knows torch; knows no
files.

The answer is needed before the first save, beside the training: `state_dict` may be slow, may raise, and must not run
in another thread than the training's. Only a tensor of a subclass is asked for the tensors inside
(`__tensor_flatten__`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from holdfast.state.names import unwrap
from holdfast.state.tensors import is_sharded, plain_parts
from holdfast.state.wrappers import PerRank, Trainable

__all__ = ["StateSize", "estimate_size"]


class StateSize(NamedTuple):
    """What a rank will store: bytes, tensors, and where they are now. `growing`: an optimizer has no state yet."""

    size_bytes: int
    tensors: int
    devices: frozenset[torch.device]
    growing: bool


def estimate_size(components: Mapping[str, Any], ranks: int) -> StateSize:
    """Return about how much of the models and optimizers this rank will store when so many ranks save together. Other
    components are small. May be called from any thread; raises a RuntimeError if the training changes a dict just now.
    """
    size_bytes, count, growing = 0.0, 0, False
    devices: set[torch.device] = set()
    with torch.no_grad():
        for component in components.values():
            inner = unwrap(component)
            copies = 1 if isinstance(component, PerRank) else ranks
            for tensor in _tensors(component, inner):
                for _, part in plain_parts(tensor):
                    size_bytes += _share(part, copies)
                    devices.add(part.device)
                    count += 1
            growing = growing or (isinstance(inner, torch.optim.Optimizer) and not inner.state)
    return StateSize(int(size_bytes), count, frozenset(devices), growing)


def _tensors(component: Any, inner: Any) -> Iterator[torch.Tensor]:
    if isinstance(inner, torch.nn.Module):
        everything = not isinstance(component, Trainable)
        own = {id(one): one for part in _parts(inner) for one in _present(part, "_parameters")}
        yield from (one for one in own.values() if everything or one.requires_grad)
        yield from {id(one): one for part in _parts(inner) for one in _present(part, "_buffers")}.values()
    elif isinstance(inner, torch.optim.Optimizer):
        for state in list(inner.state.values()):
            if isinstance(state, dict):
                yield from (value for value in list(state.values()) if isinstance(value, torch.Tensor))


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and all that are in it, each once, by a look at them: a class may have its own `modules`."""
    ahead, seen = [module], {id(module)}
    while ahead:
        part = ahead.pop()
        yield part
        for child in _present(part, "_modules"):
            if id(child) not in seen:
                seen.add(id(child))
                ahead.append(child)


def _present(module: torch.nn.Module, members: str) -> list[Any]:
    """Return the parameters, buffers or modules that a module has itself."""
    found = vars(module).get(members)
    return [one for one in found.values() if one is not None] if isinstance(found, dict) else []


def _share(tensor: torch.Tensor, ranks: int) -> float:
    """Return a rank's share of a tensor: of one that is the same on several ranks each of them writes about as much."""
    if not is_sharded(tensor):
        return float(tensor.nbytes) / ranks
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    copies: int = math.prod(size for size, placement in placed if placement.is_replicate())
    return float(tensor.to_local().nbytes) / copies
