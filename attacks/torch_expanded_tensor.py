"""A torch file whose tensor is far larger than the file."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a tensor of a .pt file repeats one stored number a trillion times, and whoever copies it runs out of memory"


def make(folder: Path) -> Path:
    import torch

    path = folder / "model.pt"
    torch.save({"weight": torch.ones(1).expand(1 << 40)}, path)
    return path


def stock(path: Path) -> bool | None:
    said = stock_fails(
        "torch.load(sys.argv[1], weights_only=True)['weight'].clone()",
        path,
        imports="import torch; torch.ones(8).sum()",
    )
    return "memory" in said or "alloc" in said or "killed" in said
