"""Ray Train on this machine: committed checkpoints are reported and not copied, and a killed worker costs no step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train", reason="ray is there without ray[train]")

STEPS = 8
pytestmark = [pytest.mark.slow, pytest.mark.limit(180)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"holdfast-ray-{os.getpid()}"  # sockets want a short path
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
        object_store_memory=128 << 20,
    )
    yield
    ray.shutdown()


def train(config: dict[str, Any]) -> None:
    """A training function as a user of Ray writes it. Worker `kill[0]` is killed once, after step `kill[1]`."""
    import hashlib
    import signal
    from pathlib import Path

    import ray.train
    import torch
    from ray.train.torch import prepare_model

    import holdfast
    from holdfast.integrations.ray import RayReporter, run_folder

    torch.manual_seed(0)
    rank, seen = ray.train.get_context().get_world_rank(), Path(config["seen"])
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank)
    manager = holdfast.CheckpointManager(run_folder(), {"model": model, "optimizer": optimizer})
    with manager, RayReporter(manager) as reporter:
        for step in range(manager.restore().next_step, config["steps"]):
            loss = model(torch.randn(4, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reporter.report(manager.save(step), {"loss": loss.item(), "step": step})
            with (seen / f"{rank}").open("a") as file:
                file.write(f"{step} {loss.item()!r}\n")
            if config.get("kill") == (rank, step) and not (seen / "killed").exists():
                (seen / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    (seen / f"weights-{rank}").write_text(digest.hexdigest())


def fit(folder: Path, workers: int, *, function: Any = train, num_to_keep: int | None = None, **config: Any) -> Any:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    seen = folder / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        function,
        train_loop_config={"steps": STEPS, "seen": str(seen), **config},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="experiment",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=2 if "kill" in config else 0),
            checkpoint_config=CheckpointConfig(num_to_keep=num_to_keep),
        ),
    )
    return trainer.fit()


def losses(folder: Path, rank: int) -> dict[int, str]:
    """The last loss of each step: a step that is trained again after a kill replaces the one before."""
    lines = (folder / "seen" / f"{rank}").read_text().splitlines()
    return {int(step): loss for step, loss in (line.split() for line in lines)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_changes_no_bit_and_ray_lists_the_checkpoints_themselves(
    workers: int, cluster: None, tmp_path: Path
) -> None:
    chance = random.Random()
    kill = (chance.randrange(workers), chance.randrange(1, STEPS - 1))
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    result = fit(undisturbed, workers)
    run = undisturbed / "experiment" / "holdfast"
    assert [found.step for found in holdfast.checkpoints(run)] == list(reversed(range(STEPS)))
    assert Path(result.checkpoint.path).parent == run
    assert holdfast.resolve(result.checkpoint.path).step == STEPS - 1
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == list(range(STEPS))

    result = fit(killed, workers, kill=kill, num_to_keep=2)
    run = killed / "experiment" / "holdfast"
    assert (killed / "seen" / "killed").exists()
    for rank in range(workers):
        assert losses(killed, rank) == losses(undisturbed, rank), kill
        one, other = ((folder / "seen" / f"weights-{rank}").read_text() for folder in (killed, undisturbed))
        assert one == other, kill
    assert result.metrics["step"] == STEPS - 1
    # What was committed and, because of the kill, not known to Ray stays: reports that it had not looked at are lost.
    kept = {found.step for found in holdfast.checkpoints(run)}
    assert {STEPS - 1, STEPS - 2} <= kept <= {STEPS - 1, STEPS - 2, *range(kill[1] + 1)}
    assert holdfast.verify(run).ok
    if workers == 1:
        # The same experiment once more: Ray finds all that it lists, and there is nothing left to train.
        again = fit(killed, workers, num_to_keep=2)
        assert holdfast.resolve(again.checkpoint.path).step == STEPS - 1


def misuse(config: dict[str, Any]) -> None:
    """Write down what each wrong use says."""
    from pathlib import Path

    import torch

    import holdfast
    from holdfast.integrations.ray import RayReporter, run_folder

    def said(work: Any) -> str:
        try:
            work()
        except holdfast.UsageError as error:
            return str(error)
        return "nothing"

    model, seen = torch.nn.Linear(2, 2), Path(config["seen"])
    found = [said(lambda: run_folder("a/b"))]
    with holdfast.CheckpointManager(seen / "a", {"model": model}, keep=holdfast.KeepLast(2)) as manager:
        found.append(said(lambda: RayReporter(manager)))
    with holdfast.CheckpointManager(seen / "b", {"model": model}, keep=holdfast.KeepAll()) as manager:
        reporter = RayReporter(manager)
        found.append(said(lambda: reporter.report(manager.save(0), {}, wait=True)))
        found.append(said(lambda: reporter.report(5, {})))
        found.append(said(lambda: reporter.report(manager.save(1), 5)))
    (seen / "said").write_text("\n".join(found))


def test_wrong_uses_are_refused_with_a_reason(cluster: None, tmp_path: Path) -> None:
    fit(tmp_path, 1, function=misuse)
    found = (tmp_path / "seen" / "said").read_text()
    assert "name='a/b'" in found
    assert "keep=KeepLast(n=2) of the manager removes checkpoints that Ray Train lists" in found
    assert "is not below the folder of the Ray experiment" in found
    assert "handle=5" in found
    assert "metrics=5" in found
    assert "nothing" not in found.splitlines()
