"""The index of a sharded Hugging Face folder that leads out of it."""

from __future__ import annotations

import json
from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import entry, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the index of a Hugging Face folder places a tensor in '../secret.safetensors'"


def make(folder: Path) -> Path:
    write(folder / "secret.safetensors", f"{{{entry(0, 4)}}}".encode(), b"data")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    index = {"metadata": {"total_size": 4}, "weight_map": {"a": "../secret.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def stock(path: Path) -> bool | None:
    return None
