"""How long does a verified restore into live CUDA tensors take? 9 GiB, with the files in the page cache and without.

The limits read Holdfast's own files: through a ring of page-locked slots onto the device, with eight threads and with
sixteen, and past the page cache in pieces of 8 MiB, with one thread and with eight. The fastest of them is the limit.
Peers read files of their own.

    python benchmarks/gpu_restore.py SCRATCH [ROUNDS] --results OUT
"""

from __future__ import annotations

import os
import queue
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import holdfast
import raw
from gpu_save import gpu_state
from measure import Bar, Number, arguments, at_least, bars_table, median, ratio, reason, show, span, write_results
from states import State

THREADS = 8
PEER_ROUNDS = 2
GUESS_SECONDS = 15.0


@dataclass
class Reading:
    """One way to read. `prepare` is not timed; `save` makes its files, when there is time for it at all."""

    name: str
    act: Callable[[], object]
    prepare: Callable[[], object]
    rounds: int
    save: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)
    skipped: str = ""
    took_seconds: float = GUESS_SECONDS
    saved: bool = False


class Ring:
    """Reads pieces of files into page-locked slots and copies them onto the device, several at a time."""

    def __init__(self, target: torch.Tensor, threads: int) -> None:
        self.target = target
        self.threads = threads
        self.slots: queue.Queue[tuple[torch.Tensor, torch.cuda.Stream]] = queue.Queue()
        for _ in range(2 * threads):
            self.slots.put((torch.empty(raw.PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()))

    def read(self, files: Sequence[Path]) -> None:
        raw.for_each(self._move, raw.with_places(raw.pieces(files)), self.threads)
        torch.cuda.synchronize()

    def _move(self, placed: tuple[raw.Piece, int]) -> None:
        piece, place = placed
        size = piece[2]
        slot, stream = self.slots.get()
        stream.synchronize()  # what the slot held before is on the device
        raw.read_piece(piece, memoryview(slot.numpy())[:size], os.O_RDONLY)
        with torch.cuda.stream(stream):
            self.target[place : place + size].copy_(slot[:size], non_blocking=True)
        self.slots.put((slot, stream))


def readings(state: State, folder: Path, rounds: int) -> list[Reading]:
    run = folder / "run"
    manager = holdfast.CheckpointManager(run, state.components, mode="sync", rng=False)
    manager.save(0)
    mine = raw.files_of(run)
    target = torch.empty(sum(path.stat().st_size for path in mine), dtype=torch.uint8, device="cuda")
    buffers = [raw.huge_pages(raw.PIECE_BYTES) for _ in range(THREADS)]
    warm, cold = (lambda: raw.warm(mine)), (lambda: raw.cool(mine))
    eight, sixteen = Ring(target, 8), Ring(target, 16)
    return [
        Reading(f"{RING}, 8 threads, warm", lambda: eight.read(mine), warm, rounds),
        Reading(f"{RING}, 16 threads, warm", lambda: sixteen.read(mine), warm, rounds),
        Reading(MINE_WARM, manager.restore, warm, rounds),
        Reading(f"{DIRECT}, 1 thread", lambda: raw.read_direct(mine, buffers[:1]), cold, rounds),
        Reading(f"{DIRECT}, 8 threads", lambda: raw.read_direct(mine, buffers), cold, rounds),
        Reading(MINE_COLD, manager.restore, cold, rounds),
        dcp_reading(state, folder / "dcp"),
        safetensors_reading(state, folder / "safetensors"),
        torch_reading(state, folder / "torch"),
    ]


RING, DIRECT = "raw page-locked ring", "raw O_DIRECT read"
MINE_WARM, MINE_COLD = "holdfast, verified, warm", "holdfast, verified, cold"


def dcp_reading(state: State, folder: Path) -> Reading:
    def save() -> None:
        dcp.save(dict(state.tensors), storage_writer=dcp.FileSystemWriter(folder, thread_count=2))

    def load() -> None:
        dcp.load(dict(state.tensors), checkpoint_id=folder)

    return Reading("dcp.load, warm", load, lambda: raw.warm(raw.files_of(folder)), PEER_ROUNDS, save)


def safetensors_reading(state: State, folder: Path) -> Reading:
    def save() -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(dict(state.tensors), folder / "state")

    def load() -> None:
        from safetensors.torch import load_file

        copy_all(load_file(folder / "state", device="cuda"), state)

    return Reading("safetensors + copy, warm", load, lambda: raw.warm(raw.files_of(folder)), PEER_ROUNDS, save)


def torch_reading(state: State, folder: Path) -> Reading:
    def save() -> None:
        folder.mkdir()
        torch.save(dict(state.tensors), folder / "state")

    def load() -> None:
        copy_all(torch.load(folder / "state", map_location="cuda", mmap=True), state)

    return Reading("torch.load + copy, warm", load, lambda: raw.warm(raw.files_of(folder)), PEER_ROUNDS, save)


def copy_all(found: dict[str, torch.Tensor], state: State) -> None:
    for name, tensor in found.items():
        state.tensors[name].copy_(tensor)


def measure(group: Sequence[Reading], deadline: float) -> None:
    """One uncounted round and then counted ones, in turn, while there is time."""
    number = 0
    while sum(take(reading, number, deadline) for reading in group):
        number += 1


def take(reading: Reading, number: int, deadline: float) -> bool:
    begin = time.perf_counter()
    if reading.skipped or len(reading.seconds) >= reading.rounds or begin + reading.took_seconds > deadline:
        return False
    try:
        if not reading.saved:
            reading.save()
            reading.saved = True
        reading.prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        reading.act()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"  round {number} {reading.name}: {seconds:.3f} s", flush=True)
        if number:
            reading.seconds.append(seconds)
    except Exception as error:  # a peer that does not run here is left out and said to be
        traceback.print_exc()
        reading.skipped = reason(error)
    reading.took_seconds = time.perf_counter() - begin
    return True


def table(group: Sequence[Reading], size_bytes: int) -> str:
    lines = ["| what | reads | median s | min-max | GiB/s |", "|---|---:|---:|---:|---:|"]
    for one in group:
        seconds = median(one.seconds)
        if seconds is None:
            lines.append(f"| {one.name} | skipped: {one.skipped or 'no time was left in the budget'} | | | |")
            continue
        lines.append(
            f"| {one.name} | {len(one.seconds)} | {show(seconds)} | {span(one.seconds)} | "
            f"{size_bytes / seconds / 2**30:.2f} |"
        )
    return "\n".join(lines) + "\n"


def bars(group: Sequence[Reading]) -> list[Bar]:
    found = {one.name: median(one.seconds) for one in group}

    def fastest(of: str) -> Number:
        return min((value for name, value in found.items() if name.startswith(of) and value), default=None)

    warm, cold = ratio(fastest(RING), found[MINE_WARM]), ratio(fastest(DIRECT), found[MINE_COLD])
    return [
        at_least("speed of a verified restore, warm", warm, 0.75, f"of the faster {RING}"),
        at_least("speed of a verified restore, cold", cold, 0.9, f"of the faster {DIRECT}"),
    ]


def main() -> None:
    began = time.perf_counter()
    parser = arguments(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--budget", type=float, default=165.0, help="seconds for the whole run")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    state = gpu_state(given.small)
    group = readings(state, given.folder, given.rounds)
    # By temperature: what the page cache forgot would have to be read again in every round. Peers get the time left.
    for part in (group[:3], group[3:6], group[6:]):
        measure(part, began + given.budget)
    text = (
        "## Restore into live CUDA tensors\n\n"
        f"{state.size_bytes / 2**30:.2f} GiB in {len(state.tensors)} tensors; "
        f"{time.perf_counter() - began:.0f} s in all\n\n{bars_table(bars(group))}\n{table(group, state.size_bytes)}"
    )
    numbers = {one.name: {"seconds": one.seconds, "skipped": one.skipped} for one in group}
    write_results("gpu-restore", text, {"size_bytes": state.size_bytes, "readings": numbers}, given.results)
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
