"""Every way from a file to memory: bytes are exact, damage and short files are found, and nothing sound is blamed."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CorruptCheckpointError
from holdfast.loading.copy_ring import DeviceCarrier, HostCarrier, Rings, Slots, piece_bytes
from holdfast.loading.files import Files
from holdfast.loading.io import DeviceChecks, Job, _Extent, _tasks
from holdfast.loading.read import _fills, check_bytes, past_cache_test, read
from holdfast.loading.requests import READ_PIECE_BYTES, WIDENED_BYTES, Request, size_of
from holdfast.loading.side_buffers import SideBuffers
from holdfast.ondisk.regions import Box, whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.state.tensors import torch_dtype
from holdfast.storage.blocks import Region
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.local.page_cache import PageCache
from tests.unit.state.devices.fake import FakeAccelerator


class ColdCache(PageCache):
    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        raise BlockingIOError(errno.EAGAIN, "it is not in the cache")

    def set_direct(self, file: int, direct: bool) -> None:
        """Whether the file system would take it does not matter here."""


class WarmCache(PageCache):
    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        return len(target)


class ColdDisk(Disk):
    """Nothing is ever in the page cache. Knows which handles read past it, and what they read."""

    cache: PageCache = ColdCache()

    def __init__(self) -> None:
        self.direct: set[int] = set()
        self.direct_bytes = 0
        self.fail_direct = 0

    def reopen_file(self, file: int) -> int:
        handle = super().reopen_file(file)
        self.direct.add(handle)
        return handle

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        count = super().read_at(file, target, offset)
        if file in self.direct:
            if self.fail_direct:
                raise OSError(self.fail_direct, os.strerror(self.fail_direct))
            self.direct_bytes += count
        return count

    def close(self, handle: int) -> None:
        self.direct.discard(handle)
        super().close(handle)


class WarmDisk(Disk):
    cache = WarmCache()


class TruncatingDisk(ColdDisk):
    """The file loses its end at the first read that is not one of its header."""

    def __init__(self, path: Path, size: int, *, cold: bool) -> None:
        super().__init__()
        self._path, self._size = path, size
        self.cache = ColdCache() if cold else WarmCache()

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        if os.path.samestat(os.fstat(file), self._path.stat()):
            os.truncate(self._path, self._size)
        return super().read_at(file, target, offset)


class Holder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def tensors() -> dict[str, torch.Tensor]:
    """Some that are many blocks long, some that are small, and none that leaves the next one at an even place."""
    generator = torch.Generator().manual_seed(0)
    return {
        "a_odd": torch.randint(0, 255, (1_234_567,), dtype=torch.uint8, generator=generator),
        "b_large": torch.randn(2048, 1500, generator=generator),
        "c_scalar": torch.tensor(3.5),
        "d_odd": torch.randint(0, 255, (3, 11), dtype=torch.uint8, generator=generator),
        "e_large": torch.randn(1_000_003, generator=generator, dtype=torch.float64),
        **{f"f_{index:03d}": torch.randn(37, index + 1, generator=generator) for index in range(100)},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with holdfast.CheckpointManager(path, {"holder": Holder(tensors())}, rng=False, mode="sync") as manager:
        manager.save(0)
    return path


def file_of(folder: Path) -> Path:
    return next(folder.glob("step-*/*.safetensors"))


def open_run(folder: Path, disk: Disk | None = None) -> Checkpoint:
    return holdfast.resolve(LocalStorage(folder, disk=disk or Disk()))


def whole_requests(checkpoint: Checkpoint) -> list[Request]:
    saved = tensors()
    return [
        Request(leaf, whole(leaf.shape), torch.zeros_like(saved[leaf.name.removeprefix("holder.")]), fresh=True)
        for leaf in checkpoint.manifest.tensors
    ]


def assert_exact(requests: list[Request]) -> None:
    saved = tensors()
    for request in requests:
        box = request.box
        cut = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(request.target, saved[request.leaf.name.removeprefix("holder.")][cut]), request.leaf.name


WAYS = {"warm": WarmDisk, "cold": ColdDisk}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_whole_tensors_are_exact(folder: Path, way: str, checked: bool) -> None:
    disk = WAYS[way]()
    checkpoint = open_run(folder, disk)
    requests = whole_requests(checkpoint)
    counts: list[int] = []
    assert read(checkpoint, requests, checked=checked, on_bytes=counts.append) == []
    assert_exact(requests)
    assert sum(counts) == size_of(requests) == sum(tensor.nbytes for tensor in tensors().values())
    if isinstance(disk, ColdDisk):
        assert disk.direct_bytes > 0.9 * sum(counts)
        assert disk.direct_bytes < 1.1 * sum(counts), "nothing is read twice"
        assert disk.direct == set()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_boxes_into_any_memory_are_exact(folder: Path, way: str, checked: bool) -> None:
    checkpoint = open_run(folder, WAYS[way]())
    leaves = {leaf.name: leaf for leaf in checkpoint.manifest.tensors}
    large, odd = leaves["holder.b_large"], leaves["holder.a_odd"]
    requests = [
        Request(large, Box((100, 0), (1000, 1500)), torch.zeros(1000, 1500), fresh=False),
        Request(large, Box((3, 7), (2000, 13)), torch.zeros(2000, 13), fresh=False),
        Request(large, Box((0, 0), (2048, 1500)), torch.zeros(1500, 2048).t(), fresh=False),
        Request(large, Box((5, 5), (40, 50)), torch.zeros(40, 100)[:, ::2], fresh=False),
        Request(odd, Box((1_000_001,), (99,)), torch.zeros(99, dtype=torch.uint8), fresh=False),
        Request(leaves["holder.d_odd"], Box((1, 2), (2, 5)), torch.zeros(2, 5, dtype=torch.uint8), fresh=False),
        Request(leaves["holder.f_050"], Box((3, 3), (30, 40)), torch.zeros(30, 40), fresh=False),
        Request(leaves["holder.c_scalar"], Box((), ()), torch.zeros(()), fresh=False),
    ]
    assert read(checkpoint, requests, checked=checked) == []
    assert_exact(requests)


def test_what_every_rank_reads_is_left_to_the_page_cache_and_what_one_reads_is_not(folder: Path) -> None:
    disk = ColdDisk()
    checkpoint = open_run(folder, disk)
    requests = whole_requests(checkpoint)
    assert read(checkpoint, requests, checked=True, readers=8) == []
    assert_exact(requests)
    assert disk.direct_bytes == 0
    leaf = next(leaf for leaf in checkpoint.manifest.tensors if leaf.name == "holder.e_large")
    part = Request(leaf, Box((0,), (500_000,)), torch.zeros(500_000, dtype=torch.float64), fresh=True)
    assert read(checkpoint, [part], checked=True, readers=8) == []
    assert disk.direct_bytes >= part.target.nbytes


def test_a_check_leaves_what_it_read_in_the_page_cache(folder: Path) -> None:
    disk = ColdDisk()
    checkpoint = open_run(folder, disk)
    assert check_bytes(checkpoint, whole_requests(checkpoint)) == []
    assert disk.direct_bytes == 0


class LateCarrier(HostCarrier):
    """Copies when it is waited for, and counts what it copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied.append((target, source))

    def drain(self) -> None:
        for target, source in self.copied[self.done :]:
            target.copy_(source)
        self.done = len(self.copied)


def transposed_requests(checkpoint: Checkpoint) -> list[Request]:
    """Targets that are never filled in place, so that all of them go through the ring, as for a device."""
    requests = whole_requests(checkpoint)
    return [
        Request(one.leaf, one.box, torch.zeros(2 * one.target.numel(), dtype=one.target.dtype)[::2].view(-1), False)
        if one.target.dim() == 1
        else Request(one.leaf, one.box, one.target.t().contiguous().t(), fresh=False)
        for one in requests
        if one.target.dim() in (1, 2)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_device_that_copies_late_gets_the_right_bytes(folder: Path, way: str) -> None:
    checkpoint = open_run(folder, WAYS[way]())
    requests = transposed_requests(checkpoint)
    carriers: list[LateCarrier] = []

    def carrier(device: torch.device) -> LateCarrier:
        carriers.append(LateCarrier())
        return carriers[-1]

    assert read(checkpoint, requests, checked=True, rings=Rings(carrier)) == []
    assert_exact(requests)
    assert sum(len(one.copied) for one in carriers) >= len(requests)


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """The same run, with one byte of `b_large` changed."""
    os.system(f"cp -r '{folder}' '{tmp_path}/run'")
    file = file_of(tmp_path / "run")
    leaf = next(leaf for leaf in open_run(folder).manifest.tensors if leaf.name == "holder.b_large")
    with file.open("r+b") as handle:
        handle.seek(leaf.chunks[0].start + 5_000_000)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    return tmp_path / "run"


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("way", WAYS)
def test_damage_is_found_named_and_blamed_on_no_other_leaf(damaged: Path, way: str) -> None:
    checkpoint = open_run(damaged, WAYS[way]())
    for make in (whole_requests, transposed_requests):
        requests = make(checkpoint)
        problems = read(checkpoint, requests, checked=True)
        assert [problem.leaf for problem in problems] == ["holder.b_large"]
        start, end = problems[0].byte_range or (0, 0)
        leaf = next(one.leaf for one in requests if one.leaf.name == "holder.b_large")
        assert start <= leaf.chunks[0].start + 5_000_000 < end
        assert_exact([one for one in requests if one.leaf.name != "holder.b_large"])
    assert [problem.leaf for problem in check_bytes(checkpoint, requests)] == ["holder.b_large"]


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_piece_is_not_copied_from_its_slot(damaged: Path, way: str) -> None:
    checkpoint = open_run(damaged, WAYS[way]())
    wanted = next(one for one in transposed_requests(checkpoint) if one.leaf.name == "holder.b_large")
    copied: list[LateCarrier] = []

    def carrier(device: torch.device) -> LateCarrier:
        copied.append(LateCarrier())
        return copied[-1]

    assert len(read(checkpoint, [wanted], checked=True, rings=Rings(carrier))) == 1
    saved = tensors()["b_large"]
    right = wanted.target == saved
    rows = torch.nonzero(~right.all(dim=1)).flatten()
    assert 5_000_000 // 6000 in rows.tolist()
    assert (wanted.target[rows] == 0).all(), "as it was before"


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("way", WAYS)
def test_damage_in_a_side_buffer_changes_nothing_live(damaged: Path, way: str) -> None:
    checkpoint = open_run(damaged, WAYS[way]())
    live = whole_requests(checkpoint)
    buffers = SideBuffers.of(live, lambda device: 1 << 40)
    assert buffers.rest == []
    assert len(read(checkpoint, buffers.requests, checked=True)) == 1
    buffers.drop()
    assert all(not one.target.any() for one in live)


def test_sound_bytes_reach_live_tensors_by_their_side_buffers(folder: Path) -> None:
    checkpoint = open_run(folder)
    live = whole_requests(checkpoint)
    buffers = SideBuffers.of(live, lambda device: 1 << 40)
    assert read(checkpoint, buffers.requests, checked=True) == []
    buffers.fill()
    assert_exact(live)


@pytest.mark.parametrize("cold", [True, False])
def test_a_file_that_is_cut_short_while_it_is_read_is_damage_and_no_signal(
    folder: Path, tmp_path: Path, cold: bool
) -> None:
    for number, make in enumerate((whole_requests, transposed_requests)):
        copy = tmp_path / str(number)
        os.system(f"cp -r '{folder}' '{copy}'")
        leaves = {leaf.name: leaf for leaf in open_run(copy).manifest.tensors}
        end = leaves["holder.f_050"].chunks[0].start + 10
        checkpoint = open_run(copy, TruncatingDisk(file_of(copy), end, cold=cold))
        requests = make(checkpoint)
        blamed = {problem.leaf for problem in read(checkpoint, requests, checked=True)}
        beyond = {
            name for name, leaf in leaves.items() if leaf.chunks[0].start + leaf.size_bytes > end and "c_s" not in name
        }
        assert blamed == beyond
        assert_exact([one for one in requests if one.leaf.name not in beyond])


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_a_disk_that_fails_past_the_cache_is_read_through_it(folder: Path, code: int) -> None:
    disk = ColdDisk()
    checkpoint = open_run(folder, disk)
    disk.fail_direct = code
    requests = whole_requests(checkpoint)
    assert read(checkpoint, requests, checked=True) == []
    assert_exact(requests)


class LiveModel(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = torch.nn.Parameter(torch.randn(3000, 2000))
        self.small = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(5, 7)) for _ in range(30))


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leaf_name", ["model.large", "model.small.29"])
def test_damage_anywhere_leaves_live_tensors_alone(tmp_path: Path, way: str, leaf_name: str) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": LiveModel(0)}, rng=False, mode="sync") as manager:
        manager.save(0)
    leaf = next(leaf for leaf in open_run(tmp_path).manifest.tensors if leaf.name == leaf_name)
    file = file_of(tmp_path)
    data = bytearray(file.read_bytes())
    data[leaf.chunks[0].start + 1] ^= 1
    file.write_bytes(data)
    model = LiveModel(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storage = LocalStorage(tmp_path, disk=WAYS[way]())
    with holdfast.CheckpointManager("", {"model": model}, rng=False, storage=storage) as manager:
        with pytest.raises(CorruptCheckpointError, match=leaf_name):
            manager.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    data[leaf.chunks[0].start + 1] ^= 1
    file.write_bytes(data)
    with holdfast.CheckpointManager("", {"model": model}, rng=False, storage=storage) as manager:
        manager.restore()
    sound = LiveModel(0).state_dict()
    assert all(torch.equal(tensor, sound[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("ranks", "limit_bytes"),
    [(1, None), (1, 1 << 20), (10**12, None)],
    ids=["enough memory", "a limit", "too little for so many ranks"],
)
def test_what_is_not_in_the_page_cache_is_read_once_for_live_tensors_where_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, limit_bytes: int | None
) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": LiveModel(0)}, rng=False, mode="sync") as manager:
        manager.save(0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    model, disk = LiveModel(1), CountingDisk()
    large, places = model.large.nbytes, [parameter.data_ptr() for parameter in model.parameters()]
    storage = LocalStorage(tmp_path, disk=disk)
    with holdfast.CheckpointManager(
        "", {"model": model}, rng=False, mode="sync", storage=storage, staging_limit_bytes=limit_bytes
    ) as manager:
        disk.read_bytes = 0
        manager.restore()
    times = disk.read_bytes / large
    assert 1.0 <= times < 1.1 if (ranks, limit_bytes) == (1, None) else 2.0 <= times < 2.1
    assert all(
        torch.equal(own, saved) for own, saved in zip(model.parameters(), LiveModel(0).parameters(), strict=True)
    )
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("limit_bytes", [None, 1 << 20])
def test_a_component_that_is_attached_later_keeps_to_the_limit_too(tmp_path: Path, limit_bytes: int | None) -> None:
    state = {"model": LiveModel(0), "other": torch.nn.Linear(2, 2)}
    with holdfast.CheckpointManager(tmp_path, state, rng=False, mode="sync") as manager:
        manager.save(0)
    model, disk = LiveModel(1), CountingDisk()
    storage, other = LocalStorage(tmp_path, disk=disk), {"other": torch.nn.Linear(2, 2)}
    with holdfast.CheckpointManager(
        "", other, rng=False, mode="sync", storage=storage, staging_limit_bytes=limit_bytes
    ) as manager:
        manager.restore()
        disk.read_bytes = 0
        assert manager.attach("model", model)
    assert round(disk.read_bytes / model.large.nbytes) == (1 if limit_bytes is None else 2)
    assert torch.equal(model.large, LiveModel(0).large)


def test_what_is_in_the_page_cache_or_wanted_by_all_ranks_gets_no_new_memory(folder: Path) -> None:
    cold, warm = open_run(folder, ColdDisk()), open_run(folder, WarmDisk())
    requests = {one.leaf.name.removeprefix("holder."): one for one in whole_requests(cold)}
    assert past_cache_test(cold, 1)(requests["b_large"])
    assert not past_cache_test(cold, 1)(requests["f_050"]), "small ones are read twice"
    assert not past_cache_test(warm, 1)(requests["b_large"])
    assert not past_cache_test(cold, 2)(requests["b_large"])
    half = replace(requests["b_large"], box=Box((0, 0), (1024, 1500)), target=torch.zeros(1024, 1500))
    assert past_cache_test(cold, 2)(half)


def test_whatever_is_read_past_the_page_cache_for_host_memory_is_read_ahead(folder: Path) -> None:
    """Also what is converted or lies in another order: where it did not fit, the threads that digest would read it."""
    checkpoint, slots = open_run(folder, ColdDisk()), Slots(1, READ_PIECE_BYTES + WIDENED_BYTES)
    requests = [*whole_requests(checkpoint), *transposed_requests(checkpoint)]
    casts = [replace(one, target=one.target.to(torch.bfloat16)) for one in requests if one.leaf.dtype == "float32"]
    with ExitStack() as stack:
        files = Files(checkpoint, stack)
        jobs = (job for one in requests + casts for job in _fills(one, checkpoint, 1, DeviceChecks(())))
        tasks = list(_tasks(jobs, files, True))
        assert len(tasks) > 10
        assert all(isinstance(task, _Extent) and task.is_for(slots) for task in tasks)


class MemorylessDisk(WarmDisk):
    """Raises a MemoryError after `looks` reads of a large file."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        if os.fstat(file).st_size > 1 << 20:
            self.looks -= 1
            if self.looks < 0:
                raise MemoryError("no more")
        return super().read_at(file, target, offset)


@pytest.mark.guarantee("G7")
def test_whatever_ends_a_restore_that_has_begun_to_fill_live_tensors_is_said_to_have(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": LiveModel(0)}, rng=False, mode="sync") as manager:
        manager.save(0)
    blocks = -(-LiveModel(0).large.nbytes // open_run(tmp_path).manifest.block_bytes)
    for looks, text in ((blocks // 2, "^the restore failed: MemoryError"), (blocks + 40, "overwritten in part: Mem")):
        model, disk = LiveModel(1), MemorylessDisk(1 << 40)
        storage = LocalStorage(tmp_path, disk=disk)
        with holdfast.CheckpointManager("", {"model": model}, rng=False, mode="sync", storage=storage) as manager:
            disk.looks = looks
            with pytest.raises(holdfast.HoldfastError, match=text):
                manager.restore()
            disk.looks = 1 << 40
            if looks < blocks:
                before = LiveModel(1).state_dict()
                assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class CountingDisk(ColdDisk):
    """Knows how many bytes were read, past the cache or through it."""

    read_bytes = 0

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        count = super().read_at(file, target, offset)
        self.read_bytes += count
        return count


class CountingCarrier(HostCarrier):
    """Knows the most bytes that were ever copied beside the target at once."""

    most = 0

    def landed(self, source: torch.Tensor) -> torch.Tensor:
        CountingCarrier.most = max(CountingCarrier.most, source.nbytes)
        return super().landed(source)


@pytest.mark.parametrize("shape", [(1, 9_000_000), (9_000_000,), (3000, 3000)])
def test_a_tensor_of_another_type_is_converted_piece_by_piece(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole_tensor = torch.randn(shape)
    with holdfast.CheckpointManager(tmp_path, {"holder": Holder({"w": whole_tensor})}, mode="sync") as manager:
        manager.save(1)
    checkpoint = holdfast.resolve(tmp_path)
    [leaf] = [leaf for leaf in checkpoint.manifest.tensors if leaf.name == "holder.w"]
    target = torch.zeros(shape, dtype=torch.bfloat16)
    CountingCarrier.most = 0
    rings = Rings(lambda device: CountingCarrier())
    assert read(checkpoint, [Request(leaf, whole(shape), target, False)], checked=True, rings=rings) == []
    assert torch.equal(target, whole_tensor.bfloat16())
    assert 0 < CountingCarrier.most <= 8 << 20


class Landing:
    """A device that checks what has landed on it."""

    def takes(self, device: torch.device) -> bool:
        return True


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("fresh", [True, False])
def test_only_new_memory_holds_bytes_that_a_device_is_still_to_check(folder: Path, fresh: bool) -> None:
    checkpoint, later = open_run(folder), Landing()
    requests = [
        Request(leaf, whole(leaf.shape), torch.empty(leaf.shape, device="meta", dtype=torch_dtype(leaf.dtype)), fresh)
        for leaf in checkpoint.manifest.tensors
    ]
    jobs = [job for one in requests for job in _fills(one, checkpoint, 1, later)]  # type: ignore[arg-type]
    assert jobs
    assert all((job.landing is not None) == fresh for job in jobs)


def test_one_element_may_have_any_stride(folder: Path) -> None:
    checkpoint = open_run(folder)
    leaf = next(leaf for leaf in checkpoint.manifest.tensors if leaf.name == "holder.c_scalar")
    target = torch.empty(2, device="meta")[::2].view(())
    jobs = list(_fills(Request(leaf, whole(()), target, False), checkpoint, 1, Landing()))  # type: ignore[arg-type]
    assert [(job.start, job.end) for job in jobs] == [(0, 4)]


def test_only_neighbours_in_one_file_for_one_device_are_read_together() -> None:
    class Source:
        size_bytes = 1 << 30

    one, other = Source(), Source()
    region = Region(0, 1 << 30, 1 << 20, ())

    def job(start: int, end: int, device: str = "cpu") -> Job:
        return Job("leaf", "file", region, start, end, 1, device=torch.device(device))

    extent = _Extent(one, 1, 0, 1000, [job(0, 1000)])  # type: ignore[arg-type]
    assert extent.takes(job(1000, 2000), one, 1000, 2000)  # type: ignore[arg-type]
    assert not extent.takes(job(1000, 2000), other, 1000, 2000), "of another file"  # type: ignore[arg-type]
    assert not extent.takes(job(1000, 2000, "meta"), one, 1000, 2000), "for another device"  # type: ignore[arg-type]
    far, large = 1000 + (1 << 20), piece_bytes(torch.device("cpu")) + 1
    assert not extent.takes(job(far, far + 10), one, far, far + 10), "too far away"  # type: ignore[arg-type]
    assert not extent.takes(job(1000, large), one, 1000, large), "too much for a slot"  # type: ignore[arg-type]


def test_a_short_read_of_several_jobs_is_damage_on_a_device_that_copies_late(folder: Path, tmp_path: Path) -> None:
    """Each is read by itself then, in the slot in which they were to be read together."""
    copy = tmp_path / "copy"
    os.system(f"cp -r '{folder}' '{copy}'")
    leaves = {leaf.name: leaf for leaf in open_run(copy).manifest.tensors}
    end = leaves["holder.f_050"].chunks[0].start + 10
    checkpoint = open_run(copy, TruncatingDisk(file_of(copy), end, cold=True))
    requests = transposed_requests(checkpoint)
    accelerator = FakeAccelerator()
    rings = Rings(lambda device: DeviceCarrier(accelerator, device, accelerator.training_stream))
    blamed = {problem.leaf for problem in read(checkpoint, requests, checked=True, rings=rings)}
    assert "holder.f_051" in blamed
    assert_exact([one for one in requests if one.leaf.name not in blamed])
