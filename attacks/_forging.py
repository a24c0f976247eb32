"""Forge the manifest of a Holdfast checkpoint: another file name, and every digest made right again."""

from __future__ import annotations

from pathlib import Path

__all__ = ["forged_run"]


def forged_run(run: Path, name: str) -> Path:
    """Save a run whose manifest names its tensor file in another way, and lay that file there."""
    from tests.security.scene import FOLDER, TENSORS, Forger, save_run

    save_run(run, 1, rng=False)
    folder = run / FOLDER
    forger = Forger(folder)
    forger.record(TENSORS)["name"] = name
    for tensor in forger.body["tensors"]:
        for chunk in tensor["chunks"]:
            chunk["file"] = name if chunk["file"] == TENSORS else chunk["file"]
    forger.sign()
    (folder / TENSORS).rename(run / "secret.safetensors")
    return run
