"""Run attacks and print what came of them: `python -m attacks [NAME ...]`, in the root of the repository."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from attacks import attack_named, attack_names
from attacks._limits import refused_in_a_process


def main(names: list[str]) -> None:
    for name in names or attack_names():
        attack = attack_named(name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "attack"
            folder.mkdir()
            path = attack.make(folder)
            outcome = refused_in_a_process(name, path)
            harmed = {True: "harmed", False: "not harmed", None: "no stock tool is harmed"}[attack.stock(path)]
        print(f"{name}: {attack.WHAT}\n  stock:    {harmed}\n  Holdfast: {outcome.type}: {outcome.message}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
