"""Trainings of Lightning that end early resume to the same bits; what users of `ModelCheckpoint` know holds."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

import holdfast
from holdfast.storage.registry import open_storage
from holdfast.testing import FullStorage, Outcome, values
from tests.ranks import run_ranks

pytest.importorskip("lightning")
pytest.importorskip("torchdata")

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.integrations.lightning_training import Net, Samples, Stop, StopTraining, Stream, result, train

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
        ((5,), {"kind": "persistent workers"}),
        ((12, 14), {"kind": "still persistent workers"}),
        ((5, 12, 13), {"kind": "stateful"}),
        ((5, 12), {"kind": "generator"}),
        ((5, 12, 13), {"kind": "stateful stream"}),
        ((5, 13), {"kind": "stream"}),
        ((8, 9), {"kind": "distributed"}),
        ((7, 12), {"accumulate_grad_batches": 5, "saving": {"every_n_train_steps": 1}}),
        ((6, 7), {"val_check_interval": 0.5}),
        ((13,), {"max_epochs": None, "max_steps": 30}),
        ((13,), {"reload_dataloaders_every_n_epochs": 2}),
        ((9,), {"limit_train_batches": 7, "kind": "stateful"}),
        ((12, 13), {"plateau": "epoch"}),
        ((7, 12, 20), {"plateau": "epoch", "val_check_interval": 0.5, "saving": {}}),
        ((13,), {"saving": {"save_on_train_epoch_end": False, "monitor": "val_loss"}}),
        ((9,), {"saving": {"train_time_interval": timedelta(0)}}),
        # The validation after batch 6 asks for a save, in the middle of the second accumulation.
        ((9,), {"saving": {"save_on_train_epoch_end": False}, "accumulate_grad_batches": 4, "val_check_interval": 0.5}),
    ],
    ids=str,
)
def test_a_training_resumes_to_the_same_bits(stops: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    module = partial(Net, plateau=options.pop("plateau", None))
    whole = uninterrupted(module=module, **options)
    for stop in stops:
        resumed = interrupted(tmp_path / str(stop), stop, module=module, **options)
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


@pytest.mark.slow
def test_metrics_that_were_logged_before_a_resume_are_known_after_it(tmp_path: Path) -> None:
    """Validations come after the batches 5 and 10 of an epoch, and the scheduler's step at its end."""
    module = partial(Net, plateau="epoch")
    saving: dict[str, Any] = {"monitor": "val_loss", "every_n_train_steps": 1, "save_top_k": -1}
    options: dict[str, Any] = {"val_check_interval": 5, "max_epochs": 2}

    def scores(run: Path) -> dict[int, float | None]:
        return {found.step: found.metrics.get("val_loss") for found in holdfast.checkpoints(run)}

    whole = result(
        train(HoldfastCheckpoint(tmp_path / "whole", save_mode="sync", **saving), module=seeded(module), **options)
    )
    resumed = interrupted(tmp_path / "resumed", 10, module=module, saving=saving, **options)
    assert (len(resumed["seen"]), resumed) == (14, tail_of(whole, resumed))
    assert scores(tmp_path / "resumed") == scores(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_resume_with_less_data_than_was_trained_on_is_an_error(kind: str, tmp_path: Path) -> None:
    def short() -> Any:
        return DataLoader(Subset(Samples(), range(16)), 4) if kind == "plain" else DataLoader(Short(), 4)

    class Short(Stream):
        def __iter__(self) -> Any:
            return itertools.islice(super().__iter__(), 16)

    with pytest.raises(StopTraining):
        train(HoldfastCheckpoint(tmp_path, every_n_train_steps=1, save_mode="sync"), Stop(8), kind=kind)
    with pytest.raises(holdfast.StateMismatchError, match="8 batches of this epoch are done, and the training data"):
        trainer_with(HoldfastCheckpoint(tmp_path), max_epochs=3).fit(Net(), short())
    strategy = holdfast.LoadStrategy(skip=("loader",))
    trainer = trainer_with(HoldfastCheckpoint(tmp_path, strategy=strategy), max_epochs=2)
    trainer.fit(Net(), short())
    # Lightning ends an epoch of known length after one more batch, and any other at the end of its data.
    assert (trainer.global_step, trainer.current_epoch) == (8 + (1 if kind == "plain" else 4) + 4, 2)


@pytest.mark.slow
def test_a_resume_with_other_data_in_the_middle_of_an_epoch_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StopTraining):
        train(HoldfastCheckpoint(tmp_path, every_n_train_steps=5, save_mode="sync"), Stop(5))

    def warnings_of(kind: str) -> str:
        caplog.clear()
        train(HoldfastCheckpoint(tmp_path, selector=5, save_top_k=-1), kind=kind, max_epochs=1)
        return "".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")

    assert "not that of the saved position" not in warnings_of("plain")
    assert "batch size was 4 and is 8, number of batches was 12 and is 6" in warnings_of("large")
    assert "sampler was RandomSampler and is SequentialSampler; " in warnings_of("sequential")


@pytest.mark.slow
def test_workers_that_outlive_an_epoch_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for stop, warned in ((5, False), (12, True), (14, True)):
        caplog.clear()
        interrupted(tmp_path / str(stop), stop, kind="persistent workers", max_epochs=2)
        assert any("persistent_workers=True" in record.getMessage() for record in caplog.records) is warned, stop


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
        callbacks.append(HoldfastCheckpoint(run, every_n_train_steps=1, save_top_k=-1, timeout=60))
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
    run, stop = tmp_path / "run", random.randrange(8, BATCHES // 2)
    killed: list[Outcome] = run_ranks(2, whole_then_killed, run, stop, sharded, tmp_path)
    assert -9 in [outcome.exit_code for outcome in killed], killed
    for rank, resumed in enumerate(values(run_ranks(2, resumed_on_two_ranks, run, sharded))):
        whole = json.loads((tmp_path / str(rank)).read_text())
        assert 0 < len(resumed["seen"]) < len(whole["seen"]) == BATCHES // 2
        assert resumed == tail_of(whole, resumed), stop
    if not sharded:
        one_rank_goes_on(run)


def one_rank_goes_on(run: Path) -> None:
    """Resume what two ranks saved: at the end of their first epoch, which has 6 batches, and after the next batch."""
    strategy = holdfast.LoadStrategy(on_world_change="adapt")
    net = train(HoldfastCheckpoint(run, selector=6, strategy=strategy, save_top_k=-1), max_epochs=2)
    assert (len(net.seen), net.trainer.global_step) == (12, 18)
    with pytest.raises(holdfast.StateMismatchError, match="cannot be shared out among 1"):
        train(HoldfastCheckpoint(run, selector=7, strategy=strategy))
    strategy = holdfast.LoadStrategy(on_world_change="skip")
    net = train(HoldfastCheckpoint(run, selector=7, strategy=strategy, save_top_k=-1), max_epochs=2)
    assert len(net.seen) == 11  # one batch of the second epoch was done


class Data(LightningDataModule):  # type: ignore[misc]
    """Loaders, hyper-parameters and a state of its own."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs = 0

    def train_dataloader(self) -> Any:
        self.epochs += 1
        return DataLoader(Samples(), self.hparams["size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(), 24)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"] + 10


class Counting(Callback):  # type: ignore[misc]
    """A callback with a state, and with the hooks of checkpoints."""

    def __init__(self) -> None:
        self.batches = 0
        self.loaded: dict[str, Any] = {}

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        assert set(checkpoint["state_dict"]) == set(module.state_dict())
        checkpoint["from the callback"] = [checkpoint["global_step"], "text"]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded = {**checkpoint}


def trainer_with(*callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )


@pytest.mark.slow
def test_everything_that_lightning_keeps_comes_back(tmp_path: Path) -> None:
    early = EarlyStopping("val_loss", patience=5)
    net, counting = Net(), Counting()
    trainer_with(HoldfastCheckpoint(tmp_path), counting, early).fit(net, datamodule=Data())
    checkpoint = holdfast.resolve(tmp_path)
    assert (checkpoint.step, checkpoint.progress["epoch"]) == (12, 1)
    assert checkpoint.config == {"width": 8, "plateau": None, "dropout": 0.5}
    assert checkpoint.extra == {"datamodule_hyper_parameters": {"size": 4}}

    again, data, counted, stopping = Net(), Data(), Counting(), EarlyStopping("val_loss", patience=5)
    trainer = trainer_with(HoldfastCheckpoint(tmp_path), counted, stopping, max_epochs=2)
    trainer.fit(again, datamodule=data)
    assert (trainer.global_step, counted.batches, again.notes) == (24, 24, 2)
    assert data.epochs == 1 + 10 + 1
    assert counted.loaded["from the callback"] == [12, "text"]
    assert torch.equal(counted.loaded["callbacks"][early.state_key]["best_score"], early.best_score)
    assert stopping.best_score <= early.best_score


@pytest.mark.slow
def test_averaged_weights_that_a_callback_puts_into_the_checkpoint_come_back(tmp_path: Path) -> None:
    def averaged(*callbacks: Any, seed: int = 1) -> dict[str, Any]:
        average = EMAWeightAveraging(decay=0.9)
        net = train(*callbacks, average, module=seeded(Net), seed=seed, max_epochs=2)
        assert average._average_model is not None
        return {**result(net), "average": [tensor.tolist() for tensor in average._average_model.state_dict().values()]}

    whole = averaged()
    with pytest.raises(StopTraining):
        averaged(HoldfastCheckpoint(tmp_path, every_n_train_steps=5), Stop(5))
    resumed = averaged(HoldfastCheckpoint(tmp_path), seed=3)
    assert len(resumed["seen"]) == len(whole["seen"]) - 5
    assert resumed == tail_of(whole, resumed)


class Scored(Net):
    """A net whose validations have scores that are given."""

    scores = (5.0, 1.0, 4.0, float("nan"), 3.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[min(self.trainer.current_epoch, len(self.scores) - 1)])


def steps_of(run: Path) -> list[int]:
    return sorted(checkpoint.step // 12 for checkpoint in holdfast.checkpoints(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "kept", "best"),
    [
        ({}, [5], 5),
        ({"save_top_k": -1}, [1, 2, 3, 4, 5], 5),
        ({"monitor": "score"}, [2, 5], 2),
        ({"monitor": "score", "save_top_k": 2, "save_last": True}, [2, 5], 2),
        ({"monitor": "score", "mode": "max"}, [1, 5], 1),
        ({"monitor": "score", "save_last": False}, [2], 2),
        ({"monitor": "score", "save_top_k": -1, "every_n_epochs": 2}, [2, 4], 2),
        ({"save_top_k": 0}, [], None),
        ({"save_top_k": 0, "save_last": True}, [5], 5),
        ({"every_n_train_steps": 24}, [4], 4),
        ({"keep": holdfast.KeepEvery(steps=24)}, [2, 4, 5], 5),
    ],
    ids=str,
)
def test_what_stays_is_what_users_of_model_checkpoint_expect(
    saving: dict[str, Any], kept: list[int], best: int | None, tmp_path: Path
) -> None:
    callback = HoldfastCheckpoint(tmp_path, **saving)
    train(callback, module=Scored(), max_epochs=5)
    assert steps_of(tmp_path) == kept
    folders = {checkpoint.step // 12: str(checkpoint.path) for checkpoint in holdfast.checkpoints(tmp_path)}
    assert callback.best_model_path == (folders[best] if best else "")
    assert callback.last_model_path == (folders[max(kept)] if kept else "")
    if "monitor" in saving and best is not None:
        assert callback.best_model_score == Scored.scores[best - 1]
        assert next(iter(callback.best_k_models)) == callback.best_model_path
        assert callback.state_dict()["best_model_path"] == callback.best_model_path


@pytest.mark.slow
def test_the_best_weights_are_tested_by_name_and_by_path(tmp_path: Path) -> None:
    class Tested(Scored):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.net[0].weight.sum().item())

    callback = HoldfastCheckpoint(tmp_path, monitor="score")
    trainer, net = trainer_with(callback, max_epochs=4), Tested()
    data = DataLoader(Samples(), 4)
    trainer.fit(net, data, data)
    latest = net.net[0].weight.sum().item()
    (by_name,) = trainer.test(net, data, ckpt_path="best", verbose=False)
    (by_path,) = trainer_with(HoldfastCheckpoint(tmp_path)).test(
        Tested(), data, ckpt_path=callback.best_model_path, verbose=False
    )
    fresh = Tested()
    holdfast.load_weights(fresh, callback.best_model_path)
    assert by_name["weight"] == by_path["weight"] == pytest.approx(fresh.net[0].weight.sum().item())
    assert by_name["weight"] != pytest.approx(latest)


@pytest.mark.slow
def test_the_last_weights_are_tested_by_name_and_by_run(tmp_path: Path) -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.net[0].weight.sum().item())

    data, run = DataLoader(Samples(), 24), tmp_path / "run"

    def tested(trainer: Trainer, path: Any) -> float:
        return float(trainer.test(Tested(), data, ckpt_path=path, verbose=False)[0]["weight"])

    trainer, net = trainer_with(HoldfastCheckpoint(run, monitor="val_loss"), max_epochs=2), Tested()
    trainer.fit(net, data, data)
    trained = pytest.approx(net.net[0].weight.sum().item())
    assert tested(trainer, "last") == trained
    for path in ("last", str(run)):
        assert tested(trainer_with(HoldfastCheckpoint(run)), path) == trained
    with pytest.raises(holdfast.UsageError, match="the run has no checkpoint"):
        tested(trainer_with(HoldfastCheckpoint(tmp_path / "new")), "last")
    with pytest.raises(holdfast.UsageError, match="is a folder, and neither a checkpoint nor a run"):
        tested(trainer_with(HoldfastCheckpoint(run)), str(tmp_path))
    for refused in (run, tmp_path / "new"):
        with pytest.raises(holdfast.UsageError, match="leave ckpt_path out"):
            trainer_with(HoldfastCheckpoint(refused)).fit(Tested(), data, ckpt_path="last")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stock", "kind"),
    [
        ({"every_n_train_steps": 7}, "stateful sequential"),
        ({"every_n_train_steps": 7}, "sequential"),
        ({"every_n_train_steps": 12}, "sequential"),
        ({"every_n_epochs": 1}, "sequential"),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, "sequential"),
    ],
    ids=str,
)
def test_a_training_of_model_checkpoint_is_imported_and_goes_on(
    stock: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """A file of Lightning has no random state, and, as it is written inside of a hook, not what later hooks do."""

    class Plain(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    def module() -> Net:
        return Plain(dropout=0.0)

    whole = uninterrupted(module=module, kind=f"still {kind}")
    with pytest.raises(StopTraining):
        train(ModelCheckpoint(tmp_path / "stock", **stock), Stop(14), module=seeded(module), kind=f"still {kind}")
    (file,) = (tmp_path / "stock").glob("*.ckpt")
    imported = holdfast.import_checkpoint(file, tmp_path / "run", parameters=module())
    resumed = result(train(HoldfastCheckpoint(tmp_path / "run"), module=seeded(module), seed=5, kind=f"still {kind}"))
    assert len(resumed["seen"]) == BATCHES - imported.step - 1
    assert resumed == tail_of(whole, resumed)


def test_arguments_that_mean_nothing_here_say_where_to_go(tmp_path: Path) -> None:
    unwanted: list[tuple[str, Any, str]] = [
        ("dirpath", "x", "first argument"),
        ("filename", "{epoch}", "links="),
        ("save_weights_only", True, "holdfast.export"),
        ("save_on_exception", True, "between two steps"),
    ]
    for name, value, advice in unwanted:
        with pytest.raises(holdfast.UsageError, match=advice):
            HoldfastCheckpoint(tmp_path, **{name: value})
    with pytest.raises(TypeError, match="every_n_steps"):
        HoldfastCheckpoint(tmp_path, every_n_steps=1)
    wrong: list[dict[str, Any]] = [
        {"mode": "down"},
        {"save_top_k": -2},
        {"save_top_k": 2},
        {"save_last": "link"},
        {"every_n_train_steps": -1},
        {"every_n_train_steps": 5, "every_n_epochs": 1},
        {"train_time_interval": 60},
    ]
    for arguments in wrong:
        with pytest.raises(holdfast.UsageError):
            HoldfastCheckpoint(tmp_path, **arguments)


@pytest.mark.slow
def test_a_path_to_resume_is_refused_beside_a_run(tmp_path: Path) -> None:
    stock = ModelCheckpoint(tmp_path / "stock")
    train(stock, max_epochs=1)
    ours = HoldfastCheckpoint(tmp_path / "run")
    with pytest.raises(holdfast.UsageError, match="import_checkpoint"):
        train(ours, max_epochs=1, ckpt_path=stock.best_model_path)
    train(ours, max_epochs=1)
    with pytest.raises(holdfast.UsageError, match="leave ckpt_path out"):
        train(ours, max_epochs=1, ckpt_path=ours.best_model_path)
    net = train(HoldfastCheckpoint(tmp_path / "other", resume="never"), max_epochs=2, ckpt_path=stock.best_model_path)
    assert len(net.seen) == 12


@pytest.mark.slow
def test_a_metric_that_no_validation_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="'accuracy' that is monitored is not among"):
        train(HoldfastCheckpoint(tmp_path, monitor="accuracy"), max_epochs=1)


@pytest.mark.slow
def test_a_failed_save_is_raised_and_the_run_is_free_after_any_exception(tmp_path: Path) -> None:
    full = FullStorage(open_storage(tmp_path / "full"), room_bytes=2_000)
    with pytest.raises(holdfast.StorageError):
        train(HoldfastCheckpoint(tmp_path / "full", storage=full, every_n_train_steps=3), max_epochs=1)
    run = tmp_path / "run"
    with pytest.raises(StopTraining):
        train(HoldfastCheckpoint(run, every_n_train_steps=4), Stop(9), max_epochs=1)
    assert holdfast.resolve(run).step == 8
    holdfast.unlock(run)  # raises if this process still holds it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_stop_saves_and_stops(name: str, tmp_path: Path) -> None:
    class Signalling(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 4:
                os.kill(os.getpid(), signal.Signals[name])

    before = signal.getsignal(signal.Signals[name])
    stop = holdfast.OnSignal(name)
    net = train(HoldfastCheckpoint(tmp_path, stop=stop), Signalling(), module=seeded(Net))
    assert (len(net.seen), holdfast.resolve(tmp_path).step) == (5, 5)
    resumed = result(train(HoldfastCheckpoint(tmp_path, stop=stop), module=seeded(Net), seed=4))
    assert resumed == tail_of(uninterrupted(), resumed)
    assert signal.getsignal(signal.Signals[name]) is before


@pytest.mark.slow
def test_a_training_that_reached_max_steps_goes_on_with_the_rest_of_its_epoch(tmp_path: Path) -> None:
    train(HoldfastCheckpoint(tmp_path), module=seeded(Net), max_epochs=-1, max_steps=17)
    assert holdfast.resolve(tmp_path).progress == {"epoch": 1, "global_step": 17, "batches_of_epoch": 5}
    resumed = result(train(HoldfastCheckpoint(tmp_path), module=seeded(Net), seed=3))
    assert len(resumed["seen"]) == BATCHES - 17
    assert resumed == tail_of(uninterrupted(), resumed)


def test_a_second_callback_and_a_second_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="more than one HoldfastCheckpoint"):
        train(HoldfastCheckpoint(tmp_path / "a"), HoldfastCheckpoint(tmp_path / "b"))
    trainer = trainer_with(HoldfastCheckpoint(tmp_path / "c"), max_epochs=1)
    data = DataLoader(Samples(), 24)
    trainer.fit(Net(), data)
    with pytest.raises(holdfast.UsageError, match="build a new Trainer"):
        trainer.fit(Net(), data)
