"""Trainings of Lightning that end early resume to the same bits; what users of `ModelCheckpoint` know holds."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.testing import Outcome, values
from tests.ranks import run_ranks

pytest.importorskip("lightning")
pytest.importorskip("torchdata")

from lightning.pytorch.callbacks import ModelCheckpoint

from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.integrations.lightning_training import Net, Stop, StopTraining, result, train

BATCHES = 36  # of three epochs


def tail_of(whole: dict[str, Any], resumed: dict[str, Any]) -> dict[str, Any]:
    """Return the uninterrupted training as one that resumed where `resumed` did should be."""
    return {**whole, "seen": whole["seen"][len(whole["seen"]) - len(resumed["seen"]) :]}


def interrupted(run: Path, stop: int, *, module: Callable[[], Net] = Net, **options: Any) -> dict[str, Any]:
    """Train until a batch, resume with other seeds, and return the result of the resumed training."""
    saving = {"save_mode": "sync", **options.pop("saving", {"every_n_train_steps": stop})}
    with pytest.raises(StopTraining):
        train(HoldfastCheckpoint(run, **saving), Stop(stop), module=seeded(module), **options)
    return result(train(HoldfastCheckpoint(run, **saving), module=seeded(module), seed=stop + 100, **options))


def seeded(module: Callable[[], Net]) -> Net:
    torch.manual_seed(1)
    return module()


def uninterrupted(*, module: Callable[[], Net] = Net, saving: Any = None, **options: Any) -> dict[str, Any]:
    return result(train(module=seeded(module), **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "options"),
    [
        ((5, 12, 13), {}),
        ((14,), {"kind": "workers"}),
        ((5, 12, 13), {"kind": "stateful"}),
        ((5, 13), {"kind": "generator"}),
        ((5, 12, 13), {"kind": "stateful stream"}),
        ((5, 13), {"kind": "stream"}),
        ((8, 9), {"kind": "distributed"}),
        ((7, 12), {"accumulate_grad_batches": 5, "saving": {"every_n_train_steps": 1}}),
        ((6, 7), {"val_check_interval": 0.5}),
        ((13,), {"max_epochs": None, "max_steps": 30}),
        ((12, 13), {"module": lambda: Net(plateau="epoch")}),
        ((7, 12, 20), {"module": lambda: Net(plateau="epoch"), "val_check_interval": 0.5, "saving": {}}),
        ((13,), {"saving": {"save_on_train_epoch_end": False, "monitor": "val_loss"}}),
        ((9,), {"saving": {"train_time_interval": timedelta(0)}, "accumulate_grad_batches": 4}),
    ],
    ids=str,
)
def test_a_training_resumes_to_the_same_bits(stops: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    whole = uninterrupted(**options)
    for stop in stops:
        resumed = interrupted(tmp_path / str(stop), stop, **options)
        assert len(resumed["seen"]) < len(whole["seen"])
        assert resumed == tail_of(whole, resumed), stop


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distributed", "stateful distributed"])
def test_stock_lightning_goes_wrong_where_this_is_exact(kind: str, tmp_path: Path) -> None:
    """In the middle of the second epoch, with a DistributedSampler."""
    whole = uninterrupted(kind=kind)
    resumed = interrupted(tmp_path / "ours", 9, kind=kind)
    assert resumed == tail_of(whole, resumed)

    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=1)
    with pytest.raises(StopTraining):
        train(stock, Stop(9), module=seeded(Net), kind=kind)
    theirs = result(train(kind=kind, module=seeded(Net), ckpt_path=stock.best_model_path))
    assert len(theirs["seen"]) == len(resumed["seen"])
    samples = [batch[2] for batch in theirs["seen"]]
    assert samples != [batch[2] for batch in resumed["seen"]]


def killed_alone(rank: int, run: Path, batch: int) -> None:
    train(HoldfastCheckpoint(run, every_n_train_steps=1), Stop(batch, kill=True), module=seeded(Net))


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    batch = random.randrange(2, BATCHES)
    (outcome,) = run_ranks(1, killed_alone, tmp_path / "run", batch, backend=None)
    assert outcome.exit_code == -9, outcome
    resumed = result(train(HoldfastCheckpoint(tmp_path / "run"), module=seeded(Net), seed=7))
    assert 0 < len(resumed["seen"]) < BATCHES
    assert resumed == tail_of(uninterrupted(), resumed)


class Sharded(Net):
    """The net as `ModelParallelStrategy` wants it: sharded with FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        # A buffer is not sharded; what it averages is.
        self.average = torch.zeros(1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.add_(1.0)


def on_two_ranks(rank: int, run: Path, *, stop: int | None, sharded: bool, seed: int = 1, **options: Any) -> Any:
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
    }
    strategy: Any = "ddp"
    if sharded:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    callbacks = [] if stop is None else [Stop(stop, kill=True)]
    if options.pop("saved", True):
        callbacks.append(HoldfastCheckpoint(run, every_n_train_steps=1, timeout=60))
    return result(
        train(
            *callbacks, module=seeded(Sharded if sharded else Net), strategy=strategy, devices=2, seed=seed, **options
        )
    )


def whole_then_killed(rank: int, run: Path, stop: int, sharded: bool, folder: Path) -> None:
    whole = on_two_ranks(rank, run, stop=None, sharded=sharded, saved=False)
    (folder / str(rank)).write_text(json.dumps(whole))
    on_two_ranks(rank, run, stop=stop, sharded=sharded)


def resumed_on_two_ranks(rank: int, run: Path, sharded: bool) -> Any:
    return on_two_ranks(rank, run, stop=None, sharded=sharded, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_ranks_resume_to_the_same_bits(sharded: bool, tmp_path: Path) -> None:
    run, stop = tmp_path / "run", random.randrange(2, BATCHES // 2)
    killed: list[Outcome] = run_ranks(2, whole_then_killed, run, stop, sharded, tmp_path)
    assert -9 in [outcome.exit_code for outcome in killed], killed
    for rank, resumed in enumerate(values(run_ranks(2, resumed_on_two_ranks, run, sharded))):
        whole = json.loads((tmp_path / str(rank)).read_text())
        assert 0 < len(resumed["seen"]) < len(whole["seen"]) == BATCHES // 2
        assert resumed == tail_of(whole, resumed), stop
