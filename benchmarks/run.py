"""Run every benchmark, each in a process of its own, and leave its table in benchmarks/results/.

The questions of a GPU are asked only where there is one. The picture is drawn last, from the numbers that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

FIRST_QUESTIONS = ("sync_save", "restore")
ASYNC_QUESTIONS = ("async_save", "lost_time", "memory", "two_ranks")
LIFE_QUESTIONS = ("agreement", "retention", "listing")
FORMAT_QUESTIONS = ("load_weights", "export")
GPU_QUESTIONS = ("gpu_save", "gpu_restore")


def main() -> None:
    here = Path(__file__).parent
    gpu = GPU_QUESTIONS if torch.cuda.is_available() else ()
    possible = FIRST_QUESTIONS + ASYNC_QUESTIONS + LIFE_QUESTIONS + FORMAT_QUESTIONS + gpu
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", default=possible, help=f"some of {', '.join(possible)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=here / "scratch", help="on the disk to measure")
    parser.add_argument("--results", type=Path, default=here / "results", help="where the tables go")
    parser.add_argument("--mode", default="async", help="the mode of Holdfast that the bars on the CPU are about")
    parser.add_argument("--small", action="store_true", help="small states: shows that the scripts work, nothing else")
    given = parser.parse_args()
    later = ["--results", str(given.results.resolve()), "--mode", given.mode, *["--small"] * given.small]
    for question in given.questions:
        options = [] if question in FIRST_QUESTIONS else later
        ask(here, question, given.folder.resolve() / question, given.rounds, options)
    with contextlib.suppress(OSError):
        given.folder.rmdir()
    subprocess.run([sys.executable, str(here / "plot.py"), *later[:2]], check=True, cwd=here)


def ask(here: Path, question: str, folder: Path, rounds: int, options: Sequence[str]) -> None:
    try:
        command = [sys.executable, str(here / f"{question}.py"), str(folder), str(rounds), *options]
        subprocess.run(command, check=True, cwd=here)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
