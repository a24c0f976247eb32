"""A manifest that is nested deeply."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the manifest of a Holdfast checkpoint, with the right digest, is nested a million deep"


def make(folder: Path) -> Path:
    from tests.security.scene import FOLDER, Forger, save_run

    save_run(folder / "run", 1, rng=False)
    Forger(folder / "run" / FOLDER).sign(b'{"files":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")
    return folder / "run"


def stock(path: Path) -> bool | None:
    return None
