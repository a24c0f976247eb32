"""How long does a restore on FSDP2 ranks take, on as many as saved or on others, and how many bytes does it read?

All files are out of the page cache before each restore, as a restarted job finds them, and every tensor is live. A time
is the slowest rank's. Bytes are those that the processes asked the system for, manifests and metadata too, against
those that the ranks hold: what is read twice, or read and not used, is above 1.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast
import raw
from holdfast.testing import run_ranks, values
from measure import Bar, arguments, at_most, bars_table, median, ratio, show, span, under, write_results
from processes import give_back_memory
from states import State
from two_ranks import sharded_state

TIMEOUT_SECONDS = 600.0
MINE, DCP, RAW = "holdfast, verified", "dcp.load", "raw O_DIRECT read, by the first rank alone"
CASES = (("2 -> 2", 2, 2), ("2 -> 1", 2, 1), ("1 -> 2", 1, 2), ("2 -> 4", 2, 4))


@dataclass
class Load:
    """The seconds of one contender in one case, and what all ranks together read in a round and hold."""

    name: str
    seconds: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    needed_bytes: int = 0


def save_on_rank(rank: int, folder: Path, small: bool, ranks: int) -> None:
    state = sharded_state(small, ranks)
    with holdfast.CheckpointManager(folder / "run", state.components, mode="sync", rng=False) as manager:
        manager.save(0)
    dcp.save(dict(state.tensors), checkpoint_id=folder / "dcp")


def load_on_rank(rank: int, folder: Path, small: bool, ranks: int, rounds: int) -> list[Load]:
    """Each contender in turns; the first round does not count."""
    state = sharded_state(small, ranks)
    give_back_memory()
    manager = holdfast.CheckpointManager(folder / "run", state.components, rng=False)
    buffer = raw.huge_pages(raw.PIECE_BYTES)
    mine, theirs = raw.files_of(folder / "run"), raw.files_of(folder / "dcp")
    acts: dict[str, tuple[list[Path], Callable[[], object]]] = {
        RAW: (mine, lambda: raw.read_direct(mine, [buffer]) if rank == 0 else None),
        MINE: (mine, manager.restore),
        DCP: (theirs, lambda: dcp.load(dict(state.tensors), checkpoint_id=folder / "dcp")),
    }
    loads = {name: Load(name, needed_bytes=state.size_bytes) for name in acts}
    for number in range(rounds + 1):
        names = list(acts)[number % len(acts) :] + list(acts)[: number % len(acts)]
        for name in names:
            files, act = acts[name]
            if rank == 0:
                raw.cool(files)
            seconds, read = take(act, state, fills=name != RAW)
            if number:
                loads[name].seconds.append(seconds)
                loads[name].read_bytes.append(read)
            if rank == 0:
                print(f"  round {number} {name}: {seconds:.3f} s", flush=True)
    manager.close()
    return list(loads.values())


def take(act: Callable[[], object], state: State, *, fills: bool) -> tuple[float, int]:
    """Do it once, on all ranks together; return this rank's seconds and bytes."""
    largest = max(state.local.values(), key=torch.Tensor.numel)
    largest.zero_()
    dist.barrier()
    read, start = bytes_read(), time.perf_counter()
    act()
    seconds, read = time.perf_counter() - start, bytes_read() - read
    dist.barrier()
    if fills and not bool(largest.any()):
        raise RuntimeError("a load left a tensor as it was")
    return seconds, read


def bytes_read() -> int:
    """What this process has asked the system for by read calls, from the page cache or past it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def together(found: Sequence[Sequence[Load]]) -> list[Load]:
    """One record of what the ranks measured: the slowest, and all bytes."""
    return [
        Load(
            parts[0].name,
            [max(seconds) for seconds in zip(*(part.seconds for part in parts), strict=True)],
            [sum(read) for read in zip(*(part.read_bytes for part in parts), strict=True)],
            sum(part.needed_bytes for part in parts),
        )
        for parts in zip(*found, strict=True)
    ]


def table(found: dict[str, list[Load]]) -> str:
    lines = [
        "| ranks | what | n | median s | min-max | GB read | of those needed |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case, loads in found.items():
        for one in loads:
            read = median(one.read_bytes)
            lines.append(
                f"| {case} | {one.name} | {len(one.seconds)} | {show(median(one.seconds))} | {span(one.seconds)} | "
                f"{show(None if read is None else read / 1e9, 2)} | {show(ratio(read, one.needed_bytes), 2)} |"
            )
    return "\n".join(lines) + "\n"


def bars(found: dict[str, list[Load]]) -> list[Bar]:
    made = []
    for case, loads in found.items():
        of = {one.name: one for one in loads}
        mine = of[MINE]
        made.append(at_most(f"{case}: bytes read", ratio(median(mine.read_bytes), mine.needed_bytes), 1.05, unit="x"))
        made.append(under(f"{case}: restore", median(mine.seconds), median(of[DCP].seconds), DCP))
    return made


def main() -> None:
    given = arguments(__doc__).parse_args()
    found: dict[str, list[Load]] = {}

    def on_ranks(ranks: int, function: Any, *args: Any) -> list[Any]:
        return values(run_ranks(ranks, function, *args, timeout_seconds=TIMEOUT_SECONDS))

    for ranks in (1, 2):
        folder = given.folder / str(ranks)
        folder.mkdir(parents=True, exist_ok=True)
        on_ranks(ranks, save_on_rank, folder, given.small, ranks)
    for case, saved, loaded in CASES:
        print(case, flush=True)
        folder = given.folder / str(saved)
        found[case] = together(on_ranks(loaded, load_on_rank, folder, given.small, loaded, given.rounds))
    text = (
        "## Restore on FSDP2 ranks, files not in the page cache\n\nA GPT of 124M parameters with AdamW, "
        f"{found['2 -> 1'][0].needed_bytes / 1e9:.2f} GB; all ranks on one machine, one thread each\n\n"
        f"{bars_table(bars(found))}\n{table(found)}"
    )
    write_results(
        "reshard", text, {case: [asdict(one) for one in loads] for case, loads in found.items()}, given.results
    )
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
