"""Runs for the tests of commands: made once, and copied for each test, which may change its copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy
import pytest
import torch

import holdfast
from tests.unit.cli.scene import LOSSES, components, save_steps


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints, steps 10, 20 (tagged) and 30, and an attempt at 40 that nothing committed."""
    run = tmp_path_factory.mktemp("made") / "run"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    config = {"lr": 1e-3, "dtype": torch.bfloat16, "scale": numpy.float32(0.5), "layers": [{"width": 4}, {"width": 3}]}
    with holdfast.CheckpointManager(run, {"model": model, "optimizer": optimizer}, config=config) as manager:
        for step in (10, 20, 30):
            manager.save(
                step,
                metrics={"val_loss": 1 / step, "val/acc": step},
                progress={"tokens": step * 100},
                extra={"pair": (1, 2)},
                guards={"data": "abc"},
                tag="good" if step == 20 else None,
            )
    (run / "step-000000040").mkdir()
    (run / "step-000000040" / "attempt.json").write_text("{}")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


@pytest.fixture(scope="session")
def made_of_five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five checkpoints. The least loss is that of step 20, the highest accuracy that of step 10."""
    run = tmp_path_factory.mktemp("made") / "run"
    with holdfast.CheckpointManager(run, components()) as manager:
        for step, loss in LOSSES.items():
            manager.save(step, metrics={"val_loss": loss, "accuracy": 1 - step / 100})
    return run


@pytest.fixture
def run_of_five(made_of_five: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_of_five, tmp_path / "run", symlinks=True))


@pytest.fixture(scope="session")
def made_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the steps 1 and 2, each saved by a manager of its own."""
    run = tmp_path_factory.mktemp("made") / "run"
    save_steps(run, 1, 2)
    return run


@pytest.fixture
def run_of_two(made_of_two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_of_two, tmp_path / "run", symlinks=True))
