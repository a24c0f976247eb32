"""Reading onto a GPU: through page-locked slots, past the page cache or from it, by side buffers or reading twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CorruptCheckpointError
from holdfast.loading import read as reading
from holdfast.loading.gpu_digest import DeviceDigester
from holdfast.loading.read import read
from holdfast.loading.requests import Request
from holdfast.ondisk.regions import Box
from holdfast.state.devices.cuda import CudaAccelerator
from holdfast.state.memory import PAGE_BYTES

if torch.cuda.is_available():
    from holdfast.loading.copy_ring import DeviceCarrier
    from holdfast.loading.side_buffers import room_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["processor", "device", "device without its compiler"], autouse=True)
def checked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who digests what has landed on the device: large restores have it done there."""
    monkeypatch.setattr(reading, "_DEVICE_CHECKS_FROM_BYTES", 1 << 40 if request.param == "processor" else 1)
    if request.param == "device without its compiler":
        monkeypatch.setattr(DeviceDigester, "on", lambda device: None)


class Model(nn.Module):
    """Tensors of many slots, of parts of one, and small ones, of several types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = nn.Parameter(torch.randn(9000, 5000, device="cuda"))
        self.narrow_type = nn.Parameter(torch.randn(3001, 777, device="cuda").bfloat16())
        self.transposed = nn.Parameter(torch.randn(700, 1100, device="cuda").t())
        self.small = nn.ParameterList(nn.Parameter(torch.randn(5, index + 1, device="cuda")) for index in range(200))
        self.register_buffer("odd", torch.randint(0, 255, (1_234_567,), dtype=torch.uint8, device="cuda"))
        self.register_buffer("scalar", torch.tensor(float(seed), device="cuda", dtype=torch.float64))


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("run")
    model = Model(0)
    with holdfast.CheckpointManager(folder, {"model": model}, rng=False, mode="sync") as manager:
        manager.save(0)
    return folder, copies(model)


def restore(folder: Path, model: nn.Module, **options: Any) -> None:
    with holdfast.CheckpointManager(folder, {"model": model}, rng=False, **options) as manager:
        manager.restore()


def make_cold(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def make_warm(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        path.read_bytes()


@pytest.fixture
def full_device() -> Iterator[None]:
    """A device on which there is no room for side buffers."""
    device = torch.device("cuda", torch.cuda.current_device())
    # What an earlier test left in torch's cache lies in pieces, and no piece is as large as all of it.
    torch.cuda.empty_cache()
    ballast = torch.empty(room_on(device), dtype=torch.uint8, device=device)
    assert room_on(device) <= 0
    yield
    del ballast
    torch.cuda.empty_cache()


@pytest.mark.parametrize("verify", ["full", "quick", "off"])
@pytest.mark.parametrize("make", [make_cold, make_warm])
def test_live_tensors_are_exact(run: tuple[Path, dict[str, torch.Tensor]], make: Any, verify: str) -> None:
    folder, expected = run
    model = Model(1)
    make(folder)
    restore(folder, model, verify=verify)
    assert_same(model, expected)


def test_live_tensors_are_exact_where_there_is_no_room_for_side_buffers(
    run: tuple[Path, dict[str, torch.Tensor]], full_device: None
) -> None:
    folder, expected = run
    model = Model(1)
    make_cold(folder)
    restore(folder, model)
    assert_same(model, expected)


def test_side_buffers_are_used_and_leave_no_memory_behind(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = Model(1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    restore(run[0], model)
    assert torch.cuda.max_memory_allocated() >= allocated + sum(t.nbytes for t in model.state_dict().values())
    assert torch.cuda.memory_reserved() <= reserved + (32 << 20)


def damage(folder: Path, target: Path, leaf_name: str) -> Path:
    """A copy of the run with a byte of that leaf changed."""
    os.system(f"cp -r '{folder}' '{target}'")
    leaf = next(leaf for leaf in holdfast.resolve(target).manifest.tensors if leaf.name == leaf_name)
    file = next(target.glob("step-*/*.safetensors"))
    with file.open("r+b") as handle:
        handle.seek(leaf.chunks[0].start + leaf.size_bytes - 1)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    return target


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("leaf", ["model.large", "model.small.77", "model.transposed", "model.odd"])
@pytest.mark.parametrize("make", [make_cold, make_warm])
def test_damage_changes_nothing_live(
    run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, make: Any, leaf: str
) -> None:
    folder = damage(run[0], tmp_path / "run", leaf)
    model = Model(1)
    before = copies(model)
    make(folder)
    with pytest.raises(CorruptCheckpointError, match=leaf):
        restore(folder, model)
    assert_same(model, before)


@pytest.mark.guarantee("G7")
def test_damage_changes_nothing_live_where_there_is_no_room_for_side_buffers(
    run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, full_device: None
) -> None:
    folder = damage(run[0], tmp_path / "run", "model.large")
    model = Model(1)
    before = copies(model)
    with pytest.raises(CorruptCheckpointError, match=r"model\.large"):
        restore(folder, model)
    assert_same(model, before)


def test_fresh_optimizer_state_lands_on_the_device(tmp_path: Path) -> None:
    def parts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2000, 3000, device="cuda")
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)}

    saved = parts(0)
    saved["model"](torch.randn(4, 2000, device="cuda")).sum().backward()
    saved["optimizer"].step()
    with holdfast.CheckpointManager(tmp_path, saved, rng=False, mode="sync") as manager:
        manager.save(0)
    again = parts(1)
    with holdfast.CheckpointManager(tmp_path, again, rng=False) as manager:
        manager.restore()
    for one, other in zip(saved["model"].parameters(), again["model"].parameters(), strict=True):
        for key, value in saved["optimizer"].state[one].items():
            assert torch.equal(value, again["optimizer"].state[other][key]), key
            assert value.device == again["optimizer"].state[other][key].device


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_restore_comes_after_what_the_current_stream_still_does_and_before_what_it_does_next(
    run: tuple[Path, dict[str, torch.Tensor]], verify: str
) -> None:
    folder, expected = run
    model = Model(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(1_000_000_000)
        model.large.add_(1)
        restore(folder, model, verify=verify)
        after = model.large.clone()
    stream.synchronize()
    assert torch.equal(after, expected["large"])
    assert_same(model, expected)


@pytest.mark.parametrize("make", [make_cold, make_warm])
def test_boxes_into_any_device_memory_are_exact(run: tuple[Path, dict[str, torch.Tensor]], make: Any) -> None:
    folder, expected = run
    checkpoint = holdfast.resolve(folder)
    leaves = {leaf.name.removeprefix("model."): leaf for leaf in checkpoint.manifest.tensors}
    targets = [
        ("large", Box((100, 0), (3000, 5000)), torch.zeros(3000, 5000, device="cuda")),
        ("large", Box((7, 11), (8000, 13)), torch.zeros(8000, 13, device="cuda")),
        ("large", Box((7, 11), (800, 1300)), torch.zeros(1300, 800, device="cuda").t()),
        ("narrow_type", Box((1, 1), (3000, 700)), torch.zeros(3000, 1400, device="cuda", dtype=torch.bfloat16)[:, ::2]),
        ("odd", Box((1_000_001,), (99,)), torch.zeros(99, device="cuda", dtype=torch.uint8)),
        ("scalar", Box((), ()), torch.zeros((), device="cuda", dtype=torch.float64)),
    ]
    make(folder)
    requests = [Request(leaves[name], box, target, fresh=True) for name, box, target in targets]
    assert read(checkpoint, requests, checked=True) == []
    for name, box, target in targets:
        cut = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(target, expected[name][cut]), (name, box)


def test_slots_are_page_locked_and_begin_at_a_page() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    carrier = DeviceCarrier(CudaAccelerator(), device, torch.cuda.current_stream())
    memory = carrier.memory(1 << 20)
    assert memory.is_pinned()
    assert memory.data_ptr() % PAGE_BYTES == 0
    carrier.release(memory)
    assert not memory.is_pinned()


def test_pytorchs_own_load_goes_the_same_way(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from holdfast.formats.dcp import HoldfastReader, HoldfastWriter

    torch.manual_seed(0)
    state = {"weight": torch.randn(4000, 3000, device="cuda"), "bias": torch.randn(17, device="cuda")}
    dcp.save(dict(state), storage_writer=HoldfastWriter(tmp_path, step=0), no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    make_cold(tmp_path)
    dcp.load(loaded, storage_reader=HoldfastReader(tmp_path), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
