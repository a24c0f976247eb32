"""Trainings for the exact-resume check: one that is exact, and each way in which people get it wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import holdfast

ROWS = torch.randn(40, 3, generator=torch.Generator().manual_seed(5))


class Loader:
    """Batches front to back, with a position."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self) -> torch.Tensor:
        self.position += 4
        return ROWS[self.position % 40 : self.position % 40 + 4]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class ForgetfulLoader(Loader):
    """Stores its position and begins at the front nevertheless."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def train(
    run: str,
    until: int,
    *,
    loader: type[Loader] = Loader,
    forget: tuple[str, ...] = (),
    rng: bool = True,
    seed: int | None = 3,
    restore: bool = True,
    every: int = 1,
    off_by: int = 0,
) -> dict[int, float]:
    if seed is not None:
        torch.manual_seed(seed)
    else:
        torch.manual_seed(random.SystemRandom().getrandbits(32))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    batches = loader()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": batches}
    kept = {name: part for name, part in state.items() if name not in forget}
    losses = {}
    with holdfast.CheckpointManager(run, kept, mode="sync", rng=rng) as manager:
        start = manager.restore().next_step if restore else 0
        for step in range(start + (off_by if start else 0), until):
            loss = model(batches.next_batch()).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses[step] = loss.item()
            if step % every == 0 or step == until - 1:
                manager.save(step)
    return losses


def train_exactly(run: str, until: int) -> dict[int, float]:
    return train(run, until)


def train_without_random_state(run: str, until: int) -> dict[int, float]:
    return train(run, until, rng=False)


def train_without_scheduler(run: str, until: int) -> None:
    train(run, until, forget=("scheduler",))


def train_from_the_front_of_the_data(run: str, until: int) -> dict[int, float]:
    return train(run, until, loader=ForgetfulLoader)


def train_without_seed(run: str, until: int) -> dict[int, float]:
    return train(run, until, seed=None)


def train_without_restore(run: str, until: int) -> dict[int, float]:
    return train(run, until, restore=False)


def train_and_skip_a_step(run: str, until: int) -> dict[int, float]:
    return train(run, until, off_by=1)


def train_and_save_nothing(run: str, until: int) -> None:
    with holdfast.CheckpointManager(run, {"model": nn.Linear(1, 1)}, mode="sync") as manager:
        manager.restore()


def train_on_ranks(run: str, until: int) -> dict[int, float]:
    """The same on every rank of a group; each rank has its own random state."""
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Linear(4, 1)))
    torch.manual_seed(torch.distributed.get_rank())
    return _train_on_ranks(run, until, model, rng=True)


def train_on_ranks_without_random_state(run: str, until: int) -> dict[int, float]:
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Linear(4, 1)))
    torch.manual_seed(torch.distributed.get_rank())
    return _train_on_ranks(run, until, model, rng=False)


def _train_on_ranks(run: str, until: int, model: nn.Module, *, rng: bool) -> dict[int, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = {}
    with holdfast.CheckpointManager(run, {"model": model, "optimizer": optimizer}, mode="sync", rng=rng) as manager:
        for step in range(manager.restore().next_step, until):
            loss = model(ROWS[step : step + 4]).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            manager.save(step)
    return losses
