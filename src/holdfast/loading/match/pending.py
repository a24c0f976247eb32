"""Decode values before their tensors are filled. Encoded values enter; a preview, and the values once filled, leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateMismatchError
from holdfast.loading.match.matching import Matching
from holdfast.loading.match.subclasses import fill_or_make
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, Subclass, decode
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.state.names import unwrap
from holdfast.state.tensors import is_sharded, torch_dtype

__all__ = ["Pending", "decode_values"]


@dataclass(frozen=True, slots=True)
class Pending:
    """Values whose tensors are not filled yet. `preview` has the right form; what is made *from* a tensor's content, as
    an array in another byte order is, is only right in `value()`, which makes it anew when the tensors are filled."""

    preview: Any
    value: Callable[[], Any]

    @classmethod
    def of(cls, value: Any) -> Pending:
        """Return a value that has nothing to fill."""
        return cls(value, lambda: value)

    @classmethod
    def decode(
        cls,
        values: Json,
        path: str,
        target: Callable[[str], torch.Tensor],
        subclass: Callable[[str, Subclass], torch.Tensor],
    ) -> Pending:
        """Check the values now, with a target for each tensor that they name."""
        targets: dict[str, torch.Tensor] = {}
        made: dict[str, torch.Tensor] = {}

        def find(reference: str) -> torch.Tensor:
            if reference not in targets:
                targets[reference] = target(reference)
            return targets[reference]

        def find_subclass(place: str, record: Subclass) -> torch.Tensor:
            if place not in made:
                made[place] = subclass(place, record)
            return made[place]

        preview = decode(values, path=path, tensor=find, subclass=find_subclass)
        return cls(preview, lambda: decode(values, path=path, tensor=find, subclass=find_subclass))


def decode_values(
    matching: Matching, tree: TreeRecord, values: Json, path: str, template: Mapping[str, torch.Tensor] | None = None
) -> Pending:
    """Decode values of a tree, with new memory for their tensors. `template` has live tensors, by their path: a new one
    lies on the same device, or is sharded like it."""

    def target(reference: str) -> torch.Tensor:
        leaf = matching.leaf(tree, reference)
        live = (template or {}).get(reference)
        if template is not None and matching.excluded(leaf.name):
            if live is not None:
                return live
            matching.fitted.mismatched.append(
                f"{leaf.name}: excluded, and there is no live tensor that could stay in its place"
            )
        if live is not None and is_sharded(live) and matching.takes(leaf, live):
            return matching.fill(leaf, torch.empty_like(live), fresh=True)
        if live is None and leaf.sharded and isinstance(unwrap(matching.component), torch.optim.Optimizer):
            return matching.fill(leaf, _like_parameters(matching, leaf, unwrap(matching.component)), fresh=True)
        device = live.device if live is not None else torch.device("cpu")
        dtype = live.dtype if live is not None and matching.takes(leaf, live) else None
        return matching.fill(leaf, matching.new_memory(leaf, device, dtype), fresh=True)

    subclass = partial(fill_or_make, matching, tree, None, in_place=False)
    return Pending.decode(values, paths.leaf_name(tree.name, path), target, subclass)


def _like_parameters(matching: Matching, leaf: TensorRecord, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return new memory for sharded state of an optimizer whose state dict does not name the parameter of it: sharded
    as all parameters of its shape are, whole where no parameter is sharded."""
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    if parameters and not any(isinstance(parameter, DTensor) for parameter in parameters):
        return matching.new_memory(leaf, parameters[0].device)
    alike = [parameter for parameter in parameters if tuple(parameter.shape) == leaf.shape]
    layouts = {(one.device_mesh, one.placements) if isinstance(one, DTensor) else None for one in alike}
    if len(layouts) == 1:
        return torch.empty_like(alike[0], dtype=torch_dtype(leaf.dtype))
    raise StateMismatchError(
        "a sharded tensor in an optimizer whose state dict has a layout of its own, and which has no state yet: "
        + ("parameters of its shape are sharded in different ways" if alike else "no parameter has its shape"),
        component=matching.fitted.component,
        leaf=leaf.name,
        advice="its sharding is not known: make the optimizer's state before the restore, by a step "
        "with a learning rate of 0; no live object was changed",
    )
