"""A training as torchrun starts it, for tests that kill, signal and double it from outside. Notes say how it goes.

    torchrun --standalone --nproc-per-node 2 -m tests.distributed.life '{"run": ..., "notes": ..., ...}'

It trains until it is told to stop. Each rank notes its process once it is at work, what its manager said when it was
built, and how it ended. `together`: the ranks exchange gradients at each step, and so stay close to each other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import HoldfastError

TIMEOUT_SECONDS = 30.0
AT_WORK_AFTER = 5
_MOST_STEPS = 100_000
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Life:
    """What a test wants of the training."""

    run: str
    notes: str
    together: bool = True
    save_steps: int = 1000
    signals: bool = True

    def text(self) -> str:
        return json.dumps(asdict(self))


def wait_for(condition: Callable[[], Any], seconds: float = _PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def say(notes: Path | str, name: str, what: Any) -> None:
    """Leave a note that is there at once or not at all."""
    notes = Path(notes)
    notes.mkdir(parents=True, exist_ok=True)
    (notes / f"{name}.tmp").write_text(json.dumps(what))
    (notes / f"{name}.tmp").rename(notes / name)


def said(notes: Path | str, name: str) -> Any:
    return json.loads((Path(notes) / name).read_text())


def is_said(notes: Path | str, *names: str) -> bool:
    return all((Path(notes) / name).exists() for name in names)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(16, 16)


def trigger(life: Life) -> Any:
    every = holdfast.Every(steps=life.save_steps)
    return every | holdfast.OnSignal("SIGTERM") if life.signals else every


def weights_of(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def main() -> None:
    life = Life(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    asked: list[int] = []

    def mine(number: int, frame: Any) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, mine)
    bare = net()
    model = DistributedDataParallel(bare) if life.together else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin = time.monotonic()
    try:
        manager = holdfast.CheckpointManager(
            life.run,
            {"model": model, "optimizer": optimizer},
            save=trigger(life),
            rng=False,
            timeout=TIMEOUT_SECONDS,
        )
    except HoldfastError as error:
        told = {"type": type(error).__name__, "fields": error.fields, "text": str(error)}
        say(life.notes, f"refused-{rank}", {**told, "seconds": time.monotonic() - begin})
        raise
    say(life.notes, f"built-{rank}", time.monotonic() - begin)
    with manager:
        start = manager.restore()
        stopped_at = train(manager, model, optimizer, start.next_step, life, rank)
        say(life.notes, f"stopped-{rank}", stopped_at)
        # Signals may still come: as long as the manager is open they are its business.
        wait_for(lambda: is_said(life.notes, "may-end"))
    end = {
        "stopped_at": stopped_at,
        "weights": weights_of(bare),
        "asked": len(asked),
        "handler": signal.getsignal(signal.SIGTERM) is mine,
    }
    say(life.notes, f"end-{rank}", end)


def train(
    manager: holdfast.CheckpointManager, model: nn.Module, optimizer: Any, first: int, life: Life, rank: int
) -> int | None:
    """The step at which `step` said to stop."""
    for step in range(first, _MOST_STEPS):
        loss = model(torch.full((4, 16), 1.0 + step % 7)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if manager.step(step, metrics={"loss": loss}, progress={"seen": step}):
            return step
        if step == first + AT_WORK_AFTER:
            say(life.notes, f"process-{rank}", os.getpid())
    return None


if __name__ == "__main__":
    main()
