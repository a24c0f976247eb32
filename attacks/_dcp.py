"""Make DCP checkpoints whose tensors lie elsewhere, and load them with stock DCP."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

from attacks._limits import stock_fails

__all__ = ["load_with_dcp", "save_apart"]

_LOAD = """
state = {"weight": torch.zeros(4)}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert state["weight"].tolist() == [1.0] * 4
"""


def save_apart(folder: Path, elsewhere: Path, place: str) -> Path:
    """Save a checkpoint, move its tensors elsewhere, and let the metadata name them there."""
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    elsewhere.mkdir()
    for file in folder.glob("*.distcp"):
        file.rename(elsewhere / file.name)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=f"{place}/{info.relative_path}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def load_with_dcp(folder: Path) -> str:
    """Return the last line of the error of stock DCP, empty if it has read the tensors from where they lie."""
    return stock_fails(_LOAD, folder, imports="import torch, torch.distributed.checkpoint as dcp")
