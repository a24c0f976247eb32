"""A value of a DCP checkpoint that runs code."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._pickles import MakeFolder, touched

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a value of a DCP checkpoint that is no tensor calls a function when it is loaded"


def make(folder: Path) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    checkpoint = folder / "checkpoint"
    dcp.save({"weight": torch.ones(4), "step": MakeFolder(folder)}, checkpoint_id=checkpoint, no_dist=True)
    return checkpoint


def stock(path: Path) -> bool | None:
    stock_fails(
        "dcp.load({'weight': torch.zeros(4), 'step': 0}, checkpoint_id=sys.argv[1], no_dist=True)",
        path,
        imports="import torch, torch.distributed.checkpoint as dcp",
    )
    return touched(path.parent)
