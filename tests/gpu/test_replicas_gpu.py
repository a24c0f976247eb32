"""Replicas on a GPU: what differs is found, and no save waits for the device to find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import HoldfastError, UsageError
from holdfast.testing import run_ranks, values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SECOND_CYCLES = 1_500_000_000
COUNT = 150


def caught(work: Callable[[], Any]) -> HoldfastError | None:
    try:
        work()
    except HoldfastError as error:
        return error
    return None


def state_on_gpu(count: int = COUNT, size: int = 40_000) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def drift_at_the_first_save(rank: int, folder: str) -> Any:
    model, optimizer = state_on_gpu()
    if rank == 1:
        with torch.no_grad():
            model[77].view(torch.int32)[-1] ^= 1
    manager = holdfast.CheckpointManager(folder, {"model": model, "optimizer": optimizer}, rng=False, timeout=60)
    return caught(lambda: manager.save(0))


def drift_that_begins_later(rank: int, folder: str, mode: str) -> Any:
    model, optimizer = state_on_gpu()
    state = {"model": model, "optimizer": optimizer}
    manager = holdfast.CheckpointManager(folder, state, mode=mode, rng=False, timeout=60)
    manager.save(0).wait()
    if rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(torch.int32)[0] ^= 1
    for step in range(1, 12):
        error = caught(lambda step=step: manager.save(step).wait())
        if error is not None:
            return step, error, caught(lambda: manager.save(20))
        torch.cuda.synchronize()
    return None, None, None


def saves_while_the_device_is_busy(rank: int, folder: str) -> Any:
    model, optimizer = state_on_gpu()
    state = {"model": model, "optimizer": optimizer}
    manager = holdfast.CheckpointManager(folder, state, mode="async_pinned", rng=False, timeout=60)
    for step in range(3):
        manager.save(step).wait()
    busy, event = [], torch.cuda.Event()
    for step in range(3, 5):
        dist.barrier()
        torch.cuda._sleep(SECOND_CYCLES)
        event.record()
        handle = manager.save(step)
        busy.append(not event.query())
        handle.wait()
    manager.close()
    return busy


@pytest.mark.guarantee("G2")
def test_a_drifted_replica_on_a_gpu_is_an_error(tmp_path: Path) -> None:
    for error in values(run_ranks(2, drift_at_the_first_save, str(tmp_path))):
        assert isinstance(error, UsageError)
        assert error.leaf == "model.77"
        assert "1 of 600 replicated leaves differ" in str(error)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["async", "async_pinned", "async_device"])
def test_a_drift_on_a_gpu_that_begins_later_is_found_with_the_step_that_was_sampled(tmp_path: Path, mode: str) -> None:
    seen = values(run_ranks(2, drift_that_begins_later, str(tmp_path), mode))
    for step, error, again in seen:
        assert isinstance(error, UsageError)
        assert isinstance(again, UsageError), "no save goes through while a difference is known"
        assert error.leaf == "model.0"
        assert f"first seen at step {step - 1}" in str(error)
        assert f"{COUNT} of 600" in str(error)


@pytest.mark.guarantee("G2")
def test_a_comparison_does_not_wait_for_the_device(tmp_path: Path) -> None:
    assert values(run_ranks(2, saves_while_the_device_is_busy, str(tmp_path))) == [[True, True]] * 2
