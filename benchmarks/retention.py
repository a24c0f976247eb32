"""How long does it take to decide what stays, in a run with very many checkpoints? Holdfast alone.

The records are in no order, a part of them lies on abandoned lines, and some metrics are NaN or missing. Nothing is
read from a disk: the scratch folder is not used.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from holdfast.runs.retention import KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged, Record, retain
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


@dataclass
class Row:
    """One policy: the seconds of each round, those of the processor, and how many checkpoints it keeps."""

    policy: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    kept: int = 0


def measured(records: list[Record], policy: KeepPolicy, rounds: int) -> Row:
    """One round that does not count, then `rounds` that do."""
    row = Row(repr(policy))
    for number in range(rounds + 1):
        cpu, start = time.process_time(), time.perf_counter()
        decisions = retain(records, policy)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        row.kept = sum(decision.keep for decision in decisions)
        if number:
            row.seconds.append(seconds)
            row.cpu_seconds.append(cpu_seconds)
    print(f"  {row.policy}: {span(row.seconds)} s", flush=True)
    return row


def table(rows: Sequence[Row]) -> str:
    lines = ["| policy | median s | min-max s | CPU s | kept |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        # A bar inside of a cell would end it.
        policy = row.policy.replace("|", "\\|")
        numbers = f"{show(median(row.seconds))} | {span(row.seconds)} | {show(median(row.cpu_seconds))} | {row.kept:,}"
        lines.append(f"| `{policy}` | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = arguments(__doc__).parse_args()
    count = SMALL_RECORDS if given.small else RECORDS
    records = a_run(count)
    rows = [measured(records, policy, given.rounds) for policy in (POLICY, *POLICY.parts())]
    what = f"a decision about each of {count:,} checkpoints, all policies together"
    bar = under(what, median(rows[0].seconds), BAR_SECONDS)
    text = f"## What stays\n\n{bars_table([bar])}\nMedians of {given.rounds} rounds\n\n{table(rows)}"
    write_results("retention", text, {row.policy: asdict(row) for row in rows}, given.results)


if __name__ == "__main__":
    main()
