"""Take notes while one component is fitted: requests for memory to fill, and differences. Changes no live object."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.loading.match.forms import fits, is_castable, other_form
from holdfast.loading.match.records import Fitted, SavedState
from holdfast.loading.renaming import Renamer
from holdfast.loading.requests import Request
from holdfast.loading.strategy import LoadStrategy
from holdfast.loading.suggestions import CASTABLE
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import TensorRecord, TreeRecord
from holdfast.ondisk.regions import Cut
from holdfast.state.names import cuts_of, unwrap
from holdfast.state.rng import random_state_kept
from holdfast.state.state_dicts import component_state, live_subclasses, values_state
from holdfast.state.tensors import dtype_name, has_host_memory, held_piece, require_memory, torch_dtype

__all__ = ["Matching"]


class Matching:
    """One component that is being fitted: what was saved, what is live, and notes of what was found, in `fitted`."""

    def __init__(
        self,
        fitted: Fitted,
        component: Any,
        components: Mapping[str, Any],
        saved: SavedState,
        strategy: LoadStrategy,
    ) -> None:
        self.fitted = fitted
        self.component = component
        self.components = components
        self.saved = saved
        self.strategy = strategy
        self._live_subclasses: dict[str, torch.Tensor] | None = None
        # The tree that was asked about last, and the front of its leaves' names: there may be very many leaves.
        self._tree: TreeRecord | None = None
        self._front = ""
        self.cuts = cuts_of(fitted.component, components)

    def note_difference(self, difference: str, ways: str) -> None:
        """List a difference that a strict restore refuses, with the ways through, and a loose one accepts."""
        if self.strategy.strict:
            self.fitted.mismatched.append(f"{difference}; {ways}")
        else:
            self.fitted.accepted.append(difference)

    def note_unused(self, tree: TreeRecord, keys: Sequence[str]) -> None:
        """List what only the checkpoint has, but for what is excluded."""
        names = (paths.leaf_name(tree.name, key) for key in keys)
        self.fitted.unused += [name for name in names if not self.excluded(name)]

    def note_renamed(self, tree: TreeRecord, old: str, new: str | None) -> None:
        """List a leaf that has another name now, or that a rename drops."""
        if new != old:
            now = "dropped" if new is None else f"is {paths.leaf_name(tree.name, new)} now"
            self.fitted.renamed.append(f"{paths.leaf_name(tree.name, old)}: {now}")

    def renamed(self, model: str, names: Collection[str]) -> dict[str, str]:
        """Return the saved name of each leaf or parameter of a model by the name that it has now."""
        rename = self.strategy.renaming(model)
        if rename is None:
            return {name: name for name in names}
        renamer = Renamer(rename)
        entries = set(renamer.unused)
        try:
            found = renamer.names(names)
        except UsageError as error:
            raise error.at(component=self.fitted.component) from None
        self.fitted.rules |= {(model, entry) for entry in entries - renamer.unused}
        return found

    def takes(self, leaf: TensorRecord, tensor: torch.Tensor, cut: Cut | None = None) -> bool:
        """Return whether a tensor can be filled with a leaf: it has its shape and its type, or one that the strategy
        allows to convert to."""
        if fits(leaf, tensor, cut):
            return True
        return self.strategy.cast and is_castable(leaf, tensor, cut)

    def note_other_form(self, leaf: TensorRecord, tensor: torch.Tensor, name: str, cut: Cut | None = None) -> None:
        """List a live tensor that has another shape or type than the leaf for it, with the way through."""
        text = other_form(leaf, tensor, name, cut)
        castable = is_castable(leaf, tensor, cut)
        self.fitted.mismatched.append(f"{text}{CASTABLE}" if castable else text)

    def excluded(self, leaf: str) -> bool:
        """Return whether the strategy excludes a leaf, and note the glob that does."""
        if not self.strategy.exclude:
            return False
        glob = self.strategy.excluding(leaf)
        if glob is not None:
            self.fitted.globs.add(glob)
            self.fitted.left_out.add(leaf)
        return glob is not None

    def leaf(self, tree: TreeRecord, reference: str) -> TensorRecord:
        """Return the leaf that the values of a tree refer to."""
        if tree is not self._tree:
            self._tree, self._front = tree, f"{tree.name}."
        leaf = self.saved.leaves.get(self._front + reference) if reference else self.saved.leaves.get(tree.name)
        if leaf is None:
            name = paths.leaf_name(tree.name, reference)
            raise CorruptCheckpointError("the values name a tensor that is not listed", leaf=name, file=tree.file)
        return leaf

    def fill(self, leaf: TensorRecord, tensor: torch.Tensor, *, fresh: bool, cut: Cut | None = None) -> torch.Tensor:
        """Request that a tensor be filled with a leaf, and return the tensor. Of a sharded one this rank's piece is."""
        box, local = held_piece(tensor, leaf=leaf.name, cut=cut)
        if tensor.dtype != torch_dtype(leaf.dtype):
            self.fitted.cast.append(f"{leaf.name}: {leaf.dtype} in the checkpoint, {dtype_name(tensor)} now")
        if 0 not in box.sizes:
            self.fitted.requests.append(Request(leaf, box, local, fresh))
        return tensor

    def new_memory(self, leaf: TensorRecord, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for a whole leaf, once it is known that there are as many bytes to fill it with."""
        for chunk in leaf.chunks:
            self.saved.require_file(chunk.file)
        return torch.empty(leaf.shape, dtype=dtype or torch_dtype(leaf.dtype), device=device)

    def require_memory(self, state: Any, path: str) -> None:
        """Refuse a live state with a tensor that cannot be filled, at any depth."""
        if isinstance(state, torch.Tensor):
            require_memory(state, component=self.fitted.component, leaf=path)
        elif isinstance(state, Mapping | list | tuple):
            for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
                if not has_host_memory(value):
                    self.require_memory(value, f"{path}.{key}")

    def live_state(self) -> Any:
        """Return the component's state in the form in which it was saved."""
        if self.fitted.kind == "values":
            return values_state(unwrap(self.component))
        return component_state(self.fitted.component, self.component, self.components)

    def live_subclass(self, path: str) -> torch.Tensor | None:
        """Return the live tensor of a wrapper subclass at a path of the component's state."""
        if self._live_subclasses is None:
            with random_state_kept():
                self._live_subclasses = live_subclasses(self.live_state())
        return self._live_subclasses.get(path)
