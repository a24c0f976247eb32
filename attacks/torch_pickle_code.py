"""A torch file that runs code."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._pickles import MakeFolder, touched

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the pickle of a .pt file calls a function when torch.load reads it without weights_only"


def make(folder: Path) -> Path:
    import torch

    path = folder / "model.pt"
    torch.save({"weight": torch.ones(4), "epoch": MakeFolder(folder)}, path)
    return path


def stock(path: Path) -> bool | None:
    stock_fails("torch.load(sys.argv[1], weights_only=False)", path, imports="import torch")
    return touched(path.parent)
