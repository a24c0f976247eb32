"""The states that are measured: a GPT with AdamW, very many small tensors, and a few large ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        heads = self.attention(self.norm_1(hidden)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.norm_2(hidden))))


class GPT(nn.Module):
    """The parameters of a GPT-2 small, by default."""

    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)


SMALL_GPT = {"layers": 3, "width": 256, "vocabulary": 2000, "context": 256}


def gpt(seed: int = 0, **sizes: int) -> tuple[GPT, torch.optim.Optimizer]:
    """Model and optimizer, both with random content: 1.49 GB in some 590 tensors by default."""
    torch.manual_seed(seed)
    model = GPT(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    fill(model, optimizer)
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step along random gradients, so that the optimizer has all of its state."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class Many:
    """Very many small tensors, as a component."""

    def __init__(self, count: int = 20_000, size: int = 1024) -> None:
        self.tensors = {f"t{index:05d}": torch.randn(size) for index in range(count)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


@dataclass(frozen=True)
class State:
    """A state as Holdfast takes it, in components, and as its peers take it, in one flat dict of the same tensors."""

    title: str
    components: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, title: str, components: Mapping[str, Any]) -> State:
        return cls(title, components, flat(components))

    @property
    def size_bytes(self) -> int:
        """What this rank holds of it."""
        return size_of(self.local)

    @property
    def local(self) -> dict[str, torch.Tensor]:
        return {name: _local(tensor) for name, tensor in self.tensors.items()}


def gpt_state(small: bool) -> State:
    model, optimizer = gpt(**(SMALL_GPT if small else {}))
    return State.of("A GPT of 124M parameters with AdamW", {"model": model, "optimizer": optimizer})


def many_state(small: bool) -> State:
    return State.of("20,000 tensors of 4 KiB", {"many": Many(500 if small else 20_000)})


def tiny_state(small: bool = False) -> State:
    """A model of 25 small layers and its AdamW: 200 tensors in 0.3 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(25)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    fill(model, optimizer)
    return State.of("A tiny model with AdamW, 200 tensors", {"model": model, "optimizer": optimizer})


def few_state(small: bool) -> State:
    size_bytes = (8 if small else 512) * 1_000_000
    return State.of("4 tensors of 512 MB", {"few": Many(4, size_bytes // 4)})


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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
