"""Accelerate: all that an accelerator has prepared is saved, and resumed in the middle of an epoch, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing import values
from tests.integrations.accelerate_training import Counter, train
from tests.ranks import run_ranks

accelerate = pytest.importorskip("accelerate")

BATCHES = 12  # of an epoch, in one process

pytestmark = pytest.mark.slow


def lines(log: Path, rank: int) -> dict[str, str]:
    """What was written for each step, the last where it was trained twice."""
    found = (line.partition(" ") for line in Path(f"{log}-{rank}").read_text().splitlines())
    return {step: rest for step, _, rest in found}


def assert_killed_and_resumed(folder: Path, ranks: int, kill_at: int, *options: Any) -> None:
    values(run_ranks(ranks, train, str(folder / "a"), str(folder / "log-a"), -1, *options))
    killed = run_ranks(ranks, train, str(folder / "b"), str(folder / "log-b"), kill_at, *options)
    assert all(outcome.exit_code == -9 for outcome in killed), killed
    values(run_ranks(ranks, train, str(folder / "b"), str(folder / "log-b"), -1, *options))
    for rank in range(ranks):
        undisturbed, resumed = lines(folder / "log-a", rank), lines(folder / "log-b", rank)
        assert resumed == undisturbed, f"killed after step {kill_at}"
        assert "weights" in resumed


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    ("workers", "accumulate", "noise"),
    [(0, 1, 0.1), (2, 1, 0.0), (0, 2, 0.1)],
    ids=["plain, random numbers in the dataset", "2 workers", "2 micro-batches"],
)
def test_one_process_that_is_killed_at_a_random_step_resumes_exactly(
    workers: int, accumulate: int, noise: float, tmp_path: Path
) -> None:
    kill_at = random.randrange(1, 3 * BATCHES // accumulate - 1)
    assert_killed_and_resumed(tmp_path, 1, kill_at, workers, accumulate, noise)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("kill_at", [BATCHES, BATCHES + 1], ids=["last batch of an epoch", "first of the next"])
def test_a_kill_at_the_end_of_an_epoch_resumes_exactly(kill_at: int, tmp_path: Path) -> None:
    assert_killed_and_resumed(tmp_path, 1, kill_at, 0, 1, 0.1)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_that_are_killed_resume_exactly(fsdp: bool, tmp_path: Path) -> None:
    # Both are killed after the same step, so that no rank waits for the other in a collective.
    assert_killed_and_resumed(tmp_path, 2, random.randrange(1, 3 * BATCHES // 2 - 1), 0, 1, 0.1, fsdp)


# A run of Accelerate's own checkpoints


@pytest.mark.guarantee("G8")
def test_a_folder_of_save_state_is_imported_and_resumed_exactly(tmp_path: Path, accelerator: Any) -> None:
    from holdfast.integrations.accelerate import HoldfastState

    def build() -> tuple[Any, ...]:
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        return *accelerator.prepare(model, optimizer, scheduler, loader), counter

    def epoch(model: Any, optimizer: Any, scheduler: Any, loader: Any, counter: Any) -> list[float]:
        losses = []
        for batch in loader:
            loss = model(batch).square().mean() * torch.rand(())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.seen += len(batch)
            losses.append(loss.item())
        return losses

    parts = build()
    epoch(*parts)
    accelerator.save_state(str(tmp_path / "theirs"))
    uninterrupted = [epoch(*parts) for _ in range(2)]
    parts = build()
    imported = holdfast.import_checkpoint(
        tmp_path / "theirs",
        tmp_path / "run",
        step=3,
        parameters=parts[0],
        components={"custom_checkpoint_0.pkl": "counter"},
    )
    assert imported.step == 3
    torch.manual_seed(31337)
    with HoldfastState(accelerator, tmp_path / "run", objects={"counter": parts[-1]}) as state:
        result = state.load_state(strategy=holdfast.LoadStrategy(on_missing="skip"))
        assert result.missing == ("dataloader",)
        assert parts[-1].seen == 12
        assert [epoch(*parts) for _ in range(2)] == uninterrupted


def test_a_batch_that_is_none_does_not_end_the_resumed_epoch(accelerator: Any, tmp_path: Path) -> None:
    from holdfast.integrations.accelerate import HoldfastState

    def build() -> Any:
        accelerator.free_memory()
        return accelerator.prepare(torch.utils.data.DataLoader(list(range(6)), collate_fn=lambda _: None))

    loader = build()
    with HoldfastState(accelerator, tmp_path) as state:
        batches = iter(loader)
        next(batches), next(batches)
        state.save_state(2)
    loader = build()
    with HoldfastState(accelerator, tmp_path) as state:
        assert state.load_state().step == 2
        assert list(loader) == [None] * 4


# What is refused


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Any]:
    from accelerate.state import AcceleratorState, GradientState

    yield accelerate.Accelerator(cpu=True, project_dir=tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_what_is_prepared_later_is_not_left_out_silently(accelerator: Any) -> None:
    from holdfast.integrations.accelerate import HoldfastState

    accelerator.prepare(torch.nn.Linear(2, 2))
    with HoldfastState(accelerator) as state:
        state.save_state(1)
        accelerator.prepare(torch.nn.Linear(2, 2))
        with pytest.raises(holdfast.UsageError, match="after HoldfastState was made"):
            state.save_state(2)
        with pytest.raises(holdfast.UsageError, match="after HoldfastState was made"):
            state.load_state()


def test_registered_objects_have_names_and_not_positions(accelerator: Any, tmp_path: Path) -> None:
    from holdfast.integrations.accelerate import HoldfastState

    model = accelerator.prepare(torch.nn.Linear(2, 2))
    first, second = Counter(), Counter()
    accelerator.register_for_checkpointing(first, second)
    with pytest.raises(holdfast.UsageError, match="two objects would have the name 'Counter'"):
        HoldfastState(accelerator)
    with pytest.raises(holdfast.UsageError, match=r"objects\['other'\] is not registered"):
        HoldfastState(accelerator, objects={"first": first, "second": second, "other": model})
    first.seen, second.seen = 1, 2
    with HoldfastState(accelerator, objects={"first": first, "second": second}) as state:
        state.save_state(7)
    first.seen = second.seen = 0
    accelerator._custom_objects.reverse()
    with HoldfastState(accelerator, objects={"second": second, "first": first}) as state:
        assert state.load_state().step == 7
    assert (first.seen, second.seen) == (1, 2)


def test_the_limit_of_the_project_is_kept(tmp_path: Path, accelerator: Any) -> None:
    from holdfast.integrations.accelerate import HoldfastState

    accelerator.project_configuration.total_limit = 2
    accelerator.prepare(torch.nn.Linear(2, 2))
    with HoldfastState(accelerator) as state:
        for step in range(1, 5):
            state.save_state(step, wait=True)
    assert [found.step for found in holdfast.checkpoints(tmp_path / "checkpoints")] == [4, 3]


def test_what_cannot_be_stored_is_refused(accelerator: Any, tmp_path: Path) -> None:
    from accelerate.utils import DataLoaderConfiguration

    from holdfast.integrations.accelerate import HoldfastState

    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.gradient_accumulation_steps = 2
    with HoldfastState(accelerator) as state, accelerator.accumulate(model):
        with pytest.raises(holdfast.UsageError, match="gradients are still being accumulated"):
            state.save_state(1)
    hook = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(holdfast.UsageError, match="hooks of register_save_state_pre_hook"):
        HoldfastState(accelerator)
    hook.remove()
    accelerator.dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator.prepare(torch.utils.data.DataLoader(list(range(8)), shuffle=True))
    with pytest.raises(holdfast.UsageError, match="the order of the RandomSampler of a StatefulDataLoader"):
        HoldfastState(accelerator)
    with pytest.raises(holdfast.UsageError, match=r"give an accelerate\.Accelerator"):
        HoldfastState(model)  # type: ignore[arg-type]
