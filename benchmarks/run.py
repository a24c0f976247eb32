"""Run every benchmark, each in a process of its own, and leave its table in benchmarks/results/."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

QUESTIONS = ("sync_save", "restore")


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help=f"some of {', '.join(QUESTIONS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=here / "scratch", help="on the disk to measure")
    arguments = parser.parse_args()
    for question in arguments.questions:
        folder = arguments.folder / question
        try:
            command = [sys.executable, str(here / f"{question}.py"), str(folder), str(arguments.rounds)]
            subprocess.run(command, check=True, cwd=here)
        finally:
            shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
