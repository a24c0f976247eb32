"""Door 2: one decision, or one error, on every rank, within a bounded time, over every store that ranks may have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore

from holdfast.errors import (
    CorruptCheckpointError,
    GuardMismatchError,
    HoldfastError,
    RankError,
    StateMismatchError,
    StorageError,
    UsageError,
)
from holdfast.ranks.base import Ranks, on_leader, together
from holdfast.ranks.messages import KeyValue
from holdfast.ranks.store import StoreRanks
from holdfast.ranks.torch_store import TorchStore
from holdfast.testing.simulation import simulate_ranks
from tests.sizes import if_deep

SIZES = (1, 2, 3, 5)
# Followers wait five seconds longer than the leader, so that its word can reach them.
GRACE_SECONDS = 5.0


class DictStore:
    """The smallest store: a dict that threads share. Knows how full it ever was."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.most_keys = 0

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.most_keys = max(self.most_keys, len(self.values))

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class BranchingStore(DictStore):
    """The same for several threads of a rank."""

    def branch(self) -> BranchingStore:
        return self


def in_threads(
    n: int, function: Callable[[Ranks], Any], stores: Callable[[int], KeyValue], *, timeout_seconds: float = 20.0
) -> list[Any]:
    """Call `function(ranks)` on n ranks that are threads: what each returned or raised."""
    outcomes: list[Any] = [TimeoutError("still running")] * n

    def live(rank: int) -> None:
        try:
            outcomes[rank] = function(StoreRanks(stores(rank), rank, n, name="test", timeout_seconds=timeout_seconds))
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds + 2 * GRACE_SECONDS + 120)  # a busy machine
    return outcomes


@contextmanager
def tcp_stores() -> Iterator[Callable[[int], KeyValue]]:
    """One server, and a connection of its own for every rank, as processes have it."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    yield lambda rank: TorchStore(TCPStore("127.0.0.1", port, is_master=False))
    del server


def the_same_error(outcomes: list[Any]) -> HoldfastError:
    """The error that every rank raised: of one type, with the same fields."""
    assert all(isinstance(outcome, HoldfastError) for outcome in outcomes), outcomes
    assert len({type(outcome) for outcome in outcomes}) == 1, outcomes
    first = outcomes[0]
    assert all(outcome.fields == first.fields and str(outcome) == str(first) for outcome in outcomes), [
        outcome.fields for outcome in outcomes
    ]
    return first


def fail(error: BaseException) -> Any:
    raise error


# One value


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_leaders_choice_of_all_answers(size: int) -> None:
    chosen_on: list[int] = []

    def work(ranks: Ranks) -> list[int]:
        def choose(answers: list[int]) -> int:
            chosen_on.append(ranks.rank)
            return sum(answers)

        sums = [
            ranks.decide("add", lambda factor=factor: factor * (ranks.rank + 1), choose, sends=int, returns=int)
            for factor in (1, 10, 100)
        ]
        return [*sums, *together(ranks, "all", lambda: ranks.rank, sends=int)]

    total = size * (size + 1) // 2
    expected = [total, 10 * total, 100 * total, *range(size)]
    assert simulate_ranks(size, work, timeout_seconds=5) == [expected] * size
    assert chosen_on == [0, 0, 0]


def test_ranks_agree_over_the_stores_of_torch() -> None:
    def work(ranks: Ranks) -> list[list[str]]:
        return [together(ranks, "who", lambda: f"{ranks.rank}!", sends=str) for _ in range(5)]

    expected = [[f"{rank}!" for rank in range(3)]] * 5
    shared = HashStore()
    assert in_threads(3, work, lambda rank: TorchStore(shared)) == [expected] * 3
    with tcp_stores() as stores:
        assert in_threads(3, work, stores) == [expected] * 3


@pytest.mark.parametrize("who", ["every rank", "the leader"])
def test_values_larger_than_a_tcp_store_takes_cross(who: str) -> None:
    size_bytes = 9 << 20  # the store refuses more than 8 MiB

    def work(ranks: Ranks) -> list[tuple[int, int]]:
        mine = bytes([ranks.rank]) * (size_bytes + ranks.rank) if who == "every rank" else b"x"
        answers = ranks.decide(
            "large",
            lambda: mine,
            lambda all_of_them: all_of_them if who == "every rank" else [b"y" * size_bytes],
            sends=bytes,
            returns=list[bytes],
        )
        return [(len(answer), sum(answer[:3])) for answer in answers]

    expected = [(size_bytes + rank, 3 * rank) for rank in range(3)]
    with tcp_stores() as stores:
        expected = expected if who == "every rank" else [(size_bytes, 3 * ord("y"))]
        assert in_threads(3, work, stores) == [expected] * 3


# One error

ERRORS = [
    UsageError("a problem", component="model", leaf="model.a", advice="do this"),
    StorageError("no room", errno=28, file="/run/step-000000001/x"),
    CorruptCheckpointError("damage", problems=["one", "two"], byte_range=(3, 9), step=2**62),
    StateMismatchError("no fit", missing=["a"], unexpected=["b"], mismatched=["c"]),
    GuardMismatchError("other", guards={"base": ("old", "new")}),
    RankError("inner", ranks=[3], timeout_seconds=2.5),
]


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("failing", range(3))
def test_an_error_on_any_rank_is_raised_on_all_with_its_fields_and_that_rank(
    failing: int, error: HoldfastError
) -> None:
    def work(ranks: Ranks) -> int:
        return ranks.decide("work", lambda: fail(error) if ranks.rank == failing else 1, len, sends=int, returns=int)

    raised = the_same_error(simulate_ranks(3, work, timeout_seconds=5))
    assert type(raised) is type(error)
    assert raised.fields == {**error.fields, "rank": failing}


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_in_the_leaders_choice_is_raised_on_all(error: HoldfastError) -> None:
    def work(ranks: Ranks) -> int:
        return ranks.decide("work", lambda: 1, lambda _: fail(error), sends=int, returns=int)

    raised = the_same_error(simulate_ranks(3, work, timeout_seconds=5))
    assert type(raised) is type(error)
    assert raised.fields == error.fields


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("failing", range(3))
def test_an_error_is_known_at_once_even_while_another_rank_is_still_at_work(failing: int) -> None:
    """Rank 2, or rank 1, works until the test has seen the others fail: it is not waited for."""
    busy = 1 if failing == 2 else 2
    others_failed = threading.Barrier(3)

    def work(ranks: Ranks) -> float:
        start = time.monotonic()
        with pytest.raises(UsageError) as caught:
            ranks.decide(
                "work",
                lambda: fail(UsageError("no")) if ranks.rank == failing else ranks.rank == busy and wait(),
                len,
                sends=bool,
                returns=int,
            )
        if ranks.rank != busy:
            others_failed.wait(300)
        assert caught.value.rank == failing
        return time.monotonic() - start

    def wait() -> bool:
        others_failed.wait(150)
        return True

    store = DictStore()
    assert all(isinstance(seconds, float) and seconds < 100 for seconds in in_threads(3, work, lambda rank: store))


@pytest.mark.parametrize("failing", range(2))
def test_an_error_that_is_not_ours_keeps_its_name_and_the_original_as_its_cause(failing: int) -> None:
    def work(ranks: Ranks) -> Any:
        work_or_fail = (lambda: fail(KeyError("lost"))) if ranks.rank == failing else (lambda: 1)
        try:
            return ranks.decide("work", work_or_fail, len, sends=int, returns=int)
        except HoldfastError as error:
            return error, type(error.__cause__)

    (first, first_cause), (second, second_cause) = simulate_ranks(2, work, timeout_seconds=5)
    raised = the_same_error([first, second])
    assert "KeyError" in raised.problem
    assert "lost" in raised.problem
    assert raised.rank == failing
    assert (first_cause, second_cause) == ((KeyError, type(None)) if failing == 0 else (type(None), KeyError))


@pytest.mark.parametrize("failing", range(2))
def test_an_error_of_the_system_becomes_a_storage_error_on_all(failing: int) -> None:
    def work(ranks: Ranks) -> int:
        def mine() -> int:
            return fail(PermissionError(13, "Permission denied")) if ranks.rank == failing else 1

        return ranks.decide("work", mine, len, sends=int, returns=int)

    raised = the_same_error(simulate_ranks(2, work, timeout_seconds=5))
    assert type(raised) is StorageError
    assert "Permission denied" in raised.problem


@pytest.mark.parametrize("failing", range(2))
def test_text_that_is_no_utf_8_still_crosses(failing: int) -> None:
    """A file name that is no UTF-8 comes to Python with lone surrogates in it, and into the message of the error."""

    def work(ranks: Ranks) -> int:
        def mine() -> int:
            return fail(UsageError("strange", file="/run/\udcff.bin")) if ranks.rank == failing else 1

        return ranks.decide("work", mine, len, sends=int, returns=int)

    raised = the_same_error(simulate_ranks(2, work, timeout_seconds=0.5))
    assert (type(raised), raised.problem, raised.rank) == (UsageError, "strange", failing)


@pytest.mark.parametrize("failing", range(2))
def test_a_value_that_cannot_be_sent_is_an_error_on_all(failing: int) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.decide("work", lambda: object() if ranks.rank == failing else 1, len, sends=Any, returns=int)

    raised = the_same_error(simulate_ranks(2, work, timeout_seconds=0.5))
    assert raised.rank == failing


def test_an_answer_of_the_wrong_type_is_an_error_on_all() -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.decide("work", lambda: "text" if ranks.rank == 1 else 1, sum, sends=int, returns=int)

    raised = the_same_error(simulate_ranks(2, work, timeout_seconds=0.5))
    assert not isinstance(raised, RankError), "nobody was silent"


@pytest.mark.guarantee("G6")
def test_ranks_go_on_agreeing_after_errors() -> None:
    def work(ranks: Ranks) -> list[Any]:
        seen: list[Any] = []
        for number in range(9):
            try:
                seen.append(
                    ranks.decide(
                        f"round {number}",
                        lambda number=number: fail(UsageError("no")) if number % 3 == ranks.rank else number,
                        sum,
                        sends=int,
                        returns=int,
                    )
                )
            except UsageError as error:
                seen.append(error.rank)
            seen.append(on_leader(ranks, "fine", lambda number=number: number, returns=int))
        return seen

    expected = [value for number in range(9) for value in (number % 3, number)]
    assert simulate_ranks(3, work, timeout_seconds=5) == [expected] * 3


@pytest.mark.parametrize("interrupted", range(3))
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_is_interrupted_sees_the_interrupt_and_all_others_an_error(
    kind: type[BaseException], interrupted: int
) -> None:
    def work(ranks: Ranks) -> Any:
        def mine() -> int:
            return fail(kind()) if ranks.rank == interrupted else 1

        try:
            return ranks.decide("work", mine, len, sends=int, returns=int)
        except (KeyboardInterrupt, SystemExit, HoldfastError) as error:
            return error

    outcomes = simulate_ranks(3, work, timeout_seconds=5)
    assert type(outcomes.pop(interrupted)) is kind
    raised = the_same_error(outcomes)
    assert kind.__name__ in raised.problem
    assert raised.rank == interrupted


def test_an_interrupt_while_the_leader_chooses_ends_the_round_on_all() -> None:
    def work(ranks: Ranks) -> Any:
        try:
            return on_leader(ranks, "work", lambda: fail(KeyboardInterrupt()), returns=int)
        except (KeyboardInterrupt, HoldfastError) as error:
            return error

    leader, *followers = simulate_ranks(3, work, timeout_seconds=5)
    assert type(leader) is KeyboardInterrupt
    assert "KeyboardInterrupt" in the_same_error(followers).problem


# Silence

TIMEOUT_SECONDS = 0.3


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("silent", [{1}, {2}, {1, 3}])
def test_a_silent_rank_is_named_on_all_others_within_the_time(silent: set[int]) -> None:
    store = DictStore()

    def work(ranks: Ranks) -> float | RankError:
        start = time.monotonic()
        if ranks.rank in silent:
            return 0.0
        with pytest.raises(RankError) as caught:
            together(ranks, "save", lambda: 1, sends=int)
        assert time.monotonic() - start < TIMEOUT_SECONDS + 20
        return caught.value

    outcomes = in_threads(4, work, lambda rank: store, timeout_seconds=TIMEOUT_SECONDS)
    raised = the_same_error([outcome for rank, outcome in enumerate(outcomes) if rank not in silent])
    assert raised.ranks == tuple(sorted(silent))
    assert raised.timeout_seconds == TIMEOUT_SECONDS
    assert "'save'" in str(raised)
    assert isinstance(raised, TimeoutError)


@pytest.mark.guarantee("G5")
def decided_with_one_silent(if_silent: Callable[[], int], *, failing: bool = False) -> tuple[list[Any], list[str]]:
    """What three ranks get of a decision in which the third says nothing, and what the leader was asked besides."""
    asked: list[str] = []

    def without() -> int:
        asked.append("if_silent")
        return if_silent()

    def part(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            return None
        return ranks.decide(
            "d",
            lambda: fail(StorageError("full")) if failing and ranks.rank == 1 else 0,
            lambda answers: fail(AssertionError("not all have answered")),
            sends=int,
            returns=int,
            if_failed=lambda: asked.append("if_failed"),
            if_silent=without,
        )

    shared = DictStore()
    return in_threads(3, part, lambda rank: shared, timeout_seconds=20.0 if failing else 2.0), asked


def test_where_a_rank_is_silent_the_leader_can_still_choose_for_all() -> None:
    outcomes, asked = decided_with_one_silent(lambda: 7)
    assert outcomes[:2] == [7, 7]
    assert asked == ["if_silent"]


def test_where_the_leader_cannot_choose_without_a_rank_that_rank_is_what_failed() -> None:
    outcomes, asked = decided_with_one_silent(lambda: fail(StorageError("a part is missing")))
    error = the_same_error(outcomes[:2])
    assert isinstance(error, RankError)
    assert error.ranks == (2,)
    assert asked == ["if_silent", "if_failed"]


def test_where_a_rank_failed_nothing_is_chosen_without_another() -> None:
    outcomes, asked = decided_with_one_silent(lambda: 7, failing=True)
    assert isinstance(the_same_error(outcomes[:2]), StorageError)
    assert asked == ["if_failed"]


def test_a_silent_leader_is_named_on_every_follower_within_the_time() -> None:
    store = DictStore()

    def work(ranks: Ranks) -> RankError | None:
        start = time.monotonic()
        if ranks.rank == 0:
            return None
        with pytest.raises(RankError) as caught:
            together(ranks, "save", lambda: 1, sends=int)
        assert time.monotonic() - start < TIMEOUT_SECONDS + GRACE_SECONDS + 20
        return caught.value

    outcomes = in_threads(3, work, lambda rank: store, timeout_seconds=TIMEOUT_SECONDS)
    assert the_same_error(outcomes[1:]).ranks == (0,)


def test_a_rank_that_comes_too_late_hears_that_it_failed_and_all_go_on() -> None:
    store = DictStore()
    given_up = threading.Event()

    def work(ranks: Ranks) -> tuple[Any, int]:
        if ranks.rank == 1:
            assert given_up.wait(300)
        with pytest.raises(RankError) as caught:
            together(ranks, "save", lambda: 1, sends=int)
        given_up.set()
        return caught.value, on_leader(ranks, "after", lambda: 7, returns=int)

    outcomes = in_threads(2, work, lambda rank: store, timeout_seconds=1.0)
    assert [after for _, after in outcomes] == [7, 7]
    assert the_same_error([error for error, _ in outcomes]).ranks == (1,)


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("missed", [1, *if_deep(0, 3)])
def test_a_rank_that_gave_the_leader_up_finds_the_round_in_which_the_leader_is_by_then(missed: int) -> None:
    store, given_up = BranchingStore(), threading.Event()

    def lead(ranks: Ranks) -> Any:
        behind = ranks.branch("behind")
        assert given_up.wait(300)
        # All that belonged to the work that the other rank has given up.
        with pytest.raises(RankError):
            on_leader(ranks, "first work", lambda: 1, returns=int)
        for number in range(missed):
            with pytest.raises(RankError):
                on_leader(ranks, f"part {number} of the first work", lambda: 2, returns=int)
            with pytest.raises(RankError):
                on_leader(behind, f"end {number} of the first work", lambda: 3, returns=int)
        return [on_leader(one, "second work", lambda: 4, returns=int) for one in (ranks, behind, ranks)]

    def follow(ranks: Ranks) -> Any:
        behind = ranks.branch("behind")
        with pytest.raises(RankError) as caught:
            on_leader(ranks, "first work", lambda: 1, returns=int)
        assert caught.value.ranks == (0,)
        given_up.set()
        return [on_leader(one, "second work", lambda: 4, returns=int) for one in (ranks, behind, ranks)]

    outcomes = in_threads(
        2, lambda ranks: follow(ranks) if ranks.rank else lead(ranks), lambda rank: store, timeout_seconds=2.0
    )
    assert outcomes == [[4, 4, 4]] * 2, outcomes


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("odd_one", range(3))
def test_ranks_that_call_different_things_are_told_so_at_once(odd_one: int) -> None:
    def work(ranks: Ranks) -> Any:
        return on_leader(ranks, "restore" if ranks.rank == odd_one else "save", lambda: 1, returns=int)

    start = time.monotonic()
    raised = the_same_error(simulate_ranks(3, work, timeout_seconds=60))
    assert time.monotonic() - start < 60
    assert isinstance(raised, RankError)
    assert "'save'" in raised.problem
    assert "'restore'" in raised.problem
    assert raised.ranks == ((odd_one,) if odd_one else (1,))


def outcomes_of(ranks: Ranks, labels: list[str]) -> dict[str, str]:
    """Call these, one after the other: of each the error, empty where there was none."""
    seen: dict[str, str] = {}
    for label in labels:
        try:
            assert on_leader(ranks, label, lambda: 7, returns=int) == 7
        except RankError as error:
            seen[label] = str(error)
        else:
            seen[label] = ""
    return seen


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("size", "alone", "extra"),
    [
        (2, 0, 1),
        (2, 0, 3),
        (4, 0, 2),
        pytest.param(2, 1, 1, marks=pytest.mark.deep),
        pytest.param(2, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 3, 1, marks=pytest.mark.deep),
    ],
)
def test_after_calls_that_one_rank_made_alone_those_of_all_ranks_work(size: int, alone: int, extra: int) -> None:
    store, meet = DictStore(), threading.Barrier(size)
    mistaken, common = [f"alone {number}" for number in range(extra)], ["all 1", "all 2", "all 3"]

    def work(ranks: Ranks) -> Any:
        first = outcomes_of(ranks, mistaken) if ranks.rank == alone else {}
        seen = []
        for label in common:
            meet.wait(300)
            seen.append(outcomes_of(ranks, [label])[label])
        return first, seen

    outcomes = in_threads(size, work, lambda rank: store, timeout_seconds=TIMEOUT_SECONDS)
    assert [seen for _, seen in outcomes] == [["", "", ""]] * size, outcomes
    for label, error in outcomes[alone][0].items():
        assert "did not answer" in error
        assert f"'{label}'" in error


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("size", [2, 4])
def test_a_call_that_the_leader_made_alone_fails_the_next_one_of_the_same_name_and_no_other(size: int) -> None:
    """Whether the other ranks were only slow cannot be told apart here."""
    store, meet = DictStore(), threading.Barrier(size)

    def work(ranks: Ranks) -> list[str]:
        seen = [outcomes_of(ranks, ["annotate"])["annotate"]] if ranks.rank == 0 else []
        for label in ("annotate", "save 1", "save 2"):
            meet.wait(300)
            seen.append(outcomes_of(ranks, [label])[label])
        return seen

    leader, *others = in_threads(size, work, lambda rank: store, timeout_seconds=TIMEOUT_SECONDS)
    assert leader[2:] == ["", ""], leader
    assert all("did not answer" in error for error in leader[:2])
    for first, *rest in others:
        assert "did not answer" in first
        assert rest == ["", ""]


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("extra", [1, 2])
@pytest.mark.parametrize("alone", [0, 1])
def test_ranks_that_are_some_calls_apart_are_told_so_and_meet_again_without_waiting(
    alone: int, extra: int, size: int
) -> None:
    """One rank makes a few calls more than the others, and nothing but these calls keeps the ranks together."""
    common = [f"all {number}" for number in range(8)]

    def work(ranks: Ranks) -> dict[str, str]:
        mistaken = [f"alone {number}" for number in range(extra)] if ranks.rank == alone else []
        return outcomes_of(ranks, mistaken + common)

    start = time.monotonic()
    outcomes = simulate_ranks(size, work, timeout_seconds=60)
    assert time.monotonic() - start < 60, "nobody waited for the time limit"
    for label in common:
        failed = {bool(outcome[label]) for outcome in outcomes}
        assert len(failed) == 1, f"'{label}' had different ends: {outcomes}"
    assert [outcomes[0][label] for label in common[2 * extra :]] == [""] * (8 - 2 * extra), outcomes[0]
    assert "'alone 0'" in outcomes[alone]["alone 0"]
    assert "'all 0'" in outcomes[alone]["alone 0"]


class InterruptedStore(DictStore):
    """A store at which the process is interrupted once, while it waits."""

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self.values, self.armed = values, False

    def pause(self, seconds: float) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        super().pause(seconds)


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("interrupted", [0, 1])
def test_after_an_interrupt_while_a_rank_waits_the_ranks_meet_again(interrupted: int) -> None:
    values: dict[str, bytes] = {}
    stores = [InterruptedStore(values) for _ in range(2)]
    stores[interrupted].armed = True
    meet = threading.Event()

    def work(ranks: Ranks) -> list[str]:
        if ranks.rank == interrupted:
            with pytest.raises(KeyboardInterrupt):
                on_leader(ranks, "alone", lambda: 7, returns=int)
            meet.set()
        assert meet.wait(300)
        return list(outcomes_of(ranks, ["all 1", "all 2"]).values())

    assert in_threads(2, work, lambda rank: stores[rank], timeout_seconds=10) == [["", ""]] * 2


# The store


def test_the_store_does_not_grow() -> None:
    """Round after round, with values of one piece and of several, with errors in between."""
    store = DictStore()
    sizes = (10, 5 << 20)

    def work(ranks: Ranks) -> int:
        for number in range(50):
            mine = bytes(sizes[1] if number in (10, 20, 30) else sizes[0])
            try:
                together(ranks, "large", lambda mine=mine: mine, sends=bytes)
                on_leader(
                    ranks, "small", lambda number=number: fail(UsageError("no")) if number % 7 == 0 else 1, returns=int
                )
            except UsageError:
                pass
        return len(store.values)

    outcomes = in_threads(3, work, lambda rank: store)
    assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
    # Two rounds of three keys each, and the pieces of one large round: one more per answer, three more of the choice.
    assert len(store.values) <= 6, sorted(store.values)
    assert store.most_keys <= 2 * 3 + 2 * 2 + 4


def test_a_tcp_store_does_not_grow() -> None:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(ranks: Ranks) -> None:
        for _ in range(50):
            together(ranks, "round", lambda: ranks.rank, sends=int)

    before = server.num_keys()
    assert in_threads(3, work, lambda rank: TorchStore(server.clone())) == [None] * 3
    assert server.num_keys() - before <= 6


class KeepingStore(DictStore):
    """A store that deletes nothing."""

    def delete(self, key: str) -> None:
        raise NotImplementedError("this store deletes nothing")

    def branch(self) -> KeepingStore:
        return self


def test_a_store_that_deletes_nothing_agrees_all_the_same_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = KeepingStore()

    def work(ranks: Ranks) -> list[list[int]]:
        return [together(ranks, f"round {number}", lambda: ranks.rank, sends=int) for number in range(4)]

    assert in_threads(2, work, lambda rank: shared) == [[[0, 1]] * 4] * 2
    assert caplog.text.count("this store deletes nothing") == 1
