"""torchtitan: its containers and loader, in a loop as its trainer has it, are saved, killed and resumed to the bit."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.testing import values
from tests.ranks import run_ranks

pytest.importorskip("torchtitan")

STEPS = 12
pytestmark = pytest.mark.slow


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """A stream of one rank's own, with a state, as torchtitan's text datasets are."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield torch.full((3,), float(10 * self.position + self.rank))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class TrainState:
    """What torchtitan's trainer stores of itself."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def build(rank: int, size: int, folder: str, seed: int = 0, own: bool = False, **options: Any) -> tuple[Any, ...]:
    """Build everything, with Holdfast's checkpoint manager or torchtitan's own."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    from holdfast.integrations.torchtitan import HoldfastCheckpointManager

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    torch.manual_seed(100 + rank + seed)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=STEPS)
    loader = ParallelAwareDataloader(Stream(rank), dp_rank=rank, dp_world_size=size, batch_size=2)
    state = TrainState()
    manager: Any = CheckpointManager if own else HoldfastCheckpointManager
    checkpointer = manager.Config(enable=True, **{"interval": 2, **options}).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    return model, optimizers, schedulers, loader, state, checkpointer


def train(
    rank: int, folder: str, log: str, kill_at: int = -1, steps: int = STEPS, draws: bool = True, **options: Any
) -> str:
    """Train as torchtitan's trainer does: load, batches of a generator, a step, a save."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizers, schedulers, loader, state, checkpointer = build(rank, size, folder, **options)
    checkpointer.load(step=-1)
    model.train(draws)
    batches = iter(loader)
    with Path(f"{log}-{rank}").open("a") as file:
        while state.step < steps:
            state.step += 1
            batch = next(batches) / 100
            state.ntokens_seen += batch.numel()
            loss = model(batch).square().mean() * (torch.rand(()) if draws else 1)
            loss.backward()
            checkpointer.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            file.write(f"{state.step} {batch.flatten().tolist()} {loss.item()!r} {state.ntokens_seen}\n")
            file.flush()
            checkpointer.save(state.step, last_step=state.step == steps)
            if state.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    checkpointer.close()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    return digest.hexdigest()


def lines(log: Path, rank: int) -> dict[str, str]:
    found = (line.partition(" ") for line in Path(f"{log}-{rank}").read_text().splitlines())
    return {step: rest for step, _, rest in found}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_training_resumes_exactly(ranks: int, tmp_path: Path) -> None:
    kill_at = random.randrange(2, STEPS - 1)
    undisturbed = values(run_ranks(ranks, train, str(tmp_path / "a"), str(tmp_path / "log-a")))
    killed = run_ranks(ranks, train, str(tmp_path / "b"), str(tmp_path / "log-b"), kill_at)
    assert all(outcome.exit_code == -9 for outcome in killed), killed
    resumed = values(run_ranks(ranks, train, str(tmp_path / "b"), str(tmp_path / "log-b")))
    assert resumed == undisturbed, kill_at
    for rank in range(ranks):
        assert lines(tmp_path / "log-b", rank) == lines(tmp_path / "log-a", rank), kill_at


def options_and_retention(rank: int, folder: str) -> list[Any]:
    def steps_of(name: str) -> list[int]:
        return [found.step for found in holdfast.checkpoints(Path(folder) / name / "checkpoint")]

    found: list[Any] = []
    train(rank, f"{folder}/kept", f"{folder}/log", keep_latest_k=2, interval=3, enable_first_step_checkpoint=True)
    found.append(steps_of("kept"))
    train(rank, f"{folder}/first", f"{folder}/log", steps=1, enable_first_step_checkpoint=True)
    found.append(steps_of("first"))
    # Loads a step of its own choice, without the data, and never saves.
    *_, loader, state, checkpointer = build(
        rank, 1, f"{folder}/kept", 7, load_only=True, exclude_from_loading=["dataloader"]
    )
    assert checkpointer.load(step=9)
    assert not checkpointer.save(9, last_step=True)
    checkpointer.close()
    found.append((state.step, next(iter(loader)).tolist()))
    # Weights of another run, of Holdfast.
    model, *_, state, checkpointer = build(
        rank, 1, f"{folder}/new", 7, initial_load_path=f"{folder}/kept/checkpoint@12"
    )
    assert checkpointer.load()
    checkpointer.close()
    weights = model[0].weight.full_tensor().tolist()
    found.append((state.step, weights == holdfast_weights(f"{folder}/kept/checkpoint@12")))
    return found


def holdfast_weights(source: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    holdfast.load_weights(model, source)
    return model[0].weight.tolist()


def test_the_options_have_the_meanings_of_torchtitan(tmp_path: Path) -> None:
    [found] = values(run_ranks(1, options_and_retention, str(tmp_path)))
    kept, first, load_only, weights = found
    assert kept == [12, 9]
    assert first == [1]
    assert load_only == (9, [[10.0] * 3, [20.0] * 3])
    assert weights == (0, True)


def test_a_run_of_torchtitans_own_checkpoints_is_taken_over_exactly(tmp_path: Path) -> None:
    undisturbed = values(run_ranks(2, train_quietly, str(tmp_path / "a"), str(tmp_path / "log-a"), False))
    resumed = values(run_ranks(2, train_quietly, str(tmp_path / "b"), str(tmp_path / "log-b"), True))
    assert resumed == undisturbed
    for rank in range(2):
        assert lines(tmp_path / "log-b", rank) == lines(tmp_path / "log-a", rank)


def train_quietly(rank: int, folder: str, log: str, taken_over: bool) -> str:
    """Train without random numbers, which torchtitan does not store; the first six steps under its own manager."""
    if taken_over:
        own = {"own": True, "last_save_model_only": False}
        train(rank, f"{folder}/own", log, steps=6, draws=False, **own)
        *objects, state, theirs = build(rank, 2, f"{folder}/own", 7, **own)
        assert theirs.load(step=6)
        theirs.close()
        from holdfast.integrations.torchtitan import HoldfastCheckpointManager

        model, optimizers, schedulers, loader = objects
        ours = HoldfastCheckpointManager.Config(enable=True).build(
            dataloader=loader,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": state},
            sd_adapter=None,
            base_folder=folder,
        )
        assert ours.save(state.step, last_step=True)
        ours.close()
    return train(rank, folder, log, draws=False)


def reshard(rank: int, folder: str, log: str) -> list[str]:
    """A checkpoint of two ranks on one: refused for the data alone, before anything is changed."""
    *_, checkpointer = build(rank, 1, folder, 7)
    found = []
    try:
        checkpointer.load()
    except holdfast.HoldfastError as error:
        found.append(str(error))
    checkpointer.close()
    *_, state, checkpointer = build(rank, 1, folder, 7, exclude_from_loading=["dataloader"], rng=False)
    assert checkpointer.load()
    checkpointer.close()
    return [*found, str(state.step)]


def test_another_number_of_ranks_takes_all_but_the_data(tmp_path: Path) -> None:
    values(run_ranks(2, train, str(tmp_path / "a"), str(tmp_path / "log")))
    [[error, step]] = values(run_ranks(1, reshard, str(tmp_path / "a"), str(tmp_path / "log")))
    assert "dataloader" in error
    assert step == str(STEPS)


def test_options_that_mean_nothing_here_are_refused() -> None:
    from holdfast.integrations.torchtitan import HoldfastCheckpointManager

    with pytest.raises(ValueError, match="holdfast export"):
        HoldfastCheckpointManager.Config(last_save_model_only=True)
    with pytest.raises(ValueError, match="Invalid async_mode"):
        HoldfastCheckpointManager.Config(async_mode="sometimes")  # type: ignore[arg-type]
