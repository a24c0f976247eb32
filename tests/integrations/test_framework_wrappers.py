"""Optimizers, schedulers and loaders in the wrappers of Accelerate and Lightning are stored as what is inside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import UsageError
from holdfast.saving.staging.step_hooks import StepHooks, changes_in_step_alone
from holdfast.state.names import kind_of, unwrap
from holdfast.testing import values
from tests.ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("torchdata")

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torchdata.stateful_dataloader import StatefulDataLoader

NAMES = ("model", "optimizer", "scheduler", "loader")
ROWS = torch.arange(60.0).reshape(20, 3) / 60
STEPS = 13  # two and a half epochs of one process


class Training(NamedTuple):
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    forget_accelerate()
    yield
    forget_accelerate()


def forget_accelerate() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(*, seedable: bool = True, stateful: bool = True, dispatch: bool | None = None) -> Accelerator:
    config = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=seedable, dispatch_batches=dispatch
    )
    return Accelerator(cpu=True, dataloader_config=config)


def build(seed: int = 3, loader: type[Any] = DataLoader) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Training(model, optimizer, scheduler, loader(TensorDataset(ROWS), batch_size=4, shuffle=True))


def accelerated(using: Accelerator, seed: int = 3, loader: type[Any] = DataLoader) -> Training:
    return Training(*using.prepare(*build(seed, loader)))


def train(training: Training, start: int, until: int, after: Callable[[int], object] = lambda step: None) -> list[Any]:
    """Train up to a step, over as many epochs as it takes; what each step saw and lost."""
    log: list[Any] = []
    step = start
    while True:
        for (batch,) in training.loader:
            step += 1
            loss = training.model(batch).pow(2).mean()
            loss.backward()
            training.optimizer.step()
            training.scheduler.step()
            training.optimizer.zero_grad()
            log.append((step, batch.flatten().tolist(), loss.item()))
            after(step)
            if step == until:
                return log


def components(training: Training, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    return {name: getattr(training, name) for name in names}


def resumed(make: Callable[[], Training], folder: str, stop: int) -> list[Any]:
    """Train up to `stop`, save there, and go on with new objects."""
    first = make()
    with holdfast.CheckpointManager(folder, components(first)) as manager:
        log = train(first, 0, stop, lambda step: manager.save(step) if step == stop else None)
    second = make()
    torch.manual_seed(99)
    with holdfast.CheckpointManager(folder, components(second)) as manager:
        assert manager.restore().step == stop
    return log + train(second, stop, STEPS)


def resume_everywhere(make: Callable[[], Training], folder: str) -> list[int]:
    expected = train(make(), 0, STEPS)
    return [stop for stop in range(1, STEPS) if resumed(make, f"{folder}/{stop}", stop) != expected]


@pytest.mark.slow
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_a_training_under_accelerate_resumes_exactly_at_every_step(loader: type[Any], tmp_path: Path) -> None:
    using = accelerator()
    assert resume_everywhere(lambda: accelerated(using, loader=loader), str(tmp_path)) == []


@pytest.mark.slow
def test_dispatched_batches_resume_exactly_at_every_step(tmp_path: Path) -> None:
    using = accelerator(dispatch=True)
    assert resume_everywhere(lambda: accelerated(using), str(tmp_path)) == []


def resume_on_rank(rank: int, folder: str) -> list[int]:
    using = accelerator()
    assert using.num_processes == 2
    expected = train(accelerated(using), 0, 8)
    wrong = []
    for stop in (2, 3, 4):  # an epoch has three batches for each rank
        first = accelerated(using)
        with holdfast.CheckpointManager(f"{folder}/{stop}", components(first)) as manager:
            log = train(first, 0, stop)
            manager.save(stop)
        second = accelerated(using)
        torch.manual_seed(99)
        with holdfast.CheckpointManager(f"{folder}/{stop}", components(second)) as manager:
            manager.restore()
        if log + train(second, stop, 8) != expected:
            wrong.append(stop)
    return wrong


def scenes(rank: int, folder: str) -> tuple[list[int], list[str], str]:
    """All that two ranks are started for, once: to import the frameworks takes longer than all of it."""
    return resume_on_rank(rank, f"{folder}/a"), crossing(rank, f"{folder}/b"), lost_order(rank, f"{folder}/c")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[str], str]]:
    return values(run_ranks(2, scenes, str(tmp_path_factory.mktemp("ranks"))))


@pytest.mark.slow
def test_two_ranks_under_accelerate_resume_exactly(two_ranks: list[tuple[list[int], list[str], str]]) -> None:
    assert [wrong for wrong, _, _ in two_ranks] == [[], []]


def crossing(rank: int, folder: str) -> list[str]:
    """Save wrapped and restore bare, and the other way round; what differs."""
    using = accelerator()
    some = ("model", "optimizer", "scheduler")
    wrong = []
    for way in ("wrapped", "bare"):
        first = accelerated(using)
        train(first, 0, 3)
        bare = Training(first.model, unwrap(first.optimizer), unwrap(first.scheduler), None)
        saved = first if way == "wrapped" else bare
        with holdfast.CheckpointManager(f"{folder}/{way}", components(saved, some)) as manager:
            manager.save(3)
        second = accelerated(using, seed=8) if way == "bare" else build(seed=8)
        with holdfast.CheckpointManager(f"{folder}/{way}", components(second, some)) as manager:
            manager.restore()
        wrong += [f"{way}: {path}" for path in differing(first.optimizer.state_dict(), second.optimizer.state_dict())]
        wrong += [f"{way}: {path}" for path in differing(first.scheduler.state_dict(), second.scheduler.state_dict())]
        rates = [one.optimizer.param_groups[0]["lr"] for one in (first, second)]
        wrong += [] if rates[0] == rates[1] else [f"{way}: learning rates {rates}"]
    return wrong


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [found for index in range(len(one)) for found in differing(one[index], other[index], f"{path}.{index}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [path]


@pytest.mark.slow
def test_wrapped_and_bare_objects_restore_each_other_on_two_ranks(
    two_ranks: list[tuple[list[int], list[str], str]],
) -> None:
    assert [wrong for _, wrong, _ in two_ranks] == [[], []]


def test_wrapped_and_bare_objects_restore_each_other(tmp_path: Path) -> None:
    assert crossing(0, str(tmp_path)) == []


def stateful(seed: int) -> Training:
    """A training whose loader can be bare, too: it has a state without Accelerate."""
    return build(seed, StatefulDataLoader)


@pytest.mark.parametrize("way", ["wrapped", "bare"])
def test_wrapped_and_bare_loaders_restore_each_other(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    using = accelerator(seedable=False)
    makes = {"wrapped": lambda: using.prepare(stateful(3).loader), "bare": lambda: stateful(3).loader}
    other = "bare" if way == "wrapped" else "wrapped"
    first = makes[way]()
    with holdfast.CheckpointManager(tmp_path, {"loader": first}, rng=False) as manager:
        batches = iter(first)
        next(batches), next(batches)
        manager.save(2)
        rest = [batch.tolist() for (batch,) in batches]
    assert holdfast.resolve(tmp_path, "latest").manifest.trees[0].type == "StatefulDataLoader"
    second = makes[other]()
    with (
        holdfast.CheckpointManager(tmp_path, {"loader": second}, rng=False) as manager,
        caplog.at_level(logging.WARNING, logger="holdfast"),
    ):
        manager.restore()
    assert [batch.tolist() for (batch,) in second] == rest
    assert ("saved without Accelerate" in caplog.text) == (way == "bare")


def test_a_save_right_after_a_restore_has_the_restored_position(tmp_path: Path) -> None:
    using = accelerator()
    first = accelerated(using).loader
    with holdfast.CheckpointManager(tmp_path / "one", {"loader": first}) as manager:
        batches = iter(first)
        next(batches), next(batches)
        manager.save(2)
        rest = [batch.tolist() for (batch,) in batches]
    second = accelerated(using).loader
    with holdfast.CheckpointManager(tmp_path / "one", {"loader": second}) as manager:
        manager.restore()
    with holdfast.CheckpointManager(tmp_path / "two", {"loader": second}) as manager:
        manager.save(2)
    third = accelerated(using).loader
    with holdfast.CheckpointManager(tmp_path / "two", {"loader": third}) as manager:
        manager.restore()
    assert [batch.tolist() for (batch,) in third] == rest


def test_another_seed_of_the_sampler_is_a_mismatch_and_not_another_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = accelerator().prepare(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    with holdfast.CheckpointManager(tmp_path, {"loader": first}) as manager:
        next(iter(first))
        manager.save(0)
    torch.manual_seed(1)
    second = accelerator().prepare(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    with holdfast.CheckpointManager(tmp_path, {"loader": second}) as manager:
        with pytest.raises(holdfast.StateMismatchError, match="the seed 0, and that of its sampler is 1"):
            manager.restore()


def test_a_prepared_loader_without_a_state_is_refused(tmp_path: Path) -> None:
    loader = accelerated(accelerator(stateful=False)).loader
    with pytest.raises(UsageError, match="use_stateful_dataloader=True"):
        holdfast.CheckpointManager(tmp_path, {"loader": loader})


def lost_order(rank: int, folder: str) -> str:
    """Restore a loader whose order Accelerate does not keep; what is logged."""
    records: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("holdfast").addHandler(Collector(logging.WARNING))
    forget_accelerate()
    loader = accelerated(accelerator(seedable=False)).loader
    with holdfast.CheckpointManager(folder, {"loader": loader}) as manager:
        next(iter(loader))
        manager.save(1)
        manager.restore()
    return "\n".join(records)


def test_workers_that_began_in_another_order_than_the_samplers_are_refused(tmp_path: Path) -> None:
    loader = accelerator().prepare(
        DataLoader(list(range(8)), shuffle=True, num_workers=1, multiprocessing_context="fork")
    )
    with pytest.raises(UsageError, match="not that of its SeedableRandomSampler"):
        holdfast.CheckpointManager(tmp_path / "run", {"loader": loader})


@pytest.mark.slow
def test_an_order_that_is_lost_in_the_share_of_a_rank_is_warned_of(
    two_ranks: list[tuple[list[int], list[str], str]],
) -> None:
    for _, _, text in two_ranks:
        assert "lost in the BatchSamplerShard around it" in text


def test_a_wrapper_beside_what_it_wraps_is_refused(tmp_path: Path) -> None:
    training = accelerated(accelerator())
    inner = unwrap(training.optimizer)
    assert type(inner) is torch.optim.AdamW
    with pytest.raises(UsageError, match="the same AdamW as 'optimizer'"):
        holdfast.CheckpointManager(tmp_path, {"model": training.model, "optimizer": training.optimizer, "again": inner})
    with holdfast.CheckpointManager(tmp_path, {"model": training.model, "optimizer": inner}) as manager:
        with pytest.raises(UsageError, match="the same AdamW as 'optimizer'"):
            manager.attach("again", training.optimizer)


class Manual(LightningModule):
    """A module that saves and restores through what Lightning hands to it: wrapped optimizers."""

    def __init__(self, work: Callable[[Manual, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.work = work
        self.log_of_losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self.work(self, index)
        loss = self.body(batch[0]).pow(2).mean()
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[call-arg]
        optimizer.zero_grad()
        self.log_of_losses.append(loss.item())


def fit(work: Callable[[Manual, int], None], rows: torch.Tensor) -> Manual:
    module = Manual(work)
    trainer = Trainer(max_epochs=1, barebones=True, accelerator="cpu")
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=2))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wrapped", "bare"])
def test_what_lightning_wraps_resumes_exactly(form: str, tmp_path: Path) -> None:
    def of(module: Manual, form: str) -> dict[str, Any]:
        optimizer: Any = module.optimizers()
        return {"model": module.body, "optimizer": optimizer if form == "wrapped" else unwrap(optimizer)}

    def save(module: Manual, index: int) -> None:
        if index == 5:
            with holdfast.CheckpointManager(tmp_path, of(module, form)) as manager:
                manager.save(5)

    def restore(module: Manual, index: int) -> None:
        if index == 0:
            with holdfast.CheckpointManager(tmp_path, of(module, "wrapped")) as manager:
                assert manager.restore().step == 5

    expected = fit(save, ROWS).log_of_losses
    assert fit(restore, ROWS[10:]).log_of_losses == expected[5:]


class Copies:
    """Stands in for copies that a step must wait for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait_for_staging(self) -> None:
        self.waits += 1


def assert_step_waits(optimizer: Any) -> None:
    copies = Copies()
    inner = unwrap(optimizer)
    assert changes_in_step_alone(inner)
    hooks = StepHooks(copies)
    hooks.install([inner])
    optimizer.step()
    assert copies.waits == 1
    hooks.remove()


def test_a_step_of_a_wrapper_waits_for_copies() -> None:
    training = accelerated(accelerator())
    training.model(ROWS).sum().backward()
    assert_step_waits(training.optimizer)
    model, optimizer = Fabric(accelerator="cpu", devices=1).setup(*build()[:2])
    model(ROWS).sum().backward()
    assert kind_of("optimizer", optimizer) == "optimizer"
    assert type(unwrap(optimizer)) is torch.optim.AdamW
    assert_step_waits(optimizer)


@pytest.mark.slow
def test_a_step_of_lightnings_wrapper_waits_for_copies() -> None:
    seen: list[int] = []

    def work(module: Manual, index: int) -> None:
        if index == 0:
            optimizer: Any = module.optimizers()
            module.body(ROWS).sum().backward()
            assert_step_waits(optimizer)
            seen.append(index)

    fit(work, ROWS)
    assert seen == [0]
