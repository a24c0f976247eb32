"""When to save, on one rank and on several: the same wish everywhere, at a known price, and asking changes nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from holdfast.errors import RankError, UsageError
from holdfast.manager.manager import CheckpointManager
from holdfast.manager.schedule import Pace, Time
from holdfast.manager.triggers import At, Every, Moment, OnLastStep, OnSignal, TimeLimit, Trigger, Wish
from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.ranks.store import StoreRanks
from holdfast.testing import simulate_ranks

SIZES = (1, 2, 3)


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass
class Clocks:
    """Clocks that stand still until they are moved."""

    seconds: float = 1000.0
    wall_seconds: float = 1_700_000_000.0
    running_seconds: float = 0.0

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall_seconds += seconds
        self.running_seconds += seconds

    @property
    def time(self) -> Time:
        return Time(lambda: self.seconds, lambda: self.wall_seconds, lambda: self.running_seconds)


def walk(ranks: Ranks, trigger: Trigger | None, steps: int, *, seconds: float = 1.0, epoch_steps: int = 0) -> list[Any]:
    """What a loop hears that saves whenever it is told to. Only the leader's clocks move: nobody else may need them."""
    clocks = Clocks()
    pace = Pace(trigger, ranks, clocks.time)
    heard = []
    for step in range(steps):
        if ranks.rank == 0:
            clocks.pass_by(seconds)
        epoch = (step + 1) // epoch_steps if epoch_steps else None
        wish = pace.ask(step, epoch)
        if wish.save or wish.stop:
            pace.note_save()
        heard.append(wish)
    pace.close()
    return heard


def saved(heard: list[Wish]) -> list[int]:
    return [step for step, wish in enumerate(heard) if wish.save or wish.stop]


def stopped(heard: list[Wish]) -> list[int]:
    return [step for step, wish in enumerate(heard) if wish.stop]


# Every trigger, alone and together

TRIGGERS: list[tuple[Trigger, list[int], list[int]]] = [
    (Every(steps=4), [4, 8, 12], []),
    (At(0, 3, 11), [0, 3, 11], []),
    (OnLastStep(14), [13], []),
    (Every(epochs=1), [4, 9], []),
    (Every(epochs=2), [9], []),
    # The clock goes on by one second before each step, and the minutes count from the last save.
    (Every(minutes=0.1), [5, 11], []),
    (TimeLimit(12), [11, 12, 13], [11, 12, 13]),
    (Every(steps=4) | Every(minutes=0.1), [4, 8, 12], []),
    (Every(steps=9) | Every(minutes=0.1), [5, 9], []),
    (At(2) | TimeLimit(13), [2, 12, 13], [12, 13]),
    (Every(steps=6) | OnLastStep(14) | At(1), [1, 6, 12, 13], []),
]


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("trigger", "saves", "stops"), TRIGGERS, ids=[repr(case[0]) for case in TRIGGERS])
def test_every_rank_hears_the_same_at_the_same_step(
    trigger: Trigger, saves: list[int], stops: list[int], size: int
) -> None:
    heard = simulate_ranks(size, lambda ranks: walk(ranks, trigger, 14, epoch_steps=5), timeout_seconds=20)
    assert [saved(one) for one in heard] == [saves] * size, heard
    assert [stopped(one) for one in heard] == [stops] * size
    assert all(one == heard[0] for one in heard), "the reasons too"


@pytest.mark.parametrize("size", SIZES)
def test_without_a_trigger_nothing_is_wished(size: int) -> None:
    assert simulate_ranks(size, lambda ranks: walk(ranks, None, 3)) == [[Wish(False, False, ())] * 3] * size


def test_what_both_the_step_and_the_clock_wish_is_one_wish_with_both_reasons() -> None:
    clocks = Clocks()
    pace = Pace(Every(steps=2) | Every(minutes=1) | TimeLimit(60), Alone(), clocks.time)
    clocks.pass_by(60)
    assert pace.ask(2, None) == Wish(True, True, ("every 2 steps", "every minute", "time limit of 00:01:00"))


@pytest.mark.parametrize("size", SIZES)
def test_the_end_of_the_job_is_the_leaders_wall_clock(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(1_700_000_000 + 70))
    trigger = TimeLimit(before_end=60)
    heard = simulate_ranks(size, lambda ranks: walk(ranks, trigger, 12))
    assert [stopped(one) for one in heard] == [[9, 10, 11]] * size


def test_the_clocks_of_a_real_process_go_forward() -> None:
    times = Time()
    first = times.now(), times.wall(), times.running()
    while times.running() <= first[2]:
        pass
    second = times.now(), times.wall(), times.running()
    assert all(later >= earlier for earlier, later in zip(first, second, strict=True))
    assert 0 < first[2] < 3600, "this process is not that old"


# Epochs


def ends_of(pace: Pace, epochs: list[int | None]) -> list[int]:
    found = []
    for step, epoch in enumerate(epochs):
        if pace.ask(step, epoch).save:
            found.append(step)
    return found


def test_an_epoch_is_over_once_whenever_that_is_first_said() -> None:
    assert ends_of(Pace(Every(epochs=1), Alone()), [0, 0, 1, 1, 1, 2, 5, 5]) == [2, 5, 6]
    assert ends_of(Pace(Every(epochs=3), Alone()), [1, 2, 3, 3, 5, 7, 7]) == [2, 5]


def test_a_step_that_names_no_epoch_ends_none_and_forgets_none() -> None:
    assert ends_of(Pace(Every(epochs=1), Alone()), [None, 1, None, 1, None, 2]) == [1, 5]


def test_a_run_that_goes_on_in_mid_epoch_ends_no_epoch_that_was_over_before() -> None:
    pace = Pace(Every(epochs=1), Alone())
    pace.note_start(None)
    assert ends_of(pace, [7, 7, 8, 8]) == [2]


def test_a_run_that_goes_on_with_known_epochs_ends_the_next_one() -> None:
    pace = Pace(Every(epochs=1), Alone())
    pace.note_start(7)
    assert ends_of(pace, [7, 8, 8]) == [1]


def test_a_loop_that_asks_and_saves_by_itself_hears_of_an_epoch_once() -> None:
    """`if should_save(step, epoch=epoch): save(step)`, without `step`."""
    pace = Pace(Every(epochs=1), Alone())
    found = []
    for step, epoch in enumerate([0, 1, 1, 1, 2, 2]):
        if pace.ask(step, epoch).save:
            found.append(step)
            pace.note_save()
    assert found == [1, 4]


# Asking changes nothing


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("trigger", [case[0] for case in TRIGGERS], ids=[repr(case[0]) for case in TRIGGERS])
def test_to_ask_is_not_to_do(trigger: Trigger, size: int) -> None:
    """Asked three times before each step, every rank hears what it hears when asked once."""

    def curious(ranks: Ranks) -> tuple[list[Wish], bool]:
        clocks = Clocks()
        pace = Pace(trigger, ranks, clocks.time)
        heard, steady = [], True
        for step in range(14):
            if ranks.rank == 0:
                clocks.pass_by(1)
            epoch = (step + 1) // 5
            wishes = [pace.ask(step, epoch) for _ in range(4)]
            steady = steady and len(set(wishes)) == 1
            if wishes[-1].save:
                pace.note_save()
            heard.append(wishes[-1])
        return heard, steady

    once = simulate_ranks(size, lambda ranks: walk(ranks, trigger, 14, epoch_steps=5), timeout_seconds=20)
    often = simulate_ranks(size, curious, timeout_seconds=20)
    assert often == [(heard, True) for heard in once]


def test_a_question_about_another_step_does_not_move_the_clock() -> None:
    clocks = Clocks()
    pace = Pace(Every(minutes=1), Alone(), clocks.time)
    clocks.pass_by(59)
    assert not pace.ask(1, None).save
    clocks.pass_by(1)
    assert pace.ask(2, None).save
    assert pace.ask(2, None).save, "until it was done"
    pace.note_save()
    assert not pace.ask(3, None).save


# Signals


def test_a_signal_to_one_process_is_a_wish_to_save_and_stop_until_the_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pace = Pace(Every(steps=10) | OnSignal("SIGTERM"), Alone())
    assert not pace.ask(1, None).save
    os.kill(os.getpid(), signal.SIGTERM)
    assert pace.ask(1, None) == Wish(False, True, ("SIGTERM",))
    assert pace.ask(2, None) == Wish(False, True, ("SIGTERM",))
    pace.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_what_asks_to_stop_asks_for_one_save_and_other_triggers_go_on() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pace = Pace(Every(steps=10) | OnSignal("SIGTERM"), Alone())
    assert (pace.wants_save(1, None), pace.should_stop) == (False, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not pace.should_stop, "nobody has asked yet"
    assert (pace.wants_save(2, None), pace.should_stop) == (True, True)
    assert pace.wants_save(2, None), "it was not saved"
    pace.note_save()
    assert [pace.wants_save(step, None) for step in range(3, 12)] == [step == 10 for step in range(3, 12)]
    assert pace.should_stop
    pace.close()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_asks_for_a_save_again(second: signal.Signals) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    pace = Pace(OnSignal("SIGTERM", "SIGUSR1"), Alone())
    os.kill(os.getpid(), signal.SIGTERM)
    assert pace.wants_save(1, None)
    pace.note_save()
    assert not pace.wants_save(2, None)
    os.kill(os.getpid(), second)
    assert pace.wants_save(3, None)
    assert set(pace.ask(3, None).reasons) == {"SIGTERM", second.name}
    pace.note_save()
    assert not pace.wants_save(4, None)
    pace.close()


def test_a_save_that_failed_leaves_what_asked_for_it() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pace = Pace(OnSignal("SIGTERM"), Alone())
    os.kill(os.getpid(), signal.SIGTERM)
    assert pace.wants_save(1, None)
    pace.note_save()
    pace.note_failure()
    assert pace.wants_save(2, None)
    pace.close()


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_second_signal_to_any_rank_asks_all_ranks_again(rank: int) -> None:
    """Three ranks, played by one thread. The handlers of `rank` are the last, so that signals come to it."""
    values: dict[str, bytes] = {}
    clocks = Clocks()
    paces: dict[int, Pace] = {}
    for one in sorted(range(3), key=lambda other: other == rank):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        ranks = StoreRanks(Counted(values), one, 3, name="three", timeout_seconds=5)
        paces[one] = Pace(OnSignal("SIGTERM", "SIGUSR1"), ranks, clocks.time)
    saves: dict[int, list[int]] = {one: [] for one in paces}
    for step in range(60):
        clocks.pass_by(0.05)
        if step in (10, 40):
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 25:
            os.kill(os.getpid(), signal.SIGUSR1)
        for one in sorted(paces):
            if paces[one].wants_save(step, None):
                paces[one].note_save()
                saves[one].append(step)
    assert saves[0] == saves[1] == saves[2]
    assert [step // 5 * 5 for step in saves[0]] == [10, 25, 40]


def test_signals_that_two_ranks_flag_at_the_same_moment_are_both_heard() -> None:
    """The first flag of rank 1 is overwritten, as by another rank that had read before it wrote."""
    values: dict[str, bytes] = {}
    clocks = Clocks()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    paces = {}
    for one in (0, 1):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks = StoreRanks(Counted(values), one, 2, name="two", timeout_seconds=5)
        paces[one] = Pace(OnSignal("SIGTERM"), ranks, clocks.time)
    os.kill(os.getpid(), signal.SIGTERM)
    heard = []
    for step in range(10):
        clocks.pass_by(0.2)
        heard.append(paces[0].ask(step, None).stop)
        paces[1].ask(step, None)
        if step == 0:
            values.pop("two/flag")
    assert heard[-1]


def test_a_trigger_of_ones_own_that_stops_by_the_step_alone_is_heard() -> None:
    class Enough(Trigger):
        by_step = True

        def wish(self, moment: Moment) -> Wish:
            return Wish(False, moment.step >= 2, ("enough",))

    pace = Pace(Enough(), Alone())
    assert (pace.wants_save(1, None), pace.should_stop) == (False, False)
    assert (pace.wants_save(2, None), pace.should_stop) == (True, True)


def test_a_signal_that_nobody_asked_about_is_no_wish() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    pace = Pace(OnSignal("SIGTERM"), Alone())
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not pace.ask(1, None).stop
    pace.close()


def test_triggers_without_signals_touch_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    Pace(Every(steps=1) | Every(minutes=1) | TimeLimit(5), Alone())
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_of_the_main_thread_signals_are_refused_and_all_else_is_not() -> None:
    seen: list[Any] = []

    def build() -> None:
        for trigger in (OnSignal("SIGTERM"), Every(minutes=1) | OnSignal("USR1"), Every(minutes=1), None):
            try:
                seen.append(Pace(trigger, Alone()))
            except UsageError as error:
                seen.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join(60)
    assert [type(one) for one in seen] == [UsageError, UsageError, Pace, Pace]


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("struck", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_a_signal_to_any_rank_stops_all_ranks_at_one_step(struck: list[int]) -> None:
    """Three ranks, played by one thread, the leader first. A signal comes to those whose handlers are the last."""
    values: dict[str, bytes] = {}
    clocks = Clocks()
    paces: dict[int, Pace] = {}
    for rank in sorted(range(3), key=lambda rank: rank in struck):
        if rank in struck and not any(other in paces for other in struck):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks = StoreRanks(Counted(values), rank, 3, name="three", timeout_seconds=5)
        paces[rank] = Pace(Every(minutes=60) | OnSignal("SIGTERM"), ranks, clocks.time)
    heard: dict[int, list[Wish]] = {rank: [] for rank in paces}
    for step in range(40):
        clocks.pass_by(0.05)
        if step == 17:
            os.kill(os.getpid(), signal.SIGTERM)
        for rank in sorted(paces):
            heard[rank].append(paces[rank].ask(step, None))
    first = stopped(heard[0])[0]
    assert [stopped(heard[rank]) for rank in range(3)] == [list(range(first, 40))] * 3, "and it stays said"
    assert [saved(heard[rank]) for rank in range(3)] == [list(range(first, 40))] * 3
    # A rank that is not the leader is heard when the leader next looks, some tenth of a second later.
    assert first == 17 if 0 in struck else 17 < first <= 17 + 3


# The price


@dataclass
class Counted:
    """A store that counts what is asked of it, between ranks that are threads."""

    values: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def set(self, key: str, value: bytes) -> None:
        self.calls.append("set")
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        self.calls.append("get")
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.calls.append("delete")
        self.values.pop(key, None)

    def pause(self, seconds: float) -> None:
        raise TimeoutError("this rank would have had to wait")

    def branch(self) -> Counted:
        raise NotImplementedError


def pair(timeout_seconds: float = 30.0) -> tuple[StoreRanks, Counted, StoreRanks, Counted]:
    """Two ranks over one store, played by one thread: the leader first, so that nobody has to wait."""
    values: dict[str, bytes] = {}
    leading, following = Counted(values), Counted(values)
    leader = StoreRanks(leading, 0, 2, name="pair", timeout_seconds=timeout_seconds)
    follower = StoreRanks(following, 1, 2, name="pair", timeout_seconds=timeout_seconds)
    return leader, leading, follower, following


STEP_ONLY = [None, Every(steps=3), Every(epochs=1), At(1, 5), OnLastStep(7), Every(steps=3) | At(1) | OnLastStep(7)]


@pytest.mark.parametrize("trigger", STEP_ONLY, ids=repr)
def test_what_the_step_alone_decides_costs_no_message(trigger: Trigger | None) -> None:
    leader, leading, follower, following = pair()
    for ranks in (follower, leader):  # in any order: nobody waits for anybody
        pace = Pace(trigger, ranks)
        assert not pace.asks_leader
        for step in range(200):
            pace.ask(step, step // 10)
    assert (leading.calls, following.calls) == ([], [])


LEADERS = [Every(minutes=5), TimeLimit("01:00:00"), Every(steps=3) | Every(minutes=5), OnSignal("SIGTERM")]


@pytest.mark.parametrize("trigger", LEADERS, ids=repr)
def test_a_broadcast_costs_one_message_and_one_look(trigger: Trigger) -> None:
    leader, leading, follower, following = pair()
    clocks = Clocks()
    paces = Pace(trigger, leader, clocks.time), Pace(trigger, follower, clocks.time)
    assert all(pace.asks_leader for pace in paces)
    looks = 0
    for step in range(100):
        clocks.pass_by(0.03)
        for pace, calls in zip(paces, (leading.calls, following.calls), strict=True):
            calls.clear()
            pace.ask(step, None)
        assert leading.calls.count("set") == 1
        assert leading.calls.count("get") + 1 == len(leading.calls)
        looks += leading.calls.count("get")
        assert following.calls == ["get"]
    assert looks <= 3.0 / 0.1 + 1, "for others' signals the leader looks ten times a second, not at every step"
    for pace in reversed(paces):
        pace.close()
    assert len(leader._store.values) == 1, "nothing piles up in the store"  # type: ignore[attr-defined]


def test_a_rank_that_is_behind_hears_every_word_at_its_step() -> None:
    """The leader is forty steps ahead; the other one is told what was said at each of them."""
    leader, _, follower, _ = pair()
    said = [b"" if number % 3 else f"word {number}".encode() for number in range(40)]
    for word in said:
        assert leader.broadcast(lambda word=word: word) == word
    assert [follower.broadcast(lambda: b"never asked") for _ in said] == said


@pytest.mark.parametrize("behind", [1, 63, 64])
def test_a_word_is_remembered_for_as_many_words_as_a_rank_may_be_behind(behind: int) -> None:
    leader, _, follower, _ = pair()
    for number in range(behind):
        leader.broadcast(lambda number=number: f"{number}".encode())
    assert [follower.broadcast(bytes) for _ in range(behind)] == [f"{number}".encode() for number in range(behind)]


@pytest.mark.guarantee("G5")
def test_a_word_that_was_forgotten_is_an_error_and_not_silence() -> None:
    """65 words ahead: to hear "go on" where the leader heard "save" would part the ranks without a word."""
    leader, _, follower, _ = pair()
    for number in range(65):
        leader.broadcast(lambda number=number: f"{number}".encode())
    with pytest.raises(RankError):
        assert follower.broadcast(bytes) == b"0"


def test_only_the_leader_looks_at_its_clocks() -> None:
    def live(ranks: Ranks) -> list[int]:
        looked = []

        def look() -> float:
            looked.append(1)
            return 0.0

        pace = Pace(Every(minutes=1) | TimeLimit(60), ranks, Time(look, look, look))
        looked.clear()
        for step in range(5):
            pace.ask(step, None)
        return looked

    leader, *followers = simulate_ranks(3, live)
    assert leader
    assert followers == [[], []]


# The leader is gone


class Shared:
    """A store of real threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def branch(self) -> Shared:
        return self


@pytest.mark.guarantee("G5")
def test_a_leader_that_is_gone_is_an_error_within_the_time_out() -> None:
    store = Shared()
    leader = Pace(Every(minutes=1), StoreRanks(store, 0, 2, name="t", timeout_seconds=1.0))
    follower = Pace(Every(minutes=1), StoreRanks(store, 1, 2, name="t", timeout_seconds=1.0))
    leader.ask(0, None)
    assert follower.ask(0, None) == Wish(False, False, ())
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        follower.ask(1, None)
    assert time.monotonic() - start >= 1.0
    assert raised.value.ranks == (0,)
    assert "leader" in raised.value.problem


def test_a_rank_that_is_gone_keeps_nobody_from_going_on() -> None:
    leader, leading, _, _ = pair()
    pace = Pace(Every(minutes=1), leader)
    for step in range(1000):
        pace.ask(step, None)
    assert leading.calls.count("set") == 1000


def test_the_leader_waits_for_nobody_and_a_follower_only_for_the_leader() -> None:
    """Words cross while both run, whoever is faster."""
    store = Shared()
    outcomes: dict[int, list[bytes]] = {}

    def live(rank: int, work: Callable[[StoreRanks], list[bytes]]) -> None:
        outcomes[rank] = work(StoreRanks(store, rank, 3, name="t", timeout_seconds=20))

    said = [f"{number}".encode() if number % 7 == 0 else b"" for number in range(300)]

    def lead(ranks: StoreRanks) -> list[bytes]:
        heard = []
        for number, word in enumerate(said):
            heard.append(ranks.broadcast(lambda word=word: word))
            if number % 50 == 0:
                time.sleep(0.005)
        return heard

    def follow(ranks: StoreRanks) -> list[bytes]:
        return [ranks.broadcast(bytes) for _ in said]

    threads = [threading.Thread(target=live, args=(rank, follow if rank else lead)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == {0: said, 1: said, 2: said}


# To ask outside of a step


def ask_outside_of_steps(ranks: Ranks, trigger: Trigger | None) -> list[Any]:
    clocks = Clocks()
    pace = Pace(trigger, ranks, clocks.time)
    heard: list[Any] = [pace.ask_to_stop()]
    if ranks.rank == 0:
        clocks.pass_by(7200.0)
    heard += [pace.ask_to_stop(), pace.should_stop, pace.must_save_to_stop]
    wish = pace.ask(1, None)
    heard += [wish.stop, pace.must_save_to_stop]
    pace.note_save()
    heard += [pace.ask_to_stop(), pace.must_save_to_stop]
    pace.close()
    return heard


@pytest.mark.parametrize("size", SIZES)
def test_a_time_limit_is_known_outside_of_a_step(size: int) -> None:
    heard = simulate_ranks(size, lambda ranks: ask_outside_of_steps(ranks, Every(minutes=1) | TimeLimit("01:00:00")))
    assert heard == [[False, True, True, True, True, True, True, False]] * size


@pytest.mark.parametrize("trigger", [None, Every(steps=1), Every(minutes=1), At(1) | OnLastStep(2)])
def test_a_trigger_that_only_saves_never_stops(trigger: Trigger | None) -> None:
    assert ask_outside_of_steps(Alone(), trigger) == [False, False, False, False, False, False, False, False]


def test_without_a_trigger_that_could_ask_to_stop_the_ranks_need_no_agreement() -> None:
    class Counting(Alone):
        calls = 0

        def decide(self, *arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return super().decide(*arguments, **options)

    ranks = Counting()
    pace = Pace(Every(steps=1) | At(3), ranks)
    assert pace.ask_to_stop() is False
    assert ranks.calls == 0
    pace.close()


def test_a_signal_that_came_before_the_first_step_is_known_and_saved_at_that_step() -> None:
    pace = Pace(OnSignal("SIGUSR1"), Alone())
    os.kill(os.getpid(), signal.SIGUSR1)
    assert pace.ask_to_stop()
    assert pace.should_stop
    assert pace.wants_save(0, None)
    pace.note_save()
    assert not pace.wants_save(1, None)
    pace.close()


def test_a_save_between_the_question_and_the_next_step_does_not_stand_for_that_step(tmp_path: Path) -> None:
    state = {"model": nn.Linear(1, 1)}
    with CheckpointManager(tmp_path, state, save=OnSignal("SIGUSR1"), mode="sync") as manager:
        manager.save(5)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_stop_now()
        assert manager.save(5).skipped
        assert manager.step(6)
        assert manager.step(7)
        assert [found.step for found in manager.checkpoints()] == [6, 5]
