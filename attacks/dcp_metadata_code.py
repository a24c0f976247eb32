"""DCP metadata that runs code."""

from __future__ import annotations

import pickle
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._pickles import MakeFolder, touched

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the metadata of a DCP checkpoint, a pickle, calls a function when it is read"


def make(folder: Path) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    checkpoint = folder / "checkpoint"
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=checkpoint, no_dist=True)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = MakeFolder(folder)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return checkpoint


def stock(path: Path) -> bool | None:
    stock_fails(
        "dcp.load({'weight': torch.zeros(4)}, checkpoint_id=sys.argv[1], no_dist=True)",
        path,
        imports="import torch, torch.distributed.checkpoint as dcp",
    )
    return touched(path.parent)
