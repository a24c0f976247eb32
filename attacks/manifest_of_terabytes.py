"""A sparse manifest."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the manifest of a Holdfast checkpoint has a terabyte, as a sparse file"


def make(folder: Path) -> Path:
    from tests.security.scene import FOLDER, MANIFEST, save_run

    save_run(folder / "run", 1, rng=False)
    with (folder / "run" / FOLDER / MANIFEST).open("r+b") as stream:
        stream.truncate(1 << 40)
    return folder / "run"


def stock(path: Path) -> bool | None:
    return None
