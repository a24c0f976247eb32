"""What does an asynchronous save cost a training on a GPU? 9 GiB of state, steps of one or four micro-batches.

Every save happens in the middle of a real training (bf16 autocast, fused AdamW); the bare disk and the bare copy are
measured between them. The run keeps to a budget of seconds: Holdfast and the limits get the rounds that they need,
peers take turns in the time that is left, and each line says how many saves it stands on.

    python benchmarks/gpu_save.py SCRATCH [ROUNDS] --results OUT
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

import savers
from lost_time import Loss, lose, steps
from measure import (
    Bar,
    Number,
    arguments,
    at_least,
    at_most,
    bars_table,
    median,
    ratio,
    reason,
    show,
    span,
    write_results,
)
from states import GPT, Many, State, fill

CONTEXT = 1024
LARGE = {"layers": 16, "width": 2048, "vocabulary": 1024, "context": CONTEXT}
SMALL = {"layers": 4, "width": 512, "vocabulary": 1024, "context": CONTEXT}
MICRO_BATCH_SECONDS = 0.070
MOST_SEQUENCES = 64
PEER_ROUNDS = 2
# What a first save is thought to take, until there is one to go by.
GUESS_SECONDS = {"limit": 5.0, "holdfast": 15.0, "peer": 20.0}


class GpuTraining:
    """Steps of some micro-batches of whole sequences; a step ends when the device has done it."""

    def __init__(
        self, model: GPT, optimizer: torch.optim.Optimizer, sequences: int, micro_batches: int, plain_steps: int
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.plain_steps = self.idle_steps = plain_steps
        self.tokens = torch.randint(0, model.tokens.num_embeddings, (sequences, CONTEXT + 1), device="cuda")

    def step(self, hold: Callable[[], AbstractContextManager[object]]) -> None:
        for _ in range(self.micro_batches):
            self.micro_batch()
        with hold():
            self.optimizer.step()
        self.optimizer.zero_grad()
        # The training's own stream, as reading the loss would: a copy that a save makes beside it is not waited for.
        torch.cuda.current_stream().synchronize()

    def micro_batch(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        (loss / self.micro_batches).backward()


@dataclass
class Scene:
    """One contender in one kind of training, or a limit that needs none."""

    title: str
    saver: savers.Saver
    training: GpuTraining | None
    rounds: int
    loss: Loss = field(init=False)
    took_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.loss = Loss(self.title, self.saver.role)
        self.took_seconds = GUESS_SECONDS[self.saver.role]

    @property
    def done(self) -> bool:
        return bool(self.loss.skipped) or len(self.loss.call) >= self.rounds

    @property
    def needs_seconds(self) -> float:
        """For the rounds that are still to come."""
        return 0.0 if self.done else (self.rounds - len(self.loss.call)) * self.took_seconds


def gpu_state(small: bool) -> State:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(**(SMALL if small else LARGE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    fill(model, optimizer)
    return State.of("A GPT of 0.8 billion parameters with AdamW", {"model": model, "optimizer": optimizer})


def sequences_for(model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """As many sequences as make a micro-batch last about as long as it should, found by trying few."""
    trial = GpuTraining(model, optimizer, 4, 1, 0)
    for _ in range(3):
        trial.micro_batch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        trial.micro_batch()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 3
    optimizer.zero_grad()
    return max(1, min(MOST_SEQUENCES, round(4 * MICRO_BATCH_SECONDS / seconds)))


def scenes(state: State, folder: Path, rounds: int) -> list[Scene]:
    model, optimizer = state.components["model"], state.components["optimizer"]
    sequences = sequences_for(model, optimizer)
    # Three seconds each: what a save costs is a few thousandths of the time that it takes, and a device that stood
    # still while a disk was measured runs its next steps faster than any later ones. What a peer costs is much more.
    four, one = (GpuTraining(model, optimizer, sequences, *counts) for counts in ((4, 12), (1, 40)))
    four_of_peers = GpuTraining(model, optimizer, sequences, 4, 4)
    raw, copy = (savers.named(kind, name)(folder, state) for kind, name in RAW)
    pinned, device, sync = (make(folder, state) for make in savers.ours("async_pinned", "async_device", "sync"))
    mine = [
        Scene(savers.RAW_WRITE, raw, None, rounds),
        Scene(COPY, copy, None, rounds),
        Scene(PINNED_FOUR, pinned, four, rounds),
        Scene(DEVICE_FOUR, device, four, rounds),
        Scene(DEVICE_ONE, device, one, rounds),
        Scene(SYNC, sync, four_of_peers, rounds),
        Scene("holdfast, async_pinned, 1 micro-batch", pinned, one, PEER_ROUNDS),
    ]
    peers = [make(folder, state) for make in savers.gpu_peers()]
    return mine + [Scene(f"{saver.name}, 4 micro-batches", saver, four_of_peers, PEER_ROUNDS) for saver in peers]


COPY = "device to page-locked host, tensor by tensor"
RAW = ((savers.RawWrite, savers.RAW_WRITE), (savers.CopyEach, COPY))
PINNED_FOUR = "holdfast, async_pinned, 4 micro-batches"
DEVICE_FOUR = "holdfast, async_device, 4 micro-batches"
DEVICE_ONE = "holdfast, async_device, 1 micro-batch"
SYNC = "holdfast, sync, 4 micro-batches"


class Run:
    """Goes round the scenes while there is time, opening each saver when its turn first comes."""

    def __init__(self, stages: Sequence[Scene], deadline: float) -> None:
        self.stages = stages
        self.deadline = deadline
        self.opened: dict[int, str] = {}
        self.number = 0

    def go(self) -> None:
        while sum(self.take(scene) for scene in self.stages if not scene.done):
            pass
        for scene in self.stages:
            if not scene.loss.call and not scene.loss.skipped:
                scene.loss.skipped = "no time was left in the budget"

    def take(self, scene: Scene) -> bool:
        """One save in a scene, if there is time for it; a peer leaves the others the time that they need."""
        begin = time.perf_counter()
        others = [one.needs_seconds for one in self.stages if one.saver.role != "peer"]
        needed = scene.took_seconds + (sum(others) if scene.saver.role == "peer" else 0.0)
        if begin + needed > self.deadline:
            return False
        first = self.open(scene) and scene.saver.warms_up
        if not scene.loss.skipped:
            scene.loss.skipped = self.attempt(lambda: self.save(scene, first=first))
        scene.took_seconds = time.perf_counter() - begin
        return True

    def open(self, scene: Scene) -> bool:
        """Whether this is the saver's first save, which is not counted. Scenes can share a saver."""
        first = id(scene.saver) not in self.opened
        if first:
            self.opened[id(scene.saver)] = self.attempt(scene.saver.open)
        scene.loss.skipped = self.opened[id(scene.saver)]
        return first

    def save(self, scene: Scene, *, first: bool) -> None:
        self.number += 1
        if scene.training is None:
            try_limit(scene, self.number, first=first)
        else:
            lose(scene.training, scene.saver, self.number, scene.loss, first=first)
        scene.saver.clear()

    def attempt(self, work: Callable[[], object]) -> str:
        """What went wrong; a peer that does not run here is left out and said to be."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            return reason(error)
        return ""


def try_limit(scene: Scene, number: int, *, first: bool) -> None:
    scene.saver.clear()
    os.sync()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    scene.saver.save(number)
    seconds = time.perf_counter() - begin
    print(f"  {scene.title}{' (first)' if first else ''}: {seconds:.3f} s", flush=True)
    (scene.loss.first_call if first else scene.loss.call).append(seconds)
    if not first and scene.title == savers.RAW_WRITE:
        scene.loss.durable.append(seconds)


def table(losses: Sequence[Loss], size_bytes: int) -> str:
    lines = [
        "| what | saves | call ms | min-max | lost ms | min-max | until durable s | GiB/s | steps slower | step ms |"
        " first: call / durable s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in losses:
        if one.skipped and not one.first_call and not one.call:
            lines.append(f"| {one.name} | skipped: {one.skipped} | | | | | | | | | |")
            continue
        call, lost, plain = ([1000 * value for value in values] for values in (one.call, one.lost, one.plain_step))
        durable, slower = median(one.durable), median(one.slower)
        speed = None if durable is None else size_bytes / durable / 2**30
        lines.append(
            f"| {one.name} | {len(call)} | {show(median(call), 1)} | {span(call, 1)} | {show(median(lost), 1)} | "
            f"{span(lost, 1)} | {show(durable)} | {show(speed, 2)} | {'-' if slower is None else f'{slower:+.2%}'} | "
            f"{show(median(plain), 1)} | {show(median(one.first_call))} / {show(median(one.first_durable))} |"
        )
    return "\n".join(lines) + "\n"


def bars(losses: Sequence[Loss], many: dict[str, list[float]]) -> list[Bar]:
    """A step of one micro-batch is over before the state is copied: there it is the mode that clones on the device."""
    found = {one.name: one for one in losses}
    pinned, four, one, sync = (found.get(name, Loss(name)) for name in (PINNED_FOUR, DEVICE_FOUR, DEVICE_ONE, SYNC))
    raw = median(found[savers.RAW_WRITE].durable)
    made = [
        at_most("training time lost per save, async_pinned, 4 micro-batches", median(pinned.lost), 0.008),
        at_most("training time lost per save, async_device, 4 micro-batches", median(four.lost), 0.008),
        at_most("training time lost per save, async_device, 1 micro-batch", median(one.lost), 0.015),
        at_least("speed of a sync save", ratio(raw, median(sync.durable)), 0.85, f"of {savers.RAW_WRITE}"),
    ]
    for name, loss in (("async_pinned", pinned), ("async_device", four)):
        speed = ratio(raw, median(loss.durable))
        made += [
            at_most(f"time inside save(), {name}", median(loss.call), 0.006),
            at_least(f"speed from save() to committed, {name}", speed, 0.9, f"of {savers.RAW_WRITE}"),
            at_most(f"steps meanwhile, slower by, {name}", _percent(median(loss.slower)), 1.5, unit="%"),
        ]
    return made + [
        at_most(f"20,000 tensors of 4 KiB: time inside save(), {mode}", median(calls), 0.040)
        for mode, calls in many.items()
    ]


def many_calls(folder: Path, rounds: int, small: bool) -> dict[str, list[float]]:
    """The seconds inside `save` of very many small tensors on the device, by mode; the first save is not counted."""
    with torch.device("cuda"):
        state = State.of("20,000 tensors of 4 KiB", {"many": Many(500 if small else 20_000)})
    found: dict[str, list[float]] = {}
    for mode in ("async_pinned", "async_device"):
        saver = savers.ours(mode)[0](folder / "many", state)
        saver.open()
        for number in range(rounds + 1):
            saver.clear()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            pending = saver.save(number)
            if number:
                found.setdefault(mode, []).append(time.perf_counter() - begin)
            pending.finish()
        saver.close()
    return found


def _percent(part: Number) -> Number:
    return None if part is None else 100 * part


def main() -> None:
    began = time.perf_counter()
    parser = arguments(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--budget", type=float, default=220.0, help="seconds for the whole run")
    parser.add_argument("--only", default="", help="of the savers, those whose line has this in its title")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    state = gpu_state(given.small)
    stages = [
        scene
        for scene in scenes(state, given.folder, given.rounds)
        if scene.saver.role == "limit" or given.only in scene.title
    ]
    for training in {id(scene.training): scene.training for scene in stages if scene.training}.values():
        seconds = median(steps(training, 6)[3:])
        said = f"{training.micro_batches} micro-batches of {len(training.tokens)} sequences"
        print(f"  a step of {said}: {show(seconds)} s", flush=True)
    Run(stages, began + given.budget).go()
    losses = [scene.loss for scene in stages]
    many = many_calls(given.folder, given.rounds, given.small)
    text = (
        "## Asynchronous save on a GPU\n\n"
        f"{state.size_bytes / 2**30:.2f} GiB in {len(state.tensors)} tensors; every save in the middle of a training; "
        f"{time.perf_counter() - began:.0f} s in all\n\n{bars_table(bars(losses, many))}\n"
        f"{table(losses, state.size_bytes)}"
    )
    numbers = {"size_bytes": state.size_bytes, "losses": {one.name: asdict(one) for one in losses}, "many": many}
    write_results("gpu-save-part" if given.only else "gpu-save", text, numbers, given.results)
    for saver in {id(scene.saver): scene.saver for scene in stages if scene.loss.call}.values():
        saver.close()
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
