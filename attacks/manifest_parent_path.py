"""A forged manifest that leads out of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from attacks._forging import forged_run
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a Holdfast manifest with the right digest names a file '../secret.safetensors'"


def make(folder: Path) -> Path:
    return forged_run(folder / "run", "../secret.safetensors")


def stock(path: Path) -> bool | None:
    return None
