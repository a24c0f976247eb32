"""Measure contenders in turn, round by round, so that a slow moment of the machine hits all of them; then one table."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Contender:
    """One way to do it. `prepare` is not timed; `act` is, from a state in which nothing is dirty."""

    name: str
    act: Callable[[int], object]
    prepare: Callable[[int], object] = lambda round_number: None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def interleave(contenders: list[Contender], rounds: int) -> None:
    """One warm-up round that does not count, then `rounds` that do, each time in another order."""
    for number in range(rounds + 1):
        shift = number % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            contender.prepare(number)
            os.sync()
            cpu = _cpu()
            start = time.perf_counter()
            contender.act(number)
            seconds = time.perf_counter() - start
            if number:
                contender.seconds.append(seconds)
                contender.cpu_seconds.append(_cpu() - cpu)
            print(f"  round {number} {contender.name}: {seconds:.3f} s", flush=True)


def table(title: str, contenders: list[Contender], size_bytes: int, baseline: str) -> str:
    """The medians, and each one's speed as a part of the baseline's."""
    base = statistics.median(next(one.seconds for one in contenders if one.name == baseline))
    lines = [
        f"### {title}",
        "",
        f"{size_bytes / 1e9:.2f} GB, {len(contenders[0].seconds)} rounds, interleaved",
        "",
        f"| what | median s | min-max s | CPU s | GB/s | speed, {baseline} = 1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in contenders:
        median = statistics.median(one.seconds)
        lines.append(
            f"| {one.name} | {median:.3f} | {min(one.seconds):.3f}-{max(one.seconds):.3f} | "
            f"{statistics.median(one.cpu_seconds):.2f} | {size_bytes / median / 1e9:.2f} | {base / median:.2f} |"
        )
    return "\n".join(lines) + "\n"


def store(name: str, text: str, contenders: dict[str, list[Contender]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{text}\n{_machine()}\n")
    numbers = {
        title: {one.name: {"seconds": one.seconds, "cpu_seconds": one.cpu_seconds} for one in group}
        for title, group in contenders.items()
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(text)


def _cpu() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
