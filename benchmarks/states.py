"""The states that are measured: a GPT of 124 million parameters with AdamW, and very many small tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class GPT(nn.Module):
    """The parameters of a GPT-2 small, without the arithmetic, which no checkpoint cares about."""

    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)


def gpt(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, both with random content: 1.49 GB in some 590 tensors."""
    torch.manual_seed(seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Many:
    """Very many small tensors, as a component."""

    def __init__(self, count: int = 20_000, size: int = 1024) -> None:
        self.tensors = {f"t{index:05d}": torch.randn(size) for index in range(count)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


def flat(components: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of some components under one name each, for the peers that take a flat dict."""
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value.detach()
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)

    for name, component in components.items():
        walk(name, component.state_dict())
    return found


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
