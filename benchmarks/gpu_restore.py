"""How long does a verified restore into live CUDA tensors take? 9 GiB, with the files in the page cache and without.

The limits read Holdfast's own files: eight threads through a ring of page-locked slots onto the device, and past the
page cache in pieces of 8 MiB, with one thread and with eight. Peers read files of their own.

    python benchmarks/gpu_restore.py SCRATCH [ROUNDS] --results OUT
"""

from __future__ import annotations

import mmap
import os
import queue
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import holdfast
import savers
from gpu_save import gpu_state
from measure import Bar, arguments, at_least, bars_table, median, ratio, show, span, write_results
from states import State

PIECE_BYTES = 8 << 20
THREADS = 8
SLOTS = 2 * THREADS
PEER_ROUNDS = 2
GUESS_SECONDS = 15.0

Piece = tuple[Path, int, int]


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

    def __init__(self, size_bytes: int) -> None:
        self.target = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self.slots: queue.Queue[tuple[torch.Tensor, torch.cuda.Stream]] = queue.Queue()
        for _ in range(SLOTS):
            self.slots.put((torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()))

    def read(self, files: Sequence[Path]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._move, _placed(pieces(files))))
        torch.cuda.synchronize()

    def _move(self, placed: tuple[Piece, int]) -> None:
        (path, position, size), place = placed
        slot, stream = self.slots.get()
        stream.synchronize()  # what the slot held before is on the device
        _read(path, position, memoryview(slot.numpy())[:size], os.O_RDONLY)
        with torch.cuda.stream(stream):
            self.target[place : place + size].copy_(slot[:size], non_blocking=True)
        self.slots.put((slot, stream))


def direct_read(files: Sequence[Path], threads: int) -> None:
    """Past the page cache into memory that is thrown away: what the disk can do."""
    buffers: queue.Queue[mmap.mmap] = queue.Queue()
    for _ in range(threads):
        buffers.put(mmap.mmap(-1, PIECE_BYTES))

    def one(piece: Piece) -> None:
        buffer = buffers.get()
        _read(piece[0], piece[1], memoryview(buffer), os.O_RDONLY | os.O_DIRECT)
        buffers.put(buffer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, pieces(files)))


def pieces(files: Sequence[Path]) -> list[Piece]:
    return [
        (path, position, min(PIECE_BYTES, path.stat().st_size - position))
        for path in files
        for position in range(0, path.stat().st_size, PIECE_BYTES)
    ]


def warm(files: Sequence[Path]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda piece: _read(*piece[:2], memoryview(bytearray(piece[2])), os.O_RDONLY), pieces(files)))


def cold(files: Sequence[Path]) -> None:
    """Let the page cache forget the files."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def readings(state: State, folder: Path, rounds: int) -> list[Reading]:
    run = folder / "run"
    manager = holdfast.CheckpointManager(run, state.components, mode="sync", rng=False)
    manager.save(0)
    mine = files_of(run)
    ring = Ring(sum(path.stat().st_size for path in mine))
    warm_mine, cold_mine = (lambda: warm(mine)), (lambda: cold(mine))
    return [
        Reading(RING, lambda: ring.read(mine), warm_mine, rounds),
        Reading(MINE_WARM, manager.restore, warm_mine, rounds),
        Reading("raw O_DIRECT read, 1 thread", lambda: direct_read(mine, 1), cold_mine, rounds),
        Reading("raw O_DIRECT read, 8 threads", lambda: direct_read(mine, THREADS), cold_mine, rounds),
        Reading(MINE_COLD, manager.restore, cold_mine, rounds),
        dcp_reading(state, folder / "dcp"),
        safetensors_reading(state, folder / "safetensors"),
        torch_reading(state, folder / "torch"),
    ]


RING = "raw page-locked ring, 8 threads, warm"
MINE_WARM, MINE_COLD = "holdfast, verified, warm", "holdfast, verified, cold"


def dcp_reading(state: State, folder: Path) -> Reading:
    def save() -> None:
        dcp.save(dict(state.tensors), storage_writer=dcp.FileSystemWriter(folder, thread_count=2))

    def load() -> None:
        dcp.load(dict(state.tensors), checkpoint_id=folder)

    return Reading("dcp.load, warm", load, lambda: warm(files_of(folder)), PEER_ROUNDS, save)


def safetensors_reading(state: State, folder: Path) -> Reading:
    def save() -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(dict(state.tensors), folder / "state")

    def load() -> None:
        from safetensors.torch import load_file

        copy_all(load_file(folder / "state", device="cuda"), state)

    return Reading("safetensors + copy, warm", load, lambda: warm(files_of(folder)), PEER_ROUNDS, save)


def torch_reading(state: State, folder: Path) -> Reading:
    def save() -> None:
        folder.mkdir()
        torch.save(dict(state.tensors), folder / "state")

    def load() -> None:
        copy_all(torch.load(folder / "state", map_location="cuda", mmap=True), state)

    return Reading("torch.load + copy, warm", load, lambda: warm(files_of(folder)), PEER_ROUNDS, save)


def copy_all(found: dict[str, torch.Tensor], state: State) -> None:
    for name, tensor in found.items():
        state.tensors[name].copy_(tensor)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


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
        reading.skipped = savers.reason(error)
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
    direct = [seconds for name, seconds in found.items() if name.startswith("raw O_DIRECT") and seconds is not None]
    fastest = min(direct, default=None)
    return [
        at_least("speed of a verified restore, warm", ratio(found[RING], found[MINE_WARM]), 0.5, f"of {RING}"),
        at_least(
            "speed of a verified restore, cold",
            ratio(fastest, found[MINE_COLD]),
            0.85,
            "of the faster raw O_DIRECT read",
        ),
    ]


def _placed(found: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Each piece with its place in the one target that all files share."""
    placed, place = [], 0
    for piece in found:
        placed.append((piece, place))
        place += piece[2]
    return placed


def _read(path: Path, position: int, view: memoryview, flags: int) -> None:
    handle = os.open(path, flags)
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], position + done)
        if count == 0:
            break
        done += count
        if flags & os.O_DIRECT and count % 4096:
            break  # the unaligned end of the file
    os.close(handle)


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
    for part in (group[:2], group[2:5], group[5:]):
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
