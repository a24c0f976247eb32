"""Train a small character-level GPT with FSDP2, and never lose more than a few steps of it.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py runs/gpt

Run the same line again after a crash, a kill or a reboot: it goes on where the newest checkpoint was made, with exactly
the losses that an undisturbed run would have had. Another number of ranks works too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast

TEXT = Path(__file__).with_name("harbour.txt").read_text()
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 64, 96, 4, 3, 0.1
WINDOWS_PER_STEP, WINDOWS_PER_PASS = 16, 4


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS)))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, windows: Tensor, following: Tensor) -> Tensor:
        hidden = self.letters(windows) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())


class ShuffledWindows:
    """Windows of the text in a new random order every epoch. All ranks share one order; each takes every n-th of it."""

    def __init__(self, rank: int, ranks: int) -> None:
        letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
        self.windows = letters.unfold(0, CONTEXT + 1, CONTEXT // 8)
        self.position, self.ranks = rank, ranks

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """The next windows, and for each of their letters the one that follows it."""
        places = range(self.position, self.position + count * self.ranks, self.ranks)
        self.position += count * self.ranks
        size = len(self.windows)
        windows = torch.stack([self.windows[_order(place // size, size)[place % size]] for place in places])
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def load_world_state(self, states: list[dict[str, Any]], index: int, count: int) -> None:
        """The number of ranks changed: divide what the old ranks have not read. Nothing is read twice or left out."""
        self.position, self.ranks = min(state["position"] for state in states) + index, count


@functools.lru_cache(maxsize=2)
def _order(epoch: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))


def train_step(model: Any, optimizer: torch.optim.Optimizer, loader: ShuffledWindows, ranks: int) -> float:
    """One optimizer step over as many passes as the ranks need for it; the loss over all windows of all ranks."""
    passes = WINDOWS_PER_STEP // (WINDOWS_PER_PASS * ranks)
    total = torch.zeros(())
    for number in range(passes):
        model.set_requires_gradient_sync(number == passes - 1)
        loss = model(*loader.take(WINDOWS_PER_PASS)) / passes
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / ranks


def weights_digest(model: nn.Module) -> str:
    """A name for the exact weights, which does not depend on how they are sharded."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return hashlib.sha256(b"".join(full[name].numpy().tobytes() for name in sorted(full))).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder or URL of the checkpoints")
    parser.add_argument("--restore", default="latest", help="latest, a step, or a checkpoint of another run: RUN@STEP")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--losses", default="losses.jsonl", help="a line of JSON for every step")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if WINDOWS_PER_STEP % (WINDOWS_PER_PASS * ranks) != 0:
        raise SystemExit(f"{ranks} ranks cannot divide {WINDOWS_PER_STEP} windows into passes of {WINDOWS_PER_PASS}")
    # Not for Holdfast: without these, two runs of the same training differ in the last bits.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    torch.manual_seed(0)  # the same weights on every rank
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(1 + rank)  # another dropout on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    loader = ShuffledWindows(rank, ranks)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": holdfast.PerRank(loader)}
    losses = options.losses if rank == 0 else os.devnull
    with holdfast.CheckpointManager(options.run, state) as manager, open(losses, "a", buffering=1) as log:
        start = manager.restore(options.restore, strategy=holdfast.LoadStrategy(on_world_change="adapt"))
        tokens_seen = start.progress.get("tokens_seen", 0)
        print(json.dumps({"resumed_from": start.step, "ranks": ranks, "weights": weights_digest(model)}), file=log)
        for step in range(start.next_step, options.steps):
            loss = train_step(model, optimizer, loader, ranks)
            scheduler.step()
            tokens_seen += WINDOWS_PER_STEP * CONTEXT
            print(json.dumps({"step": step, "loss": loss}), file=log)
            if (step + 1) % options.every == 0:
                manager.save(step, metrics={"loss": loss}, progress={"tokens_seen": tokens_seen})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
