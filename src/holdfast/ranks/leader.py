"""The leader's side of a round: collect the answers of all ranks, choose, and publish the choice.

Ranks that are in different calls get the same error as soon as that is seen, and meet again in a later round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.errors import error_record
from holdfast.ondisk.decoding import from_msgpack
from holdfast.ranks.base import Choice, Mine
from holdfast.ranks.messages import Message, first_failure, message_of
from holdfast.ranks.rounds import Rounds, no_answer

__all__ = ["Leader"]

_KEPT_MISMATCHES = 64


class Leader:
    """The leader's side, from round to round."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._open_rounds: list[int] = []
        self._mismatched: dict[int, deque[str]] = {}

    def decide(
        self,
        own: Message,
        choose: Callable[[list[Mine]], Choice],
        sends: Any,
        if_failed: Callable[[], None],
        if_silent: Callable[[], Choice] | None,
    ) -> tuple[Message, BaseException | None]:
        """Return the choice of a round, which every rank gets, and the error of `choose` itself."""
        label = own.label
        self._close_earlier_rounds()
        answers, failure = self._collect(label, own)
        while late := self._late(label, answers):
            self._fail_late_calls(label, own, late)
            answers, failure = self._collect(label, own)
        choice, cause = Message(label, error=failure), None
        if failure is not None and first_failure(label, answers) is None and if_silent is not None:
            without, _ = message_of(label, if_silent)
            choice = without if without.error is None else choice
        elif failure is None:
            # Every rank answered in this round, so every rank has read the round before it: its keys may go.
            self._rounds.mailbox.sweep()
            values = [answers[rank].value for rank in range(self._rounds.size)]
            choice, cause = message_of(label, lambda: choose([from_msgpack(value, sends) for value in values]))
        if choice.error is not None:
            if_failed()
        # A rank that is in a call to which the leader comes later must wait for it there.
        ahead = [rank for rank, answer in answers.items() if answer.label != label and label in self._mismatches(rank)]
        self._conclude(choice, {rank: answer for rank, answer in answers.items() if rank not in ahead})
        self._note_mismatches(label, answers)
        return choice, cause

    def _close_earlier_rounds(self) -> None:
        """Let the others pass over rounds in which the leader was interrupted, or lost the store, before its choice."""
        rounds = self._rounds
        self._open_rounds.append(rounds.number)
        for number in self._open_rounds[:-1]:
            everyone = tuple(range(1, rounds.size))
            rounds.mailbox.discard_later(
                rounds.mailbox.send(rounds.choice_key(number), Message("", unanswered=everyone))
            )

    def _collect(self, label: str, own: Message) -> tuple[dict[int, Message], dict[str, Any] | None]:
        """Return the answers of the ranks and the first failure as soon as it is known; all when there is none."""
        rounds, answers = self._rounds, {0: own}
        waiting = rounds.start_waiting(rounds.timeout_seconds)
        while True:
            for rank in range(1, rounds.size):
                if rank not in answers:
                    answer = self._receive(rank)
                    # One without a label was withdrawn.
                    if answer is not None and answer.label:
                        answers[rank] = answer
                        waiting.look_often()
            failure = first_failure(label, answers)
            if failure is not None or len(answers) == rounds.size:
                return answers, failure
            missing = [rank for rank in range(rounds.size) if rank not in answers]
            if not waiting.pause(missing):
                return answers, error_record(no_answer(label, missing, rounds.timeout_seconds))

    def _receive(self, rank: int) -> Message | None:
        received = self._rounds.mailbox.receive(self._rounds.answer_key(rank))
        if received is None:
            return None
        answer, further_keys = received
        self._rounds.mailbox.discard_later(further_keys)
        return answer

    def _late(self, label: str, answers: dict[int, Message]) -> dict[int, Message]:
        """Return the answers of ranks that reached a call which has failed here already."""
        if answers[0].error is not None:
            return {}
        failed = self._mismatches(0)
        return {rank: answer for rank, answer in answers.items() if answer.label != label and answer.label in failed}

    def _fail_late_calls(self, label: str, own: Message, late: dict[int, Message]) -> None:
        """Have these calls fail, as they did here, and wait for all ranks in the next round."""
        self._conclude(Message("", error=first_failure(label, {0: own, **late})), late)
        self._rounds.number += 1
        self._open_rounds.append(self._rounds.number)

    def _conclude(self, choice: Message, answered: dict[int, Message]) -> None:
        """Publish the choice of this round, which uses these answers."""
        rounds = self._rounds
        choice.unanswered = tuple(rank for rank in range(1, rounds.size) if rank not in answered)
        choice.retries = {rank: answer.retry for rank, answer in answered.items() if answer.retry}
        keys = rounds.mailbox.send(rounds.choice_key(), choice)
        keys += [rounds.answer_key(rank) for rank in range(1, rounds.size)]
        keys += [rounds.heartbeat_key(rank) for rank in range(rounds.size)]
        rounds.mailbox.discard_later(keys)
        self._open_rounds.clear()

    def _mismatches(self, rank: int) -> deque[str]:
        """Return the labels in which a rank did not meet the others, since the last round in which all met."""
        return self._mismatched.setdefault(rank, deque(maxlen=_KEPT_MISMATCHES))

    def _note_mismatches(self, label: str, answers: dict[int, Message]) -> None:
        if any(answer.label != label for answer in answers.values()):
            for rank, answer in answers.items():
                self._mismatches(rank).append(answer.label)
        elif len(answers) == self._rounds.size:
            self._mismatched.clear()
