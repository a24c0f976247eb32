"""A torch file whose pickle has a key that is nested a million deep."""

from __future__ import annotations

import zipfile
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the pickle of a .pt file has a key of a million nested tuples, and hashing it overflows the stack"


def make(folder: Path) -> Path:
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return path


def stock(path: Path) -> bool | None:
    said = stock_fails("torch.load(sys.argv[1], weights_only=True)", path, imports="import torch")
    return "killed by signal 11" in said
