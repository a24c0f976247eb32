"""Deal the samples of an epoch to ranks, and deal out what is left to other ranks. Numbers enter and leave.

The order of an epoch depends on the seed and the epoch alone. Rank `r` of `n` gets each `n`-th sample of it, from the
`r`-th on, as `torch.utils.data.DistributedSampler` deals them. A *deal* that has ended is kept as the number of samples
that each of its ranks got: what these leave, in the same order, is dealt anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

__all__ = ["count_left", "derived_seed", "epoch_order", "left_after", "share_length", "share_of"]


def epoch_order(length: int, *, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch: the one of `DistributedSampler` with this seed."""
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))


def left_after(order: torch.Tensor, deals: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return what is left of an epoch after some deals, each given as the number of samples that its ranks got."""
    for counts in deals:
        left = torch.ones(len(order), dtype=torch.bool)
        for rank, count in enumerate(counts):
            # Samples that were repeated to fill up the last round lie past the end, and take nothing away.
            left[rank :: len(counts)][:count] = False
        order = order[left]
    return order


def share_of(left: torch.Tensor, rank: int, size: int, *, drop_last: bool) -> torch.Tensor:
    """Return the samples of one rank, as many as of every other. The last round is dropped, or filled up by repeating
    samples from the beginning of what is left."""
    total = len(left)
    if drop_last:
        return left[: total // size * size][rank::size]
    if total == 0:
        return left
    each = -(-total // size)
    return left[torch.arange(rank, each * size, size) % total]


def count_left(total: int, deals: Sequence[Sequence[int]]) -> int:
    """Return how many of an epoch's samples are left after some deals: the length of `left_after`."""
    for counts in deals:
        dealt = (len(range(rank, total, len(counts))) for rank in range(len(counts)))
        total -= sum(min(count, most) for count, most in zip(counts, dealt, strict=True))
    return total


def share_length(left: int, size: int, *, drop_last: bool) -> int:
    """Return how many samples each rank gets of what is left: the length of `share_of`."""
    return left // size if drop_last else -(-left // size)


def derived_seed(*parts: object) -> int:
    """Return a seed that is the same in every process for the same parts, and another one for others."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
