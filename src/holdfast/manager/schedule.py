"""Decide when to save and when to stop, on all ranks alike. A step enters; the wish of the triggers leaves.

Triggers that depend on the step alone are evaluated on every rank. Clocks and signals are evaluated by the leader, once
per step, and broadcast; a signal that comes to another rank is passed on to the leader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.manager.signals import SignalWatch
from holdfast.manager.triggers import Moment, Trigger, Wish, split
from holdfast.ondisk.decoding import from_msgpack
from holdfast.ranks.base import Ranks
from holdfast.runs.process_identity import seconds_since_birth

logger = logging.getLogger("holdfast")

__all__ = ["Pace", "Time"]

_LOOK_FOR_FLAGS_SECONDS = 0.1
_NOTHING = Wish(False, False, ())


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """The leader's message about a step: its wish, and what asks to stop: every signal that came to any rank so far,
    and any other reason."""

    wish: Wish
    causes: tuple[str, ...] = ()


_SILENCE = _Word(_NOTHING)


@dataclass(frozen=True, slots=True)
class Time:
    """The clocks that triggers are asked with: one that only goes forward, the wall's, and the age of the process."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    running: Callable[[], float] = seconds_since_birth


class Pace:
    """The triggers of one manager.

    `should_stop`: something has asked to stop, as of the last question. `epoch`: the last one that was named.

    Each signal that comes, and each other reason to stop, asks for one save. The leader names them, and every rank
    knows which there were at its last save: one more asks again.
    """

    def __init__(self, trigger: Trigger | None, ranks: Ranks, clocks: Time | None = None) -> None:
        self._by_step, self._by_leader = split(trigger) if trigger is not None else (None, None)
        self._needs_epoch = trigger is not None and trigger.needs_epoch
        self._ranks = ranks
        self._time = clocks or Time()
        self._watch = SignalWatch(trigger.signals if trigger is not None else ())
        self._flags: frozenset[str] = frozenset()
        self._causes: frozenset[str] = frozenset()
        self._asked_causes: frozenset[str] = frozenset()
        self._saved_causes: frozenset[str] = frozenset()
        self._next_look = 0.0
        self._last_save = self._time.now()
        self._last_epoch: int | None = 0
        self._asked: tuple[int, int | None] | None = None
        self.should_stop = False
        self.epoch: int | None = None

    @property
    def asks_leader(self) -> bool:
        """Return whether every question is one to the leader, and so has to be asked on all ranks."""
        return self._by_leader is not None

    def ask(self, step: int, epoch: int | None) -> Wish:
        """Return what the triggers want after a step. To ask about the same step again changes nothing."""
        if epoch is None and self._needs_epoch:
            self._needs_epoch = False
            logger.warning("Every(epochs=...) saves only if the number of epochs done is passed as epoch=")
        self._turn_to(step, epoch)
        wish = _NOTHING
        if self._by_step is not None:
            moment = Moment(step, epoch, self._last_epoch)
            wish = self._by_step.wish(moment)
            self._causes |= _reasons_to_stop(self._by_step, moment) if wish.stop else set()
        if self._by_leader is not None:
            self._pass_signals_on()
            word = self._ranks.broadcast(lambda: self._word(step, epoch))
            message = from_msgpack(word, _Word) if word else _SILENCE
            self._causes |= set(message.causes)
            wish = _both(wish, message.wish)
        self.should_stop = self.should_stop or wish.stop
        self._asked_causes = self._causes
        return wish

    def ask_to_stop(self) -> bool:
        """Return whether something asks to stop now, outside of a step. A signal to any rank counts at once: every rank
        sends those that it got. Asks for no save; the next question about a step does."""
        if self._by_leader is None:
            return self.should_stop
        word = self._ranks.decide(
            "should_stop_now",
            lambda: tuple(sorted(self._own_signals())),
            self._word_to_stop,
            sends=tuple[str, ...],
            returns=_Word,
        )
        self._causes |= set(word.causes)
        self.should_stop = self.should_stop or word.wish.stop
        return word.wish.stop

    @property
    def must_save_to_stop(self) -> bool:
        """Return whether something that asks to stop has had no save yet, as of the last question."""
        return not self._causes <= self._saved_causes

    def wants_save(self, step: int, epoch: int | None) -> bool:
        """Return whether to save after a step. A reason to stop asks for one save, however long training goes on."""
        wish = self.ask(step, epoch)
        return wish.save or (wish.stop and self.must_save_to_stop)

    def note_start(self, epoch: int | None) -> None:
        """Note that a run starts or resumes, with the number of epochs done if it is known."""
        self._last_epoch, self._asked, self.epoch = epoch, None, epoch

    def note_fresh_start(self) -> None:
        """Begin with no epoch done, whatever was done before."""
        self._last_epoch, self._asked, self.epoch = 0, None, None

    def note_save(self) -> None:
        """Note a save. It serves what asked to stop at the last question about a step; what `ask_to_stop` found since
        still has its save before it."""
        self._last_save = self._time.now()
        self._saved_causes = self._asked_causes

    def note_failure(self) -> None:
        """Note that the last save before a stop failed: whatever asked for it still does."""
        self._saved_causes = frozenset()

    def close(self) -> None:
        self._watch.close()

    def _turn_to(self, step: int, epoch: int | None) -> None:
        """Turn to a step at the first question about it: the epoch of the step before becomes the last one."""
        if self._asked is not None and self._asked[0] != step and self._asked[1] is not None:
            self._last_epoch = self._asked[1]
        self._asked = (step, epoch)
        self.epoch = epoch if epoch is not None else self.epoch

    def _word(self, step: int, epoch: int | None) -> bytes:
        """Return the message of the leader for this step: empty, most of the time."""
        if self._by_leader is None:
            return b""
        now = self._time.now()
        if self._ranks.size > 1 and now >= self._next_look:
            self._next_look = now + _LOOK_FOR_FLAGS_SECONDS
            # Added to what `ask_to_stop` gathered: a rank whose signals are known does not flag them.
            self._flags |= frozenset(self._ranks.flags())
        moment = self._moment(step, epoch)
        wish = self._by_leader.wish(moment)
        if not wish.save and not wish.stop:
            return b""
        return msgspec.msgpack.encode(self._word_of(self._by_leader, wish, moment))

    def _word_to_stop(self, signals: list[tuple[str, ...]]) -> _Word:
        """Return the message of the leader outside of a step, from the signals of all ranks."""
        self._flags |= {occurrence for of_rank in signals for occurrence in of_rank}
        if self._by_leader is None:
            return _SILENCE
        step, epoch = self._asked if self._asked is not None else (0, None)
        moment = self._moment(step, epoch)
        wish = self._by_leader.wish(moment)
        return self._word_of(self._by_leader, wish, moment) if wish.stop else _SILENCE

    def _moment(self, step: int, epoch: int | None) -> Moment:
        return Moment(
            step,
            epoch,
            self._last_epoch,
            seconds_since_save=self._time.now() - self._last_save,
            seconds_running=self._time.running(),
            wall_seconds=self._time.wall(),
            signals=frozenset(_name_of(one) for one in self._flags) | self._watch.received,
        )

    def _word_of(self, trigger: Trigger, wish: Wish, moment: Moment) -> _Word:
        causes = _reasons_to_stop(trigger, moment) - moment.signals if wish.stop else set()
        return _Word(wish, tuple(sorted(causes | self._flags | self._own_signals())))

    def _own_signals(self) -> frozenset[str]:
        """Return every signal that came to this rank, each as a text."""
        counts = self._watch.counts
        return frozenset(
            f"{self._ranks.rank}/{number}/{name}" for name in list(counts) for number in range(counts[name])
        )

    def _pass_signals_on(self) -> None:
        """Let the leader know, until its word shows that it does: two ranks may flag at the same moment."""
        if self._ranks.rank != 0 and self._watch.counts and not self._own_signals() <= self._causes:
            self._ranks.flag(sorted(self._own_signals()))


def _reasons_to_stop(trigger: Trigger, moment: Moment) -> set[str]:
    """Return the reasons of the parts that ask to stop. One that gives none counts as a reason."""
    wishes = [part.wish(moment) for part in trigger.parts()]
    return {reason for wish in wishes if wish.stop for reason in wish.reasons or ("",)}


def _name_of(occurrence: str) -> str:
    return occurrence.rpartition("/")[2]


def _both(one: Wish, other: Wish) -> Wish:
    return Wish(one.save or other.save, one.stop or other.stop, (*one.reasons, *other.reasons))
