"""Train what one config file describes, under a batch system that may end the job at any time.

    python examples/config_loop/train.py examples/config_loop/base.toml
    python examples/config_loop/train.py examples/config_loop/tune.toml
    torchrun --standalone --nproc-per-node 2 examples/config_loop/train.py examples/config_loop/tune.toml
    sbatch examples/config_loop/job.sbatch examples/config_loop/tune.toml

`base.toml` pretrains a small model of letters; `tune.toml` trains a new head over its frozen body. One process trains
the plain model, several train it sharded with FSDP2. What this example shows:

- The table `[checkpoint]` of the file is a `holdfast.CheckpointConfig`, `[restore]` a `holdfast.LoadStrategy`,
  `[warm_start]` the arguments of `holdfast.load_weights`. A key that does not exist is an error with the nearest one.
- The frozen body is not stored (`Trainable`), but a restore over another body is refused, and so is one with other
  parameters frozen or another alphabet (`guards=`).
- The data loader exists only after the restore: `attach` gives it its position then.
- A signal or the time limit is noticed at a step, in the middle of an evaluation, and in the warm-up. The exit code is
  then 75, and `job.sbatch` puts the job into the queue again.
- An evaluation that was cut short is made up for by the next start, and its result reported to the checkpoint.

Run the same line again after any end: the training goes on with the step after the newest checkpoint. On the same
number of ranks it is, bit for bit, the training that was not interrupted.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import holdfast
from holdfast.data import ElasticLoader

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: try again later
TEXT = Path(__file__).parents[1].joinpath("harbour.txt").read_text()
LETTERS = "".join(sorted(set(TEXT)))
CONTEXT = 8
EVALUATION_BATCHES = 6


class LetterModel(nn.Module):
    """Predict a letter from the letters in front of it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(CONTEXT * width, 2 * width), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(2 * width, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(letters)))


@dataclass(frozen=True, kw_only=True)
class Data:
    part: str
    batch_size: int  # over all ranks
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    steps: int
    learning_rate: float
    evaluate_every: int
    warm_up_passes: int = 0
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the file says. Any other table or key is an error, so that one that is misspelt is not passed over."""

    model: dict[str, Any]
    data: Data
    training: Schedule
    checkpoint: holdfast.CheckpointConfig
    restore: holdfast.LoadStrategy = field(default_factory=holdfast.LoadStrategy)
    warm_start: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Config:
        tables = tomllib.loads(path.read_text())
        readers = {
            "data": lambda table: Data(**table),
            "training": lambda table: Schedule(**table),
            "checkpoint": holdfast.CheckpointConfig.from_dict,
            "restore": holdfast.LoadStrategy.from_dict,
        }
        read = {}
        try:
            for name, table in tables.items():
                read[name] = readers.get(name, dict)(table)
            return cls(**read)
        except (TypeError, holdfast.UsageError) as error:
            raise SystemExit(f"{path}: {error}") from None


def freeze(model: nn.Module, globs: tuple[str, ...]) -> list[str]:
    """Freeze the parameters that a glob names, and return their names. A glob that names none is an error."""
    names = dict(model.named_parameters())
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise SystemExit(f"training.freeze: no parameter is called '{glob}'; there are {', '.join(names)}")
    frozen = [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    for name in frozen:
        names[name].requires_grad_(False)
    return frozen


def windows_of(part: str) -> tuple[TensorDataset, Tensor]:
    """Return the windows of a part of the text for the training, and others for the evaluation."""
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    windows = letters.unfold(0, CONTEXT + 1, 1)
    parts = dict(zip(("first half", "second half"), windows.chunk(2), strict=True))
    if part not in parts:
        raise SystemExit(f"data.part: there is no '{part}'; there are {', '.join(parts)}")
    chosen = parts[part]
    return TensorDataset(chosen[:-96]), chosen[-96:]


class Training:
    """One start of the training, from the config to the exit code."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if config.data.batch_size % self.ranks != 0:
            raise SystemExit(f"data.batch_size: {self.ranks} ranks cannot divide {config.data.batch_size} samples")
        torch.manual_seed(0)  # the same weights on every rank
        self.model = LetterModel(**config.model)
        if config.warm_start is not None:
            # At every start, also of a run that goes on: the frozen body is not in its checkpoints.
            loaded = holdfast.load_weights(self.model, **config.warm_start)
            self.report(warm_start=len(loaded.loaded), left=list(loaded.excluded))
        self.frozen = freeze(self.model, config.training.freeze)
        if self.ranks > 1:
            fully_shard(self.model.body)
            fully_shard(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.training.learning_rate)
        torch.manual_seed(1 + self.rank)  # another dropout on every rank

    def run(self) -> int:
        """Train to the last step, or until the job has to end; return the exit code."""
        checkpoint, last = self.config.checkpoint, holdfast.OnLastStep(self.config.training.steps)
        settings = replace(checkpoint, save=last if checkpoint.save is None else checkpoint.save | last)
        model = holdfast.Trainable(self.model) if self.frozen else self.model
        state = {"model": model, "optimizer": self.optimizer}
        built = holdfast.create_checkpoint_manager(settings, state=state, config_to_store=self.stored)
        with built.manager as self.manager:  # the `CheckpointManager` inside of the built-in class
            # The warm-up draws random numbers, so the restored random state is set after it.
            start = self.manager.restore(strategy=self.config.restore, guards=self.guards, rng="later")
            self.report(resumed_from=start.step, ranks=self.ranks)
            dataset, self.held_out = windows_of(self.config.data.part)
            self.loader = ElasticLoader(
                dataset,
                self.config.data.batch_size // self.ranks,
                shuffle=True,
                seed=self.config.data.seed,
                drop_last=True,
            )
            self.manager.attach("loader", self.loader)
            warm = self.warm_up()
            self.manager.restore_rng()
            finished = warm and self.make_up_for_evaluation(start) and self.train(start)
            return 0 if finished else REQUEUE

    @property
    def stored(self) -> dict[str, Any]:
        """Return the config that is stored with every checkpoint, as plain data."""
        data, training = asdict(self.config.data), asdict(self.config.training)
        return {"model": self.config.model, "data": data, "training": training, "warm_start": self.config.warm_start}

    @property
    def guards(self) -> dict[str, Any]:
        """Return what must be the same for a checkpoint to be continued."""
        return {"letters": LETTERS, "frozen": self.frozen}

    def warm_up(self) -> bool:
        """Compile, autotune, fill caches: passes that train nothing. Return whether the training may begin."""
        for number in range(self.config.training.warm_up_passes):
            with torch.no_grad():
                self.model(self.held_out[:8, :-1])
            self.report(warm_up=number)
            # All ranks ask equally often, and get the same answer. No step is done, so there is nothing to save.
            if self.manager.should_stop_now():
                return False
        return True

    def train(self, start: holdfast.RestoreResult) -> bool:
        """Train from where the start is; return whether the last step is done."""
        batches = self.batches()
        last, every = self.config.training.steps - 1, self.config.training.evaluate_every
        for step in range(start.next_step, last + 1):
            loss = self.train_step(next(batches))
            metrics = {"loss": loss}
            due = step == last or (step > 0 and step % every == 0)
            val_loss = self.evaluate() if due else None
            if val_loss is not None:
                metrics["val_loss"] = val_loss
            self.report(step=step, **metrics)
            samples = (step + 1) * self.config.data.batch_size
            progress = {"samples": samples, "unevaluated": due and val_loss is None}
            if self.manager.step(step, metrics=metrics, progress=progress, guards=self.guards):
                return step == last and val_loss is not None
        return True

    def batches(self) -> Iterator[Tensor]:
        """Yield batches for ever. The loader knows its epoch, and after a restore its position in it."""
        while True:
            for (batch,) in self.loader:
                yield batch

    def train_step(self, windows: Tensor) -> float:
        loss = nn.functional.cross_entropy(self.model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(loss)

    def evaluate(self) -> float | None:
        """Return the loss on windows that are not trained on, or None where the job has to end before it is known."""
        self.model.eval()
        total = 0.0
        try:
            for number, windows in enumerate(self.held_out.chunk(EVALUATION_BATCHES)):
                with torch.no_grad():
                    mine = windows[self.rank :: self.ranks]
                    total += self.mean(nn.functional.cross_entropy(self.model(mine[:, :-1]), mine[:, -1]))
                self.report(evaluated=number)
                if number + 1 < EVALUATION_BATCHES and self.manager.should_stop_now():
                    return None  # the `step` after this evaluation saves
        finally:
            self.model.train()
        return total / EVALUATION_BATCHES

    def make_up_for_evaluation(self, start: holdfast.RestoreResult) -> bool:
        """Evaluate the restored step if the last start did not come to it; return whether the training may go on."""
        if not start.progress.get("unevaluated", False):
            return True
        val_loss = self.evaluate()
        if val_loss is None:
            return False  # the checkpoint still says that it is not evaluated
        self.manager.report(start.step, {"val_loss": val_loss})
        self.report(step=start.step, **start.metrics, val_loss=val_loss)
        return True

    def mean(self, value: Tensor) -> float:
        """Return the mean of a number over all ranks."""
        total = value.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item() / self.ranks

    def report(self, **values: Any) -> None:
        if self.rank == 0:
            print(json.dumps(values), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    config = Config.read(parser.parse_args().config)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return Training(config).run()
    dist.init_process_group("gloo")
    code = Training(config).run()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
