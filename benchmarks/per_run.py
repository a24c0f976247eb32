"""What do a commit and a restore cost in a run that has many checkpoints already? Holdfast alone, a tiny state.

It is CPU time that counts, of the process and of the writer that it started. The run is grown to its size by copies of
a real checkpoint, each with a manifest of its own: what a run that has saved ten thousand times looks like on the disk.
A process's first cleanup reads all of the run once, beside the training: it is measured by itself, and over before the
saves that count.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import torch

import holdfast
from holdfast.ondisk.manifest import decode_manifest, encode_manifest
from measure import Bar, arguments, at_most, bars_table, median, show, times, write_results
from processes import cpu_seconds, family
from states import tiny_state

COUNTS, SMALL_COUNTS = (10, 100, 1_000, 10_000), (10, 50)
SAVES = 10
MODES = ("sync", "async")
LOOK_SECONDS, IDLE_SHARE = 1.0, 0.02


@dataclass
class Cost:
    """Seconds of the processor and of the clock at one number of checkpoints; `save_cpu` by mode."""

    checkpoints: int
    save_cpu: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    save_seconds: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    cleanup_cpu: list[float] = field(default_factory=list)
    restore_cpu: list[float] = field(default_factory=list)
    restore_seconds: list[float] = field(default_factory=list)


def grow(run: Path, components: dict[str, torch.nn.Module], count: int) -> None:
    """Save once, and copy that checkpoint until there are this many, each the parent of the next."""
    with holdfast.CheckpointManager(run, components, mode="sync", rng=False, links=False) as manager:
        manager.save(1)
    first = next(run.glob("step-*"))
    manifest, parent = decode_manifest((first / "manifest.json").read_bytes())
    for sequence in range(2, count + 1):
        folder = run / f"step-{sequence:09d}"
        folder.mkdir()
        for path in first.iterdir():
            if path.name != "manifest.json":
                os.link(path, folder / path.name)
        grown = msgspec.structs.replace(
            manifest,
            folder=folder.name,
            step=sequence,
            sequence=sequence,
            parent=parent,
            line=((1, sequence - 1),),
            segments=(manifest.segment,),
        )
        data, parent = encode_manifest(grown)
        (folder / "manifest.json").write_bytes(data)
    os.sync()


def measure(run: Path, components: dict[str, torch.nn.Module], cost: Cost, rounds: int) -> None:
    for _ in range(rounds):
        restore(run, components, cost)
    step = cost.checkpoints
    for mode in MODES:
        with holdfast.CheckpointManager(run, components, mode=mode, rng=False, links=False) as manager:
            manager.restore()
            cost.cleanup_cpu.append(first_cleanup(manager, step + 1))
            step += 1
            for number in range(rounds + 1):
                cpu, start = cpu_seconds(family(os.getpid())), time.perf_counter()
                for _ in range(SAVES):
                    step += 1
                    manager.save(step).wait()
                if number:
                    cost.save_cpu[mode].append((cpu_seconds(family(os.getpid())) - cpu) / SAVES)
                    cost.save_seconds[mode].append((time.perf_counter() - start) / SAVES)


def first_cleanup(manager: holdfast.CheckpointManager, step: int) -> float:
    """Save for the first time; return the CPU seconds of this process after that, until its cleanup is over."""
    manager.save(step).wait()
    cpu, seen = time.process_time(), -1.0
    while time.process_time() - seen > IDLE_SHARE * LOOK_SECONDS:
        seen = time.process_time()
        time.sleep(LOOK_SECONDS)
    return time.process_time() - cpu


def restore(run: Path, components: dict[str, torch.nn.Module], cost: Cost) -> None:
    """As a new process does it: nothing is remembered of the run."""
    cpu, start = time.process_time(), time.perf_counter()
    with holdfast.CheckpointManager(run, components, mode="sync", rng=False, links=False) as manager:
        found = manager.restore()
    cost.restore_cpu.append(time.process_time() - cpu)
    cost.restore_seconds.append(time.perf_counter() - start)
    if found.step != cost.checkpoints:
        raise RuntimeError(f"step {found.step} was restored, and not the newest, {cost.checkpoints}")


def table(costs: Sequence[Cost]) -> str:
    lines = [
        "| checkpoints | sync save, CPU ms | ms | async save until committed, CPU ms | ms | "
        "first cleanup, once, CPU ms | new manager, restore, close, CPU ms | ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in costs:
        cells = [values[mode] for mode in MODES for values in (one.save_cpu, one.save_seconds)]
        cells += [one.cleanup_cpu, one.restore_cpu, one.restore_seconds]
        shown = (show(times(median(cell), 1000), 1) for cell in cells)
        lines.append(f"| {one.checkpoints:,} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def bars(costs: Sequence[Cost]) -> list[Bar]:
    """Constant: no more than half as much again as with the fewest, and 2 ms that a clock of 10 ms may err."""
    made = []
    for mode in MODES:
        least, most = (median(cost.save_cpu[mode]) for cost in (costs[0], costs[-1]))
        limit = None if least is None else 1.5 * least + 0.002
        what = f"CPU time of a commit, {mode}, at {costs[-1].checkpoints:,} checkpoints"
        made.append(at_most(what, most, limit, f"as at {costs[0].checkpoints}: 1.5 times and 2 ms"))
    return made


def main() -> None:
    given = arguments(__doc__).parse_args()
    components = dict(tiny_state().components)
    costs = []
    for count in SMALL_COUNTS if given.small else COUNTS:
        run = given.folder / str(count)
        grow(run, components, count)
        cost = Cost(count)
        measure(run, components, cost, given.rounds)
        print(f"  {count:,}: {show(median(cost.save_cpu['sync']), 4)} s per sync save", flush=True)
        costs.append(cost)
        shutil.rmtree(run)
    text = (
        "## A commit and a restore in a run with many checkpoints\n\n200 tensors; medians of "
        f"{given.rounds} rounds of {SAVES} saves each\n\n{bars_table(bars(costs))}\n{table(costs)}"
    )
    write_results("per-run", text, {str(one.checkpoints): asdict(one) for one in costs}, given.results)


if __name__ == "__main__":
    main()
