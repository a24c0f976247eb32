"""Chunks of an arena as tensors: their places, their types, and copies into them. Knows torch, no devices."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from holdfast.ondisk.safetensors import SMALL_BYTES
from holdfast.saving.staging.arena import Arena

__all__ = ["BYTE", "Chunk", "Placement", "Sources", "can_copy", "copy_all", "copy_now", "copyable"]

BYTE = torch.uint8


class Chunk(NamedTuple):
    """The place of a chunk in the arena, its type and its sizes."""

    start: int
    end: int
    dtype: torch.dtype
    sizes: tuple[int, ...]

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Return these bytes as a tensor of the form that `copyable` gives to a source of this type."""
        if not can_copy(self.dtype):
            return memory
        if self.dtype.is_complex:
            return memory.view(self.dtype.to_real()).view(*self.sizes, 2)
        return memory.view(self.dtype).view(self.sizes)


class Sources(NamedTuple):
    """The memory of each part of an inventory: its tensor; where its bytes lie in host memory as a file has them, 0
    where torch has to copy them; and all devices that the tensors are on."""

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    devices: Set[torch.device]


@dataclass(slots=True)
class Placement:
    """Where the chunks of a save lie in an arena; those that are empty lie nowhere.

    `order` has for each chunk its part of the inventory, `views` a tensor over its place, `targets` and `sizes` its
    address and its bytes. The other lists are of indices: `special` are the chunks whose sources `copyable` has to
    change, `small` and `large` are all of them.
    """

    arena: Arena
    chunks: list[Chunk] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    special: list[int] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    large: list[int] = field(default_factory=list)

    def add(self, part: int, chunk: Chunk) -> None:
        """Add the next chunk, which holds a part of the inventory."""
        index = len(self.order)
        if chunk.dtype.is_complex or not can_copy(chunk.dtype):
            self.special.append(index)
        (self.small if chunk.end - chunk.start < SMALL_BYTES else self.large).append(index)
        self.order.append(part)
        self.targets.append(self.arena.address + chunk.start)
        self.sizes.append(chunk.end - chunk.start)
        self.chunks.append(chunk)
        self.views.append(chunk.on(torch.frombuffer(self.arena.memory[chunk.start : chunk.end], dtype=BYTE)))

    def sources(self, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the source of each chunk, from the memory of each part of the inventory."""
        sources = [memory[part] for part in self.order]
        for index in self.special:
            sources[index] = copyable(sources[index])
        return sources


def copyable(source: torch.Tensor) -> torch.Tensor:
    """Return a source in a form that torch can copy into an arena."""
    if source.is_complex():
        # A file aligns complex numbers to their halves, and torch's own copy ends the process over such an address.
        return torch.view_as_real(source.resolve_conj()).resolve_neg()
    return source if can_copy(source.dtype) else source.contiguous().view(torch.uint8).reshape(-1)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each into each; many small ones in one call, which a loop would spend most of its time between."""
    if not targets:
        return
    torch._foreach_copy_(list(targets), list(sources))


def copy_now(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy in the order of the current stream, without waiting for it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


_KNOWN_TO_COPY: dict[torch.dtype, bool] = {}


def can_copy(dtype: torch.dtype) -> bool:
    """Return whether torch can copy tensors of this type; some of the newest are only names for bytes so far."""
    if dtype not in _KNOWN_TO_COPY:
        try:
            torch.empty(2, dtype=dtype).copy_(torch.empty(2, dtype=dtype))
            _KNOWN_TO_COPY[dtype] = True
        except (RuntimeError, NotImplementedError):
            _KNOWN_TO_COPY[dtype] = False
    return _KNOWN_TO_COPY[dtype]
