"""How long does it take to decide what stays, in a run with very many checkpoints? Holdfast alone.

The records are in no order, a part of them lies on abandoned lines, and some metrics are NaN or missing. Nothing is
read from a disk: the scratch folder is not used.
"""

from __future__ import annotations

import random
import time

from holdfast.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged, Record
from holdfast.stages.retain import retain
from measure import arguments, bars_table, median, show, span, under, write_results

RECORDS = 100_000
SMALL_RECORDS = 1_000
BAR_SECONDS = 0.5
POLICY = KeepLast(3) | KeepBest("val_loss", 5) | KeepEvery(steps=10_000) | KeepEvery(minutes=60) | KeepTagged()


def a_run(count: int) -> list[Record]:
    """A checkpoint every 100 steps and every 30 seconds."""
    source = random.Random(0)
    records = [
        Record(
            folder=f"step-{number * 100:09d}",
            step=number * 100,
            sequence=number + 1,
            created_seconds=1.7e9 + number * 30.0,
            metrics=_metrics(number, source),
            tags=("release",) if number % 5_000 == 0 else (),
            on_line=number % 1_000 > 50,
        )
        for number in range(count)
    ]
    source.shuffle(records)
    return records


def _metrics(number: int, source: random.Random) -> dict[str, float]:
    if number % 97 == 0:
        return {}
    return {"val_loss": float("nan") if number % 101 == 0 else 2 + source.random()}


def measured(records: list[Record], policy: KeepPolicy, rounds: int) -> tuple[list[float], int]:
    """Seconds of each round but the first, which does not count, and how many are kept."""
    seconds, kept = [], 0
    for _ in range(rounds + 1):
        start = time.perf_counter()
        decisions = retain(records, policy)
        seconds.append(time.perf_counter() - start)
        kept = sum(decision.keep for decision in decisions)
    return seconds[1:], kept


def table(rows: dict[str, tuple[list[float], int]]) -> str:
    lines = ["| policy | median s | min-max s | kept |", "|---|---:|---:|---:|"]
    for name, (seconds, kept) in rows.items():
        # A policy's own bars would end the cell.
        shown = name.replace("|", "\\|")
        lines.append(f"| `{shown}` | {show(median(seconds))} | {span(seconds)} | {kept:,} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = arguments(__doc__).parse_args()
    count = SMALL_RECORDS if given.small else RECORDS
    records = a_run(count)
    rows = {}
    for policy in (POLICY, *POLICY.parts()):
        rows[repr(policy)] = measured(records, policy, given.rounds)
        print(f"  {policy}: {span(rows[repr(policy)][0])} s", flush=True)
    what = f"a decision about each of {count:,} checkpoints, all policies together"
    bar = under(what, median(rows[repr(POLICY)][0]), BAR_SECONDS)
    text = f"## What stays\n\n{bars_table([bar])}\nMedians of {given.rounds} rounds\n\n{table(rows)}"
    numbers = {name: {"seconds": seconds, "kept": kept} for name, (seconds, kept) in rows.items()}
    write_results("retention", text, numbers, given.results)


if __name__ == "__main__":
    main()
