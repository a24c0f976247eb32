"""A config that is nested deeply."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._tar import pack, weights_member

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the config of a .nemo archive is nested a hundred thousand deep, which a parser cannot follow"


def make(folder: Path) -> Path:
    text = b"target: " + b"[" * 100_000 + b"]" * 100_000
    (folder / "config.yaml").write_bytes(text)
    return pack(folder / "model.nemo", [weights_member()], config=text)


def stock(path: Path) -> bool | None:
    code = "yaml.load(open(sys.argv[1]), Loader=yaml.CSafeLoader)"
    said = stock_fails(code, path.parent / "config.yaml", imports="import yaml")
    return True if said.startswith("killed") else None
