"""A training as users of Accelerate write it, which kills itself after a step. Run by test_accelerate.py."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy
import torch

EPOCHS = 3
SAMPLES = 46


class Samples(torch.utils.data.Dataset[Any]):
    """Samples with their index. `noise` is drawn from torch's global generator when one is fetched."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.data = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = self.noise * torch.randn(3) if self.noise else torch.zeros(3)
        return index, self.data[index] + noise


class Counter:
    """An object of the user's own, to be registered."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def train(
    rank: int,
    run: str,
    log: str,
    kill_at: int,
    workers: int = 0,
    accumulate: int = 1,
    noise: float = 0.0,
    fsdp: bool = False,
) -> None:
    """Train for three epochs. Write a line for each step; of a step that is trained again, another."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from holdfast.integrations.accelerate import HoldfastState

    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP") if fsdp else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, fsdp_plugin=plugin)
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader: Any = torch.utils.data.DataLoader(
        Samples(noise),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    with (
        HoldfastState(accelerator, run, objects={"counter": counter}) as state,
        Path(f"{log}-{rank}").open("a") as file,
    ):
        done = state.load_state().step or 0
        for epoch in range(state.epoch, EPOCHS):
            for indices, batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean() * torch.rand(())
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                counter.seen += len(batch)
                if not accelerator.sync_gradients:
                    continue
                done += 1
                draws = (random.random(), numpy.random.rand())
                file.write(f"{done} {epoch} {indices.tolist()} {loss.item()!r} {draws} {counter.seen}\n")
                file.flush()
                state.save_state(done)
                if done == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        file.write(f"weights {_digest(model)}\n")


def _digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()
