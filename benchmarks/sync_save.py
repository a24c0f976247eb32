"""How long does a durable save take? Holdfast in sync mode, its peers, and the bare disk, in the same run.

Contenders take turns as in async_save.py, where those are that save behind the call only.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict

import savers
from async_save import Record, ahead_of_peers, allow_many_files, measure
from measure import Bar, arguments, at_least, bars_table, median, ratio, show, span, write_results
from processes import give_back_memory
from states import gpt_state, many_state

MINE = "holdfast, sync"
STATES = {"gpt": gpt_state, "many": many_state}


def table(title: str, records: Sequence[Record], size_bytes: int) -> str:
    raw = median(next(one.durable for one in records if one.name == savers.RAW_WRITE))
    lines = [
        f"### {title}",
        "",
        f"{size_bytes / 1e9:.2f} GB; medians of n saves in turns",
        "",
        f"| what | n | until durable s | min-max | CPU s | GB/s | speed, {savers.RAW_WRITE} = 1 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in records:
        seconds = median(one.durable)
        if one.skipped or seconds is None:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | | |")
            continue
        lines.append(
            f"| {one.name} | {len(one.durable)} | {show(seconds)} | {span(one.durable)} | {show(median(one.cpu), 2)} | "
            f"{size_bytes / seconds / 1e9:.2f} | {show(ratio(raw, seconds), 2)} |"
        )
    return "\n".join(lines) + "\n"


def bars(key: str, title: str, records: Sequence[Record]) -> list[Bar]:
    found = {one.name: one for one in records}
    mine, raw = found[MINE], median(found[savers.RAW_WRITE].durable)
    ahead = ahead_of_peers(f"{title}: durable", mine, records, "durable")
    if key != "gpt":
        return [ahead]
    speed = ratio(raw, median(mine.durable))
    return [at_least(f"{title}: speed", speed, 0.9, f"of {savers.RAW_WRITE}"), ahead]


def main() -> None:
    given = arguments(__doc__).parse_args()
    allow_many_files()
    factories = [savers.named(savers.RawWrite, savers.RAW_WRITE), *savers.ours("sync"), *savers.sync_peers()]
    tables, found_bars, numbers = "", [], {}
    for key, make in STATES.items():
        state = make(given.small)
        print(state.title, flush=True)
        records = measure(factories, state, given.folder / key, given.rounds)
        numbers[key] = {one.name: asdict(one) for one in records}
        tables += table(state.title, records, state.size_bytes) + "\n"
        found_bars += bars(key, state.title, records)
        del state
        give_back_memory()
        shutil.rmtree(given.folder / key, ignore_errors=True)
    text = f"## Synchronous save, until it is durable\n\n{bars_table(found_bars)}\n{tables}"
    write_results("sync-save", text, numbers, given.results)


if __name__ == "__main__":
    main()
