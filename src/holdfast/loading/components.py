"""Match all components of this rank to a checkpoint. A request and a checkpoint enter; how each component fits
leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.errors import StateMismatchError, UsageError
from holdfast.loading.files import ValueFiles
from holdfast.loading.match import Fitted, Place, SavedState, match
from holdfast.loading.records import LoadRequest
from holdfast.loading.strategy import LoadStrategy
from holdfast.loading.verdict import MatchReport, Share
from holdfast.ondisk.manifest import IMPORTED_FROM, TreeRecord
from holdfast.ranks.base import call_each
from holdfast.runs.checkpoint import Checkpoint
from holdfast.state.frozen import take_frozen
from holdfast.state.names import holds_state, kind_of, unwrap
from holdfast.state.rng import RNGState
from holdfast.state.wrappers import PerRank

__all__ = ["Matched", "match_components"]


@dataclass(slots=True)
class Matched:
    """How the components of one rank fit. `chosen` are those that the strategy takes, `absent` those of them that the
    checkpoint lacks, and `skipped` what stays as it is, each with the reason."""

    fitted: list[Fitted] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left_for_world: list[str] = field(default_factory=list)

    def report(self, request: LoadRequest) -> MatchReport:
        """Return what the leader needs to decide for all ranks."""
        components = request.components
        return MatchReport(
            missing=_all(self.fitted, "missing"),
            unused=_all(self.fitted, "unused"),
            mismatched=_all(self.fitted, "mismatched"),
            globs=_all(self.fitted, "globs"),
            frozen=take_frozen({one.component: components[one.component] for one in self.fitted}, anew=True),
            trees=_all(self.fitted, "trees"),
            attached=tuple(components),
            absent=tuple(self.absent),
            shares=self._shares(request),
            accepted=(*_all(self.fitted, "accepted"), *self.left_for_world),
            renamed=_all(self.fitted, "renamed"),
            cast=_all(self.fitted, "cast"),
            rules=tuple(sorted({rule for one in self.fitted for rule in one.rules})),
            deferred=tuple(one.component for one in self.fitted if request.defer_rng and _is_rng(one, request)),
        )

    def _shares(self, request: LoadRequest) -> tuple[Share, ...]:
        """Return how much of each chosen component is restored. The random state does not count: every process has
        one."""
        components = request.components
        fitted = {one.component: one for one in self.fitted}
        shares = []
        for name in self.chosen:
            one = fitted.get(name)
            if one is not None and not _is_rng(one, request):
                shares.append(Share(name, one.kind, True, one.held, one.stored, one.common, len(one.missing)))
            elif one is None:
                held = int(holds_state(components[name]))
                # A per-rank state of another number of ranks is left out on request, also where it is a model's.
                left = isinstance(components[name], PerRank) and name not in self.absent
                shares.append(Share(name, "values" if left else kind_of(name, components[name]), False, held))
        return tuple(shares)


def match_components(request: LoadRequest, checkpoint: Checkpoint, place: Place) -> Matched:
    """Match every component that is to be restored, from the manifest and the values alone."""
    manifest = checkpoint.manifest
    trees: dict[str, list[TreeRecord]] = {}
    for tree in manifest.trees:
        trees.setdefault(tree.component, []).append(tree)
    leaves = {tensor.name: tensor for tensor in manifest.tensors}
    same_torch = manifest.versions.get("torch") == str(torch.__version__)
    files = ValueFiles(checkpoint, checked=request.verify == "full")
    saved = SavedState(leaves, trees, files.values, files.require, manifest.world_size, same_torch)
    matched = Matched()
    chosen = _choose(matched, request, trees, checkpoint)

    def match_one(name: str) -> Fitted:
        return match(name, request.components, saved, request.strategy, place)

    for name, fitted in zip(chosen, call_each(match_one, chosen), strict=True):
        if fitted.skipped:
            matched.skipped.append(f"{name}: {fitted.skipped}")
            matched.left_for_world.append(f"{name}: {fitted.skipped}")
        else:
            matched.fitted.append(fitted)
    return matched


def _choose(
    matched: Matched, request: LoadRequest, trees: Mapping[str, Sequence[TreeRecord]], checkpoint: Checkpoint
) -> list[str]:
    """Return the components to restore. One that was named and is nowhere, or that the checkpoint lacks, is an
    error."""
    components, strategy = request.components, request.strategy
    for name in strategy.named():
        if name not in components and not (name in strategy.skip and name in trees):
            raise UsageError(
                f"there is no component '{name}' to restore", advice=f"the manager has {', '.join(sorted(components))}"
            )
    kinds = {name: kind_of(name, unwrap(component)) for name, component in components.items()}
    _check_renamed(strategy, kinds, trees)
    chosen = [name for name in components if strategy.takes(name, kinds[name])]
    matched.skipped += [f"{name}: left out by the strategy" for name in components if name not in chosen]
    matched.skipped += [f"{name}: no such component is attached" for name in trees if name not in components]
    covered = {
        name
        for cover in chosen
        if isinstance(components[cover], PerRank) and cover in trees
        for name in components[cover].covers
    }
    matched.skipped += [f"{name}: covered by another component" for name in chosen if name in covered]
    # What another tool saved seldom has a random state of ours; the one of this process goes on.
    unknown = {
        name
        for name in chosen
        if IMPORTED_FROM in checkpoint.head.versions
        and name not in trees
        and name not in strategy.named()
        and isinstance(unwrap(components[name]), RNGState)
    }
    matched.skipped += [f"{name}: the checkpoint was imported, and its source had none" for name in unknown]
    matched.chosen = chosen = [name for name in chosen if name not in covered | unknown]
    matched.absent = [name for name in chosen if name not in trees]
    if matched.absent and strategy.on_missing == "error":
        raise StateMismatchError(
            "the checkpoint has no such component",
            step=checkpoint.step,
            missing=matched.absent,
            advice=f"its components are {', '.join(sorted(trees))}; LoadStrategy(on_missing='skip') continues without",
        )
    return [name for name in chosen if name in trees]


def _check_renamed(strategy: LoadStrategy, kinds: Mapping[str, str], trees: Mapping[str, Sequence[TreeRecord]]) -> None:
    """Refuse to rename leaves of a component that is no model, or that is nowhere."""
    for name in strategy.renamed_components():
        kind = kinds.get(name) or next((tree.kind for tree in trees.get(name, ())), None)
        if kind != "module":
            models = ", ".join(sorted(one for one, kind in kinds.items() if kind == "module"))
            raise UsageError(
                f"rename names the component '{name}', which is " + ("no model" if kind else "not there"),
                advice=f"the manager has the models {models}; state of optimizers follows them",
            )


def _is_rng(fitted: Fitted, request: LoadRequest) -> bool:
    return isinstance(unwrap(request.components[fitted.component]), RNGState)


def _all(fitted: Sequence[Fitted], name: str) -> tuple[str, ...]:
    return tuple(text for one in fitted for text in getattr(one, name))
