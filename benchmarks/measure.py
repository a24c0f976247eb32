"""Measure contenders in turn, round by round, so that a slow moment of the machine hits all of them; then one table.

A bar is what we set out to reach. It is met or not by the numbers of the same run; one without numbers says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


# A contender that takes longer than this has said enough with two or three: the others need the time.
SLOW_SECONDS = 2.5


def is_slow(seconds: Sequence[float]) -> bool:
    return len(seconds) >= 2 and statistics.median(seconds) > SLOW_SECONDS


@dataclass
class Contender:
    """One way to do it. `prepare` is not timed; `act` is, from a state in which nothing is dirty."""

    name: str
    act: Callable[[int], object]
    prepare: Callable[[int], object] = lambda round_number: None
    role: str = "peer"
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    skipped: str = ""

    def take(self, number: int) -> None:
        """Do it once. The first time of all does not count."""
        self.prepare(number)
        os.sync()
        cpu, start = _cpu(), time.perf_counter()
        self.act(number)
        seconds = time.perf_counter() - start
        if number:
            self.seconds.append(seconds)
            self.cpu_seconds.append(_cpu() - cpu)
        print(f"  round {number} {self.name}: {seconds:.3f} s", flush=True)


def interleave(contenders: Sequence[Contender], rounds: int) -> None:
    """One warm-up round that does not count, then `rounds` that do, each time in another order."""
    for number in range(rounds + 1):
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            if contender.skipped or is_slow(contender.seconds):
                continue
            try:
                contender.take(number)
            except Exception as error:  # a peer that does not run here is left out and said to be
                traceback.print_exc()
                contender.skipped = reason(error)


def table(title: str, contenders: Sequence[Contender], size_bytes: int) -> str:
    """The medians, and each one's speed as a part of the fastest limit's."""
    base = fastest([one for one in contenders if one.role == "limit"])
    lines = [
        f"### {title}",
        "",
        f"{size_bytes / 1e9:.2f} GB, {max(len(one.seconds) for one in contenders)} rounds, interleaved",
        "",
        "| what | n | median s | min-max s | CPU s | GB/s | speed, fastest raw = 1 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in contenders:
        seconds = median(one.seconds)
        if one.skipped or seconds is None:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | | |")
            continue
        lines.append(
            f"| {one.name} | {len(one.seconds)} | {show(seconds)} | {span(one.seconds)} | "
            f"{show(median(one.cpu_seconds), 2)} | {size_bytes / seconds / 1e9:.2f} | {show(ratio(base, seconds), 2)} |"
        )
    return "\n".join(lines) + "\n"


def fastest(contenders: Sequence[Contender]) -> Number:
    return min((statistics.median(one.seconds) for one in contenders if one.seconds), default=None)


def numbers_of(contenders: Sequence[Contender]) -> dict[str, Any]:
    """What the picture needs of a table."""
    return {
        one.name: {"role": one.role, "seconds": one.seconds, "cpu_seconds": one.cpu_seconds, "skipped": one.skipped}
        for one in contenders
    }


def reason(error: Exception) -> str:
    """Why a contender was left out, in the few words that a table has room for."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # Where it was measured is no part of it.
    last = re.sub(r"(/[\w.-]+)+/", "", lines[-1]) if lines else ""
    return f"{type(error).__name__}: {last}"[:160]


def write_results(name: str, text: str, numbers: Any, folder: Path) -> None:
    """One table for people and the same numbers for the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"{text}\n{machine()}\n")
    (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(text, flush=True)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every question takes; `run.py` passes it on."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("folder", type=Path, help="scratch folder on the disk to measure; it is emptied")
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table and its numbers")
    parser.add_argument("--small", action="store_true", help="small states: shows that the script works, nothing else")
    parser.add_argument("--mode", default="async", help="the mode of Holdfast that the bars are about")
    return parser


@dataclass(frozen=True)
class Bar:
    """One bar, and what was measured against it. `met` is None when there is nothing to compare."""

    what: str
    bar: str
    measured: str
    met: bool | None

    def line(self) -> str:
        verdict = {True: "met", False: "**not met**", None: "not measured"}[self.met]
        return f"| {self.what} | {self.bar} | {self.measured} | {verdict} |"


Number = float | None


def at_most(what: str, measured: Number, limit: Number, why: str = "", unit: str = "s") -> Bar:
    met = None if measured is None or limit is None else measured <= limit
    return Bar(what, f"at most {_amount(limit, unit)}{_because(why)}", _amount(measured, unit), met)


def under(what: str, measured: Number, limit: Number, why: str = "", unit: str = "s") -> Bar:
    met = None if measured is None or limit is None else measured < limit
    return Bar(what, f"under {_amount(limit, unit)}{_because(why)}", _amount(measured, unit), met)


def at_least(what: str, measured: Number, limit: Number, why: str = "", unit: str = "") -> Bar:
    met = None if measured is None or limit is None else measured >= limit
    return Bar(what, f"at least {_amount(limit, unit)}{_because(why)}", _amount(measured, unit), met)


def bars_table(bars: Sequence[Bar]) -> str:
    lines = ["| bar | wanted | measured | |", "|---|---|---:|---|", *(bar.line() for bar in bars)]
    return "\n".join(lines) + "\n"


def median(values: Sequence[float]) -> Number:
    return statistics.median(values) if values else None


def ratio(part: Number, whole: Number) -> Number:
    return None if part is None or not whole else part / whole


def times(number: Number, factor: float) -> Number:
    return None if number is None else number * factor


def show(value: Number, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def span(values: Sequence[float], digits: int = 3) -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}" if values else "-"


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return (
        f"{device}{os.cpu_count()} cores, {memory:.0f} GiB of memory, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _amount(value: Number, unit: str) -> str:
    if value is None:
        return "?"
    if unit == "s" and abs(value) < 0.1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.3f} {unit}".rstrip() if unit != "%" else f"{value:.2f} %"


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _cpu() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
