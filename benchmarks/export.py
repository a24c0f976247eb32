"""How long does it take to make one safetensors file of a checkpoint of two ranks, and with how much memory?

Holdfast, which verifies every byte, against PyTorch's own ways: `dcp_to_torch_save`, and the consolidation of sharded
safetensors files; and a bare copy of as many bytes. Each turn is a process of its own, which starts with its input not
in the page cache and ends when its output is durable. Memory is the most that the process had above what it had before.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
import raw
from holdfast.formats.exporting.export import export
from holdfast.testing import run_ranks, values
from measure import arguments, at_least, bars_table, median, ratio, show, span, under, write_results
from states import GPT, SMALL_GPT

RANKS = 2
MOST_ROUNDS = 3
TIMEOUT_SECONDS = 900.0
# 3.0 GB of parameters.
LARGE_GPT = {"layers": 13, "width": 2048, "vocabulary": 50257, "context": 1024}
OURS, COPY, BUFFERED_COPY = "holdfast.export, verified", "raw copy, O_DIRECT", "raw copy, page cache"


def save_on_rank(rank: int, folder: Path, small: bool) -> int:
    """Save the same sharded model in the three forms, and return how many bytes its tensors have."""
    with torch.device("meta"):
        model = GPT(**(SMALL_GPT if small else LARGE_GPT))
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()
    with holdfast.CheckpointManager(folder / "run", {"model": model}, rng=False, mode="sync") as manager:
        manager.save(0)
    state = get_model_state_dict(model)
    dcp.save(dict(state), checkpoint_id=folder / "dcp")
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True))
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def inputs(folder: Path, name: str) -> Path:
    return folder / {"dcp_to_torch_save": "dcp", "DCP's consolidation": "hf"}.get(name, "run")


def with_holdfast(folder: Path, target: Path) -> None:
    export(folder, target / "model.safetensors", format="safetensors")


def with_dcp_to_torch_save(folder: Path, target: Path) -> None:
    dcp_to_torch_save(folder, target / "model.pt")


def with_consolidation(folder: Path, target: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = holdfast.resolve(folder.parent / "run").manifest.tensors
    mapping = {tensor.name.partition(".")[2]: 1 for tensor in names}
    consolidate_safetensors_files(str(folder), str(target), mapping, num_threads=2)


def with_direct_copy(folder: Path, target: Path) -> None:
    """Read and write past the page cache, two pieces at a time: one is read while the other is written."""
    buffers: queue.Queue[memoryview] = queue.Queue()
    for _ in range(2):
        buffers.put(raw.huge_pages(raw.PIECE_BYTES))
    for path in tensor_files(folder):
        copy = os.open(target / f"{path.parent.name}-{path.name}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

        def move(piece: raw.Piece, copy: int = copy) -> None:
            buffer = buffers.get()
            raw.read_piece(piece, buffer, os.O_RDONLY | os.O_DIRECT)
            # The last piece is written in whole pages, and cut off.
            os.pwrite(copy, buffer[: -(-piece[2] // mmap.PAGESIZE) * mmap.PAGESIZE], piece[1])
            buffers.put(buffer)

        raw.for_each(move, raw.pieces([path]), 2)
        os.ftruncate(copy, path.stat().st_size)
        os.close(copy)


def with_buffered_copy(folder: Path, target: Path) -> None:
    for path in tensor_files(folder):
        shutil.copyfile(path, target / f"{path.parent.name}-{path.name}")


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("rank-*.safetensors"))


CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    COPY: with_direct_copy,
    BUFFERED_COPY: with_buffered_copy,
    OURS: with_holdfast,
    "dcp_to_torch_save": with_dcp_to_torch_save,
    "DCP's consolidation": with_consolidation,
}


@dataclass
class Record:
    """What was measured of one contender, turn by turn."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    output_bytes: list[int] = field(default_factory=list)
    skipped: str = ""


def be_contender(name: str, folder: Path, target: Path) -> None:
    """Do it once, in this process, and print what it took."""
    base = memory_bytes("VmRSS")
    # The highest resident size counts from here on.
    Path("/proc/self/clear_refs").write_text("5")
    written = written_bytes()
    cpu, start = time.process_time(), time.perf_counter()
    CONTENDERS[name](inputs(folder, name), target)
    for path in sorted(target.rglob("*")):
        sync(path)
    sync(target)
    note = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": memory_bytes("VmHWM") - base,
        "written_bytes": written_bytes() - written,
        "output_bytes": sum(path.stat().st_size for path in target.rglob("*")),
    }
    print(json.dumps(note), flush=True)


def memory_bytes(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) << 10


def written_bytes() -> int:
    """Return how many bytes this process has caused to be written to a disk; 0 where that is not told."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def drop_cache(folder: Path) -> None:
    """Let the page cache forget the files of a folder, which must be on the disk already."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def turn(name: str, folder: Path, record: Record, counts: bool) -> None:
    target = folder / "out"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    drop_cache(folder)
    command = [sys.executable, __file__, str(folder), "1", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        record.skipped = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
        return
    note = json.loads(done.stdout.splitlines()[-1])
    print(f"  {name}: {note['seconds']:.3f} s, {note['peak_bytes'] / 1e6:.0f} MB", flush=True)
    for key, value in note.items() if counts else ():
        getattr(record, key).append(value)


def table(records: dict[str, Record], size_bytes: int, raw_seconds: float | None) -> str:
    lines = [
        "| what | median s | min-max s | CPU s | GB/s | speed, raw copy = 1 | peak MB | written GB | output GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in records.items():
        if one.skipped or not one.seconds:
            lines.append(f"| {name} | skipped: {one.skipped} | | | | | | | |")
            continue
        seconds = median(one.seconds) or 0.0
        lines.append(
            f"| {name} | {seconds:.3f} | {span(one.seconds)} | {show(median(one.cpu_seconds), 2)} | "
            f"{size_bytes / seconds / 1e9:.2f} | {show(ratio(raw_seconds, seconds), 2)} | "
            f"{max(one.peak_bytes) / 1e6:.0f} | {max(one.written_bytes) / 1e9:.2f} | "
            f"{max(one.output_bytes) / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def bars_of(records: dict[str, Record], size_bytes: int, raw_seconds: float | None, largest_bytes: int) -> str:
    ours = records[OURS]
    peak = max(ours.peak_bytes) / 1e6 if ours.peak_bytes else None
    return bars_table(
        [
            at_least("speed of the export", ratio(raw_seconds, median(ours.seconds)), 0.7, "of the faster raw copy"),
            under("memory of the export", peak, size_bytes / 10 / 1e6, "a tenth of the state", "MB"),
            under("the same", peak, 300 + largest_bytes / 1e6, "300 MB above the largest tensor", "MB"),
        ]
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--one", help="be this contender, once")
    given = parser.parse_args(words)
    if given.one is not None:
        be_contender(given.one, given.folder, given.folder / "out")
        return
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    folder = given.folder.resolve()
    size_bytes = values(run_ranks(RANKS, save_on_rank, folder, given.small, timeout_seconds=TIMEOUT_SECONDS))[0]
    records = {name: Record() for name in CONTENDERS}
    names = list(CONTENDERS)
    rounds = min(given.rounds, MOST_ROUNDS)
    for number in range(rounds + 1):
        print(f"round {number}", flush=True)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            turn(name, folder, records[name], counts=number > 0)
    copies = [median(records[name].seconds) for name in (COPY, BUFFERED_COPY)]
    raw_seconds = min((one for one in copies if one is not None), default=None)
    largest = max(tensor.size_bytes for tensor in holdfast.resolve(folder / "run").manifest.tensors)
    text = f"## One safetensors file of a checkpoint of two ranks\n\n{size_bytes / 1e9:.2f} GB, {rounds} rounds, "
    text += "interleaved, each in a process of its own, its input not in the page cache\n\n"
    text += f"{table(records, size_bytes, raw_seconds)}\n{bars_of(records, size_bytes, raw_seconds, largest)}"
    numbers = {name: vars(record) for name, record in records.items()}
    write_results("export", text, {"size_bytes": size_bytes, "contenders": numbers}, given.results)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
