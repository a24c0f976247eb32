"""Wrappers around components: the same on all ranks, one per rank, trainable parts only, shards of whole tensors.

A user's object enters a wrapper; what a save and a restore ask of it leaves. Imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import StateMismatchError, UsageError
from holdfast.ondisk.paths import check_component_name
from holdfast.state.framework_wrappers import is_loader_adapter, load_loader_adapter, loader_adapter_state

__all__ = ["PerRank", "Sharded", "Shared", "Trainable"]


class PerRank:
    """A component of which every rank has its own state, such as a data loader.

    `group` (a DeviceMesh of one dimension or a process group) declares that ranks with the same position in that group
    hold the same state: it is stored once and given to all of them. `covers` names other components of the same
    manager, which are not restored separately once this one is restored.
    """

    def __init__(self, component: Any, group: Any = None, covers: Sequence[str] = ()) -> None:
        if isinstance(component, PerRank | Shared | Sharded | Trainable):
            raise UsageError(f"PerRank cannot wrap {component!r}", advice="wrap the component itself")
        if isinstance(covers, str | Mapping) or not isinstance(covers, Iterable):
            raise UsageError(
                f"covers={covers!r:.100}", advice="give a list of names of other components, such as covers=['sampler']"
            )
        self.component = component
        self.group = group
        self.covers = tuple(check_component_name(name) for name in covers)

    def __repr__(self) -> str:
        return f"PerRank({type(self.component).__name__})"

    def place(self, rank: int, size: int) -> tuple[int, int]:
        """Return this rank's index among the states that are kept apart, and their number."""
        if self.group is None:
            return rank, size
        return _place_in(self.group, "PerRank(group=...)")


class Shared:
    """A component that is the same on all ranks, on the user's word: the leader's state is stored and given to all."""

    def __init__(self, component: Any) -> None:
        if isinstance(component, PerRank | Shared | Sharded):
            raise UsageError(f"Shared cannot wrap {component!r}", advice="wrap the component itself")
        self.component = component

    def __repr__(self) -> str:
        return f"Shared({type(self.component).__name__})"


class United(Shared):
    """A plain state dict of which each rank may hold other keys. What any rank has is stored; of what several ranks
    have under one key, the first one's counts."""


class Sharded:
    """A model of which some parameters are this rank's shards of whole tensors, as plain tensors: tensor parallelism in
    the manner of Megatron. They are stored as the whole tensors, and restored into any other layout.

    layouts: for each glob over the names of parameters and buffers, such as `"*.up.weight"`, the dimension along which
        they are cut and the group (a process group or a DeviceMesh of one dimension) over whose ranks the equal shards
        lie, in the order of the ranks. What no glob matches is the same on all ranks, and is compared.

    The state of an optimizer that has a parameter's shape is cut as the parameter is.
    """

    def __init__(self, module: Any, layouts: Mapping[str, tuple[int, Any]]) -> None:
        import torch

        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"Sharded takes a torch.nn.Module, not {type(module).__name__}")
        if not isinstance(layouts, Mapping) or not layouts:
            raise UsageError(
                f"layouts={layouts!r:.100}", advice="give a mapping such as {'*.up.weight': (0, tensor_parallel_group)}"
            )
        self.component = module
        self.layouts = {glob: _checked_layout(glob, layout) for glob, layout in layouts.items()}

    def __repr__(self) -> str:
        return f"Sharded({type(self.component).__name__})"


def _checked_layout(glob: object, layout: object) -> tuple[int, int, int]:
    """Return the dimension, this rank's place in the group, and how many places there are."""
    if not isinstance(glob, str) or not glob:
        raise UsageError(f"a glob of Sharded is a text, not {glob!r:.100}")
    if (
        not isinstance(layout, tuple)
        or len(layout) != 2
        or isinstance(layout[0], bool)
        or not isinstance(layout[0], int)
    ):
        raise UsageError(
            f"the layout of '{glob}' is {layout!r:.100}",
            advice="give a pair of a dimension and a group, such as (0, group)",
        )
    index, count = _place_in(layout[1], f"the layout of '{glob}'")
    return layout[0], index, count


def _place_in(group: Any, what: str) -> tuple[int, int]:
    """Return this rank's place in a process group or a mesh of one dimension, and how many places there are."""
    if hasattr(group, "get_local_rank"):
        if group.ndim != 1:
            raise UsageError(
                f"{what} takes a mesh of one dimension, not of {group.ndim}", advice="pick one, such as mesh['dp']"
            )
        if group.get_coordinate() is None:
            raise UsageError(f"{what}: this rank is not in the mesh", advice="give the mesh that this rank is in")
        return int(group.get_local_rank()), int(group.size())
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"{what} takes a process group or a DeviceMesh, not {type(group).__name__}",
            advice="new_group gives a process group only to the ranks that are in it",
        )
    index = dist.get_rank(group)
    if index < 0:
        raise UsageError(f"{what}: this rank is not in the group", advice="give the group that this rank is in")
    return index, dist.get_world_size(group)


class Trainable:
    """A model of which only what trains is stored, as for adapters; the frozen base is recorded by its fingerprint.

    Restoring onto another base is a `GuardMismatchError`.
    """

    def __init__(self, module: Any) -> None:
        import torch

        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"Trainable takes a torch.nn.Module, not {type(module).__name__}")
        self.component = module

    def __repr__(self) -> str:
        return f"Trainable({type(self.component).__name__})"


def has_plain_state(component: Any) -> bool:
    """Return whether a component is one whose state Holdfast takes itself: a dict, or a generator of torch or NumPy."""
    if isinstance(component, dict):
        return not callable(getattr(component, "state_dict", None))
    import numpy
    import torch

    return isinstance(component, torch.Generator | numpy.random.Generator)


def state_of(component: Any) -> Any:
    """Return a component's state: its `state_dict()`, or what a dict or a generator holds."""
    if is_loader_adapter(component):
        return loader_adapter_state(component)
    if not has_plain_state(component):
        return component.state_dict()
    if isinstance(component, dict):
        return dict(component)
    import torch

    if isinstance(component, torch.Generator):
        return {"state": component.get_state()}
    return {"bit_generator": component.bit_generator.state}


def load_state(component: Any, state: Any) -> None:
    """Give a component its state: by `load_state_dict`, or, for a dict or a generator, in place."""
    if is_loader_adapter(component):
        load_loader_adapter(component, state)
        return
    if not has_plain_state(component):
        component.load_state_dict(state)
        return
    check_plain_state(component, state)
    if isinstance(component, dict):
        # By item: the update() of a subclass may do something else, as that of a Counter, which adds.
        for key, value in state.items():
            component[key] = _filled(component.get(key), value)
        return
    import torch

    if isinstance(component, torch.Generator):
        component.set_state(state["state"].cpu())
    else:
        component.bit_generator.state = state["bit_generator"]


def _filled(live: Any, saved: Any) -> Any:
    """Return a saved value, in the memory of the live tensor where that has its type and shape: an optimizer, or the
    model whose `state_dict()` a dict is, may hold the same tensor."""
    import torch

    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if not _is_fillable(live, saved):
            return saved
        try:
            with torch.no_grad():
                return live.copy_(saved)
        except RuntimeError:  # memory that cannot be written as a whole, such as an expanded tensor's
            return saved
    if isinstance(live, Mapping) and isinstance(saved, dict):
        for key, value in saved.items():
            saved[key] = _filled(live.get(key), value)
    elif isinstance(live, list | tuple) and isinstance(saved, list) and len(live) == len(saved):
        saved[:] = map(_filled, live, saved)
    return saved


def filled_pairs(live: Any, saved: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the tensors of a dict that `load_state` tries to fill in their own memory, each with the saved one. Saved
    tensors need not be filled yet; nothing changes."""
    import torch

    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if _is_fillable(live, saved):
            yield live, saved
    elif isinstance(live, Mapping) and isinstance(saved, dict):
        for key, value in saved.items():
            yield from filled_pairs(live.get(key), value)
    elif isinstance(live, list | tuple) and isinstance(saved, list) and len(live) == len(saved):
        for one, value in zip(live, saved, strict=True):
            yield from filled_pairs(one, value)


def _is_fillable(live: Any, saved: Any) -> bool:
    return live is not saved and (live.dtype, live.shape) == (saved.dtype, saved.shape)


def check_plain_state(component: Any, state: Any) -> None:
    """Refuse what is no state of this dict or generator, without changing it. Tensors need not be filled yet."""
    import torch

    if isinstance(component, dict):
        if not isinstance(state, Mapping):
            raise StateMismatchError(f"a dict cannot take {type(state).__name__}")
        return
    wanted = "state" if isinstance(component, torch.Generator) else "bit_generator"
    held = state.get(wanted) if isinstance(state, Mapping) else None
    if isinstance(component, torch.Generator):
        ours = component.get_state()
        fits = isinstance(held, torch.Tensor) and (held.dtype, held.shape) == (ours.dtype, ours.shape)
    else:
        kind = component.bit_generator.state["bit_generator"]
        fits = isinstance(held, Mapping) and held.get("bit_generator") == kind
    if not fits:
        raise StateMismatchError(
            f"this is no state of a {type(component).__module__}.{type(component).__name__} of this kind",
            advice="build the generator as it was when it was saved, or leave it out with skip=",
        )


def check_covers(components: Mapping[str, Any]) -> None:
    """Refuse a `covers` that names no component, or that goes round in a circle: nothing in there would be restored."""
    covers = {name: one.covers for name, one in components.items() if isinstance(one, PerRank)}
    for name, covered in covers.items():
        for other in covered:
            others = [one for one in components if one != name]
            if other not in others:
                raise UsageError(
                    f"covers names '{other}', which is no other component of the manager",
                    component=name,
                    advice=f"name one of {', '.join(others)}" if others else "leave it out: there is no other one",
                )
            if name in _all_covered(other, covers):
                raise UsageError(
                    f"covers names '{other}', which covers '{name}'",
                    component=name,
                    advice="take one of the two out, or neither is restored",
                )


def _all_covered(name: str, covers: Mapping[str, Sequence[str]]) -> set[str]:
    """Return what comes along with a component, also by way of others."""
    found: set[str] = set()
    rest = [name]
    while rest:
        new = set(covers.get(rest.pop(), ())) - found
        found |= new
        rest += new
    return found
