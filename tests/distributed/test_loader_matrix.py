"""G8 for data loaders: every kind of order, workers and stop, in trainings whose every step draws random numbers.

One process, or one pair of ranks, runs all cells of one loader and one parallel form in a row. For each order and
number of workers it trains once without a break, with a save at each stop, and then resumes from each of the saves
with new objects and other seeds, for the rest of the epoch and two more. Batches are lists of numbers: tensors would
come out of the workers through shared memory, which takes most of the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import ResumableLoader, ResumableSampler
from holdfast.testing import values
from tests.ranks import run_ranks

BATCHES = 3  # of an epoch, on each rank
EPOCHS = 4
LATER_EPOCHS = 2  # that a resumed run goes on for, after the one in which it was stopped
ORDERS = ("sequential", "shuffled", "distributed", "own generator", "generator of the sampler")
WORKERS = ("no workers", "workers", "persistent workers")
# The number of steps done, and the epoch that the training is in.
STOPS = {
    "before the first batch": (0, 0),
    "first batch of the next epoch": (BATCHES + 1, 1),
    "mid-epoch": (BATCHES + 2, 1),
    "last batch": (2 * BATCHES, 1),
    "between epochs": (2 * BATCHES, 2),
}
Record: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Cell:
    """One way to load the data."""

    loader: str
    form: str
    order: str
    workers: str


class Training:
    """A model with dropout and a loader. Samples, losses and draws from all three global generators are compared."""

    def __init__(self, rank: int, size: int, cell: Cell) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        if cell.form == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif cell.form == "fsdp":
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        numpy.random.seed(100 + rank)
        self.generator = torch.Generator().manual_seed(4 + rank)
        self.loader = self.build_loader(rank, size, cell)
        self.state = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def build_loader(self, rank: int, size: int, cell: Cell) -> Any:
        samples = size * BATCHES * 2
        data = list(range(samples))
        options: dict[str, Any] = {"batch_size": 2, "collate_fn": list}
        if cell.order == "distributed":
            options["sampler"] = DistributedSampler(data, size, rank, seed=3)
        else:
            data = data[rank::size]
        if cell.order in ("shuffled", "own generator"):
            options["shuffle"] = True
        if cell.order == "own generator":
            options["generator"] = self.generator
        if cell.workers != "no workers":
            options["num_workers"] = 2
            options["persistent_workers"] = cell.workers == "persistent workers"
        if cell.order == "generator of the sampler":
            sampler: Any = torch.utils.data.RandomSampler(data, generator=self.generator)
            options["sampler"] = ResumableSampler(sampler) if cell.loader == "stateful" else sampler
        self.sampler = options.get("sampler")
        self.has_generator = "generator" in cell.order
        if cell.loader == "stateful":
            return StatefulDataLoader(data, **options)
        return ResumableLoader(DataLoader(data, **options))

    def train(self, step: int, first_epoch: int, manager: holdfast.CheckpointManager | None) -> Iterator[Record]:
        """Yield what each step saw, and at the end of each epoch what the training came to."""
        last = EPOCHS if manager is not None else min(first_epoch + 1 + LATER_EPOCHS, EPOCHS)
        for epoch in range(first_epoch, last):
            if isinstance(self.sampler, DistributedSampler):
                self.sampler.set_epoch(epoch)
            self.save_at(step, epoch, manager)
            for batch in self.loader:
                loss = self.model(torch.tensor(batch, dtype=torch.float32)[:, None]).pow(2).mean() * torch.rand(())
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                yield step, epoch, batch, loss.item(), self.draws()
                self.save_at(step, epoch, manager)
            weights = [parameter.detach().flatten().tolist() for parameter in self.weights()]
            yield "end of epoch", epoch, weights, self.draws()

    def draws(self) -> Record:
        own = float(torch.rand((), generator=self.generator)) if self.has_generator else None
        return random.random(), float(numpy.random.rand()), float(torch.rand(())), own

    def weights(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            yield getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()

    def end_workers(self) -> None:
        """End them now: when the garbage collector finds their iterator, torch waits for them in vain."""
        if isinstance(self.loader, StatefulDataLoader):
            self.loader._iterator = None
        else:
            self.loader._copy = None

    def save_at(self, step: int, epoch: int, manager: holdfast.CheckpointManager | None) -> None:
        for number, stop in enumerate(STOPS.values()):
            if manager is not None and stop == (step, epoch):
                manager.save(number, progress={"step": step, "epoch": epoch})


def run_cells(rank: int, size: int, loader: str, form: str, folder: str) -> dict[str, str]:
    """Return what differed, for each cell that did not resume exactly."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    differing = {}
    for order in ORDERS if size == 1 else ORDERS[:4]:
        for workers in WORKERS:
            cell = Cell(loader, form, order, workers)
            run = str(Path(folder) / f"{order}-{workers}".replace(" ", "-"))
            for stop, found in resume_everywhere(rank, size, cell, run).items():
                differing[f"{loader}, {form}, {order}, {workers}, {stop}"] = found
    return differing


def resume_everywhere(rank: int, size: int, cell: Cell, run: str) -> dict[str, str]:
    first = Training(rank, size, cell)
    with holdfast.CheckpointManager(run, first.state, mode="sync") as manager:
        uninterrupted = list(first.train(0, 0, manager))
    first.end_workers()
    assert len(uninterrupted) == (BATCHES + 1) * EPOCHS
    differing = {}
    for number, (stop, (done, epoch)) in enumerate(STOPS.items()):
        second = Training(rank, size, cell)
        torch.manual_seed(31337)
        random.seed(31337)
        numpy.random.seed(31337)
        second.generator.manual_seed(31337)
        with holdfast.CheckpointManager(run, second.state, mode="sync") as manager:
            progress = manager.restore(number).progress
            resumed = list(second.train(progress["step"], progress["epoch"], None))
        second.end_workers()
        # Each epoch before this one has one record more than it has steps.
        expected = uninterrupted[done + epoch :][: len(resumed)]
        if resumed != expected or len(resumed) < LATER_EPOCHS * (BATCHES + 1):
            differing[stop] = first_difference(resumed, expected)
    return differing


def first_difference(resumed: list[Record], uninterrupted: list[Record]) -> str:
    for one, other in zip(resumed, uninterrupted, strict=False):
        if one != other:
            return f"{one} and not {other}"
    return f"{len(resumed)} steps and not {len(uninterrupted)}"


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("loader", ["stateful", "resumable"])
def test_a_loader_resumes_exactly_in_one_process(loader: str, tmp_path: Path) -> None:
    outcomes = run_ranks(1, run_cells, 1, loader, "plain", str(tmp_path), backend=None)
    assert values(outcomes) == [{}]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
@pytest.mark.parametrize("loader", ["stateful", "resumable"])
def test_a_loader_resumes_exactly_on_two_ranks(loader: str, form: str, tmp_path: Path) -> None:
    outcomes = run_ranks(2, run_cells, 2, loader, form, str(tmp_path))
    assert values(outcomes) == [{}, {}]
