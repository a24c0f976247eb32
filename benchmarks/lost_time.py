"""How much training time does a save cost in all: the call, and the slower steps until the checkpoint is durable?

A training with one thread on two cores runs on. Each step is a real one: forward, backward and AdamW over one block of
the 1.5 GB model, block after block. The time lost is what passed from the call until it was durable, at the end of a
step, less what that number of steps takes when nothing is saved. Contenders take turns as in async_save.py.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

import async_save
import savers
from measure import (
    Bar,
    Number,
    arguments,
    at_most,
    bars_table,
    is_slow,
    median,
    ratio,
    reason,
    show,
    span,
    times,
    write_results,
)
from processes import give_back_memory
from states import GPT, State, gpt_state

SAVES_PER_TURN = 3
TOKENS = 64
LOST_OF_MEMCPY = 0.25 / 0.15


class Training(Protocol):
    """`plain_steps` is how many steps before a save, and as many after it, say how long one takes without; before them
    come `idle_steps` that count for nothing."""

    plain_steps: int
    idle_steps: int

    def step(self, hold: Callable[[], AbstractContextManager[object]]) -> None: ...


class BlockTraining:
    """One block of the model per step, so that a step is short beside a save and the whole state is in use."""

    plain_steps = 10
    idle_steps = 0

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inputs = torch.randn(1, TOKENS, model.norm.weight.shape[0])
        self.count = 0

    def step(self, hold: Callable[[], AbstractContextManager[object]]) -> None:
        block = self.model.blocks[self.count % len(self.model.blocks)]
        block(self.inputs).square().mean().backward()
        with hold():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1


@dataclass
class Loss:
    """What the saves of one contender cost the training, in seconds. `slower` is a part of a plain step."""

    name: str
    role: str = "peer"
    lost: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    plain_step: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    first_call: list[float] = field(default_factory=list)
    first_durable: list[float] = field(default_factory=list)
    skipped: str = ""


def lose(training: Training, saver: savers.Saver, number: int, loss: Loss, *, first: bool) -> None:
    """One save in the middle of a training, and what it cost."""
    saver.clear()
    os.sync()
    steps(training, training.idle_steps)
    plain = steps(training, training.plain_steps)
    start = time.perf_counter()
    pending = saver.save(number)
    call = time.perf_counter() - start
    watch = Watch(pending)
    meanwhile, after_staging = 0, []
    while not watch.ended.is_set():
        staged, begin = pending.is_staged(), time.perf_counter()
        training.step(saver.hold)
        meanwhile += 1
        if staged:
            after_staging.append(time.perf_counter() - begin)
    elapsed = time.perf_counter() - start
    watch.result()
    # Half of each: a machine that grows slower, or faster, all the time has done so by half between them.
    plain_step = statistics.fmean(map(statistics.median, (plain, steps(training, training.plain_steps))))
    lost = elapsed - meanwhile * plain_step
    durable = watch.at - start
    said = f"lost {lost:.3f}, call {call:.3f}, durable {durable:.3f} s"
    print(f"  {loss.name}{' (first)' if first else ''}: {said}", flush=True)
    if first:
        loss.first_call.append(call)
        loss.first_durable.append(durable)
        return
    loss.lost.append(lost)
    loss.call.append(call)
    loss.durable.append(durable)
    loss.plain_step.append(plain_step)
    if after_staging:
        loss.slower.append(statistics.median(after_staging) / plain_step - 1)


def steps(training: Training, count: int) -> list[float]:
    """The seconds of some steps while nothing is saved."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        training.step(nullcontext)
        found.append(time.perf_counter() - begin)
    return found


class Watch:
    """Waits for a save in a thread of its own and notes when it was durable."""

    def __init__(self, pending: savers.Pending) -> None:
        self.pending = pending
        self.at = 0.0
        self.error: Exception | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def result(self) -> None:
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        try:
            self.pending.finish()
        except Exception as error:
            self.error = error
        self.at = time.perf_counter()
        self.ended.set()


def take_turn(training: Training, saver: savers.Saver, loss: Loss, number: int) -> None:
    try:
        saver.open()
        for extra in range(1 + SAVES_PER_TURN):
            lose(training, saver, number + extra, loss, first=extra == 0)
        saver.close()
    except Exception as error:  # a peer that does not run here is left out and said to be
        traceback.print_exc()
        loss.skipped = reason(error)
    give_back_memory()


def measure(
    factories: Sequence[savers.Factory], training: Training, state: State, folder: Path, rounds: int
) -> list[Loss]:
    losses: dict[str, Loss] = {}
    number = 0
    for turn in range(-(-rounds // SAVES_PER_TURN)):
        shift = turn % len(factories)
        for factory in [*factories[shift:], *factories[:shift]]:
            saver = factory(folder, state)
            loss = losses.setdefault(saver.name, Loss(saver.name, saver.role))
            if not loss.skipped and not is_slow(loss.durable):
                take_turn(training, saver, loss, number)
                number += 1 + SAVES_PER_TURN
    return [losses[factory(folder, state).name] for factory in factories]


def table(losses: Sequence[Loss]) -> str:
    lines = [
        "| what | n | lost s | min-max | call s | until durable s | steps slower meanwhile | plain step s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in losses:
        if one.skipped:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | | | |")
            continue
        slower = median(one.slower)
        lines.append(
            f"| {one.name} | {len(one.lost)} | {show(median(one.lost))} | {span(one.lost)} | "
            f"{show(median(one.call))} | {show(median(one.durable))} | {'-' if slower is None else f'{slower:+.1%}'} | "
            f"{show(median(one.plain_step))} |"
        )
    return "\n".join(lines) + "\n"


def bars(losses: Sequence[Loss], memcpy: Number, which: str, mode: str) -> list[Bar]:
    mine = next(median(one.lost) for one in losses if one.name == f"holdfast, {mode}")
    peers = [one for one in losses if one.role == "peer" and one.lost]
    best = min(peers, key=lambda one: median(one.lost) or 0.0, default=None)
    limit = None if best is None else times(median(best.lost), 0.75)
    return [
        at_most("training time lost per save", mine, times(memcpy, LOST_OF_MEMCPY), f"0.25 s where {which} takes 0.15"),
        at_most(
            "training time lost per save, against the best peer",
            mine,
            limit,
            f"0.75x {best.name}" if best else "no peer ran",
        ),
    ]


def main() -> None:
    given = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    state = gpt_state(given.small)
    training = BlockTraining(state.components["model"], state.components["optimizer"])
    steps(training, len(training.model.blocks))
    copies = async_save.measure(savers.limits()[:2], state, given.folder, given.rounds)
    memcpy, which = async_save.memcpy_seconds(copies)
    factories = [*savers.ours(given.mode), *savers.reusing_async_peers()]
    losses = measure(factories, training, state, given.folder, given.rounds)
    plain = median([value for one in losses for value in one.plain_step])
    text = (
        "## Training time lost per save on the CPU\n\n"
        f"{state.size_bytes / 1e9:.2f} GB, one training thread, steps of {show(plain)} s, "
        f"n saves of each in turns; {which} {show(memcpy)} s, "
        f"which is {show(ratio(memcpy, plain), 1)} steps\n\n"
        f"{bars_table(bars(losses, memcpy, which, given.mode))}\n{table(losses)}"
    )
    numbers = {"losses": {one.name: asdict(one) for one in losses}, "memcpy": {"name": which, "seconds": memcpy}}
    write_results("lost-time", text, numbers, given.results)


if __name__ == "__main__":
    main()
