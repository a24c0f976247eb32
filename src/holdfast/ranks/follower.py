"""The side of every rank but the leader in a round: send an answer, and wait for the choice that uses it."""

from __future__ import annotations

import contextlib

from holdfast.ranks.messages import Message
from holdfast.ranks.rounds import Rounds, no_answer

__all__ = ["Follower", "LeaderLosses"]

# Followers wait longer than the leader, so that its message about missing ranks reaches them before they give up.
_GRACE_SECONDS = 5.0


class LeaderLosses:
    """How often this rank lost the leader, in any thread: each thread has to find the leader's round again."""

    def __init__(self) -> None:
        self.count = 0


class Follower:
    """A follower's side, from round to round."""

    def __init__(self, rounds: Rounds, losses: LeaderLosses) -> None:
        self._rounds = rounds
        self._losses = losses
        self._losses_recovered = 0
        self._retry = 0

    def take_part(self, own: Message) -> Message:
        """Send this rank's answer and return the leader's choice.

        The leader may have gone through rounds that this rank never came to, alone or after this rank lost it. Their
        choices do not use this answer, or have other labels, and are passed over. An answer that no choice came for is
        withdrawn: the next call of this rank is for the same round.
        """
        losses = self._losses.count
        try:
            choice = self._exchange(own)
            while self._is_for_other_call(choice, own.label, lost=losses != self._losses_recovered):
                self._rounds.number += 1
                self._retry = 0
                choice = self._exchange(own)
        except BaseException as error:
            self._losses.count += 1
            if not isinstance(error, Exception):
                self._withdraw()
            self._rounds.number -= 1
            self._retry += 1
            raise
        self._losses_recovered = losses
        self._retry = 0
        return choice

    def _exchange(self, own: Message) -> Message:
        own.retry = self._retry
        self._rounds.mailbox.send(self._rounds.answer_key(self._rounds.rank), own)
        return self._wait_for_choice(own.label)

    def _is_for_other_call(self, choice: Message, label: str, *, lost: bool) -> bool:
        unanswered = self._rounds.rank in choice.unanswered
        if not unanswered and choice.retries.get(self._rounds.rank, 0) != self._retry:
            return True
        # One without a label, as the leader sends it to a rank that is late, is meant for this very call.
        return choice.label != label and (unanswered or (lost and choice.label != ""))

    def _wait_for_choice(self, label: str) -> Message:
        rounds = self._rounds
        waiting = rounds.start_waiting(rounds.timeout_seconds + _GRACE_SECONDS)
        while (received := rounds.mailbox.receive(rounds.choice_key())) is None:
            if not waiting.pause([0]):
                self._withdraw()
                raise no_answer(label, [0], rounds.timeout_seconds)
        choice, _ = received
        return choice

    def _withdraw(self) -> None:
        """Replace this rank's answer by one that the leader does not count."""
        with contextlib.suppress(Exception):
            self._rounds.mailbox.send(self._rounds.answer_key(self._rounds.rank), Message(""))
