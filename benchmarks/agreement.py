"""What `manager.step()` costs on two ranks when nothing is saved: where the step alone decides, and where a clock or a
signal does, which is the leader's word.

The ranks meet before each step, so that they come to it together; the meeting is not counted. A number of both is the
slower rank's of each step. What one message of the store takes, in the same run, says where the time goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.testing import run_ranks, values
from measure import arguments, at_most, bars_table, median, write_results

RANKS = 2
TIMEOUT_SECONDS = 1800.0
STEPS, SMALL_STEPS = 2000, 100
BAR_SECONDS = 0.0002
BY_STEP = "the step alone: Every(steps=...)"
BY_LEADER = "the leader's word: Every(minutes=...), OnSignal(...)"
NEVER = 10**9


def triggers() -> dict[str, holdfast.manager.triggers.Trigger]:
    """None of them fires here."""
    return {
        BY_STEP: holdfast.Every(steps=NEVER),
        BY_LEADER: holdfast.Every(minutes=NEVER) | holdfast.OnSignal("SIGTERM"),
    }


def be_rank(rank: int, folder: Path, rounds: int, steps: int) -> dict[str, list[float]]:
    """The seconds of every call on this rank, by what was called. A round that does not count comes first."""
    state = {"model": torch.nn.Linear(8, 8)}
    managers = {
        name: holdfast.CheckpointManager(folder / str(number), state, save=save, rng=False)
        for number, (name, save) in enumerate(triggers().items())
    }
    calls: dict[str, Callable[[int], object]] = {name: manager.step for name, manager in managers.items()}
    calls |= store_messages(rank)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    done = 0
    for number in range(rounds + 1):
        for name in shifted(list(calls), number):
            measured = time_calls(calls[name], range(done, done + steps))
            seconds[name] += measured if number else []
            done += steps
            if rank == 0:
                print(f"  round {number} {name}: {median(measured) * 1e6:.0f} us", flush=True)
    for manager in managers.values():
        manager.close()
    return seconds


def shifted(names: list[str], number: int) -> list[str]:
    shift = number % len(names)
    return names[shift:] + names[:shift]


def time_calls(call: Callable[[int], object], steps: range) -> list[float]:
    seconds = []
    for step in steps:
        dist.barrier()
        start = time.perf_counter()
        call(step)
        seconds.append(time.perf_counter() - start)
    return seconds


def store_messages(rank: int) -> dict[str, Callable[[int], object]]:
    """Single messages to the store that the ranks agree through."""
    store = dist.distributed_c10d._get_default_store().clone()
    key = f"benchmark/{rank}"
    store.set(key, b"x" * 8)
    return {
        "store: set": lambda step: store.set(key, b"x" * 8),
        "store: check": lambda step: store.check([key]),
        "store: get": lambda step: store.get(key),
        "store: compare_set, which answers at once": lambda step: store.compare_set(key, "never", "never"),
    }


def table(names: Sequence[str], answers: Sequence[dict[str, list[float]]], rounds: int, steps: int) -> str:
    lines = [
        f"{rounds} rounds of {steps:,} steps each, in turns; microseconds per call",
        "",
        "| what | leader, median | p95 | follower, median | p95 | slower of both, median | p95 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        columns = [*(answer[name] for answer in answers), slower(name, answers)]
        cells = (f"{median(column) * 1e6:.0f} | {percentile(column, 95) * 1e6:.0f}" for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def slower(name: str, answers: Sequence[dict[str, list[float]]]) -> list[float]:
    return [max(pair) for pair in zip(*(answer[name] for answer in answers), strict=True)]


def percentile(seconds: Sequence[float], percent: int) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def main() -> None:
    given = arguments(__doc__).parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    steps = SMALL_STEPS if given.small else STEPS
    outcomes = run_ranks(RANKS, be_rank, given.folder, given.rounds, steps, timeout_seconds=TIMEOUT_SECONDS)
    answers: list[dict[str, Any]] = values(outcomes)
    names = list(answers[0])
    measured = median(slower(BY_LEADER, answers))
    bars = [at_most("agreement by the leader's word, per step", measured, BAR_SECONDS, "the slower rank")]
    text = (
        "## Agreement of two ranks on whether to save, per step\n\n"
        f"{bars_table(bars)}\n{table(names, answers, given.rounds, steps)}"
    )
    numbers = {name: {"leader": answers[0][name], "follower": answers[1][name]} for name in names}
    write_results("agreement", text, summed_up(numbers), given.results)


def summed_up(numbers: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Some thousand numbers each, as those that a picture needs."""
    return {
        name: {
            who: {f"p{percent}": percentile(seconds, percent) for percent in (5, 25, 50, 75, 95, 99)}
            for who, seconds in of_ranks.items()
        }
        for name, of_ranks in numbers.items()
    }


if __name__ == "__main__":
    main()
