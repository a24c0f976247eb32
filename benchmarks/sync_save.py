"""How long does a durable save take? Holdfast in sync mode, its peers, and the bare disk, in the same run."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from measure import Contender, interleave, store, table
from states import Many, flat, gpt, size_of

PIECE_BYTES = 8 << 20


def durable(path: Path) -> None:
    for target in (path, path.parent):
        handle = os.open(target, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def raw_write(path: Path, size_bytes: int, memory: mmap.mmap) -> None:
    """The same number of bytes, from aligned memory, past the page cache, made durable: what the disk can do."""
    view = memoryview(memory)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    left = -(-size_bytes // 4096) * 4096
    while left:
        left -= os.write(handle, view[: min(left, PIECE_BYTES)])
    os.fsync(handle)
    os.close(handle)
    durable(path)


def contenders(folder: Path, components: Mapping[str, Any]) -> tuple[list[Contender], int]:
    tensors = flat(components)
    size = size_of(tensors)
    memory = mmap.mmap(-1, PIECE_BYTES)
    memory.write(os.urandom(PIECE_BYTES))
    manager = holdfast.CheckpointManager(folder / "holdfast", components, mode="sync")

    def place(name: str, number: int) -> Path:
        return folder / f"{name}-{number}"

    def clear(name: str) -> Any:
        def act(number: int) -> None:
            for old in folder.glob(f"{name}-*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()

        return act

    def forget_older(number: int) -> None:
        for old in (folder / "holdfast").glob("step-*"):
            shutil.rmtree(old)

    def torch_save(number: int) -> None:
        with place("torch", number).open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        durable(place("torch", number))

    def safetensors_save(number: int) -> None:
        save_file(tensors, place("safetensors", number))
        durable(place("safetensors", number))

    def dcp_save(threads: int) -> Any:
        def act(number: int) -> None:
            writer = dcp.FileSystemWriter(place(f"dcp{threads}", number), thread_count=threads)
            dcp.save(dict(tensors), storage_writer=writer, no_dist=True)

        return act

    return [
        Contender("raw O_DIRECT + fsync", lambda number: raw_write(place("raw", number), size, memory), clear("raw")),
        Contender("holdfast, sync", lambda number: manager.save(number), forget_older),
        Contender("torch.save + fsync", torch_save, clear("torch")),
        Contender("safetensors + fsync", safetensors_save, clear("safetensors")),
        Contender("dcp.save, as it comes", dcp_save(1), clear("dcp1")),
        Contender("dcp.save, 2 threads", dcp_save(2), clear("dcp2")),
    ], size


def main(folder: Path, rounds: int) -> None:
    model, optimizer = gpt()
    states = {
        "A GPT of 124M parameters with AdamW": {"model": model, "optimizer": optimizer},
        "20,000 tensors of 4 KiB": {"many": Many()},
    }
    groups, text = {}, "## Synchronous save, until it is durable\n\n"
    for title, components in states.items():
        print(title, flush=True)
        group, size = contenders(folder / title.split()[0].lower(), components)
        (folder / title.split()[0].lower()).mkdir(parents=True, exist_ok=True)
        interleave(group, rounds)
        groups[title] = group
        text += table(title, group, size, "raw O_DIRECT + fsync") + "\n"
        shutil.rmtree(folder / title.split()[0].lower())
    store("sync-save", text, groups)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
