"""Fit tensors of wrapper subclasses, whose inner tensors are leaves. Stored forms enter; tensors to fill leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateMismatchError
from holdfast.loading.files import reference_of
from holdfast.loading.match.forms import fits, other_form
from holdfast.loading.match.matching import Matching
from holdfast.ondisk.codec import Json, Subclass, class_name, decode, subclass_of, typed
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.state.tensors import (
    cut_like,
    even_shards,
    flattened,
    is_same_form,
    is_sharded,
    stored_form,
    tensor_class,
    torch_dtype,
    unflattened,
)

__all__ = ["described_value", "fill_inner", "fill_or_make", "pair_tensors", "refuse_other_content"]


def pair_tensors(matching: Matching, leaf: str, live: Subclass, saved: Subclass | None) -> dict[str, str]:
    """Return which saved tensor each inner tensor of a live one takes; none where class or context are others."""
    if saved is None or not is_same_form(live, saved):
        was = "another value" if saved is None else _described(saved)
        matching.fitted.mismatched.append(f"{leaf}: {was} in the checkpoint, {_described(live)} now")
        return {}
    pairs: dict[str, str] = {}
    for name, value in live.tensors.items():
        nested, reference, other = subclass_of(value), reference_of(value), reference_of(saved.tensors[name])
        if nested is not None:
            pairs.update(pair_tensors(matching, f"{leaf}.{name}", nested, subclass_of(saved.tensors[name])))
        elif reference is not None and other is not None:
            pairs[reference] = other
        else:
            matching.fitted.mismatched.append(
                f"{leaf}.{name}: a tensor of a subclass in the checkpoint, a plain one now"
            )
    return pairs


def refuse_other_content(
    matching: Matching, tree: TreeRecord, known: Mapping[str, str], pairs: Mapping[str, str]
) -> None:
    """Note a live tensor that is tied now, and whose names had different content when saved."""
    for path, reference in pairs.items():
        leaf, other = matching.leaf(tree, reference), matching.leaf(tree, known.get(path, reference))
        if [chunk.digests for chunk in leaf.chunks] != [chunk.digests for chunk in other.chunks]:
            matching.fitted.mismatched.append(f"{other.name}: is tied to {leaf.name} now, and differed when saved")


def fill_inner(matching: Matching, leaf: TensorRecord, tensor: torch.Tensor) -> None:
    """Request one inner tensor, or note that it has another shape or type."""
    if fits(leaf, tensor):
        matching.fill(leaf, tensor, fresh=False)
    else:
        matching.fitted.mismatched.append(other_form(leaf, tensor))


def fill_or_make(
    matching: Matching, tree: TreeRecord, parameter: torch.Tensor | None, place: str, saved: Subclass, *, in_place: bool
) -> torch.Tensor:
    """Return a tensor of a wrapper subclass: the live one, to be filled, or a new one of the same class and context."""
    live = matching.live_subclass(place[len(tree.name) + 1 :])
    if live is None:
        return _new_subclass(matching, tree, place, saved, parameter)
    tensors: dict[str, torch.Tensor] = {}
    form = stored_form(live, tensors)
    pairs = pair_tensors(matching, place, form, saved)
    if pairs and not in_place:
        return _new_subclass(matching, tree, place, saved, live)
    for path, reference in pairs.items():
        fill_inner(matching, matching.leaf(tree, reference), tensors[path])
    return live


def _new_subclass(
    matching: Matching, tree: TreeRecord, place: str, saved: Subclass, like: torch.Tensor | None
) -> torch.Tensor:
    """Return a new tensor of the saved class, cut and placed like another. Its class must be known to the program: it
    is that of the other tensor, or registered."""
    known = flattened(like) if like is not None else None
    same = known is not None and class_name(known.kind) == saved.name
    kind: Any = known.kind if known is not None and same else tensor_class(saved.name)
    if kind is None:
        _cannot_be_made(matching, place, f"a tensor of class '{saved.name}', which is not registered")
    if saved.shards != (even_shards(like) if is_sharded(like) else 1):
        _cannot_be_made(matching, place, f"a '{saved.name}' in {saved.shards} shards, and it is cut in another way now")
    inner = {
        name: _new_inner(matching, tree, f"{place}.{name}", value, like if is_sharded(like) else None, _device(like))
        for name, value in saved.tensors.items()
    }
    context = known.context if known is not None and same else decode(saved.context, path=place, tensor=None)
    return unflattened(kind, inner, context, saved, place, like)


def _cannot_be_made(matching: Matching, place: str, what: str) -> NoReturn:
    raise StateMismatchError(
        f"the checkpoint has {what}, and there is no live tensor to fill",
        component=matching.fitted.component,
        leaf=place,
        advice="register its class with holdfast.register_type, or restore as many shards as were saved",
    )


def _new_inner(
    matching: Matching, tree: TreeRecord, place: str, value: Json, mesh: DTensor | None, device: torch.device
) -> torch.Tensor:
    """Return new memory for one inner tensor; of a sharded one, for this rank's piece."""
    reference, nested = reference_of(value), subclass_of(value)
    if nested is not None:
        made = _new_subclass(matching, tree, place, nested, mesh if mesh is not None else torch.empty(0, device=device))
        return made.to_local() if is_sharded(made) else made
    leaf = matching.leaf(tree, reference or "")
    if mesh is None:
        return matching.fill(leaf, matching.new_memory(leaf, device), fresh=True)
    shards = even_shards(mesh) or 1
    if not leaf.shape or leaf.shape[0] % shards:
        _cannot_be_made(matching, place, f"a tensor of shape {list(leaf.shape)} that is no {shards} equal pieces")
    for chunk in leaf.chunks:
        matching.saved.require_file(chunk.file)
    rows = leaf.shape[0] // shards
    local = torch.empty((rows, *leaf.shape[1:]), dtype=torch_dtype(leaf.dtype), device=device)
    matching.fill(leaf, cut_like(mesh, local), fresh=True)
    return local


def _described(subclass: Subclass) -> str:
    return f"'{subclass.name}' {subclass.dtype} {list(subclass.shape)} with the context {typed(subclass.context):.300}"


def described_value(value: Json) -> str:
    """Return what a stored value is, for a message about a tensor that is live now."""
    subclass = subclass_of(value)
    return "no tensor" if subclass is None else _described(subclass)


def _device(like: torch.Tensor | None) -> torch.device:
    return like.device if like is not None else torch.device("cpu")
