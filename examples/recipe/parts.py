"""The parts that a recipe can name: models, optimizers, schedulers, data and metrics. Each is registered, none knows of
the others or of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from registry import register
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast.data import ElasticLoader


@register("model", "mlp")
class MLP(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.layers(points))


@register("model", "normed_mlp")
class NormedMLP(nn.Module):
    """The same trunk under another name, and a layer that `mlp` does not have."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(points)))


@register("optimizer", "adamw")
def adamw(model: nn.Module, lr: float, weight_decay: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


@register("optimizer", "sgd")
def sgd(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


@register("scheduler", "cosine")
def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


@register("scheduler", "constant")
def constant(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@register("data", "spirals")
class Spirals:
    """Points on the arms of a spiral; the arm is the class. One part is trained on, the other is for evaluations."""

    def __init__(self, arms: int, points: int, batch_size: int, noise: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(arms)
        labels = torch.arange(points) % arms
        radius = torch.rand(points, generator=generator)
        angle = 3 * radius + labels * 2 * math.pi / arms
        places = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        places += noise * torch.randn(points, 2, generator=generator)
        cut = points * 3 // 4
        self.loader = ElasticLoader(TensorDataset(places[:cut], labels[:cut]), batch_size, shuffle=True, drop_last=True)
        held_out = zip(places[cut:].split(batch_size), labels[cut:].split(batch_size), strict=True)
        self.evaluation_batches: list[tuple[Tensor, Tensor]] = list(held_out)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches for ever; the loader keeps its epoch and its position."""
        while True:
            yield from self.loader


class Mean:
    """The mean of a number over the samples of an evaluation, in two tensors that can be saved halfway."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.total += self.each(logits, labels).double().sum()
        self.count += len(labels)

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def result(self) -> float:
        return (self.total / self.count).item()

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


@register("metric", "accuracy")
class Accuracy(Mean):
    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(1) == labels


@register("metric", "val_loss")
class ValidationLoss(Mean):
    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="none")
