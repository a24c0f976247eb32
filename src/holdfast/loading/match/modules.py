"""Fit a model. Its tree and the live module enter; requests for its own memory, and the act that loads it, leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holdfast.loading.files import reference_of
from holdfast.loading.match.forms import object_of
from holdfast.loading.match.matching import Matching
from holdfast.loading.match.pending import Pending, decode_values
from holdfast.loading.match.subclasses import described_value, fill_inner, pair_tensors, refuse_other_content
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Json, subclass_of
from holdfast.ondisk.manifest import TreeRecord
from holdfast.ondisk.merging import references
from holdfast.ondisk.regions import Cut
from holdfast.state.modules import load_module
from holdfast.state.names import cut_at, unwrap
from holdfast.state.state_dicts import tree_of
from holdfast.state.tensors import shares_elements

__all__ = ["match_module"]


def match_module(matching: Matching, tree: TreeRecord) -> None:
    """Fit a module, key by key of its state dict."""
    module = unwrap(matching.component)
    state = matching.live_state()
    matching.require_memory(state, matching.fitted.component)
    live = tree_of(matching.fitted.component, matching.component, state, None)
    live_values, saved_values = object_of(live.values, tree), _renamed(matching, tree)
    wanted: dict[str, list[str]] = {}
    inner: dict[str, str] = {}
    extras: dict[str, Pending] = {}
    spared: set[str] = set()
    for key, value in live_values.items():
        # An extra state is loaded by the module itself, also where it is a tensor.
        own = key.rpartition(".")[2] == "_extra_state"
        reference, subclass = (None, None) if own else (reference_of(value), subclass_of(value))
        if matching.excluded(paths.leaf_name(tree.name, key)):
            spared |= {reference} if reference is not None else set(references(value))
        elif key not in saved_values:
            matching.fitted.missing.append(paths.leaf_name(tree.name, key))
        elif reference is not None:
            wanted.setdefault(reference, []).append(key)
        elif subclass is not None:
            pairs = pair_tensors(matching, paths.leaf_name(tree.name, key), subclass, subclass_of(saved_values[key]))
            refuse_other_content(matching, tree, inner, pairs)
            inner.update(pairs)
            matching.fitted.common += 1
        else:
            extras[key] = decode_values(matching, tree, saved_values[key], key)
    matching.note_unused(tree, [key for key in saved_values if key not in live_values])
    matching.fitted.held, matching.fitted.stored = len(live_values), len(saved_values)
    matching.fitted.common += len(extras)
    for path, keys in wanted.items():
        # A tied tensor of which one name is excluded is excluded.
        if path not in spared:
            matching.fitted.common += len(keys)
            cut = cut_at(matching.cuts, path, live.tensors[path])
            _want(matching, tree, live.tensors[path], keys, saved_values, cut)
    for path, reference in inner.items():
        if path not in spared:
            fill_inner(matching, matching.leaf(tree, reference), live.tensors[path])

    def take_up() -> None:
        # The tensors in it are the live ones, filled by now: what is left to do is what the modules' own hooks and
        # extra states want to do.
        state.update({key: extra.value() for key, extra in extras.items()})
        load_module(matching.fitted.component, module, state)

    matching.fitted.take_up = take_up


def _want(
    matching: Matching,
    tree: TreeRecord,
    tensor: torch.Tensor,
    keys: Sequence[str],
    saved_values: Mapping[str, Json],
    cut: Cut | None,
) -> None:
    """Request one live tensor, known by one name or, when it is tied, by several, or note why it does not fit."""
    references = {key: reference_of(saved_values[key]) for key in keys}
    for key, reference in references.items():
        if reference is None:
            was = described_value(saved_values[key])
            matching.fitted.mismatched.append(f"{paths.leaf_name(tree.name, key)}: was {was} when it was saved")
            return
    leaves = [matching.leaf(tree, reference) for reference in references.values() if reference is not None]
    if len(leaves) > 1 and len({tuple(chunk.digests for chunk in leaf.chunks) for leaf in leaves}) > 1:
        matching.fitted.mismatched.append(f"{leaves[0].name}: is tied to {leaves[1].name} now, and differed when saved")
    leaf = leaves[0]
    if not tensor.is_contiguous() and shares_elements(tensor):
        matching.fitted.mismatched.append(
            f"{leaf.name}: its elements share memory now (expand), so it cannot be filled"
        )
        return
    if tensor.is_inference():
        # Module.load_state_dict raises for it, after others have changed.
        matching.fitted.mismatched.append(f"{leaf.name}: was made in torch.inference_mode(), so it cannot be filled")
        return
    if not matching.takes(leaf, tensor, cut):
        matching.note_other_form(leaf, tensor, paths.leaf_name(tree.name, keys[0]), cut)
        return
    matching.fill(leaf, tensor, fresh=False, cut=cut)


def _renamed(matching: Matching, tree: TreeRecord) -> dict[str, Json]:
    """Return the saved values of a module by the names that they have now. The tensors that they refer to keep their
    names."""
    saved = object_of(matching.saved.values(tree), tree)
    names = matching.renamed(tree.component, saved)
    news = {old: new for new, old in names.items()}
    for old in saved:
        matching.note_renamed(tree, old, news.get(old))
    return {new: saved[old] for new, old in names.items()}
