"""Run every benchmark, each in a process of its own, and leave its table in benchmarks/results/.

The questions of a GPU are asked only where there is one. The picture is drawn last, from the numbers that are there.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

SAVE_QUESTIONS = ("sync_save", "async_save", "lost_time", "first_save", "tiny")
RESTORE_QUESTIONS = ("restore", "load_weights", "export")
RANK_QUESTIONS = ("two_ranks", "reshard", "agreement")
RUN_QUESTIONS = ("memory", "per_run", "retention", "listing")
GPU_QUESTIONS = ("gpu_save", "gpu_restore", "gpu_first_save")
# A question that is another script's, asked with more options.
SCRIPTS = {"gpu_first_save": ("first_save", "--device", "cuda")}


def main() -> None:
    here = Path(__file__).parent
    gpu = GPU_QUESTIONS if torch.cuda.is_available() else ()
    possible = SAVE_QUESTIONS + RESTORE_QUESTIONS + RANK_QUESTIONS + RUN_QUESTIONS + gpu
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", default=possible, help=f"some of {', '.join(possible)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=here / "scratch", help="on the disk to measure")
    parser.add_argument("--results", type=Path, default=here / "results", help="where the tables go")
    parser.add_argument("--mode", default="async", help="the mode of Holdfast that the bars on the CPU are about")
    parser.add_argument("--small", action="store_true", help="small states: shows that the scripts work, nothing else")
    given = parser.parse_args()
    results = ["--results", str(given.results.resolve())]
    options = [*results, "--mode", given.mode, *["--small"] * given.small]
    # As pip leaves an installed package: a first save starts a process that imports it, and must not compile it.
    compileall.compile_dir(here.parent / "src", quiet=1)
    took: dict[str, float] = {}
    for question in given.questions:
        begin = time.perf_counter()
        ask(here, question, given.folder.resolve() / question, given.rounds, options)
        took[question] = time.perf_counter() - begin
    with contextlib.suppress(OSError):
        given.folder.rmdir()
    subprocess.run([sys.executable, str(here / "plot.py"), *results], check=True, cwd=here)
    print("\n".join(f"{question}: {seconds:.0f} s" for question, seconds in took.items()))


def ask(here: Path, question: str, folder: Path, rounds: int, options: Sequence[str]) -> None:
    script, *more = SCRIPTS.get(question, (question,))
    try:
        command = [sys.executable, str(here / f"{script}.py"), str(folder), str(rounds), *options, *more]
        subprocess.run(command, check=True, cwd=here)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
