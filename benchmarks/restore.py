"""How long does a verified restore take? Holdfast, its peers, and a bare read of the same bytes, in the same run.

The files are in the page cache for everybody. "Live tensors" overwrites a model and an optimizer that have trained;
"fresh optimizer" is what a restarted run does: the model is there, the optimizer has no state yet.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import holdfast
from measure import Contender, interleave, store, table
from states import flat, gpt, size_of

PIECE_BYTES = 8 << 20


def raw_read(path: Path, target: torch.Tensor) -> None:
    """One thread reads the file into memory; nothing is checked and nothing is put in its place."""
    view = memoryview(target.numpy())
    handle = os.open(path, os.O_RDONLY)
    position = 0
    while position < len(view):
        position += os.preadv(handle, [view[position : position + PIECE_BYTES]], position)
    os.close(handle)


def warm(folder: Path) -> None:
    """Bring every file into the page cache: what was written past it is not there, nor is what was read past it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(PIECE_BYTES):
                    pass


def main(folder: Path, rounds: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = gpt()
    components = {"model": model, "optimizer": optimizer}
    tensors = flat(components)
    size = size_of(tensors)
    with holdfast.CheckpointManager(folder / "run", components, mode="sync") as manager:
        manager.save(0)
    torch.save(tensors, folder / "state.pt")
    save_file(tensors, folder / "state.safetensors")
    dcp.save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    with (folder / "raw").open("wb") as file:
        for _ in range(0, size, PIECE_BYTES):
            file.write(os.urandom(PIECE_BYTES))
    warm(folder)
    touched = torch.zeros(size, dtype=torch.uint8)
    fresh: dict[str, Any] = {}

    def copy_all(found: dict[str, torch.Tensor]) -> None:
        for name, tensor in found.items():
            tensors[name].copy_(tensor)

    def restore(verify: str) -> Any:
        manager = holdfast.CheckpointManager(folder / "run", components, verify=verify)
        return lambda number: manager.restore()

    def make_fresh(number: int) -> None:
        fresh["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        state = {"model": model, "optimizer": fresh["optimizer"]}
        fresh["manager"] = holdfast.CheckpointManager(folder / "run", state)

    group = [
        Contender(
            "raw read, allocated memory", lambda n: raw_read(folder / "raw", torch.empty(size, dtype=torch.uint8))
        ),
        Contender("raw read, memory in use", lambda n: raw_read(folder / "raw", touched)),
        Contender("holdfast, verified, fresh optimizer", lambda n: fresh["manager"].restore(), make_fresh),
        Contender("holdfast, verified, live tensors", restore("full")),
        Contender("holdfast, quick, live tensors", restore("quick")),
        Contender("torch.load + copy", lambda n: copy_all(torch.load(folder / "state.pt"))),
        Contender("safetensors + copy", lambda n: copy_all(load_file(folder / "state.safetensors"))),
        Contender("dcp.load, live tensors", lambda n: dcp.load(tensors, checkpoint_id=folder / "dcp", no_dist=True)),
    ]
    interleave(group, rounds)
    text = "## Restore, files in the page cache\n\n"
    text += table("A GPT of 124M parameters with AdamW", group, size, "raw read, allocated memory")
    store("restore", text, {"gpt": group})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
