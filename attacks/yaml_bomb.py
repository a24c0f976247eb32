"""A config whose aliases stand for more values than there is memory."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._tar import pack, weights_member

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the config of a .nemo archive has few lines, whose merged aliases stand for billions of entries"


def make(folder: Path) -> Path:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}" for level in range(1, 11)]
    text = "\n".join(lines).encode()
    (folder / "config.yaml").write_bytes(text)
    return pack(folder / "model.nemo", [weights_member()], config=text)


def stock(path: Path) -> bool | None:
    said = stock_fails("yaml.safe_load(open(sys.argv[1]))", path.parent / "config.yaml", imports="import yaml")
    return "MemoryError" in said or "killed" in said
