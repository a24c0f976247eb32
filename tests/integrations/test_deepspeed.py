"""DeepSpeed on the CPU: a killed training goes on to the same bits, and what is loaded is what DeepSpeed saved."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing import values
from tests.integrations.deepspeed_training import STEPS, build, plain, step, train
from tests.ranks import run_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "stage", "bf16"), [(1, 1, False), (2, 2, True)])
def test_a_killed_training_goes_on_to_the_same_bits(ranks: int, stage: int, bf16: bool, tmp_path: Path) -> None:
    kill_after = random.Random().randrange(3, STEPS)
    undisturbed = values(run_ranks(ranks, train, tmp_path / "undisturbed", stage, bf16, None))
    outcomes = run_ranks(ranks, train, tmp_path / "killed", stage, bf16, kill_after)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * ranks
    resumed = values(run_ranks(ranks, train, tmp_path / "killed", stage, bf16, None))
    for before, after in zip(undisturbed, resumed, strict=True):
        # A checkpoint of each second step, of which the newest is the one before the kill.
        assert after["began"] == (kill_after - 1) // 2 * 2
        assert after["losses"] == {at: loss for at, loss in before["losses"].items() if at > after["began"]}
        assert after["states"] == before["states"]
    found = holdfast.checkpoints(tmp_path / "killed" / "holdfast")
    assert sorted({checkpoint.step for checkpoint in found}) == [2, 4, 6]
    for checkpoint in found:
        assert checkpoint.extra["deepspeed"]["tag"] == f"global_step{checkpoint.step}"
        assert holdfast.verify(checkpoint.path).ok


def compare_with_deepspeed(rank: int, folder: Path) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from holdfast.integrations.deepspeed import attach

    for stage in range(4):
        engine = build(stage)
        for _ in range(2):
            step(engine, rank)
        client_state = {"counts": {1: (2, 3)}, "weights": torch.arange(5.0)}
        own, ours = folder / f"own-{stage}", folder / f"ours-{stage}"
        engine.save_checkpoint(str(own), client_state=client_state)
        checkpoints = attach(engine)
        engine.save_checkpoint(str(ours), client_state=client_state)
        files = sorted(file.relative_to(own) for file in own.rglob("*.pt"))
        assert len(files) == (1, 3, 3, 4)[stage]
        for file in files:
            assert plain(checkpoints.load(str(ours / file))) == plain(TorchCheckpointEngine().load(str(own / file)))
        checkpoints.detach()
        assert isinstance(engine.checkpoint_engine, TorchCheckpointEngine)


def refused(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(holdfast.HoldfastError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def save_and_refuse(rank: int, folder: Path) -> None:
    from holdfast.integrations.deepspeed import attach

    engine = build(1)
    step(engine, rank)
    engine.save_checkpoint(str(folder / "own"))
    assert "not Linear" in refused(attach, torch.nn.Linear(1, 1))
    checkpoints = attach(engine, keep=holdfast.KeepLast(2))
    assert "attach() once" in refused(attach, engine)
    assert not checkpoints.restore_rng()

    # What one rank cannot store is an error on all of them, and the next save works.
    assert "generator" in refused(engine.save_checkpoint, str(folder), client_state={"bad": (one for one in "a")})
    assert "not a file of the checkpoint" in refused(engine.save_16bit_model, str(folder))
    # Files of DeepSpeed's own are neither replaced nor read.
    assert "not written through Holdfast" in refused(engine.save_checkpoint, str(folder / "own"))
    assert "not written through Holdfast" in refused(engine.load_checkpoint, str(folder / "own"))
    assert checkpoints.newest_tag(folder) is None
    # A tag of which nothing is committed.
    assert "no checkpoint with the tag 'global_step1'" in refused(engine.load_checkpoint, str(folder), "global_step1")

    # A tag that is saved again is the later one, and only the newest are kept.
    for count in range(4):
        engine.save_checkpoint(str(folder), tag="same" if count else "first", client_state={"count": count})
    assert engine.load_checkpoint(str(folder))[1]["count"] == 3
    assert checkpoints.newest_tag(folder) == "same"
    # Checkpoints of one step take one place.
    assert [found.step for found in holdfast.checkpoints(folder / "holdfast")] == [1]
    assert "'first'" in refused(engine.load_checkpoint, str(folder), "first")

    # A restart goes on with the line of what it loads, by which the retention counts.
    checkpoints.detach()
    checkpoints = attach(engine, keep=holdfast.KeepLast(2))
    engine.load_checkpoint(str(folder), tag=checkpoints.newest_tag(folder))
    step(engine, rank)
    engine.save_checkpoint(str(folder))
    assert [found.step for found in holdfast.checkpoints(folder / "holdfast")] == [2, 1]
    checkpoints.detach()


def load_with_another_number_and_damage(rank: int, folder: Path) -> None:
    from holdfast.integrations.deepspeed import attach

    engine = build(1, seed=5)
    before = plain(engine.module.state_dict())
    checkpoints = attach(engine)
    message = refused(engine.load_checkpoint, str(folder))
    assert "saved by 2 ranks, and 1 load it" in message
    assert "not resharded" in message
    assert plain(engine.module.state_dict()) == before

    damaged = folder / "damaged"
    engine.save_checkpoint(str(damaged))
    damage(next((damaged / "holdfast").glob("step-*/*.safetensors")))
    with pytest.raises(holdfast.CorruptCheckpointError):
        engine.load_checkpoint(str(damaged))
    checkpoints.detach()


def damage(file: Path) -> None:
    """Flip a bit of every tensor in a file of safetensors, and leave its header as it is."""
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(byte ^ 1 for byte in content[start:])
    file.chmod(0o644)
    file.write_bytes(content)


def test_what_is_loaded_is_what_deepspeed_would_have_loaded(tmp_path: Path) -> None:
    values(run_ranks(2, compare_with_deepspeed, tmp_path))


def test_what_cannot_be_stored_or_loaded_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    values(run_ranks(2, save_and_refuse, tmp_path))
    values(run_ranks(1, load_with_another_number_and_damage, tmp_path))
