"""Saves of device memory behind a training that goes on: nothing torn, nothing stale, nothing left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODES = ["async", "async_pinned", "async_device"]
STEPS = 200
MEBI = 1 << 20
GIBI = 1 << 30


@pytest.fixture(autouse=True)
def peak_of_this_test() -> None:
    """A clone is made where there is room at the training's peak, and another test may have filled the device."""
    torch.cuda.reset_peak_memory_stats()


class Holder:
    """Some tensors as a component. No optimizer owns them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(state)


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, timeout=120, **options)


def training(seed: int, kind: str = "fused") -> dict[str, Any]:
    """Buffers that a forward pass changes, weights that follow others, moments: about 26 MB in all."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(640, 1280), nn.BatchNorm1d(1280), nn.ReLU(), nn.Linear(1280, 640)).cuda()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused", foreach=kind == "foreach")
    return {"model": model, "average": average, "optimizer": optimizer}


def train_one_step(state: dict[str, Any], data: torch.Tensor) -> torch.Tensor:
    """Never waits for the device."""
    loss = state["model"](data).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["average"].update_parameters(state["model"])
    return loss.detach()


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every live tensor by a name."""
    found = {
        f"{part}.{name}": tensor for part in ("model", "average") for name, tensor in state[part].state_dict().items()
    }
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            found[f"optimizer.{name}.{key}"] = value
    return found


def clones_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(state).items()}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names whose tensors differ in any bit."""
    assert sorted(found) == sorted(expected)
    return [name for name, tensor in expected.items() if not same_bits(found[name], tensor)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (one, other))
    return torch.equal(first.view(torch.uint8).cpu(), second.view(torch.uint8).cpu())


def keep_busy(seconds: float = 0.3) -> None:
    """Have the current stream stand still, so that all that is sent to it after this has not happened for a while."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


# What is saved


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("mode", MODES)
def test_every_one_of_200_saves_is_what_the_state_was_at_that_step(mode: Any, kind: str, tmp_path: Path) -> None:
    state = training(0, kind)
    batches = torch.randn(8, 32, 640, device="cuda")
    expected = []
    with manager_of(tmp_path / "run", state, mode=mode) as manager:
        for step in range(STEPS):
            train_one_step(state, batches[step % 8])
            expected.append(clones_of(state))
            manager.save(step)
            # Not the next step yet: a forward pass alone changes buffers, and follows the save without a pause.
            state["model"](batches[0])
    again = training(1, kind)
    with manager_of(tmp_path / "run", again, verify="quick") as manager:
        assert len(manager.checkpoints()) == STEPS
        for step in range(STEPS):
            manager.restore(step)
            assert different(tensors_of(again), expected[step]) == [], step
    shutil.rmtree(tmp_path / "run")


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
def test_a_training_on_a_stream_of_its_own_that_is_far_behind_is_saved_as_it_will_be(mode: Any, tmp_path: Path) -> None:
    """When `save` is called the device has not even begun with the step that is to be saved."""
    state, data = training(0), torch.randn(32, 640, device="cuda")
    expected = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with manager_of(tmp_path, state, mode=mode) as manager, torch.cuda.stream(stream):
        for step in range(6):
            keep_busy()
            train_one_step(state, data)
            expected.append(clones_of(state))
            manager.save(step)
    torch.cuda.synchronize()
    again = training(1)
    with manager_of(tmp_path, again) as manager:
        for step in range(6):
            manager.restore(step)
            assert different(tensors_of(again), expected[step]) == [], step


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
def test_device_tensors_of_odd_types_and_layouts_are_exact(mode: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.randn(300, 200, device="cuda")
    odd = Holder(
        strided=base.t(),
        every_other=base[::2, 1::3],
        empty=base[:0],
        scalar=torch.tensor(3.0, device="cuda"),
        number=torch.tensor(2**40, device="cuda"),
        flags=base > 0,
        half=base.half(),
        brain=base.bfloat16(),
        eighth=base.to(torch.float8_e4m3fn),
        complex=torch.randn(5, 7, dtype=torch.complex64, device="cuda"),
        conjugate=torch.randn(5, 7, dtype=torch.complex128, device="cuda").conj(),
        on_the_host=torch.randn(50),
        double=base.double(),
    )
    expected = {name: tensor.clone() for name, tensor in odd.tensors.items()}
    with manager_of(tmp_path, {"odd": odd}, mode=mode) as manager:
        manager.save(0)
        manager.save(1)
        for tensor in odd.tensors.values():
            if tensor.dtype != torch.float8_e4m3fn:
                tensor.zero_()
    for step in (0, 1):
        again = Holder(**{name: torch.empty_like(tensor) for name, tensor in odd.tensors.items()})
        with manager_of(tmp_path, {"odd": again}) as manager:
            manager.restore(step)
        assert different(again.tensors, expected) == []
        for name, tensor in expected.items():
            assert again.tensors[name].device == tensor.device


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("owner", ["an optimizer", "nobody"])
def test_without_room_for_a_clone_on_the_device_nothing_is_torn_or_stale(owner: str, mode: Any, tmp_path: Path) -> None:
    """The copies then have to be made by the training's own stream, which is behind."""
    torch.cuda.empty_cache()
    weight = nn.Parameter(torch.zeros(64 * MEBI, device="cuda"))
    buffer = torch.zeros(64 * MEBI, device="cuda")
    state: dict[str, Any] = {"buffer": Holder(buffer=buffer)}
    if owner == "an optimizer":
        state |= {"model": nn.ParameterList([weight]), "optimizer": torch.optim.SGD([weight], lr=1.0)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - GIBI - 64 * MEBI, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with manager_of(tmp_path, state, mode=mode) as manager:
        for step in range(4):
            keep_busy()
            with torch.no_grad():
                manager.wait_for_staging()
                weight.fill_(step + 1)
                buffer.fill_(step + 1)
            manager.save(step)
            # Changed at once: whatever reads it now must have been sent before.
            buffer.fill_(-77)
    del filler
    torch.cuda.empty_cache()
    for step in range(4):
        with manager_of(tmp_path, state) as manager:
            manager.restore(step)
        held = state["buffer"].tensors["buffer"]
        assert held.min().item() == held.max().item() == step + 1, f"step {step}"
        if owner == "an optimizer":
            assert weight.min().item() == weight.max().item() == step + 1, f"step {step}"


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_begins_where_a_parameter_does_is_not_taken_for_the_parameter(mode: Any, tmp_path: Path) -> None:
    """The optimizer's step changes its front alone; the rest may change at any time."""
    flat = torch.zeros(128 * MEBI, device="cuda")
    weight = nn.Parameter(flat[:1000])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    holder = Holder(flat=flat)
    with manager_of(tmp_path, {"flat": holder, "optimizer": optimizer}, mode=mode) as manager:
        for step in range(4):
            manager.save(step)
            flat[1000:].add_(1)
    for step in range(4):
        again = Holder(flat=torch.full_like(flat, -1))
        with manager_of(tmp_path, {"flat": again, "optimizer": optimizer}) as manager:
            manager.restore(step)
        rest = again.tensors["flat"][1000:]
        assert rest.min().item() == rest.max().item() == step


# Updates that are no optimizer's step


def update_in_place(
    run: Path, mode: Any, before: Callable[[holdfast.CheckpointManager], None], tries: int
) -> list[int]:
    """Change weights that an optimizer owns behind its back, right after each save; the steps that were saved torn."""
    weight = nn.Parameter(torch.zeros(128 * MEBI, device="cuda"))
    state = {"model": nn.ParameterList([weight]), "optimizer": torch.optim.SGD([weight], lr=1.0)}
    with manager_of(run, state, mode=mode) as manager:
        for step in range(tries):
            manager.save(step)
            before(manager)
            with torch.no_grad():
                weight.add_(1)
    torn = []
    with manager_of(run, state, verify="quick") as manager:
        for step in range(tries):
            manager.restore(step)
            torn += [] if weight.min().item() == weight.max().item() == step else [step]
    shutil.rmtree(run)
    return torn


@pytest.mark.guarantee("G2")
def test_weights_changed_in_place_after_before_update_are_saved_whole(tmp_path: Path) -> None:
    assert update_in_place(tmp_path / "run", "async_pinned", lambda manager: manager.wait_for_staging(), 8) == []


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["async", "async_device"])
def test_weights_changed_in_place_from_a_copy_or_a_clone_need_nothing(mode: Any, tmp_path: Path) -> None:
    assert update_in_place(tmp_path / "run", mode, lambda manager: None, 8) == []


def test_without_the_wait_a_torn_save_is_noticed(tmp_path: Path) -> None:
    """The tests above can fail: a race, so it is only shown where it is hit."""

    def forget_the_wait(manager: holdfast.CheckpointManager) -> None:
        copier = manager._run.saver._async.stager._copier
        assert copier._staging is not None, "there was something to wait for"
        copier._staging = None

    if not update_in_place(tmp_path / "run", "async_pinned", forget_the_wait, 12):
        pytest.skip("the update never overtook the copy on this device")


# What is held, and given back


def belongings() -> tuple[int, int]:
    """The arenas that are mapped here, and the writers."""
    gc.collect()
    arenas = sum("holdfast-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())
    children = " ".join(one.read_text() for one in Path("/proc/self/task").glob("*/children")).split()
    writers = sum(b"holdfast.saving.writer" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)
    return arenas, writers


@pytest.mark.parametrize("mode", MODES)
def test_hooks_memory_and_writers_are_given_back(mode: Any, tmp_path: Path) -> None:
    state, data = training(0), torch.randn(32, 640, device="cuda")
    hooks = state["optimizer"]._optimizer_step_pre_hooks
    assert len(hooks) == 0
    before = belongings()
    torch.cuda.synchronize()
    for round_number in range(3):
        with manager_of(tmp_path / str(round_number), state, mode=mode) as manager:
            for step in range(3):
                train_one_step(state, data)
                manager.save(step)
            manager.wait()
            assert len(hooks) == (0 if mode == "async" else 1), "one for all saves"
            assert belongings() == (before[0] + 1, before[1] + 1)
            assert manager._run.saver._async.stager._placement.views[0].is_pinned(), (
                "page-locked, or copies would be slow and block"
            )
            del manager
        if round_number == 0:
            gc.collect()
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
        assert len(hooks) == 0
        assert belongings() == before
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + MEBI, "no clone stays on the device"
    train_one_step(state, data)


@pytest.mark.parametrize("mode", MODES)
def test_no_clone_stays_on_the_device_after_a_save(mode: Any, tmp_path: Path) -> None:
    holder = Holder(large=torch.zeros(64 * MEBI, device="cuda"))
    with manager_of(tmp_path, {"h": holder}, mode=mode) as manager:
        manager.save(0, wait=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in range(1, 4):
            manager.save(step, wait=True)
        assert torch.cuda.memory_allocated() <= before + MEBI


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
def test_a_save_over_the_staging_limit_streams_and_is_right(mode: Any, tmp_path: Path) -> None:
    state, data = training(0), torch.randn(32, 640, device="cuda")
    train_one_step(state, data)
    expected = clones_of(state)
    with manager_of(tmp_path, state, mode=mode, staging_limit_bytes=MEBI) as manager:
        keep_busy(0.1)
        handle = manager.save(0)
        assert handle.done()
        assert belongings() == (0, 0)
        train_one_step(state, data)
    again = training(1)
    with manager_of(tmp_path, again) as manager:
        manager.restore(0)
    assert different(tensors_of(again), expected) == []


# Going on from it


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_restore_into_live_tensors_after_a_save_is_exact(mode: Any, own_stream: bool, tmp_path: Path) -> None:
    """In one manager, also while the save is under way: the losses go on as they did after the save."""
    state, data = training(0), torch.randn(32, 640, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext()
    with manager_of(tmp_path, state, mode=mode) as manager, stream:
        for _ in range(3):
            train_one_step(state, data)
        manager.save(2)
        expected = [train_one_step(state, data).item() for _ in range(5)]
        for _ in range(2):
            assert manager.restore(2).next_step == 3
            assert [train_one_step(state, data).item() for _ in range(5)] == expected


# Death


SCRIPT = """
import os, signal, sys, time
import torch, holdfast

weight = torch.nn.Parameter(torch.zeros(128 << 20, device="cuda"))
state = {"model": torch.nn.ParameterList([weight]), "optimizer": torch.optim.SGD([weight], lr=1.0)}
manager = holdfast.CheckpointManager(sys.argv[1], state, mode=sys.argv[2], rng=False)
manager.save(0, wait=True)
with torch.no_grad():
    manager.wait_for_staging()
    weight.fill_(1)
handle = manager.save(1)
while sys.argv[3] == "staged" and not handle.staged():
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("moment", ["at once", "staged"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_is_killed_while_its_device_copies_commits_all_of_it_or_nothing(
    mode: str, moment: str, tmp_path: Path
) -> None:
    code = textwrap.dedent(SCRIPT)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), mode, moment], timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for(lambda: not writers_of(tmp_path))
    steps = [found.step for found in holdfast.checkpoints(tmp_path)]
    assert steps in ([1, 0], [0])
    if moment == "staged" or mode == "async":
        assert steps == [1, 0]
    weight = nn.Parameter(torch.full((128 * MEBI,), -1.0, device="cuda"))
    with manager_of(tmp_path, {"model": nn.ParameterList([weight])}) as manager:
        manager.restore(strategy=holdfast.LoadStrategy(only=("model",)))
    assert weight.min().item() == weight.max().item() == steps[0]


def writers_of(run: Path) -> list[str]:
    """The writers that have a file of the run open, or that may be about to: those whose trainer is gone."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            command = (process / "cmdline").read_bytes()
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"holdfast.saving.writer" in command and fields[1] != str(os.getpid()) and fields[0] not in "ZX":
            found.append(process.name)
    return found
