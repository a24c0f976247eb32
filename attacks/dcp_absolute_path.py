"""DCP metadata that leads out of the folder of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from attacks._dcp import load_with_dcp, save_apart
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the metadata of a DCP checkpoint places a tensor in a file outside of the folder, by an absolute path"


def make(folder: Path) -> Path:
    return save_apart(folder / "checkpoint", folder / "secret", str(folder / "secret"))


def stock(path: Path) -> bool | None:
    return load_with_dcp(path) == ""
