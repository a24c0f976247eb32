"""A small real training in every parallel form that the tests need: dropout, shuffling, warm-up, accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

WIDTH = 24
SAMPLES = 60


class Net(nn.Module):
    """Uneven sizes, a tied weight, a buffer that the forward pass changes, dropout."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.up = nn.Linear(WIDTH, 52)
        self.down = nn.Linear(52, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.shape[0]
        hidden = self.embed(tokens)
        hidden = hidden + self.drop(self.down(torch.relu(self.up(hidden))))
        return self.head(self.norm(hidden))


class ShufflingLoader:
    """Batches of a small corpus, shuffled anew in every epoch, each rank its own share; resumes in mid-epoch."""

    def __init__(self, rank: int, size: int, batch: int = 4) -> None:
        self.rank, self.size, self.batch = rank, size, batch
        self.generator = torch.Generator().manual_seed(1234)
        self.data = torch.randint(0, 17, (SAMPLES, 9), generator=torch.Generator().manual_seed(5))
        self.epoch, self.position = 0, 0
        self.order = self._shuffle()

    def _shuffle(self) -> torch.Tensor:
        return torch.randperm(SAMPLES, generator=self.generator)[self.rank :: self.size]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.position + self.batch > len(self.order):
                self.epoch, self.position = self.epoch + 1, 0
                self.order = self._shuffle()
            rows = self.order[self.position : self.position + self.batch]
            self.position += self.batch
            yield self.data[rows]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position, self.order = state["epoch"], state["position"], state["order"]
        self.generator.set_state(state["generator"])

    def load_world_state(self, states: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        self.load_state_dict(states[index % len(states)])


@dataclass
class Training:
    """All the live objects of a run on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: ShufflingLoader
    loader_group: Any = None

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": holdfast.PerRank(self.loader, group=self.loader_group),
        }

    def steps(self, count: int) -> list[float]:
        """Train with two micro-batches per step; the losses as they are, to compare bit for bit."""
        losses = []
        batches = iter(self.loader)
        for _ in range(count):
            total = 0.0
            for _ in range(2):
                tokens = next(batches)
                logits = self.model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.reshape(-1, 17), tokens[:, 1:].reshape(-1)) / 2
                loss.backward()
                total += loss.item()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(total)
        return losses


def build(form: str, rank: int, size: int, *, mesh: DeviceMesh | None = None, seed: int = 0) -> Training:
    """The run in one of its forms: plain, ddp, fsdp, or mesh (two dimensions: data and tensor parallel)."""
    torch.manual_seed(seed)
    net = Net(tied=form not in ("mesh", "untied"))
    data_rank, data_size, group = rank, size, None
    model: nn.Module = net
    if form == "ddp":
        model = DistributedDataParallel(net)
    elif form == "fsdp":
        mesh = mesh or init_device_mesh("cpu", (size,))
        fully_shard(net, mesh=mesh)
    elif form == "mesh":
        mesh = mesh or init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        data_rank, data_size, group = mesh["dp"].get_local_rank(), mesh["dp"].size(), mesh["dp"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    loader = ShufflingLoader(data_rank, data_size)
    torch.manual_seed(1000 + data_rank)
    return Training(model, optimizer, scheduler, loader, group)
