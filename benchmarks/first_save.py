"""How long does the first save of a process keep its training, and what does it cost to get ready and to close?

Each round is a new process: it makes the state, takes some steps, sets the contender up, trains on for ten seconds or
for none, saves for the first time, then a few times more, and closes. "Lost meanwhile" is what the steps between
construction and the first save took longer than as many steps before: the price of getting ready beside the training.

    python benchmarks/first_save.py SCRATCH [ROUNDS] --device cuda
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import savers
from lost_time import BlockTraining, Training, steps
from measure import Bar, arguments, at_most, bars_table, median, show, span, times, write_results
from states import State, gpt_state, tiny_state

LATER_SAVES = 3
TRAINING_SECONDS = 10.0
PLAIN_STEPS = 10
PEER_ROUNDS = 2
GPU_MODE = "async_pinned"


class TinyTraining:
    """Steps of a whole tiny model."""

    plain_steps = idle_steps = PLAIN_STEPS

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inputs = torch.randn(8, 32)

    def step(self, hold: Callable[[], AbstractContextManager[object]]) -> None:
        self.model(self.inputs).square().mean().backward()
        with hold():
            self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class First:
    """The seconds of one contender, one of each per process."""

    name: str
    role: str
    trained: float
    call: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    later_durable: list[float] = field(default_factory=list)
    construct: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    close: list[float] = field(default_factory=list)
    skipped: str = ""

    @property
    def title(self) -> str:
        when = f"after {self.trained:.0f} s of training" if self.trained else "at once"
        return f"{self.name}, {when}"


# In the process of a contender


def be_child(given: argparse.Namespace) -> None:
    state, training = scene(given.state, given.small)
    saver = next(made for made in (make(given.folder, state) for make in factories(given)) if made.name == given.child)
    steps(training, PLAIN_STEPS)
    plain = statistics.median(steps(training, PLAIN_STEPS))
    begin = time.perf_counter()
    saver.open()
    found: dict[str, Any] = {"role": saver.role, "construct": time.perf_counter() - begin}
    found["lost"] = train(training, saver, given.seconds, plain)
    found["call"], found["durable"] = save(saver, 0)
    later = []
    for number in range(1, 1 + LATER_SAVES):
        steps(training, 2)
        saver.clear()
        later.append(save(saver, number))
    found["later"], found["later_durable"] = (statistics.median(part) for part in zip(*later, strict=True))
    saver.clear()  # what close would have to delete
    begin = time.perf_counter()
    saver.close()
    found["close"] = time.perf_counter() - begin
    print(json.dumps(found), flush=True)


def scene(name: str, small: bool) -> tuple[State, Training]:
    if name == "gpu":
        from gpu_save import GpuTraining, gpu_state, sequences_for

        state = gpu_state(small)
        model, optimizer = state.components["model"], state.components["optimizer"]
        return state, GpuTraining(model, optimizer, sequences_for(model, optimizer), 1, PLAIN_STEPS)
    torch.set_num_threads(1)
    state = tiny_state() if name == "tiny" else gpt_state(small)
    kind = TinyTraining if name == "tiny" else BlockTraining
    return state, kind(state.components["model"], state.components["optimizer"])


def factories(given: argparse.Namespace) -> list[savers.Factory]:
    """Holdfast, and a peer of each kind that prepares something for its later saves."""
    if given.state == "gpu":
        return savers.ours(GPU_MODE)
    wanted = ("dcp.async_save, process, shared stager, plan cache", "torch-checkpointing, staged in the call")
    empty = State("", {}, {})
    peers = [make for make in savers.async_peers() if make(Path(), empty).name in wanted]
    return [*savers.ours(given.mode), *peers]


def train(training: Training, saver: savers.Saver, seconds: float, plain: float) -> float:
    """Train for some seconds; return how much of them was lost."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        training.step(saver.hold)
        count += 1
    return time.perf_counter() - begin - count * plain


def save(saver: savers.Saver, number: int) -> tuple[float, float]:
    begin = time.perf_counter()
    pending = saver.save(number)
    call = time.perf_counter() - begin
    pending.finish()
    return call, time.perf_counter() - begin


# In the process that asks


def ask(given: argparse.Namespace, name: str, state: str, seconds: float) -> dict[str, Any]:
    """Let a new process do it, and return what it says; an error is its last line."""
    command = [sys.executable, __file__, str(given.folder), "1", "--child", name, "--state", state]
    command += ["--seconds", str(seconds), "--mode", given.mode, *["--small"] * given.small]
    done = subprocess.run(command, capture_output=True, text=True)
    shutil.rmtree(given.folder, ignore_errors=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode:
        print(done.stderr, flush=True)
        return {"skipped": lines[-1][:160] if lines else f"exit {done.returncode}"}
    return json.loads(lines[-1])


def measure(given: argparse.Namespace, state: str, cases: Sequence[tuple[str, float]], rounds: int) -> list[First]:
    """All cases in turns, a process each."""
    found = [First(name, "peer", seconds) for name, seconds in cases]
    for number in range(rounds):
        shift = number % len(found)
        for first in [*found[shift:], *found[:shift]]:
            if first.skipped or (first.role == "peer" and number >= PEER_ROUNDS):
                continue
            answer = ask(given, first.name, state, first.trained)
            first.skipped, first.role = answer.get("skipped", ""), answer.get("role", first.role)
            for key in ("call", "durable", "later", "later_durable", "construct", "lost", "close"):
                getattr(first, key).extend([answer[key]] if key in answer else [])
            print(f"  round {number} {first.title}: {show(median(first.call[-1:]))} s", flush=True)
    return found


def table(found: Sequence[First]) -> str:
    lines = [
        "| what | n | first call s | min-max | later call s | first durable s | later durable s | construct s | "
        "lost meanwhile s | close s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        if one.skipped:
            lines.append(f"| {one.title} | skipped: {one.skipped} | | | | | | | | |")
            continue
        cells = (one.later, one.durable, one.later_durable, one.construct, one.lost if one.trained else [], one.close)
        lines.append(
            f"| {one.title} | {len(one.call)} | {show(median(one.call))} | {span(one.call)} | "
            + " | ".join(show(median(cell)) for cell in cells)
            + " |"
        )
    return "\n".join(lines) + "\n"


def bars(found: Sequence[First], state: str) -> list[Bar]:
    mine = next(one for one in found if one.role == "holdfast" and one.trained)
    what = f"the first save's call, {mine.trained:.0f} s after construction"
    if state == "gpu":
        return [at_most(what, median(mine.call), 0.100)]
    return [at_most(what, median(mine.call), times(median(mine.later), 2), "2x a later one")]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--state", default="gpt", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        be_child(given)
        return
    given.state = state = "gpu" if given.device == "cuda" else "gpt"
    mine, *peers = (make(given.folder, State("", {}, {})).name for make in factories(given))
    seconds = 1.0 if given.small else TRAINING_SECONDS
    cases = [(mine, seconds), (mine, 0.0), *((peer, 0.0) for peer in peers)]
    found = measure(given, state, cases, given.rounds)
    text = (
        "## The first save of a process\n\nA new process per round, all in turns; later calls are medians of "
        f"{LATER_SAVES}\n\n{bars_table(bars(found, state))}\n{table(found)}"
    )
    name = "gpu-first-save" if state == "gpu" else "first-save"
    write_results(name, text, {one.title: asdict(one) for one in found}, given.results)


if __name__ == "__main__":
    main()
