"""A small Lightning training whose result depends on everything that a resume must bring back."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = 48
BATCH = 4


class Samples(Dataset[Any]):  # type: ignore[misc]
    """Numbered samples with noise from the global generator, as augmentations draw it."""

    def __init__(self, noise: float = 0.01) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(4, generator=generator) + self.noise * torch.rand(4)


class Stream(IterableDataset[Any]):  # type: ignore[misc]
    """The same samples without a length."""

    def __iter__(self) -> Any:
        dataset = Samples()
        return (dataset[index] for index in range(SAMPLES))


class StatefulStream(Stream):
    """A stream that keeps its position, which a StatefulDataLoader stores."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        dataset = Samples()
        while self.position < SAMPLES:
            self.position += 1
            yield dataset[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Net(pl.LightningModule):  # type: ignore[misc]
    """A net with dropout; notes the samples, the loss and the learning rate of each batch."""

    def __init__(self, width: int = 8, plateau: str | None = None, dropout: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(dropout), torch.nn.Linear(width, 1))
        self.register_buffer("average", torch.zeros(width, 4))
        self.seen: list[Any] = []
        self.notes = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, x = batch
        loss = self.net(x).pow(2).mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append([self.trainer.current_epoch, batch_idx, index.tolist(), loss.item(), rate])
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        # It comes after the callbacks' hook: a save from inside of that lacks it.
        self.average.lerp_(self.net[0].weight.detach(), 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[1]).pow(2).mean() + torch.rand(()), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes += 1
        checkpoint["notes"] = {"saves": self.notes, "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert torch.equal(checkpoint["notes"]["tensor"], torch.arange(3))
        self.notes = checkpoint["notes"]["saves"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if not self.hparams["plateau"]:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        entry = {"scheduler": scheduler, "monitor": "val_loss", "interval": self.hparams["plateau"], "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": entry}


class StopTraining(Exception):
    """Ends a training at a batch, from the inside."""


class Stop(pl.Callback):  # type: ignore[misc]
    """Ends the training before a batch, counted over all epochs: by an exception, or by SIGKILL."""

    def __init__(self, batch: int, *, kill: bool = False) -> None:
        self.batch = batch
        self.kill = kill

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx >= self.batch:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise StopTraining


def loader(kind: str) -> Any:
    """Return a training loader. `kind` has what is special about it: "stateful", "workers", "persistent", "sequential",
    "generator", "distributed", "stream", "large" for larger batches, "still" for samples without noise; a "plain"
    one is shuffled."""
    options: dict[str, Any] = {
        "batch_size": 8 if "large" in kind else BATCH,
        "num_workers": 2 if "workers" in kind else 0,
    }
    options["persistent_workers"] = "persistent" in kind
    dataset: Any = Samples(noise=0.0 if "still" in kind else 0.01)
    if "stream" in kind:
        dataset = StatefulStream() if "stateful" in kind else Stream()
    elif "distributed" in kind:
        options["sampler"] = DistributedSampler(dataset, num_replicas=2, rank=0)
    else:
        options["shuffle"] = "sequential" not in kind
        options["generator"] = torch.Generator().manual_seed(5) if "generator" in kind else None
    return (StatefulDataLoader if "stateful" in kind else DataLoader)(dataset, **options)


def train(
    *callbacks: Any,
    kind: str = "plain",
    seed: int = 1,
    module: Net | None = None,
    ckpt_path: str | None = None,
    validate: bool = True,
    **options: Any,
) -> Net:
    """Train for three epochs and return the module."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    net = module or Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "devices": 1, **options},
    )
    validation = DataLoader(Samples(), 24) if validate else None
    trainer.fit(net, loader(kind), validation, ckpt_path=ckpt_path)
    return net


def result(net: Net) -> dict[str, Any]:
    """Return what two trainings are compared by: each batch with its samples and loss, and the state at the end."""
    optimizer = net.trainer.optimizers[0]
    tensors = [*net.state_dict().values(), *(state["exp_avg"] for state in optimizer.state.values())]
    return {
        "seen": net.seen,
        "tensors": [getattr(tensor, "full_tensor", lambda own=tensor: own)().tolist() for tensor in tensors],
        "lr": optimizer.param_groups[0]["lr"],
        "global_step": net.trainer.global_step,
        "epoch": net.trainer.current_epoch,
    }
