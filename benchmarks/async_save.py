"""How long does an asynchronous save keep the training, and when is it durable? Nothing else runs meanwhile.

Contenders take turns. In its turn one is set up, saves once without counting (its buffers and processes are made
then), saves three times counted, and is closed; so only one holds memory at a time, and a slow moment of the machine
hits all of them. The first save's times are those of the first turn. One that takes seconds for a save has one turn.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import savers
from measure import (
    Bar,
    Number,
    arguments,
    at_least,
    at_most,
    bars_table,
    is_slow,
    median,
    ratio,
    reason,
    show,
    span,
    times,
    under,
    write_results,
)
from processes import cpu_seconds, family, give_back_memory
from states import State, few_state, gpt_state, many_state

SAVES_PER_TURN = 3


@dataclass
class Record:
    """The seconds of one contender. `first_*` are the saves that set it up."""

    name: str
    role: str = "peer"
    staged_on_return: bool = True
    call: list[float] = field(default_factory=list)
    staged: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    first_call: list[float] = field(default_factory=list)
    first_durable: list[float] = field(default_factory=list)
    skipped: str = ""


def measure(factories: Sequence[savers.Factory], state: State, folder: Path, rounds: int) -> list[Record]:
    """At least `rounds` counted saves of each, in turns of another order each time."""
    records: dict[str, Record] = {}
    number = 0
    for turn in range(-(-rounds // SAVES_PER_TURN)):
        shift = turn % len(factories)
        for factory in [*factories[shift:], *factories[:shift]]:
            saver = factory(folder, state)
            record = records.setdefault(saver.name, Record(saver.name, saver.role))
            if not record.skipped and not is_slow(record.durable):
                take_turn(saver, record, number)
                number += 1 + SAVES_PER_TURN
    return [records[factory(folder, state).name] for factory in factories]


def take_turn(saver: savers.Saver, record: Record, number: int) -> None:
    try:
        saver.open()
        for extra in range(1 + SAVES_PER_TURN):
            save_once(saver, record, number + extra, first=extra == 0)
        saver.close()
    except Exception as error:  # a peer that does not run here is left out and said to be
        traceback.print_exc()
        record.skipped = reason(error)
    record.staged_on_return = saver.staged_on_return
    give_back_memory()


def save_once(saver: savers.Saver, record: Record, number: int, *, first: bool) -> None:
    saver.clear()
    os.sync()
    cpu = cpu_seconds(family(os.getpid()))
    start = time.perf_counter()
    pending = saver.save(number)
    call = time.perf_counter() - start
    savers.wait_until_staged(pending)
    staged = time.perf_counter() - start
    pending.finish()
    durable = time.perf_counter() - start
    cpu = cpu_seconds(family(os.getpid())) - cpu
    print(f"  {saver.name}{' (first)' if first else ''}: {call:.3f} / {durable:.3f} s", flush=True)
    (record.first_call if first else record.call).append(call)
    if pending.writes:
        (record.first_durable if first else record.durable).append(durable)
    if not first:
        record.staged.append(staged)
        record.cpu.append(cpu)


def table(title: str, records: Sequence[Record], size_bytes: int) -> str:
    lines = [
        f"### {title}",
        "",
        f"{size_bytes / 1e9:.2f} GB; medians of n saves in turns",
        "",
        "| what | n | call s | min-max | staged s | until durable s | min-max | CPU s | first: call / durable s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in records:
        if one.skipped:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | | | | |")
            continue
        first = f"{show(median(one.first_call[:1]))} / {show(median(one.first_durable[:1]))}"
        lines.append(
            f"| {one.name} | {len(one.call)} | {show(median(one.call))} | {span(one.call)} | "
            f"{show(median(one.staged))} | {show(median(one.durable))} | {span(one.durable)} | "
            f"{show(median(one.cpu), 2)} | {first} |"
        )
    return "\n".join(lines) + "\n"


def memcpy_seconds(records: Sequence[Record]) -> tuple[Number, str]:
    """The faster way to copy the state, and its name."""
    copies = [one for one in records if one.name in (savers.COPY_EACH, savers.COPY_FLAT) and one.call]
    best = min(copies, key=lambda one: median(one.call) or 0.0, default=None)
    return (None, "?") if best is None else (median(best.call), best.name)


def large_bars(title: str, records: Sequence[Record], mode: str) -> list[Bar]:
    """What holds for a state of a size at which copying and writing are the work."""
    found = {one.name: one for one in records}
    mine = found[f"holdfast, {mode}"]
    memcpy, which = memcpy_seconds(records)
    call, durable, raw = median(mine.call), median(mine.durable), median(found[savers.RAW_WRITE].durable)
    return [
        at_most(f"{title}: time inside save()", call, times(memcpy, 1.05), f"1.05x {which}"),
        ahead_of_peers(f"{title}: time inside save(), against peers that have staged", mine, records, "call"),
        at_least(f"{title}: speed from save() to committed", ratio(raw, durable), 0.9, f"of {savers.RAW_WRITE}"),
        ahead_of_peers(f"{title}: from save() to committed", mine, records, "durable"),
    ]


def ahead_of_peers(what: str, mine: Record, records: Sequence[Record], key: str) -> Bar:
    """The fastest peer is the bar; for the call, of those that have a copy of the state when it returns."""
    peers = [
        one for one in records if one.role == "peer" and getattr(one, key) and (key != "call" or one.staged_on_return)
    ]
    best = min(peers, key=lambda one: median(getattr(one, key)) or 0.0, default=None)
    if best is None:
        return under(what, median(getattr(mine, key)), None, "no peer ran")
    return under(what, median(getattr(mine, key)), median(getattr(best, key)), best.name)


def small_tensor_bars(title: str, records: Sequence[Record], mode: str) -> list[Bar]:
    mine = next(one for one in records if one.name == f"holdfast, {mode}")
    return [
        at_most(f"{title}: time inside save()", median(mine.call), 0.060),
        ahead_of_peers(f"{title}: from save() to committed", mine, records, "durable"),
    ]


QUESTIONS = {"gpt": (gpt_state, large_bars), "few": (few_state, large_bars), "many": (many_state, small_tensor_bars)}
DEFAULT_STATES = ["gpt", "many"]


def allow_many_files() -> None:
    """Some peers take a file handle for each tensor that they share with another process."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--states", nargs="*", default=DEFAULT_STATES, choices=list(QUESTIONS))
    given = parser.parse_args()
    allow_many_files()
    mine = [*savers.limits(), *savers.ours(given.mode)]
    tables, bars, numbers = "", [], {}
    # Of some states alone in a file of their own: the table of all is of one run.
    name = "-".join(["async-save", *(given.states if given.states != DEFAULT_STATES else ())])
    for key in given.states:
        make, state_bars = QUESTIONS[key]
        state = make(given.small)
        print(state.title, flush=True)
        # What DCP does anew at each save takes it ten seconds and more for very many tensors.
        peers = savers.reusing_async_peers() if key == "many" else savers.async_peers()
        records = measure([*mine, *peers], state, given.folder / key, given.rounds)
        numbers[key] = {one.name: asdict(one) for one in records}
        tables += table(state.title, records, state.size_bytes) + "\n"
        bars += state_bars(state.title, records, given.mode)
        del state
        give_back_memory()
        shutil.rmtree(given.folder / key, ignore_errors=True)
        text = f"## Asynchronous save on the CPU, one rank\n\n{bars_table(bars)}\n{tables}"
        write_results(name, text, numbers, given.results)


if __name__ == "__main__":
    main()
