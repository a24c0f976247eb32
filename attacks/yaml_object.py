"""A config that asks for a Python object."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._tar import pack, weights_member

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the config of a .nemo archive calls a function when a loader of full YAML reads it"


def make(folder: Path) -> Path:
    text = f"target: !!python/object/apply:os.mkdir ['{folder.parent / 'touched'}']\n".encode()
    (folder / "config.yaml").write_bytes(text)
    return pack(folder / "model.nemo", [weights_member()], config=text)


def stock(path: Path) -> bool | None:
    stock_fails("yaml.unsafe_load(open(sys.argv[1]))", path.parent / "config.yaml", imports="import yaml")
    return (path.parent.parent / "touched").is_dir()
