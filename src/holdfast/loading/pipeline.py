"""The load chain in order: resolve, match, verify, read, restore. A selector enters, restored objects leave.

No live object changes before every rank knows that its part fits and is sound. What must be decided from files is
decided by the leader; a checkpoint that is damaged for one rank is damaged for all.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from holdfast.errors import (
    CorruptCheckpointError,
    GuardMismatchError,
    HoldfastError,
    KeyDamagedError,
    KeyMissingError,
    StateMismatchError,
    StorageError,
    UsageError,
)
from holdfast.loading.files import check_sizes, parse_values, read_values, require_file
from holdfast.loading.match import Fitted, Place, SavedState, match
from holdfast.loading.read import check_bytes, read
from holdfast.loading.requests import Request, size_of
from holdfast.loading.resolve import candidates
from holdfast.loading.restore import restore_tensors, restore_values
from holdfast.loading.side_buffers import Shadows, room_on
from holdfast.loading.strategy import LoadStrategy, Verify
from holdfast.ondisk.codec import Json, plain, typed
from holdfast.ondisk.manifest import TreeRecord
from holdfast.ranks.base import Ranks, on_leader, together
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Skipped
from holdfast.runs.progress import Progress
from holdfast.runs.readers import reading
from holdfast.runs.report import Problem
from holdfast.runs.selector import Selector
from holdfast.state.frozen import frozen_guards, take_frozen
from holdfast.state.memory import collector_paused
from holdfast.state.names import holds_state, kind_of, unwrap
from holdfast.state.records import FrozenEntry, ranks_in_words
from holdfast.state.wrappers import PerRank, RNGState

logger = logging.getLogger("holdfast")

_SHOWN_CHARACTERS = 80
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to restore into which live objects. `globs_must_match`: an `exclude` that matches no leaf is an error."""

    selector: Selector
    components: Mapping[str, Any]
    strategy: LoadStrategy
    guards: Mapping[str, Json] = field(default_factory=dict)
    pipeline_stage: int | None = None
    verify: Verify = "full"
    unwanted: Set[str] = frozenset()
    globs_must_match: bool = True


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was restored, from where, and what was not. `phases` are the seconds of each part, by name. `unclaimed` are
    the components of the checkpoint that no rank holds and that the strategy does not leave out. `accepted` are the
    differences that only a loose strategy lets pass."""

    checkpoint: Checkpoint
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]
    passed_over: tuple[Skipped, ...]
    damaged: Mapping[Checkpoint, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    unclaimed: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NothingToLoad:
    """There is no checkpoint; `passed_over` is what there is instead."""

    passed_over: tuple[Skipped, ...] = ()


class _Clock:
    """Seconds by phase. All that passes belongs to one: each `end_of` takes what passed since the one before it."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.monotonic()

    def end_of(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now


class _Candidate(msgspec.Struct, frozen=True, array_like=True):
    folder: str
    digest: str


class _Choice(msgspec.Struct, frozen=True, array_like=True):
    candidates: tuple[_Candidate, ...]
    passed_over: tuple[tuple[str, str], ...]


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """How much of one component is restored on one rank. `restored`: the checkpoint has it, and it is not skipped.
    `missing` counts the leaves that the checkpoint does not have."""

    component: str
    kind: str
    restored: bool
    held: int = 0
    stored: int = 0
    common: int = 0
    missing: int = 0


class _Fit(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says of a candidate: its damage, or how its part fits."""

    damage: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    frozen: tuple[FrozenEntry, ...] = ()
    trees: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    shares: tuple[_Share, ...] = ()
    accepted: tuple[str, ...] = ()


_Texts = tuple[str, ...]


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
    damage: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unclaimed: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


def load(request: LoadRequest, catalog: Catalog, ranks: Ranks) -> Loaded | NothingToLoad:
    """Restore on all ranks. `NothingToLoad` when `latest` was asked of a run that has no checkpoint."""
    try:
        # New memory must be ordinary memory, whatever mode the caller is in: the training goes on with it.
        with collector_paused(), torch.inference_mode(False), torch.no_grad():
            return _load(request, catalog, ranks)
    except HoldfastError:
        raise
    except Exception as error:
        raise HoldfastError(f"the restore failed: {type(error).__name__}: {error}") from error


def _load(request: LoadRequest, catalog: Catalog, ranks: Ranks) -> Loaded | NothingToLoad:
    clock = _Clock()
    choice = on_leader(ranks, "resolve", lambda: _resolve(catalog, request.selector), returns=_Choice)
    clock.end_of("resolve")
    passed_over = [Skipped(*pair) for pair in choice.passed_over]
    damaged: list[str] = []
    aside: dict[Checkpoint, str] = {}
    for candidate in choice.candidates:
        attempt = _Attempt(candidate, request, catalog, ranks, clock)
        with _said_to_be_read(candidate, catalog, ranks):
            verdict = ranks.decide("fit", attempt.fit, attempt.judge, sends=_Fit, returns=_Verdict)
            clock.end_of("fit")
            damage = verdict.damage or ranks.decide("check", attempt.check, _union, sends=_Texts, returns=_Texts)
            clock.end_of("read")
            if not damage:
                # Components' own code first, on all ranks: if one of them refuses, no tensor has changed on any.
                together(ranks, "restore values", attempt.restore_values, sends=None)
                together(ranks, "restore tensors", attempt.restore_tensors, sends=None)
                clock.end_of("restore")
                if ranks.rank == 0:
                    attempt.log_differences(verdict)
                return attempt.loaded(verdict, passed_over, aside)
        if attempt.opened is not None:
            aside[attempt.opened] = damage[0]
        damaged += [f"{candidate.folder}: {text}" for text in damage]
        passed_over += [Skipped(candidate.folder, text) for text in damage[:1]]
        if request.selector.may_fall_back and ranks.rank == 0:
            logger.warning("%s is damaged and passed over: %s", candidate.folder, damage[0])
    if damaged:
        explicit = f"{choice.candidates[0].folder} is damaged"
        raise CorruptCheckpointError(
            "no sound checkpoint is left" if request.selector.may_fall_back else explicit,
            run=catalog.storage.url,
            problems=damaged,
            advice="no live object was changed",
        )
    return NothingToLoad(tuple(passed_over))


@contextmanager
def _said_to_be_read(candidate: _Candidate, catalog: Catalog, ranks: Ranks) -> Iterator[None]:
    """The leader says it, before any rank looks at the manifest again, and for all of them."""
    with ExitStack() as stack:
        on_leader(
            ranks,
            "say that it is read",
            lambda: stack.enter_context(reading(catalog.storage, candidate.folder)),
            returns=None,
        )
        yield


def _union(found: list[_Texts]) -> _Texts:
    return tuple(sorted({text for texts in found for text in texts}))


def _resolve(catalog: Catalog, selector: Selector) -> _Choice:
    found, passed_over = candidates(catalog, selector)
    for skipped in passed_over:
        logger.warning("passed over %s", skipped)
    return _Choice(
        tuple(_Candidate(checkpoint.folder, checkpoint.digest) for checkpoint in found),
        tuple((skipped.folder, skipped.reason) for skipped in passed_over),
    )


class _Attempt:
    """The attempt to restore from one candidate, on one rank."""

    def __init__(
        self, candidate: _Candidate, request: LoadRequest, catalog: Catalog, ranks: Ranks, clock: _Clock
    ) -> None:
        self.candidate = candidate
        self.request = request
        self.catalog = catalog
        self.clock = clock
        self.place = Place(ranks.rank, ranks.size, request.pipeline_stage)
        self.fitted: list[Fitted] = []
        self.skipped: list[str] = []
        self.chosen: list[str] = []
        self.absent: list[str] = []
        self.left_for_world: list[str] = []
        self.values: dict[str, dict[str, Json]] = {}
        self.present: set[str] = set()
        self.shadows = Shadows()

    def fit(self) -> _Fit:
        """This rank's part: fit every component, from the manifest and the values alone."""
        try:
            self.checkpoint = self._open()
            _require_decodable(self.checkpoint)
            self._check_guards(self.request.guards)
            self._fit_components()
        except (CorruptCheckpointError, KeyMissingError, KeyDamagedError) as error:
            # Any other StorageError says that the storage cannot be read now: an error on all ranks, and no damage.
            return _Fit(damage=(str(error),))
        return _Fit(
            missing=_all(self.fitted, "missing"),
            unused=_all(self.fitted, "unused"),
            mismatched=_all(self.fitted, "mismatched"),
            globs=_all(self.fitted, "globs"),
            frozen=take_frozen(
                {one.component: self.request.components[one.component] for one in self.fitted}, anew=True
            ),
            trees=_all(self.fitted, "trees"),
            attached=tuple(self.request.components),
            absent=tuple(self.absent),
            shares=self._shares(),
            accepted=(*_all(self.fitted, "accepted"), *self.left_for_world),
        )

    def _shares(self) -> tuple[_Share, ...]:
        """How much of each chosen component is restored. The random state does not count: every process has one."""
        components = self.request.components
        fitted = {one.component: one for one in self.fitted}
        shares = []
        for name in self.chosen:
            one = fitted.get(name)
            if one is not None and not isinstance(unwrap(components[name]), RNGState):
                shares.append(_Share(name, one.kind, True, one.held, one.stored, one.common, len(one.missing)))
            elif one is None:
                held = int(holds_state(components[name]))
                # A per-rank state of another number of ranks is left out on request, also where it is a model's.
                left = isinstance(components[name], PerRank) and name not in self.absent
                shares.append(_Share(name, "values" if left else kind_of(name, components[name]), False, held))
        return tuple(shares)

    def judge(self, fits: list[_Fit]) -> _Verdict:
        """The leader's part: damage first, then whatever does not fit, over all ranks."""
        damage = sorted({damage for fit in fits for damage in fit.damage})
        if damage:
            return _Verdict(damage=tuple(damage))
        strategy = self.request.strategy
        missing = sorted({name for fit in fits for name in fit.missing})
        mismatched = sorted({text for fit in fits for text in fit.mismatched})
        unexpected = sorted({*_unexpected(fits), *self._stages_left(fits)})
        useless = sorted(set(strategy.exclude) - {glob for fit in fits for glob in fit.globs})
        if useless and self.request.globs_must_match:
            raise UsageError(f"exclude={useless[0]!r} matches no leaf", step=self.checkpoint.step)
        if mismatched or (strategy.strict and (missing or unexpected)):
            raise StateMismatchError(
                "checkpoint and live objects do not fit together",
                step=self.checkpoint.step,
                missing=missing if strategy.strict else (),
                unexpected=unexpected if strategy.strict else (),
                mismatched=mismatched,
                advice=_advice(strategy, one_sided=bool(missing or unexpected), mismatched=bool(mismatched)),
            )
        self._require_something([share for fit in fits for share in fit.shares], missing, unexpected)
        self._require_something_on_each(fits, missing, unexpected)
        self._check_guards(frozen_guards({entry for fit in fits for entry in fit.frozen}))
        return _Verdict(
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            absent=_union([fit.absent for fit in fits]),
            unclaimed=self._unclaimed(_union([fit.attached for fit in fits])),
            accepted=_union([fit.accepted for fit in fits]),
        )

    def _require_something(self, shares: Sequence[_Share], missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Refuse, in every strictness, to call it a restore when a model or an optimizer would stay as it is."""
        for name in dict.fromkeys(share.component for share in shares):
            own = [share for share in shares if share.component == name and share.restored]
            if any(share.held and share.stored for share in own) and not any(share.common for share in own):
                raise _nothing_in_common(name, own[0].kind, self.request.strategy, self.checkpoint, missing, unexpected)
        models = [share for share in shares if share.kind == "module" and share.held]
        wanted = models or shares
        if wanted and not any(share.restored and (share.common or not models) for share in wanted):
            raise StateMismatchError(
                f"nothing of {_first_names(sorted({share.component for share in wanted}))} would be restored",
                step=self.checkpoint.step,
                missing=sorted({share.component for share in wanted if not share.restored}),
                advice=f"no live object was changed; the checkpoint has {', '.join(self._stored_components())}: give "
                "the components the same names, or leave them out with skip=",
            )

    def _require_something_on_each(
        self, fits: Sequence[_Fit], missing: Sequence[str], unexpected: Sequence[str]
    ) -> None:
        """Refuse to leave the model of one rank as it is because the checkpoint has none of its tensors, whatever the
        other ranks restore. A rank whose tensors are all excluded was meant to be left out."""
        bare: dict[str, list[int]] = {}
        for rank, fit in enumerate(fits):
            for share in fit.shares:
                if share.kind == "module" and share.restored and share.stored and share.missing and not share.common:
                    bare.setdefault(share.component, []).append(rank)
        for name, ranks in bare.items():
            raise _nothing_in_common(
                name, "module", self.request.strategy, self.checkpoint, missing, unexpected, ranks=ranks
            )

    def _stored_components(self) -> list[str]:
        return sorted({tree.component for tree in self.checkpoint.manifest.trees})

    def _unclaimed(self, attached: Sequence[str]) -> tuple[str, ...]:
        """The components of the checkpoint that no rank holds, and that nobody wants to leave out."""
        strategy, out = self.request.strategy, {*attached, *self.request.unwanted}
        trees = self.checkpoint.manifest.trees
        return tuple(
            sorted({tree.component for tree in trees if strategy.takes(tree.component, tree.kind)}.difference(out))
        )

    def log_differences(self, verdict: _Verdict) -> None:
        """Log, once for all ranks, what a loose restore left as it was or accepted, and what nobody has taken."""
        strategy, step = self.request.strategy, self.checkpoint.step
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
            said = found or "nothing is missing on either side"
            logger.log(level, "step %d was restored with %s: %s", step, " and ".join(ways), said)
        if verdict.unclaimed:
            logger.log(
                logging.WARNING if strategy.progress else logging.INFO,
                "the checkpoint of step %d has components that this manager lacks: %s; attach() restores one later, "
                "and every save until then carries its state on; skip= leaves it out for good",
                step,
                ", ".join(verdict.unclaimed),
            )

    def _stages_left(self, fits: Sequence[_Fit]) -> set[str]:
        """Pipeline stages of a component that is restored, of which no rank takes the state."""
        taken = {tree for fit in fits for tree in fit.trees}
        components = {name.partition("@")[0] for name in taken}
        return {
            tree.name
            for tree in self.checkpoint.manifest.trees
            if tree.scope.startswith("stage-") and tree.component in components and tree.name not in taken
        }

    def check(self) -> _Texts:
        """The damage in what this rank needs. New memory is filled right away, and so is memory that stands in for live
        tensors; where there is none, the bytes for them are only checked."""
        fresh, live = self._requests(fresh=True), self._requests(fresh=False)
        if self.request.verify != "full":
            problems = check_sizes(self.checkpoint, live) if self.request.verify == "quick" else []
            return _texts(problems + self._read(fresh, checked=False))
        self.shadows = Shadows.of(live, room_on)
        problems = self._read([*fresh, *self.shadows.requests], checked=True)
        with self._progress("checking", self.shadows.rest) as progress:
            problems += check_bytes(self.checkpoint, self.shadows.rest, on_bytes=progress.add)
        if problems:
            self.shadows.drop()
        return _texts(problems)

    def restore_values(self) -> None:
        restore_values(self.fitted, self.request.components)

    def restore_tensors(self) -> None:
        self.clock.end_of("restore")
        self._fill_live()
        self.clock.end_of("read")
        restore_tensors(self.fitted, self.request.components)

    def loaded(self, verdict: _Verdict, passed_over: Sequence[Skipped], damaged: Mapping[Checkpoint, str]) -> Loaded:
        return Loaded(
            self.checkpoint,
            restored=tuple(one.component for one in self.fitted),
            missing=(*self.absent, *verdict.missing),
            skipped=(*self.skipped, *verdict.unexpected, *self._left_out()),
            passed_over=tuple(passed_over),
            damaged=damaged,
            phases=self.clock.phases,
            unclaimed=verdict.unclaimed,
            accepted=verdict.accepted,
        )

    @property
    def opened(self) -> Checkpoint | None:
        return getattr(self, "checkpoint", None)

    def _left_out(self) -> list[str]:
        return [f"{leaf}: left out by exclude" for one in self.fitted for leaf in sorted(one.left_out)]

    def _open(self) -> Checkpoint:
        try:
            checkpoint = self.catalog.read(self.candidate.folder)
        except FileNotFoundError:
            raise CorruptCheckpointError("its manifest is gone", file=self.candidate.folder) from None
        if checkpoint.digest != self.candidate.digest:
            raise CorruptCheckpointError("this rank sees another manifest than the leader", file=self.candidate.folder)
        return self.catalog.annotated(checkpoint)

    def _fit_components(self) -> None:
        manifest = self.checkpoint.manifest
        trees: dict[str, list[TreeRecord]] = {}
        for tree in manifest.trees:
            trees.setdefault(tree.component, []).append(tree)
        leaves = {tensor.name: tensor for tensor in manifest.tensors}
        same_torch = manifest.versions.get("torch") == str(torch.__version__)
        saved = SavedState(leaves, trees, self._values, self._require_file, manifest.world_size, same_torch)
        for name in self._chosen(trees):
            fitted = match(name, self.request.components, saved, self.request.strategy, self.place)
            if fitted.skipped:
                self.skipped.append(f"{name}: {fitted.skipped}")
                self.left_for_world.append(f"{name}: {fitted.skipped}")
            else:
                self.fitted.append(fitted)

    def _chosen(self, trees: Mapping[str, Sequence[TreeRecord]]) -> list[str]:
        """The components to restore. One that was named and is nowhere, or that the checkpoint lacks, is an error."""
        components, strategy = self.request.components, self.request.strategy
        for name in strategy.named():
            if name not in components and not (name in strategy.skip and name in trees):
                raise UsageError(
                    f"there is no component '{name}' to restore",
                    advice=f"the manager has {', '.join(sorted(components))}",
                )
        kinds = {name: kind_of(name, unwrap(component)) for name, component in components.items()}
        chosen = [name for name in components if strategy.takes(name, kinds[name])]
        self.skipped += [f"{name}: left out by the strategy" for name in components if name not in chosen]
        self.skipped += [f"{name}: no such component is attached" for name in trees if name not in components]
        covered = {
            name
            for cover in chosen
            if isinstance(components[cover], PerRank) and cover in trees
            for name in components[cover].covers
        }
        self.skipped += [f"{name}: covered by another component" for name in chosen if name in covered]
        self.chosen = chosen = [name for name in chosen if name not in covered]
        self.absent = [name for name in chosen if name not in trees]
        if self.absent and strategy.on_missing == "error":
            raise StateMismatchError(
                "the checkpoint has no such component",
                step=self.checkpoint.step,
                missing=self.absent,
                advice=f"it has {', '.join(sorted(trees))}; LoadStrategy(on_missing='skip') goes on without",
            )
        return [name for name in chosen if name in trees]

    def _values(self, tree: TreeRecord) -> Json:
        """The values of a tree, from a file that is read and checked once."""
        if tree.file not in self.values:
            data = read_values(self.checkpoint, tree.file, checked=self.request.verify == "full")
            self.values[tree.file] = parse_values(data, tree.file)
        try:
            return self.values[tree.file][tree.name]
        except KeyError:
            raise CorruptCheckpointError(f"it has no values of '{tree.name}'", file=tree.file) from None

    def _require_file(self, name: str) -> None:
        """A file that is as large as the manifest says: whoever takes memory by the manifest's word asks first."""
        if name not in self.present:
            require_file(self.checkpoint, name)
            self.present.add(name)

    def _requests(self, *, fresh: bool) -> list[Request]:
        return [request for one in self.fitted for request in one.requests if request.fresh is fresh]

    def _read(self, requests: Sequence[Request], *, checked: bool) -> list[Problem]:
        with self._progress("restoring", requests) as progress:
            return read(self.checkpoint, requests, checked=checked, readers=self.place.size, on_bytes=progress.add)

    def _progress(self, doing: str, requests: Sequence[Request]) -> Progress:
        return Progress(f"{doing} step {self.checkpoint.step}", size_of(requests), shown=self.place.rank == 0)

    def _fill_live(self) -> None:
        checked = self.request.verify == "full"
        try:
            problems = self._read(self.shadows.rest if checked else self._requests(fresh=False), checked=checked)
        except StorageError as error:
            raise _while_filling(error) from error
        if problems:
            raise CorruptCheckpointError(
                "the checkpoint changed while it was restored, and live tensors were overwritten",
                run=self.catalog.storage.url,
                step=self.checkpoint.step,
                problems=[str(problem) for problem in problems],
                advice="restore another one before you go on",
            )
        self.shadows.fill()

    def _check_guards(self, live: Mapping[str, Json]) -> None:
        """Compare what both sides name."""
        saved = self.checkpoint.manifest.guards
        names = sorted(saved.keys() & live.keys())
        wrong = {name: _shown_apart(saved[name], live[name]) for name in names if saved[name] != live[name]}
        if not wrong:
            return
        text = "; ".join(f"{name}: {old} in the checkpoint, {new} now" for name, (old, new) in wrong.items())
        if self.request.strategy.on_guard_mismatch == "warn":
            if self.place.rank == 0:
                logger.warning("guards differ, and are passed over on request: %s", text)
            return
        raise GuardMismatchError(
            f"guards differ: {text}",
            step=self.checkpoint.step,
            guards=wrong,
            advice="restore with what the checkpoint was made with, or on_guard_mismatch='warn'",
        )


def _advice(strategy: LoadStrategy, *, one_sided: bool, mismatched: bool) -> str:
    """Return the ways through that would help here: a loose restore helps with leaves of one side alone."""
    advice = "no live object was changed; "
    if strategy.strict and one_sided:
        advice += "LoadStrategy(strict=False) accepts leaves that only one side has"
        advice += ", but no other shape or type; " if mismatched else "; "
    return advice + "exclude= leaves single leaves as they are, skip= whole components"


def _nothing_in_common(
    name: str,
    kind: str,
    strategy: LoadStrategy,
    checkpoint: Checkpoint,
    missing: Sequence[str],
    unexpected: Sequence[str],
    ranks: Sequence[int] = (),
) -> StateMismatchError:
    where = f" on {ranks_in_words(ranks)}" if ranks else ""
    what = "no tensor" if kind == "module" else "no parameter"
    excluded = "exclude= leaves the rest out; " if strategy.exclude else ""
    return StateMismatchError(
        f"'{name}' would stay as it is{where}: {what} of it would be restored",
        step=checkpoint.step,
        missing=[leaf for leaf in missing if leaf.partition(".")[0].partition("@")[0] == name],
        unexpected=[leaf for leaf in unexpected if leaf.partition(".")[0].partition("@")[0] == name],
        advice=f"no live object was changed; {excluded}compare the names, or leave the component out with "
        f"skip=({name!r},)",
    )


def _counted(names: Sequence[str], one: str, several: str, what: str, separator: str = ", ") -> str:
    """How many there are, and the first names; empty where there are none."""
    if not names:
        return ""
    return f"{len(names)} {one if len(names) == 1 else several} {what} ({_first_names(names, separator)})"


def _first_names(names: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown}{separator}..."


def _require_decodable(checkpoint: Checkpoint) -> None:
    """Raise now what would be raised when the result is made, after live objects have changed."""
    _ = checkpoint.config, checkpoint.extra, checkpoint.progress, checkpoint.metrics


def _while_filling(error: StorageError) -> HoldfastError:
    return error.changed(
        problem=f"{error.problem}, and live tensors were overwritten in part",
        advice="check the mount, the file server or the disk, and restore again before you go on",
    )


def _texts(problems: Sequence[Problem]) -> _Texts:
    return tuple(str(problem) for problem in problems)


def _unexpected(fits: Sequence[_Fit]) -> list[str]:
    """The leaves that no rank has a place for. Pipeline ranks hold different parts of one tree, or different trees."""
    unused = [(set(fit.trees), set(fit.unused)) for fit in fits]
    return sorted(
        leaf
        for leaf in set().union(*(leaves for _, leaves in unused))
        if all(leaf in leaves for trees, leaves in unused if leaf.partition(".")[0] in trees)
    )


def _shown_apart(old: Json, new: Json) -> tuple[str, str]:
    """Two values that differ, for people, in the shortest way that shows that they do: a tuple and a list look alike,
    and so do a number and its digits."""
    ways = (lambda value: str(plain(value)), typed, json.dumps)
    for way in ways:
        left, right = way(old), way(new)
        if left != right:
            break
    shorter = min(len(left), len(right))
    alike = next((place for place in range(shorter) if left[place] != right[place]), shorter)
    return _cut(left, alike), _cut(right, alike)


def _cut(text: str, alike: int) -> str:
    """At most 80 characters of it, among them the first that the other text does not have."""
    start = 0 if alike < _SHOWN_CHARACTERS - 10 else alike - 10
    rest = ("..." if start else "") + text[start:]
    return rest if len(rest) <= _SHOWN_CHARACTERS else rest[: _SHOWN_CHARACTERS - 3] + "..."


def _all(fitted: Sequence[Fitted], name: str) -> tuple[str, ...]:
    return tuple(text for one in fitted for text in getattr(one, name))


__all__ = ["LoadRequest", "Loaded", "NothingToLoad", "Verify", "load"]
