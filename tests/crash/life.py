"""The life of a run as a game: what may happen to it, and what must hold after everything that does.

A model is kept beside the run: which checkpoints there are, what was said of them, who reads, who writes. After each
action the shelf is compared with it, without asking the code that is tested, but for one scan, which must agree too.
What retention may remove is worked out by `_goes`, on its own: simple, slow, and from the words of the policies alone.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from blake3 import blake3
from hypothesis import currently_in_test_context, note, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import holdfast
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HoldfastError,
    KeyExistsError,
    KeyMissingError,
    RunInUseError,
)
from holdfast.manager.manager import CheckpointManager
from holdfast.manager.results import RestoreResult
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.readers import reading
from holdfast.runs.retention import KeepPolicy
from holdfast.testing import SimulatedCrash
from tests.crash.room import Door, Fault, Process, Room

__all__ = ["Life", "Violation"]

TAGS = ("gold", "silver")
METRICS = (0.5, 0.25, 0.5, math.nan, math.inf, -math.inf, 0.0, 1, 2**53, 2**53 + 1)
MOST_TRAINERS = 3
DEAD = object()


class Violation(AssertionError):
    """A guarantee does not hold."""


class Keep(NamedTuple):
    """A policy in plain words, for `_goes`, and for building the real one."""

    kind: str
    n: int = 1
    metric: str = "loss"
    mode: Any = "min"

    def real(self) -> KeepPolicy:
        if self.kind == "last":
            return holdfast.KeepLast(self.n)
        if self.kind == "best":
            return holdfast.KeepBest(self.metric, self.n, self.mode)
        if self.kind == "every":
            return holdfast.KeepEvery(steps=self.n)
        if self.kind == "oldest":
            return holdfast.KeepEvery(minutes=10.0**9)
        return holdfast.KeepTagged() if self.kind == "tagged" else holdfast.KeepAll()


Policies = tuple[Keep, ...] | None

POLICIES: tuple[Policies, ...] = (
    (Keep("last", 1),),
    (Keep("last", 2),),
    None,
    (Keep("tagged"),),
    (Keep("best", 1),),
    (Keep("best", 2, "acc", "max"), Keep("last", 1)),
    (Keep("every", 2),),
    (Keep("last", 2), Keep("best", 1), Keep("best", 1, "acc", "max")),
    (Keep("every", 3), Keep("best", 1, "loss", "max")),
    (Keep("oldest"), Keep("last", 1)),
    (Keep("all"),),
)


class Said(NamedTuple):
    """What notes say of a checkpoint, together with its manifest."""

    tags: frozenset[str]
    metrics: tuple[tuple[str, str], ...]
    damaged: bool

    @classmethod
    def of(cls, tags: Iterable[str], metrics: dict[str, Any], damaged: bool) -> Said:
        # As texts: NaN is not the same as itself, 1 is not 1.0 and 2**53 + 1 not the float next to it.
        return cls(frozenset(tags), tuple(sorted((name, repr(value)) for name, value in metrics.items())), damaged)


@dataclass(eq=False)
class Kept:
    """A checkpoint in the model. `firm`: somebody was told that it is committed. `broken`: its bytes are. `passed`:
    somebody found that out, and will write it down. `or_else`: what may be said of it instead of what is, because a
    note is on its way, or was not made durable."""

    digest: str
    folder: str
    step: int
    sequence: int
    line: frozenset[int]
    mark: int
    parent: Kept | None
    files: tuple[str, ...]
    metrics: dict[str, Any]
    said: Said
    firm: bool = False
    broken: bool = False
    passed: bool = False
    tried: bool = False
    or_else: tuple[Said, ...] = ()
    checked: tuple[bytes, ...] = ()

    def expect(self, noted: Callable[[Said], Said]) -> None:
        """A note is on its way. Of those before it that are not durable, a power cut may keep any."""
        states = dict.fromkeys((*self.or_else, self.said))
        self.or_else = (*dict.fromkeys((*states, *map(noted, states))), noted(self.said))

    def __repr__(self) -> str:
        return f"{self.folder} (number {self.sequence})"


@dataclass(eq=False)
class Part:
    """A component whose whole state is its mark."""

    mark: int = -1
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int64))

    def become(self, mark: int) -> None:
        self.mark = mark
        self.tensor.copy_(torch.tensor([mark, ~mark, mark << 33]))

    def is_of(self, mark: int) -> bool:
        return self.mark == mark and self.tensor.tolist() == [mark, ~mark, mark << 33]

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "mark": self.mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor, self.mark = state["tensor"], state["mark"]


class Behind:
    """In the place of the housekeeper's thread: what that would do is done when the game says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def wait(self) -> None:
        while self.work:
            self.work.pop(0)()

    def stop(self) -> None:
        pass

    close = stop


class Manager(CheckpointManager):
    """A manager without a thread: else no sequence would happen twice in the same way."""

    # Those that a test leaves behind: what a failure holds is not collected at its end.
    made: ClassVar[WeakSet[Manager]] = WeakSet()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.add(self)
        # One that holds the run from the start has begun to clear it.
        self._run.housekeeper._worker.close()
        self._run.housekeeper._worker = Behind()  # type: ignore[assignment]

    @property
    def behind(self) -> Behind:
        return self._run.housekeeper._worker  # type: ignore[return-value]

    @property
    def number(self) -> int:
        return self._run.saver.lease

    @property
    def head(self) -> str | None:
        return self._run.saver.lineage.head

    def die(self) -> None:
        """A process that is dead leaves no thread and releases nothing."""
        coordinator = self._run.saver._coordinator
        lease, coordinator._lease = coordinator._lease, None
        if lease is not None:
            lease._heartbeat.stop()
        self._run.saver._async.worker.stop()


@dataclass(eq=False)
class Trainer:
    """A process that trains. `aside`: what it found to be damaged, and will write down. `prunes`: among the housework
    that it has put off is what retention asks for."""

    process: Process
    door: Door
    manager: Manager
    keep: Policies
    links: bool
    part: Part
    head: Kept | None = None
    aside: set[Kept] = field(default_factory=set)
    prunes: bool = False

    @property
    def line(self) -> frozenset[int]:
        return self.head.line | {self.head.sequence} if self.head is not None else frozenset()


@dataclass(eq=False)
class Reader:
    process: Process
    kept: Kept
    claim: AbstractContextManager[None]


@dataclass(eq=False)
class Planned:
    """A save that is under way: what it is a checkpoint of, if it becomes one."""

    step: int
    mark: int
    metrics: dict[str, Any]
    tags: tuple[str, ...]
    parent: Kept | None
    line: frozenset[int]
    became: Kept | None = None


@dataclass(eq=False)
class Underway:
    who: Trainer
    adds: Planned | None
    goes: frozenset[str]
    met: bool = False
    fenced: bool = False
    late: int = 0


# What may happen, as values. Who and which are numbers, taken modulo what there is.


class Save(NamedTuple):
    """After `skip` more steps."""

    who: int
    skip: int
    metrics: dict[str, Any]
    lazy: bool


class SaveBadly(NamedTuple):
    """The step `back` from here, or the next one, with a tag, and with an accident."""

    who: int
    back: int
    metrics: dict[str, Any]
    tag: str | None
    fault: Fault | None


class Restore(NamedTuple):
    who: int
    what: str
    nth: int
    fault: Fault | None


class Report(NamedTuple):
    who: int
    nth: int
    metrics: dict[str, Any]
    fault: Fault | None


class Tag(NamedTuple):
    who: int
    nth: int
    tag: str
    off: bool
    fault: Fault | None


class Prune(NamedTuple):
    who: int
    dry: bool
    fault: Fault | None


class Start(NamedTuple):
    """A process starts on the run, with policies of its own; it takes over from whoever is seen to be gone."""

    host: str
    keep: Policies
    links: bool
    eager: bool
    restores: bool
    fault: Fault | None


class Read(NamedTuple):
    nth: int
    host: str


class ReadNoMore(NamedTuple):
    nth: int
    dies: bool


class Damage(NamedTuple):
    nth: int
    values: bool


class Leave(NamedTuple):
    who: int
    how: str


class CutPower(NamedTuple):
    seed: int


Action = Save | SaveBadly | Restore | Report | Tag | Prune | Start | Read | ReadNoMore | Damage | Leave | CutPower


def _action(number: int) -> Action:
    """The action with that number. Each is as likely as it is useful: left to itself, hypothesis prefers small values,
    and sequences in which hardly anything is saved."""
    chance = random.Random(number)
    make = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    return make(chance)


def _save(chance: random.Random) -> Action:
    return Save(_who(chance), chance.randrange(3), _values(chance), chance.random() < 0.1)


def _save_badly(chance: random.Random) -> Action:
    back = chance.choice((-1, -1, -1, 0, 1, 2, 3))
    tag = chance.choice((None, None, *TAGS))
    return SaveBadly(_who(chance), back, _values(chance), tag, _fault(chance, 16))


def _restore(chance: random.Random) -> Action:
    what = chance.choice(("latest", "latest", "step", "step", "step", "tag", "missing"))
    return Restore(_who(chance), what, chance.randrange(8), _fault(chance, 6))


def _report(chance: random.Random) -> Action:
    return Report(_who(chance), chance.randrange(8), _values(chance) or {"loss": 0.5}, _fault(chance, 6))


def _tag(chance: random.Random) -> Action:
    return Tag(_who(chance), chance.randrange(8), chance.choice(TAGS), chance.random() < 0.4, _fault(chance, 6))


def _prune(chance: random.Random) -> Action:
    return Prune(_who(chance), chance.random() < 0.5, _fault(chance, 10))


def _start(chance: random.Random) -> Action:
    eager, restores, links = chance.random() < 0.4, chance.random() < 0.7, chance.random() < 0.8
    return Start(_host(chance), chance.choice(POLICIES), links, eager, restores, _fault(chance, 6))


def _host(chance: random.Random) -> str:
    return chance.choice(("here", "here", "far"))


def _who(chance: random.Random) -> int:
    # The first of those who train comes most often: to be refused should not be the rule.
    return chance.choice((0, 0, 0, 1, 2))


def _values(chance: random.Random) -> dict[str, Any]:
    names = chance.choice((("loss",), ("loss", "acc"), ("acc",), ()))
    return {name: chance.choice(METRICS) for name in names}


def _fault(chance: random.Random, most: int) -> Fault | None:
    kind = chance.choice(("", "die", "meet", "meet", "glance", "fail", "power", "power", "full", "full", "blind"))
    if not kind:
        return None
    behind = chance.random() < 0.4
    most = 40 if kind in ("glance", "blind") else 10 if behind else most
    return Fault(kind, chance.randint(1, most), chance.random() < 0.5, behind)


_WEIGHTS: dict[Callable[[random.Random], Action], int] = {
    _save: 12,
    _save_badly: 8,
    _restore: 5,
    _report: 3,
    _tag: 3,
    _prune: 4,
    _start: 5,
    lambda chance: Read(chance.randrange(8), _host(chance)): 3,
    lambda chance: ReadNoMore(chance.randrange(8), chance.random() < 0.4): 2,
    lambda chance: Leave(_who(chance), chance.choice(("close", "kill", "silence", "speak"))): 3,
    lambda chance: Damage(chance.choice((0, 0, 0, 1, 2)), chance.random() < 0.5): 2,
    lambda chance: CutPower(chance.randrange(1000)): 1,
}
_actions = st.integers(0, (1 << 24) - 1).map(_action)


class Life(RuleBasedStateMachine):
    """Trainers, readers and accidents on one run."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room()
        self.known: dict[str, Kept] = {}
        self.former: dict[str, Kept] = {}
        self.trainers: list[Trainer] = []
        self.readers: list[Reader] = []
        self.marks = 0
        self.settled = 0
        self.wrong: list[str] = []
        self.underway: list[Underway] = []
        self.observer = self._door("here")
        self.catalog = Catalog(self.observer)  # type: ignore[arg-type]
        self.meetings = 0
        # What is being said of a step. If somebody comes in between, it may be of a checkpoint that he has made.
        self.noting: Callable[[Kept], tuple[Said, ...]] = lambda kept: ()

    # What may happen

    @rule(action=_actions)
    def act(self, action: Action) -> None:
        """One thing happens. Where nobody is there to do it, somebody comes first."""
        if currently_in_test_context():
            note(f"# {action}")
        getattr(self, f"_on_{type(action).__name__}")(action)

    def _on_Start(self, action: Start) -> None:
        if len(self.trainers) < MOST_TRAINERS:
            who = self._start(action.host, action.keep, links=action.links, eager=action.eager, fault=action.fault)
            if who in self.trainers and action.restores:
                self._restore(who, "latest", None)

    def _on_Save(self, action: Save) -> None:
        who = self._pick(action.who)
        if who is not None:
            step = who.head.step + 1 + action.skip if who.head is not None else action.skip
            self._save(who, step, action.metrics, None, None, lazy=action.lazy and action.skip == 2)

    def _on_SaveBadly(self, action: SaveBadly) -> None:
        who = self._pick(action.who)
        if who is not None:
            step = max((who.head.step if who.head is not None else 0) - action.back, 0)
            self._save(who, step, action.metrics, action.tag, action.fault)

    def _on_Restore(self, action: Restore) -> None:
        who, kept = self._pick(action.who), self._nth(action.nth)
        if who is None:
            return
        if action.what == "step" and kept is not None:
            self._restore(who, kept.step, action.fault)
        elif action.what == "tag":
            self._restore(who, TAGS[action.nth % 2], action.fault)
        else:
            self._restore(who, 999 if action.what == "missing" else "latest", action.fault)

    def _on_Report(self, action: Report) -> None:
        who, kept = self._pick(action.who), self._nth(action.nth) if action.nth < 7 else None
        if who is not None:
            self._report(who, 999 if kept is None else kept.step, action.metrics, action.fault)

    def _on_Tag(self, action: Tag) -> None:
        who, kept = self._pick(action.who), self._nth(action.nth) if action.nth < 7 else None
        if who is not None:
            self._tag(who, 999 if kept is None else kept.step, action.tag, action.off, action.fault)

    def _on_Prune(self, action: Prune) -> None:
        who = self._pick(action.who)
        if who is not None:
            if action.dry:
                self._look_ahead(who)
            self._prune(who, action.fault)

    def _on_Read(self, action: Read) -> None:
        kept = self._nth(action.nth)
        if kept is not None:
            self._read(kept, action.host)

    def _on_ReadNoMore(self, action: ReadNoMore) -> None:
        if not self.readers:
            return
        reader = self.readers.pop(action.nth % len(self.readers))
        key, claim = self._claim_of(reader)
        reader.claim.__exit__(None, None, None)
        reader.process.alive = False
        if action.dies:
            # It did not end to read, it ended: the claim is still there.
            self.room.shelf.set(key, claim)

    def _on_Damage(self, action: Damage) -> None:
        kept = self._nth(action.nth)
        if kept is not None and not kept.broken:
            kept.broken = True
            self.room.shelf.damage(f"{kept.folder}/{'shared.json' if action.values else 'rank-00000.safetensors'}")

    def _on_Leave(self, action: Leave) -> None:
        if not self.trainers:
            return
        who = self.trainers[action.who % len(self.trainers)]
        if action.how == "close":
            self._close(who)
        elif action.how == "kill":
            self._bury(who)
        else:
            who.process.silent = action.how == "silence"

    def _on_CutPower(self, action: CutPower) -> None:
        self._cut_power(action.seed)

    def teardown(self) -> None:
        """Everybody goes; the next one finds the run in order, every checkpoint as it was, and clears away the rest."""
        try:
            if sys.exc_info()[0] is None:
                self._end()
        finally:
            for trainer in list(self.trainers):
                trainer.manager.die()
            for reader in self.readers:
                reader.claim.__exit__(None, None, None)

    # How it is done, and what has to come of it

    def _start(self, host: str, keep: Policies, *, links: bool, eager: bool, fault: Fault | None) -> Trainer | None:
        door = self._door(host)
        part, policy = Part(), _joined(keep)
        made: list[Manager] = []

        def open_run() -> None:
            # Asked to hold the run in the constructor, whoever may not is refused there.
            trigger = holdfast.Every(steps=10**6) if eager else None
            options: dict[str, Any] = {"keep": policy, "links": links, "save": trigger, "mode": "sync", "rng": False}
            made.append(Manager("room", {"part": part}, storage=door, **options))  # type: ignore[arg-type]

        may = self._may_write(door, 0)
        trainer = Trainer(door.process, door, None, keep, links, part)  # type: ignore[arg-type]
        door.arm(_now(fault))
        outcome = self._do(trainer, open_run)
        if not made:
            door.process.alive = False
            if outcome is not DEAD and not door.fired and (may or not isinstance(outcome, RunInUseError)):
                raise Violation(f"G13: a run that is free was refused: {outcome!r}")
            return None
        trainer.manager = made[0]
        if not may and eager and not door.fired:
            raise Violation("G13: a second writer was let in")
        self.trainers.append(trainer)
        self._tidy(trainer, fault)
        return trainer

    def _save(
        self,
        who: Trainer,
        step: int,
        metrics: dict[str, Any],
        tag: str | None,
        fault: Fault | None,
        *,
        lazy: bool = False,
    ) -> None:
        self.marks += 1
        who.part.become(self.marks)
        there = [kept for kept in self.known.values() if kept.step == step and kept.sequence in who.line]
        may, tags = self._may_write(who.door, who.manager.number), () if tag is None else (tag,)
        planned = Planned(step, self.marks, metrics, tags, who.head, who.line)

        def noted(said: Said) -> Said:
            texts = {**dict(said.metrics), **{name: repr(value) for name, value in metrics.items()}}
            return said._replace(tags=said.tags | set(tags), metrics=tuple(sorted(texts.items())))

        for kept in there:
            kept.expect(noted)
        who.door.arm(_now(fault))
        outcome = self._while_noting(
            step,
            noted,
            who,
            lambda: who.manager.save(step, metrics=metrics, tag=tag).wait(),
            adds=None if there or not may else planned,
        )
        fired = who.door.fired
        if outcome is DEAD:
            return
        if isinstance(outcome, Checkpoint):
            self._was_saved(who, outcome, planned, there, fired=fired, may=may)
        elif not fired and (may or not isinstance(outcome, RunInUseError)):
            raise Violation(f"G6: a save failed for no reason: {outcome!r}") from outcome
        elif self._met(who) and not _is_fencing(outcome) and not (there and isinstance(outcome, KeyMissingError)):
            raise Violation(f"G13: a writer that lost the run is told {outcome!r}") from outcome
        self._is_heard_once(who)
        if not lazy:
            self._tidy(who, fault)

    def _was_saved(
        self, who: Trainer, saved: Checkpoint, planned: Planned, there: list[Kept], *, fired: bool, may: bool
    ) -> None:
        kept = self.known.get(saved.digest) or self.former.get(saved.digest)
        if kept is None:
            raise Violation(f"G1: {saved} was committed, and is not there")
        if kept is planned.became:
            kept.firm = who.prunes = True
            who.head = kept
        elif there and kept in there:
            self._note_came(kept, True, who, expected=True)
            who.prunes = True
            return
        elif not fired:
            raise Violation(f"G1: step {planned.step} is said to be {kept}")
        if not may and not fired:
            raise Violation("G13: two writers")

    def _is_heard_once(self, who: Trainer) -> None:
        try:
            who.manager.poll()
            who.manager.wait()
        except HoldfastError as error:
            raise Violation(f"G6: heard twice: {error}") from error

    def _restore(self, who: Trainer, selector: str | int, fault: Fault | None) -> None:
        order = self._newest_first()
        if selector == "latest":
            candidates = [kept for kept in order if not kept.said.damaged]
        elif isinstance(selector, int):
            candidates = [kept for kept in order if kept.step == selector][:1]
        else:
            candidates = [kept for kept in order if selector in kept.said.tags][:1]
        sound = next((kept for kept in candidates if not kept.broken), None)
        passed = candidates[: candidates.index(sound)] if sound is not None else candidates
        before = dict(self.known)
        who.part.become(-2)
        who.door.arm(_now(fault))
        outcome = self._do(who, lambda: who.manager.restore(selector))
        if outcome is DEAD:
            return
        if self._fired(who, "blind"):
            self._was_restored_blindly(who, outcome)
        elif isinstance(outcome, RestoreResult) and outcome.resumed:
            self._was_restored(who, outcome, sound if not self._met(who) else None, {**before, **self.known})
            for kept in passed:
                kept.passed = True
                who.aside.add(kept)
            self._tidy(who, fault)
        elif not self._met(who):
            self._was_not_restored(outcome, selector, sound, candidates)

    def _was_restored(self, who: Trainer, result: RestoreResult, sound: Kept | None, among: dict[str, Kept]) -> None:
        digest = result.checkpoint.digest if result.checkpoint is not None else ""
        kept = among.get(digest)
        if kept is None or kept.broken or (sound is not None and kept is not sound):
            raise Violation(f"G3: {kept} was restored, and {sound} is the newest sound one")
        if not who.part.is_of(kept.mark) or result.next_step != kept.step + 1:
            raise Violation(f"G2: {kept} is not what was saved")
        kept.tried = True
        who.head = kept

    def _was_restored_blindly(self, who: Trainer, outcome: Any) -> None:
        """What could not be read for a moment is passed over, or the restore fails; a run is never taken for empty."""
        if isinstance(outcome, RestoreResult) and outcome.resumed:
            self._was_restored(who, outcome, None, self.known)
            # It takes what it could not read for damaged. Whether it may write that down is asked elsewhere.
            self._bury(who)
        elif isinstance(outcome, RestoreResult) and self.known:
            raise Violation("G11: a run that could not be read for a moment starts afresh")

    def _was_not_restored(self, outcome: Any, selector: str | int, sound: Kept | None, candidates: list[Kept]) -> None:
        if sound is not None:
            raise Violation(f"G1: {sound} cannot be restored: {outcome!r}")
        if selector == "latest" and not self.known:
            if not isinstance(outcome, RestoreResult):
                raise Violation(f"G11: an empty run does not start afresh: {outcome!r}")
        elif candidates or selector == "latest":
            if not isinstance(outcome, CorruptCheckpointError):
                raise Violation(f"G11: only damaged ones are left, and it says {outcome!r}")
        elif not isinstance(outcome, CheckpointNotFoundError):
            raise Violation(f"G11: {selector!r} is not there, and it says {outcome!r}")

    def _report(self, who: Trainer, step: int, metrics: dict[str, Any], fault: Fault | None) -> None:
        same_step = [kept for kept in self._newest_first() if kept.step == step]
        kept = next((kept for kept in same_step if who.head is None or kept.sequence in who.line), None)

        def noted(said: Said) -> Said:
            texts = {**dict(said.metrics), **{name: repr(value) for name, value in metrics.items()}}
            return said._replace(metrics=tuple(sorted(texts.items())))

        if kept is not None:
            kept.expect(noted)
        who.door.arm(_now(fault))
        outcome = self._while_noting(step, noted, who, lambda: who.manager.report(step, metrics))
        if outcome is DEAD:
            return
        who.prunes = who.prunes or (outcome is True and who.manager.number > 0)
        self._note_came(kept, outcome, who, expected=kept is not None)
        self._tidy(who, fault)

    def _tag(self, who: Trainer, step: int, tag: str, off: bool, fault: Fault | None) -> None:
        same_step = [kept for kept in self._newest_first() if kept.step == step]
        kept = next((kept for kept in same_step if kept.sequence in who.line), next(iter(same_step), None))
        able = kept is not None and (not off or tag in kept.said.tags)

        def noted(said: Said) -> Said:
            return said._replace(tags=said.tags - {tag} if off else said.tags | {tag})

        if kept is not None and able:
            kept.expect(noted)
        who.door.arm(_now(fault))
        change = who.manager.untag if off else who.manager.tag
        outcome = self._while_noting(step, noted, who, lambda: change(step, tag))
        if outcome is DEAD:
            return
        if not able and not who.door.fired and not isinstance(outcome, CheckpointNotFoundError):
            raise Violation(f"G11: {tag} of step {step} is not there, and it says {outcome!r}")
        who.prunes = who.prunes or (outcome is None and who.manager.number > 0)
        if able:
            self._note_came(kept, outcome is None, who, expected=True)
        self._tidy(who, fault)

    def _while_noting(
        self,
        step: int,
        noted: Callable[[Said], Said],
        who: Trainer,
        body: Callable[[], Any],
        *,
        adds: Planned | None = None,
    ) -> Any:
        self.noting = lambda kept: (noted(kept.said),) if kept.step == step and self._met(who) else ()
        try:
            return self._do(who, body, adds=adds)
        finally:
            self.noting = lambda kept: ()

    def _note_came(self, kept: Kept | None, outcome: Any, who: Trainer, *, expected: bool) -> None:
        if who.door.fired:
            return
        if outcome is not expected:
            raise Violation(f"G11: of {kept} it says {outcome!r}")
        if kept is None:
            return  # nothing was written, so nothing that was written before has become durable
        if kept.or_else and kept.said[:2] != kept.or_else[-1][:2]:
            raise Violation(f"a note on {kept} is lost: {kept.said}, not {kept.or_else[-1]}")
        for other in self.known.values():
            other.or_else = ()

    def _prune(self, who: Trainer, fault: Fault | None) -> None:
        who.door.arm(None)
        self._tidy(who)
        may = self._may_write(who.door, who.manager.number)
        goes = self._goes(who) if may else frozenset()
        listed = [kept.folder for kept in self._newest_first()]
        who.door.arm(fault)
        outcome = self._do(who, who.manager.prune, goes=goes, exact=may)
        if outcome is DEAD or who.door.fired:
            return
        if not may:
            if not isinstance(outcome, RunInUseError):
                raise Violation(f"G13: who is not the writer pruned: {outcome!r}")
            return
        self._is_planned(outcome, listed, goes)

    def _look_ahead(self, who: Trainer) -> None:
        """A dry run says what goes, and nothing goes."""
        before = {key: value for key, value in self.room.shelf.values.items() if not key.startswith("readers/")}
        who.door.arm(None)
        decided = who.manager.retention()
        after = {key: value for key, value in self.room.shelf.values.items() if not key.startswith("readers/")}
        if before != after:
            raise Violation("G4: a dry run changed something")
        self._is_planned(decided, [kept.folder for kept in self._newest_first()], self._goes(who, dry=True))

    def _is_planned(self, decided: Any, listed: list[str], goes: frozenset[str]) -> None:
        if isinstance(decided, HoldfastError):
            raise Violation(f"G4: it could not be pruned: {decided!r}") from decided
        wanted = {kept.folder for kept in [*self.known.values(), *self.former.values()] if kept.digest in goes}
        if [decision.folder for decision in decided] != listed:
            raise Violation(f"G4: decided about {decided}, and there are {listed}")
        if {decision.folder for decision in decided if not decision.keep} != wanted:
            raise Violation(f"G4: {wanted} may go, and it was decided: {list(map(str, decided))}")
        if not all(decision.reasons for decision in decided):
            raise Violation("G4: a decision without a reason")

    def _tidy(self, who: Trainer, fault: Fault | None = None) -> None:
        """The housework that a save, a report or a tag leaves for later."""
        if who not in self.trainers or not who.manager.behind.work:
            return
        if fault is not None and fault.behind:
            who.door.arm(fault)
        may, prunes, who.prunes = self._may_write(who.door, who.manager.number), who.prunes, False
        goes = self._goes(who) if may and prunes else frozenset()
        self._do(who, who.manager.behind.wait, goes=goes, exact=may)

    def _close(self, who: Trainer) -> None:
        may = self._may_write(who.door, who.manager.number)
        goes = self._goes(who) if may and who.prunes else frozenset()
        who.door.arm(None)
        outcome = self._do(who, who.manager.close, goes=goes, exact=may and who.prunes)
        if isinstance(outcome, HoldfastError):
            raise Violation(f"G6: heard again: {outcome!r}") from outcome
        self.trainers.remove(who)
        who.process.alive = False
        if self.room.writer_on()[1] is who.process and not self.room.writer_on()[2]:
            raise Violation("G13: a run that was closed is not free")

    def _read(self, kept: Kept, host: str) -> None:
        door = self._door(host)
        claim = reading(door, kept.folder)  # type: ignore[arg-type]
        claim.__enter__()
        if self._manifest(kept.folder) is None:
            claim.__exit__(None, None, None)  # it was given up just before
            door.process.alive = False
            return
        self.readers.append(Reader(door.process, kept, claim))

    def _bury(self, who: Trainer) -> None:
        who.process.alive = False
        if who.manager is not None:
            who.manager.die()
        if who in self.trainers:
            self.trainers.remove(who)

    def _cut_power(self, seed: int) -> None:
        for trainer in list(self.trainers):
            self._bury(trainer)
        for reader in self.readers:
            key, claim = self._claim_of(reader)
            reader.claim.__exit__(None, None, None)
            self.room.shelf.set(key, claim)
        for process in self.room.processes.values():
            process.alive = process is self.observer.process
        self.readers = []
        chance = random.Random(seed)
        self.room.shelf.cut_power(chance, chance.choice((0.0, 0.5, 1.0)))
        self._compare(None, frozenset(), exact=False, cut=True)

    def _meet(self) -> None:
        """In the middle of what somebody does, somebody else does something."""
        underway, self.meetings = self.underway[-1], self.meetings + 1
        underway.met = True
        who = underway.who
        self._compare(underway.adds, underway.goes, exact=False)
        fault = who.door.fault
        elsewhere = "far" if who.process.host == "here" else "here"
        if fault is not None and fault.after:
            # Nobody has heard of this one for so long that another takes its place. It only slept.
            who.process.silent = True
            self._take_over(elsewhere, underway.goes)
            who.process.silent = False
            return
        wanted = [self.known[digest] for digest in underway.goes if digest in self.known]
        # By number: digests are others in every run.
        wanted.sort(key=lambda kept: kept.sequence)
        kept = wanted[0] if wanted else self._nth(self.meetings)
        if kept is not None:
            self._read(kept, elsewhere)

    def _take_over(self, host: str, going: frozenset[str]) -> None:
        """Somebody takes a writer's place, and, now and then, another one his. What the sleeping one is about to remove
        is removed meanwhile, and its step is saved again."""
        policies = POLICIES[0] if going else POLICIES[self.meetings % len(POLICIES)]
        for last in (False, True) if self.meetings % 2 else (True,):
            other = self._start(host, policies, links=True, eager=True, fault=None)
            if other is None:
                return
            self._restore(other, "latest", None)
            if going:
                self._prune(other, None)
            if not last:
                self._close(other)
        again = sorted(self.former[digest].step for digest in going if digest in self.former)
        step = again[-1] if again else (other.head.step + 1 if other.head is not None else 0)
        self._save(other, step, {"loss": 0.5}, None, None)

    def _met(self, who: Trainer) -> bool:
        return self._fired(who, "meet") or self._fired(who, "glance")

    def _fired(self, who: Trainer, kind: str) -> bool:
        return who.door.fired and who.door.fault is not None and who.door.fault.kind == kind

    def _end(self) -> None:
        for trainer in list(self.trainers):
            self._bury(trainer)
        while self.readers:
            reader = self.readers.pop()
            reader.claim.__exit__(None, None, None)
            reader.process.alive = False
        who = self._start("here", (Keep("all"),), links=True, eager=True, fault=None)
        if who is None:
            raise Violation("G13: a run that nobody writes to is refused")
        for kept in self._newest_first():
            if not kept.tried and not kept.broken:
                self._restore_folder(who, kept)
        self._restore(who, "latest", None)
        self._save(who, 1000, {}, None, None)
        self._prune(who, None)
        self._is_in_order(who)
        self._close(who)

    def _restore_folder(self, who: Trainer, kept: Kept) -> None:
        who.door.arm(None)
        result = self._do(who, lambda: who.manager.restore(kept.folder))
        if not isinstance(result, RestoreResult) or not who.part.is_of(kept.mark):
            raise Violation(f"G1: {kept} cannot be restored as it was saved: {result!r}")

    def _is_in_order(self, who: Trainer) -> None:
        """Nothing is left of what nobody needs, but the word on attempts whose writers may still live."""
        needed = {kept.folder for kept in self.known.values()} | self._being_read(who)
        for entry in self.room.shelf.entries(""):
            if not entry.is_folder or entry.name in needed:
                continue
            names = {inner.name for inner in self.room.shelf.entries(entry.name)}
            if entry.name.startswith("step-") and not names <= {"attempt.json", "manifest.json"}:
                raise Violation(f"{entry.name} is left with {sorted(names)}")
            if entry.name == "readers" and (left := self._of_the_dead(names)):
                raise Violation(f"claims of readers that are gone are left: {left}")
            if entry.name == "lease" and len(names) > 6:
                raise Violation(f"claims of writers pile up: {sorted(names)}")

    def _of_the_dead(self, names: set[str]) -> list[str]:
        front = b'"machine":"here"'
        return [name for name in sorted(names) if front in self.room.shelf.values[f"readers/{name}"]]

    # What has to hold

    def _do(
        self,
        who: Trainer,
        body: Callable[[], Any],
        *,
        adds: Planned | None = None,
        goes: frozenset[str] = frozenset(),
        exact: bool = False,
    ) -> Any:
        """Let somebody do something, and look whether everything is as it must be."""
        before = who.door.fired
        number = who.manager.number if who.manager is not None else 0
        underway = Underway(who, adds, goes, fenced=0 < number < self.settled)
        self.underway.append(underway)
        outcome: Any
        try:
            outcome = body()
        except HoldfastError as error:
            outcome = error
        except SimulatedCrash:
            outcome = DEAD
        if not who.process.alive:
            outcome = DEAD  # what a dead process catches and says does not count
        if underway.late > (1 if underway.met and not underway.fenced else 0):
            self.wrong.append("G13: a writer that lost the run removed a checkpoint")
        died = who.door.fault
        if outcome is DEAD:
            self._bury(who)
        exact = exact and outcome is not DEAD and who.door.fired == before and not who.door.is_full
        self._compare(adds, goes, exact=exact)
        self.underway.pop()
        if exact and (unsaid := [kept for kept in who.aside if kept in self.known.values() and not kept.said.damaged]):
            raise Violation(f"G3: {unsaid} are damaged, and nobody wrote it down")
        if outcome is DEAD and died is not None and died.kind == "power":
            self._cut_power(died.at)
        return outcome

    def _compare(self, adds: Planned | None, goes: frozenset[str], *, exact: bool, cut: bool = False) -> None:
        for text in self.wrong:
            raise Violation(text)
        seen = self._seen()
        lost = [kept for digest, kept in self.known.items() if digest not in seen]
        for kept in lost:
            if kept.digest not in goes and not (cut and not kept.firm):
                raise Violation(f"G1, G4: {kept} is gone, and nothing allowed that")
            self.former[kept.digest] = self.known.pop(kept.digest)
        for digest, (folder, manifest) in seen.items():
            if digest in self.known:
                continue
            if cut and digest in self.former:
                self.known[digest] = self.former.pop(digest)
            elif adds is not None and adds.became is None:
                self._add(adds, digest, folder, manifest)
            else:
                raise Violation(f"G13: {folder} was committed, and nobody who may write did")
        if exact and (stays := [self.known[digest] for digest in goes if digest in self.known]):
            raise Violation(f"G4: {stays} should have gone")
        self._is_whole(seen)
        self._is_durable(lost)
        self._is_readable()
        self._is_listed(cut)
        for trainer in self.trainers:
            self.settled = max(self.settled, trainer.manager.number if trainer.manager is not None else 0)

    def _add(self, adds: Planned, digest: str, folder: str, manifest: dict[str, Any]) -> None:
        highest = max((kept.sequence for kept in self.known.values()), default=0)
        if manifest["sequence"] <= highest:
            raise Violation(f"{folder} has number {manifest['sequence']}, and there is a {highest}")
        line = frozenset(number for first, last in manifest["line"] for number in range(first, last + 1))
        parent = adds.parent.digest if adds.parent is not None else None
        if (manifest["step"], manifest["parent"]) != (adds.step, parent):
            raise Violation(f"{folder} is of step {manifest['step']}, after {manifest['parent']}")
        if line != adds.line:
            raise Violation(f"{folder} goes back to {sorted(line)}, and it came from {sorted(adds.line)}")
        adds.became = self.known[digest] = Kept(
            digest,
            folder,
            adds.step,
            manifest["sequence"],
            line,
            adds.mark,
            adds.parent,
            tuple(file["name"] for file in manifest["files"]),
            dict(adds.metrics),
            Said.of(adds.tags, adds.metrics, False),
        )

    def _seen(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """What is committed, by the bytes alone."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for key, data in self.room.shelf.values.items():
            if key.endswith("/manifest.json"):
                envelope = _decoded(data)
                if "abandoned" not in envelope:
                    found[envelope["digest"]] = (key.partition("/")[0], envelope["manifest"])
        return found

    def _manifest(self, folder: str) -> dict[str, Any] | None:
        data = self.room.shelf.values.get(f"{folder}/manifest.json")
        return None if data is None or "abandoned" in (envelope := _decoded(data)) else envelope["manifest"]

    def _is_whole(self, seen: dict[str, tuple[str, dict[str, Any]]]) -> None:
        values = self.room.shelf.values
        for digest, (folder, manifest) in seen.items():
            kept = self.known[digest]
            now = tuple(values.get(f"{folder}/{name}", b"") for name in kept.files)
            if kept.broken or (kept.checked and all(a is b for a, b in zip(now, kept.checked, strict=True))):
                continue
            for file, data in zip(manifest["files"], now, strict=True):
                if _digest(data, file, manifest) != file["digest"]:
                    raise Violation(f"G1: {folder}/{file['name']} is not what its manifest says")
            kept.checked = now

    def _is_durable(self, lost: list[Kept]) -> None:
        """Whatever goes, something to resume from would survive a power cut at this moment."""
        if not any(kept.firm and not kept.broken for kept in lost):
            return
        sound = [kept for kept in self.known.values() if not kept.broken]
        durable = self.room.shelf.is_durable
        if sound and not any(all(map(durable, _keys(kept))) for kept in sound):
            raise Violation(f"G1: {lost} went, and a power cut would take {sound}")

    def _is_readable(self) -> None:
        for reader in self.readers:
            for name in reader.kept.files:
                if f"{reader.kept.folder}/{name}" not in self.room.shelf.values:
                    raise Violation(f"G4: {reader.kept} is being read, and {name} is gone")

    def _is_listed(self, cut: bool) -> None:
        """A scan agrees: the same checkpoints, the latest first, and what was said of them."""
        scan = self.catalog.scan()
        if scan.damaged:
            raise Violation(f"G1: {scan.damaged} cannot be read")
        order = self._newest_first()
        if [found.digest for found in scan.checkpoints] != [kept.digest for kept in order]:
            raise Violation(f"a scan finds {scan.checkpoints}, and there are {order}")
        for found, kept in zip(scan.checkpoints, order, strict=True):
            said = Said.of(found.tags, dict(found.metrics), bool(found.damage))
            allowed = (kept.said, *kept.or_else, *self.noting(kept))
            if (said.tags, said.metrics) not in {(one.tags, one.metrics) for one in allowed}:
                raise Violation(f"of {kept} it is said {said}, not {kept.said}")
            if said.damaged != kept.said.damaged and not (kept.passed if said.damaged else cut):
                raise Violation(f"G3: of {kept} it is said {said}, not {kept.said}")
            if said.damaged and not kept.broken:
                raise Violation(f"G3: {kept} is sound, and called damaged: {found.damage}")
            kept.said, kept.metrics = said, dict(found.metrics)

    def _goes(self, who: Trainer, *, dry: bool = False) -> frozenset[str]:
        """What may go, and, when the housework is done, has gone: by the words of the policies, and by nothing else."""
        aside = set() if dry else who.aside
        sound = [kept for kept in self.known.values() if not kept.said.damaged and kept not in aside]
        if who.keep is None or not sound:
            return frozenset()
        newest = max(sound, key=lambda kept: kept.sequence)
        numbers = self._line_of(newest)
        line = [kept for kept in sound if kept.sequence in numbers]
        chosen = {newest.digest}
        for keep in who.keep:
            chosen |= {kept.digest for kept in _chosen(keep, sound, line)}
        read = self._being_read(who)
        return frozenset(
            kept.digest
            for kept in sound
            if kept.digest not in chosen
            and kept.sequence in numbers
            and not kept.said.tags
            and kept.folder not in read
            and (who.head is None or kept.digest != who.head.digest)
        )

    def _line_of(self, newest: Kept) -> set[int]:
        """The numbers of what a checkpoint goes back to, and its own. One that does not know goes by its parents."""
        numbers, parent = {newest.sequence, *newest.line}, newest.parent
        while not newest.line and parent is not None and parent.digest in self.known:
            numbers.add(parent.sequence)
            parent = parent.parent
        return numbers

    def _being_read(self, who: Trainer) -> set[str]:
        """What somebody reads, as far as one can see: who died elsewhere may have died or not."""
        found = set()
        for key, data in self.room.shelf.values.items():
            if key.startswith("readers/") and key.endswith(".json"):
                reader = self.room.who(data)
                if reader is not None and (reader.alive or reader.host != who.process.host):
                    found.add(key.removeprefix("readers/").partition("--")[0])
        return found

    # Small things

    def _door(self, host: str) -> Door:
        door = Door(self.room, self.room.process(host))
        door.on_meeting = self._meet
        door.on_change = lambda what, key, data: self._watch(door, what, key, data)
        return door

    def _watch(self, door: Door, what: str, key: str, data: bytes | None) -> None:
        """Who has lost the run may not make a checkpoint, nor take one away."""
        if not key.endswith("/manifest.json") or not self.underway:
            return
        underway = self.underway[-1]
        number = underway.who.manager.number if underway.who.manager is not None else 0
        if not 0 < number < self.settled or underway.who.door is not door:
            return
        if what == "delete" and self._manifest(key.partition("/")[0]) is not None:
            underway.late += 1
        if what == "put" and data is not None and b'"abandoned"' not in data[:64]:
            self.wrong.append(f"G13: {key} was committed by a writer that had lost the run")

    def _may_write(self, door: Door, number: int) -> bool:
        highest, holder, released = self.room.writer_on()
        if number:
            return highest == number
        if holder is None or released or holder is door.process:
            return True
        return not holder.alive or (holder.silent and holder.host != door.process.host)

    def _pick(self, who: int) -> Trainer | None:
        """Somebody who trains; where nobody does, somebody comes."""
        if not self.trainers:
            started = self._start("here", POLICIES[who % len(POLICIES)], links=True, eager=False, fault=None)
            if started is not None and self.known:
                self._restore(started, "latest", None)
            return started if started in self.trainers else None
        return self.trainers[who % len(self.trainers)]

    def _nth(self, nth: int) -> Kept | None:
        order = self._newest_first()
        return order[nth % len(order)] if order else None

    def _newest_first(self) -> list[Kept]:
        return sorted(self.known.values(), key=lambda kept: kept.sequence, reverse=True)

    def _claim_of(self, reader: Reader) -> tuple[str, bytes]:
        front = f'"host":"played-{reader.process.number}"'.encode()
        for key, data in self.room.shelf.values.items():
            if key.startswith(f"readers/{reader.kept.folder}--") and front in data:
                return key, data
        raise Violation(f"G4: the claim of somebody who reads {reader.kept} is gone")


def _now(fault: Fault | None) -> Fault | None:
    return None if fault is None or fault.behind else fault


def _joined(policies: Policies) -> KeepPolicy | None:
    joined: KeepPolicy | None = None
    for keep in policies or ():
        joined = keep.real() if joined is None else joined | keep.real()
    return joined


def _chosen(keep: Keep, sound: list[Kept], line: list[Kept]) -> list[Kept]:
    """Which checkpoints a policy keeps, after its own words."""
    if keep.kind == "last":
        return sorted(line, key=lambda kept: -kept.sequence)[: keep.n]
    if keep.kind == "oldest":
        return sorted(line, key=lambda kept: kept.sequence)[:1]
    if keep.kind == "all":
        return sound
    if keep.kind == "every":
        periods = {kept.step // keep.n for kept in line} - {0}
        inside = [[kept for kept in line if kept.step // keep.n == period] for period in periods]
        return [min(group, key=lambda kept: (kept.step, kept.sequence)) for group in inside]
    if keep.kind == "best":
        return sorted(sound, key=lambda kept: _rank(kept, keep))[: keep.n]
    return [kept for kept in sound if kept.said.tags]


def _rank(kept: Kept, keep: Keep) -> tuple[int, Any, int]:
    """The lower the better: numbers, then NaN, then nothing at all; of two that are equal, the newer."""
    value = kept.metrics.get(keep.metric)
    if value is None:
        return 2, 0, -kept.sequence
    if value != value:
        return 1, 0, -kept.sequence
    return 0, -value if keep.mode == "max" else value, -kept.sequence


def _is_fencing(outcome: Any) -> bool:
    return isinstance(outcome, RunInUseError | KeyExistsError)


def _keys(kept: Kept) -> list[str]:
    return [f"{kept.folder}/{name}" for name in (*kept.files, "manifest.json")]


def _digest(data: bytes, file: dict[str, Any], manifest: dict[str, Any]) -> str:
    """Of a tensor file over its header and its blocks' digests, of any other over its bytes."""
    if not file["header_bytes"]:
        return blake3(data).hexdigest()
    whole = blake3(data[: file["header_bytes"]])
    chunks = [chunk for tensor in manifest["tensors"] for chunk in tensor["chunks"] if chunk["file"] == file["name"]]
    ends = [*sorted(chunk["start"] for chunk in chunks)[1:], len(data)]
    for chunk, end in zip(sorted(chunks, key=lambda chunk: chunk["start"]), ends, strict=True):
        whole.update(blake3(data[chunk["start"] : end]).digest())
    return whole.hexdigest()


_decodings: dict[bytes, dict[str, Any]] = {}


def _decoded(data: bytes) -> dict[str, Any]:
    """The content of a manifest; each is taken apart once."""
    found = _decodings.get(data)
    if found is None:
        if len(_decodings) > 256:
            _decodings.clear()
        found = _decodings[data] = json.loads(data)
    return found
