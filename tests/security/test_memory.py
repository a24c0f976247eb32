"""A checkpoint takes as much memory as it really has bytes, whatever sizes it claims. Measured from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from blake3 import blake3

import holdfast
from tests.distributed.scenes import Holder

MIB = 1 << 20

MEASURED = """
import sys
import holdfast, holdfast.manager.manager, torch
sys.path.insert(0, sys.argv[3])
from tests.distributed.scenes import Holder

def highest():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

def restore():
    manager = holdfast.CheckpointManager(sys.argv[1], {"part": Holder()}, mode="sync", rng=False)
    found = manager.restore()
    print(found.step, [not value.any().item() for value in manager._run.components.live["part"].state.values()])

torch.ones(8).sum()
before = highest()
try:
    {"restore": restore, "is_restart": lambda: print(holdfast.is_restart(sys.argv[1]))}[sys.argv[2]]()
except holdfast.HoldfastError as error:
    print(type(error).__name__)
print(highest() - before)
"""


def measure(run: Path, what: str) -> tuple[str, int]:
    """What a process printed that did this, and by how many bytes its memory grew at the most."""
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", MEASURED, str(run), what, str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=run.parent)
    *said, grown = done.stdout.splitlines()
    return "\n".join(said), int(grown)


def saved(run: Path, **state: torch.Tensor) -> Path:
    with holdfast.CheckpointManager(run, {"part": Holder(**state)}, mode="sync", rng=False) as manager:
        manager.save(1)
    return run / "step-000000001"


def make_sparse(file: Path) -> None:
    """The same bytes, and holes where they are zero."""
    size = file.stat().st_size
    with file.open("rb") as source, file.with_suffix(".sparse").open("wb") as copy:
        while piece := source.read(64 << 10):
            copy.seek(len(piece), os.SEEK_CUR) if not any(piece) else copy.write(piece)
        copy.truncate(size)
    file.with_suffix(".sparse").replace(file)


def forged(folder: Path, **changed: object) -> None:
    manifest = folder / "manifest.json"
    body = json.dumps({**json.loads(manifest.read_bytes())["manifest"], **changed}).encode()
    manifest.write_bytes(
        b'{"holdfast_format":1,"digest":"%s","manifest":%s}\n' % (blake3(body).hexdigest().encode(), body)
    )


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("what", ["is_restart", "restore"])
def test_a_sparse_manifest_takes_no_memory(tmp_path: Path, what: str) -> None:
    folder = saved(tmp_path / "run", tensor=torch.ones(4))
    os.truncate(folder / "manifest.json", (1 << 30) - 1)
    said, grown = measure(tmp_path / "run", what)
    assert said == {"is_restart": "True", "restore": "CorruptCheckpointError"}[what]
    assert grown < 64 * MIB


@pytest.mark.guarantee("G9")
def test_a_sparse_file_of_values_takes_no_memory(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", tensor=torch.ones(4))
    files = json.loads((folder / "manifest.json").read_bytes())["manifest"]["files"]
    for file in files:
        if file["name"].endswith(".json"):
            file["size_bytes"] = 2 << 30
            os.truncate(folder / file["name"], 2 << 30)
    forged(folder, files=files)
    said, grown = measure(tmp_path / "run", "restore")
    assert said == "CorruptCheckpointError"
    assert grown < 64 * MIB


@pytest.mark.guarantee("G9")
def test_new_memory_takes_no_more_than_a_sparse_file_really_holds(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", large=torch.zeros(700 * MIB // 4), small=torch.zeros(5, dtype=torch.float64))
    (file,) = folder.glob("*.safetensors")
    make_sparse(file)
    assert file.stat().st_blocks * 512 < 1 * MIB
    said, grown = measure(tmp_path / "run", "restore")
    assert said == "1 [True, True]", "it is sound, and all zeros"
    assert grown < 250 * MIB


def test_memory_that_was_given_back_still_holds_what_was_saved(tmp_path: Path) -> None:
    large = torch.zeros(12 * MIB // 4)
    large[::1_000_003] = 7.0
    large[-3:] = torch.tensor([1.0, 2.0, 3.0])
    saved(tmp_path / "run", large=large, before=torch.arange(1000), odd=torch.zeros(3 * MIB + 17, dtype=torch.uint8))
    holder = Holder()
    with holdfast.CheckpointManager(tmp_path / "run", {"part": holder}, mode="sync", rng=False) as manager:
        manager.restore()
    assert torch.equal(holder.state["large"], large)
    assert torch.equal(holder.state["before"], torch.arange(1000))
    assert not holder.state["odd"].any()
    holder.state["large"].add_(1.0)
    assert torch.equal(holder.state["large"], large + 1.0), "and can be written to"
