"""The same questions as async_save.py, for two FSDP2 ranks that share the machine, and how long their agreement takes.

A number is the slower rank's. Each rank has one thread. "agree" is what Holdfast's own events say of the second and
later saves of an unchanged structure.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import savers
import states
from async_save import SAVES_PER_TURN, Record, large_bars, table
from holdfast.testing import run_ranks, values
from measure import arguments, at_most, bars_table, is_slow, median, reason, show, span, write_results
from processes import give_back_memory

RANKS = 2
TIMEOUT_SECONDS = 1800.0
TITLE = "A GPT of 124M parameters with AdamW on two FSDP2 ranks"


def sharded_state(small: bool, ranks: int = RANKS) -> states.State:
    model, optimizer = states.gpt(**(states.SMALL_GPT if small else {}))
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = type(optimizer)(model.parameters(), lr=1e-3, foreach=True)
    states.fill(model, optimizer)
    return states.State.of(TITLE, {"model": model, "optimizer": optimizer})


class Agreements:
    """Collects how long the ranks took to agree, from the events of each save."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, event: Any) -> None:
        phases = getattr(event, "phases", None) or {}
        if "agree" in phases:
            self.seconds.append(phases["agree"])


def contenders(mode: str, agreements: Agreements) -> list[savers.Factory]:
    # Every mode but the one that exists without events tells them.
    listen = {} if mode == "sync" else {"on_event": agreements}
    return [
        *savers.limits(),
        savers.named(savers.Holdfast, f"holdfast, {mode}", mode=mode, **listen),
        savers.named(savers.DcpSave, savers.DCP_AS_IT_COMES, threads=1),
        savers.named(savers.DcpSave, savers.DCP_THREADS, threads=2),
        *savers.reusing_async_peers(),
    ]


def be_rank(rank: int, folder: Path, rounds: int, small: bool, mode: str) -> dict[str, Any]:
    """All contenders in turns, on this rank. Every rank takes the same way, also past a contender that fails on one."""
    state = sharded_state(small)
    give_back_memory()
    agreements = Agreements()
    records: dict[str, Record] = {}
    agreed: list[float] = []
    number = 0
    for turn in range(-(-rounds // SAVES_PER_TURN)):
        factories = contenders(mode, agreements)
        shift = turn % len(factories)
        for factory in factories[shift:] + factories[:shift]:
            saver = for_rank(factory, folder, state, rank)
            record = records.setdefault(saver.name, Record(saver.name, saver.role))
            # Times differ between ranks; what one of them finds slow, all of them leave out.
            if not record.skipped and not anywhere(is_slow(record.durable)):
                agreed += take_turn(saver, record, rank, number, agreements)
                number += 1 + SAVES_PER_TURN
    ordered = [factory(folder, state).name for factory in contenders(mode, agreements)]
    return {"records": [records[name] for name in ordered], "agree": agreed, "size_bytes": state.size_bytes}


def anywhere(here: bool) -> bool:
    found: list[bool] = [False] * RANKS
    dist.all_gather_object(found, here)
    return any(found)


def for_rank(factory: savers.Factory, folder: Path, state: states.State, rank: int) -> savers.Saver:
    """The ranks share a checkpoint's folder, except where each tries the bare machine."""
    saver = factory(folder, state)
    return factory(folder / f"rank-{rank}", state) if saver.role == "limit" else saver


def take_turn(saver: savers.Saver, record: Record, rank: int, number: int, agreements: Agreements) -> list[float]:
    """One turn. The agreements of the first save are not counted, since its plan is new."""
    agreed: list[float] = []
    problem = attempt(saver.open)
    for extra in range(1 + SAVES_PER_TURN):
        agreements.seconds.clear()
        problem = problem or save_together(saver, record, rank, number + extra, first=extra == 0)
        agreed += agreements.seconds if extra else []
    record.skipped = problem
    record.staged_on_return = saver.staged_on_return
    if not problem:
        attempt(saver.close)
    give_back_memory()
    return agreed


def attempt(work: Any) -> str:
    """What went wrong on any rank; a peer that does not run here is left out and said to be."""
    problem = ""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        problem = reason(error)
    problems: list[str] = [""] * RANKS
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def save_together(saver: savers.Saver, record: Record, rank: int, number: int, *, first: bool) -> str:
    """One save. It is durable when every rank has written and the first has synced it all, folder and names too."""
    save = Save(saver, rank, number)
    problem = attempt(save.prepare) or attempt(save.act) or attempt(save.sync)
    if problem:
        return problem
    if rank == 0:
        print(f"  {saver.name}{' (first)' if first else ''}: {save.call:.3f} / {save.durable:.3f} s", flush=True)
    (record.first_call if first else record.call).append(save.call)
    if save.pending.writes:
        (record.first_durable if first else record.durable).append(save.durable)
    if not first:
        record.staged.append(save.staged)
    return ""


class Save:
    """One save on one rank, in parts; a rank starts the next part when all have done the one before."""

    def __init__(self, saver: savers.Saver, rank: int, number: int) -> None:
        self.saver = saver
        self.rank = rank
        self.number = number

    def prepare(self) -> None:
        if self.rank == 0 or self.saver.role == "limit":
            self.saver.clear()
        os.sync()

    def act(self) -> None:
        self.start = time.perf_counter()
        self.pending = self.saver.save(self.number)
        self.call = self._passed()
        savers.wait_until_staged(self.pending)
        self.staged = self._passed()
        if self.pending.wait is not None:
            self.pending.wait()
        self.durable = self._passed()

    def sync(self) -> None:
        if self.rank == 0 and self.pending.path is not None:
            savers.sync_tree(self.pending.path)
            self.durable = self._passed()

    def _passed(self) -> float:
        return time.perf_counter() - self.start


def slower_of(records: Sequence[Record]) -> Record:
    """One record of what the ranks measured of the same contender."""
    joined = Record(**asdict(records[0]))
    for name in ("call", "staged", "durable", "first_call", "first_durable"):
        setattr(joined, name, [max(pair) for pair in zip(*(getattr(one, name) for one in records), strict=True)])
    return joined


def main() -> None:
    given = arguments(__doc__).parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    answers = values(
        run_ranks(RANKS, be_rank, given.folder, given.rounds, given.small, given.mode, timeout_seconds=TIMEOUT_SECONDS)
    )
    records = [slower_of(pair) for pair in zip(*(answer["records"] for answer in answers), strict=True)]
    agreed = [max(pair) for pair in zip(*(answer["agree"] for answer in answers), strict=False)]
    size = sum(answer["size_bytes"] for answer in answers)
    bar = at_most("planning agreement of an unchanged structure, two ranks", median(agreed), 0.010)
    bars = [bar, *large_bars("two ranks", records, given.mode)]
    note = f"agreements: {len(agreed)}, median {show(median(agreed), 4)} s, {span(agreed, 4)} s"
    text = f"## Asynchronous save on the CPU, two ranks\n\n{bars_table(bars)}\n{note}\n\n{table(TITLE, records, size)}"
    numbers = {"agree": agreed, "records": {one.name: asdict(one) for one in records}}
    write_results("two-ranks", text, numbers, given.results)


if __name__ == "__main__":
    main()
