"""Decide from all ranks' reports whether a checkpoint fits. Reports enter on the leader; one verdict for all leaves.

What does not fit is an error that names everything at once, before any live object has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.errors import StateMismatchError, UsageError
from holdfast.loading.guards import check_guards
from holdfast.loading.records import LoadRequest
from holdfast.loading.renaming import rename_entries
from holdfast.loading.strategy import LoadStrategy
from holdfast.loading.suggestions import Differences, suggestion
from holdfast.ranks.wording import ranks_in_words
from holdfast.runs.checkpoint import Checkpoint
from holdfast.state.frozen import frozen_guards
from holdfast.state.trees import FrozenEntry

logger = logging.getLogger("holdfast")

__all__ = ["MatchReport", "Share", "Texts", "Verdict", "judge", "log_differences", "union"]

_SHOWN_NAMES = 5

Texts = tuple[str, ...]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """How much of one component is restored on one rank. `restored`: the checkpoint has it, and it is not skipped.
    `missing` counts the leaves that the checkpoint does not have."""

    component: str
    kind: str
    restored: bool
    held: int = 0
    stored: int = 0
    common: int = 0
    missing: int = 0


class MatchReport(msgspec.Struct, frozen=True, array_like=True):
    """What one rank found in a candidate: its damage, or how its part fits."""

    damage: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    frozen: tuple[FrozenEntry, ...] = ()
    trees: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    accepted: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    deferred: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The leader's decision about a candidate: its damage, or what a loose restore leaves as it is."""

    damage: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unclaimed: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()


def judge(reports: Sequence[MatchReport], request: LoadRequest, checkpoint: Checkpoint) -> Verdict:
    """Decide, on the leader, whether a sound checkpoint fits all ranks. What does not fit is an error."""
    strategy = request.strategy
    missing = sorted({name for report in reports for name in report.missing})
    mismatched = sorted({text for report in reports for text in report.mismatched})
    unexpected = sorted({*_unexpected(reports), *_stages_left(reports, checkpoint)})
    useless = sorted(set(strategy.exclude) - {glob for report in reports for glob in report.globs})
    if useless and request.globs_must_match:
        raise UsageError(f"exclude={useless[0]!r} matches no leaf", step=checkpoint.step)
    if request.globs_must_match:
        _require_rules(strategy, reports, checkpoint.step)
    misfits = _Misfits(checkpoint, strategy, missing, unexpected, _by_kind(reports))
    if mismatched or (strategy.strict and (missing or unexpected)):
        raise StateMismatchError(
            "checkpoint and live objects do not fit together",
            step=checkpoint.step,
            missing=missing if strategy.strict else (),
            unexpected=unexpected if strategy.strict else (),
            mismatched=mismatched,
            advice=_advice(strategy, one_sided=bool(missing or unexpected), mismatched=bool(mismatched))
            + misfits.to_paste(mismatched),
        )
    misfits.require_something([share for report in reports for share in report.shares])
    misfits.require_something_on_each(reports)
    guards = frozen_guards({entry for report in reports for entry in report.frozen})
    check_guards(checkpoint, guards, strategy, logs=True)
    return Verdict(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        absent=union([report.absent for report in reports]),
        unclaimed=_unclaimed(union([report.attached for report in reports]), request, checkpoint),
        accepted=union([report.accepted for report in reports]),
        renamed=union([report.renamed for report in reports]),
        cast=union([report.cast for report in reports]),
        deferred=union([report.deferred for report in reports]),
    )


def _require_rules(strategy: LoadStrategy, reports: Sequence[MatchReport], step: int) -> None:
    """Refuse a rename of which an entry matches nothing in any model, but for models that are attached later."""
    used = {rule for report in reports for rule in report.rules}
    attached = {name for report in reports for name in report.attached}
    by_component = strategy.renamed_components()
    for model in by_component or [""]:
        entries = rename_entries(strategy.renaming(model))
        matched = {entry for name, entry in used if name == model or not by_component}
        useless = [entry for entry in entries if entry not in matched]
        if useless and (not model or model in attached):
            where = f" of '{model}'" if model else ""
            raise UsageError(
                f"rename: {useless[0]!r} matches no leaf{where} in the checkpoint",
                step=step,
                advice="names have no component in front and are those of the checkpoint, such as "
                "'layers.0.weight' or 'layers.*'; no live object was changed",
            )


def log_differences(verdict: Verdict, strategy: LoadStrategy, step: int) -> None:
    """Log, once for all ranks, what a loose restore left as it was or accepted, and what no component has taken."""
    ways = [] if strategy.strict else ["strict=False"]
    ways += ["on_missing='skip'"] if strategy.on_missing == "skip" else []
    ways += ["on_world_change='skip'"] if strategy.on_world_change == "skip" else []
    parts = [
        _counted(verdict.absent, "component is", "components are", "missing in the checkpoint"),
        _counted(verdict.missing, "leaf is", "leaves are", "missing in the checkpoint"),
        _counted(verdict.unexpected, "leaf of the checkpoint was", "leaves of the checkpoint were", "not used"),
        _counted(verdict.accepted, "difference was", "differences were", "accepted", separator="; "),
    ]
    found = "; ".join(filter(None, parts))
    if ways:
        level = logging.WARNING if found else logging.INFO
        text = found or "nothing is missing on either side"
        logger.log(level, "step %d was restored with %s: %s", step, " and ".join(ways), text)
    if verdict.renamed or verdict.cast:
        changes = (
            _counted(verdict.renamed, "leaf was", "leaves were", "renamed", separator="; "),
            _counted(verdict.cast, "tensor was", "tensors were", "converted", separator="; "),
        )
        logger.info("step %d: %s", step, "; ".join(filter(None, changes)))
    if verdict.unclaimed:
        logger.log(
            logging.WARNING if strategy.progress else logging.INFO,
            "the checkpoint of step %d has components that this manager lacks: %s; attach() restores one later, "
            "and every save until then carries its state on; skip= leaves it out for good",
            step,
            ", ".join(verdict.unclaimed),
        )


def union(found: list[Texts]) -> Texts:
    """Return the texts of all ranks, sorted, each once."""
    return tuple(sorted({text for texts in found for text in texts}))


def _unexpected(reports: Sequence[MatchReport]) -> list[str]:
    """Return the leaves that no rank has a place for. Pipeline ranks hold different parts of one tree, or different
    trees."""
    unused = [(set(report.trees), set(report.unused)) for report in reports]
    return sorted(
        leaf
        for leaf in set().union(*(leaves for _, leaves in unused))
        if all(leaf in leaves for trees, leaves in unused if leaf.partition(".")[0] in trees)
    )


def _stages_left(reports: Sequence[MatchReport], checkpoint: Checkpoint) -> set[str]:
    """Return the pipeline stages of a component that is restored, of which no rank takes the state."""
    taken = {tree for report in reports for tree in report.trees}
    components = {name.partition("@")[0] for name in taken}
    return {
        tree.name
        for tree in checkpoint.manifest.trees
        if tree.scope.startswith("stage-") and tree.component in components and tree.name not in taken
    }


def _unclaimed(attached: Sequence[str], request: LoadRequest, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the components of the checkpoint that no rank holds and that the strategy does not leave out."""
    strategy, out = request.strategy, {*attached, *request.unwanted}
    trees = checkpoint.manifest.trees
    return tuple(
        sorted({tree.component for tree in trees if strategy.takes(tree.component, tree.kind)}.difference(out))
    )


@dataclass(frozen=True, slots=True)
class _Misfits:
    """The leaves that only one side has, over all ranks; refuses a restore that would leave a model as it is."""

    checkpoint: Checkpoint
    strategy: LoadStrategy
    missing: Sequence[str]
    unexpected: Sequence[str]
    components: Mapping[str, Sequence[str]]

    def to_paste(self, mismatched: Sequence[str] = ()) -> str:
        """Return the arguments that would let the restore through, ready to paste; an empty text where that is not
        plain to see."""
        strict = self.strategy.strict
        found = Differences(
            self.missing if strict or not mismatched else (),
            self.unexpected if strict or not mismatched else (),
            mismatched,
            {tensor.name for tensor in self.checkpoint.manifest.tensors},
            self.components.get("module", ()),
            self.components.get("optimizer", ()),
        )
        text = suggestion(found, may_rename=self.strategy.rename is None)
        if not text:
            return ""
        plain = self.strategy == LoadStrategy()
        return f"; to paste: strategy=LoadStrategy({text})" if plain else f"; to add to the LoadStrategy: {text}"

    def require_something(self, shares: Sequence[Share]) -> None:
        """Refuse, in every strictness, to call it a restore when a model or an optimizer would stay as it is."""
        for name in dict.fromkeys(share.component for share in shares):
            own = [share for share in shares if share.component == name and share.restored]
            if any(share.held and share.stored for share in own) and not any(share.common for share in own):
                raise self._nothing_in_common(name, own[0].kind)
        models = [share for share in shares if share.kind == "module" and share.held]
        wanted = models or shares
        if wanted and not any(share.restored and (share.common or not models) for share in wanted):
            stored = sorted({tree.component for tree in self.checkpoint.manifest.trees})
            raise StateMismatchError(
                f"nothing of {_first_names(sorted({share.component for share in wanted}))} would be restored",
                step=self.checkpoint.step,
                missing=sorted({share.component for share in wanted if not share.restored}),
                advice=f"no live object was changed; the checkpoint has {', '.join(stored)}: give "
                "the components the same names, or leave them out with skip=",
            )

    def require_something_on_each(self, reports: Sequence[MatchReport]) -> None:
        """Refuse to leave the model of one rank as it is because the checkpoint has none of its tensors, whatever the
        other ranks restore. A rank whose tensors are all excluded was meant to be left out."""
        bare: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            for share in report.shares:
                if share.kind == "module" and share.restored and share.stored and share.missing and not share.common:
                    bare.setdefault(share.component, []).append(rank)
        for name, ranks in bare.items():
            raise self._nothing_in_common(name, "module", ranks=ranks)

    def _nothing_in_common(self, name: str, kind: str, ranks: Sequence[int] = ()) -> StateMismatchError:
        where = f" on {ranks_in_words(ranks)}" if ranks else ""
        what = "no tensor" if kind == "module" else "no parameter"
        excluded = "exclude= leaves the rest out; " if self.strategy.exclude else ""
        return StateMismatchError(
            f"'{name}' would stay as it is{where}: {what} of it would be restored",
            step=self.checkpoint.step,
            missing=[leaf for leaf in self.missing if leaf.partition(".")[0].partition("@")[0] == name],
            unexpected=[leaf for leaf in self.unexpected if leaf.partition(".")[0].partition("@")[0] == name],
            advice=f"no live object was changed; {excluded}compare the names, or leave the component out with "
            f"skip=({name!r},)" + self.to_paste(),
        )


def _by_kind(reports: Sequence[MatchReport]) -> dict[str, list[str]]:
    """Return the components of all ranks by their kind."""
    kinds = sorted({(share.component, share.kind) for report in reports for share in report.shares})
    return {kind: [name for name, one in kinds if one == kind] for _, kind in kinds}


def _advice(strategy: LoadStrategy, *, one_sided: bool, mismatched: bool) -> str:
    """Return the ways through that would help here: a loose restore helps with leaves of one side alone."""
    advice = "no live object was changed; "
    if strategy.strict and one_sided:
        advice += "LoadStrategy(strict=False) accepts leaves that only one side has"
        advice += ", but no other shape or type; " if mismatched else "; "
    return advice + "exclude= leaves single leaves as they are, skip= whole components"


def _counted(names: Sequence[str], one: str, several: str, what: str, separator: str = ", ") -> str:
    """Return how many there are, and the first names; an empty text where there are none."""
    if not names:
        return ""
    return f"{len(names)} {one if len(names) == 1 else several} {what} ({_first_names(names, separator)})"


def _first_names(names: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown}{separator}..."
