"""What does it cost to save a tiny model at each step? 200 tensors in 0.3 MB; what is fixed about a save is all of it.

Contenders take turns: one is set up, saves once without counting, and then after each of some steps; a step lasts at
least 50 ms. The first save of a process is asked of new processes, as in first_save.py, at once after construction.
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

import first_save
import savers
from async_save import Record
from measure import Bar, arguments, at_most, bars_table, is_slow, median, reason, show, span, write_results
from processes import give_back_memory
from states import State, tiny_state

STEPS, SMALL_STEPS = 10, 4
STEP_SECONDS = 0.050


def take_turn(saver: savers.Saver, record: Record, training: first_save.TinyTraining, steps: int) -> None:
    try:
        saver.open()
        os.sync()
        for number in range(1 + steps):
            save_once(saver, record, training, number)
        saver.close()
    except Exception as error:  # a peer that does not run here is left out and said to be
        traceback.print_exc()
        record.skipped = reason(error)
    give_back_memory()


def save_once(saver: savers.Saver, record: Record, training: first_save.TinyTraining, number: int) -> None:
    ends = time.perf_counter() + STEP_SECONDS
    training.step(nullcontext)
    time.sleep(max(0.0, ends - time.perf_counter()))
    call, durable = first_save.save(saver, number)
    (record.call if number else record.first_call).append(call)
    (record.durable if number else record.first_durable).append(durable)


def measure(state: State, folder: Path, mode: str, rounds: int, steps: int) -> list[Record]:
    training = first_save.TinyTraining(state.components["model"], state.components["optimizer"])
    makers = [
        savers.named(savers.RawWrite, savers.RAW_WRITE),
        *savers.ours(mode, "sync"),
        *savers.sync_peers(),
        *savers.async_peers(),
    ]
    records = {saver.name: Record(saver.name, saver.role) for saver in (make(folder, state) for make in makers)}
    for turn in range(rounds):
        shift = turn % len(makers)
        for make in [*makers[shift:], *makers[:shift]]:
            saver = make(folder, state)
            record = records[saver.name]
            if not record.skipped and not is_slow(record.durable):
                take_turn(saver, record, training, steps)
                print(f"  turn {turn} {saver.name}: {show(median(record.durable[-steps:]), 4)} s", flush=True)
    return list(records.values())


def table(records: Sequence[Record]) -> str:
    lines = ["| what | n | call ms | min-max | until durable ms | min-max |", "|---|---:|---:|---:|---:|---:|"]
    for one in records:
        if one.skipped:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | |")
            continue
        call, durable = ([1000 * value for value in values] for values in (one.call, one.durable))
        lines.append(
            f"| {one.name} | {len(call)} | {show(median(call), 2)} | {span(call, 1)} | {show(median(durable), 2)} | "
            f"{span(durable, 1)} |"
        )
    return "\n".join(lines) + "\n"


def bars(records: Sequence[Record], firsts: Sequence[first_save.First], mode: str) -> list[Bar]:
    mine = next(one for one in records if one.name == f"holdfast, {mode}")
    first = next(one for one in firsts if one.role == "holdfast")
    return [
        at_most("save each step: time inside save()", median(mine.call), 0.002),
        at_most("save each step: from save() to committed", median(mine.durable), 0.030),
        at_most("first save of a process, at once: until committed", median(first.durable), 0.150),
    ]


def main() -> None:
    given = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    state = tiny_state()
    # A turn has many saves in it: three turns are as many as any median needs.
    steps, turns = (SMALL_STEPS, 1) if given.small else (STEPS, min(given.rounds, 3))
    records = measure(state, given.folder, given.mode, turns, steps)
    given.state = "tiny"
    names = [make(given.folder, state).name for make in first_save.factories(given)]
    firsts = first_save.measure(given, "tiny", [(name, 0.0) for name in names], given.rounds)
    text = (
        f"## A tiny model, saved at each step\n\n{len(state.tensors)} tensors, {state.size_bytes / 1e6:.2f} MB\n\n"
        f"{bars_table(bars(records, firsts, given.mode))}\n{table(records)}\n"
        f"### The first save of a process\n\n{first_save.table(firsts)}"
    )
    numbers = {
        "each step": {one.name: asdict(one) for one in records},
        "first": {one.title: asdict(one) for one in firsts},
    }
    write_results("tiny", text, numbers, given.results)
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
