"""The kernel's source as plain C++, its threads run one after the other, against the blake3 package."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch
from blake3 import blake3

from holdfast.loading.gpu_digest import DeviceDigester
from holdfast.state.devices import DigestKernel
from holdfast.state.devices.cuda_digest import SOURCE

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BEFORE = """
#define __global__
#define __device__
#define __forceinline__ inline
struct uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static struct { unsigned x; } blockIdx, blockDim = {1}, threadIdx;
"""
# More threads than were asked for, as on a device, where they come in whole blocks.
AFTER = """
extern "C" void forwards(const s64 *table, int ranges, int level, int threads, u32 *values) {
    for (blockIdx.x = 0; blockIdx.x < threads + 100u; blockIdx.x++) digest_nodes(table, ranges, level, threads, values);
}
extern "C" void backwards(const s64 *table, int ranges, int level, int threads, u32 *values) {
    for (blockIdx.x = threads + 100u; blockIdx.x-- > 0;) digest_nodes(table, ranges, level, threads, values);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("digesting")
    (folder / "kernel.cpp").write_text(BEFORE + SOURCE + AFTER)
    options = ["-O2", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


@pytest.fixture(params=["forwards", "backwards"])
def launch(library: ctypes.CDLL, request: pytest.FixtureRequest) -> DigestKernel:
    run = library[request.param]

    def launch(threads: int, table: torch.Tensor, level: int, values: torch.Tensor) -> None:
        assert table.is_contiguous()
        assert values.is_contiguous()
        address = ctypes.c_void_p(table.data_ptr())
        run(address, table.shape[1], level, threads, ctypes.c_void_p(values.data_ptr()))

    return launch


class Memory:
    """Bytes at an address that begins a page."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = torch.empty(size_bytes + 4096, dtype=torch.uint8)
        self.bytes = self.bytes[-self.bytes.data_ptr() % 4096 :][:size_bytes]
        self.bytes.copy_(torch.frombuffer(bytearray(blake3(b"seed").digest(length=size_bytes)), dtype=torch.uint8))

    def ranges(self, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(self.bytes.data_ptr() + start, size) for start, size in places]

    def expected(self, places: list[tuple[int, int]]) -> list[bytes]:
        return [blake3(self.bytes[start : start + size].numpy()).digest() for start, size in places]


@needs_compiler
def test_every_size_up_to_three_chunks_at_every_alignment_has_blake3s_digest(launch: DigestKernel) -> None:
    memory = Memory(4096)
    places = [(start, size) for start in range(17) for size in range(0, 3 * 1024 + 2, 1 if start < 5 else 61)]
    assert DeviceDigester(torch.device("cpu"), launch).digests(memory.ranges(places)) == memory.expected(places)


@needs_compiler
def test_every_number_of_chunks_has_blake3s_tree(launch: DigestKernel) -> None:
    counts = [*range(1, 68), *(power + more for power in (128, 256, 1024, 4096) for more in (-1, 0, 1, 3))]
    memory = Memory(5 << 20)
    places = [(0, count * 1024 + more) for count in counts for more in (-1, 0, 1)]
    assert DeviceDigester(torch.device("cpu"), launch).digests(memory.ranges(places)) == memory.expected(places)


@needs_compiler
@pytest.mark.parametrize("group_chunks", [1, 7, 64, 1 << 20])
def test_ranges_of_every_kind_side_by_side_have_their_own_digests(launch: DigestKernel, group_chunks: int) -> None:
    memory = Memory(1 << 20)
    sizes = [0, 100, 5000, 64 << 10, 1, 1024, 0, 0, 33 << 10, 1025, 7, 200_000, 2048, 64]
    places = [(977 * turn, sizes[turn * 5 % len(sizes)]) for turn in range(300)]
    digester = DeviceDigester(torch.device("cpu"), launch, group_chunks)
    assert digester.digests(memory.ranges(places)) == memory.expected(places)


@needs_compiler
def test_one_flipped_bit_changes_the_digest_of_its_range_alone(launch: DigestKernel) -> None:
    memory = Memory(64 << 10)
    places = [(start, 4096) for start in range(0, 64 << 10, 4096)]
    digester = DeviceDigester(torch.device("cpu"), launch)
    sound = digester.digests(memory.ranges(places))
    for place in (0, 4095, 4096, 20_000, (64 << 10) - 1):
        memory.bytes[place] ^= 1 << (place % 8)
        damaged = digester.digests(memory.ranges(places))
        assert [turn for turn, digest in enumerate(damaged) if digest != sound[turn]] == [place // 4096]
        memory.bytes[place] ^= 1 << (place % 8)


@needs_compiler
def test_a_kernel_that_digests_wrongly_does_not_pass_the_tryout(launch: DigestKernel) -> None:
    def wrong(threads: int, table: torch.Tensor, level: int, values: torch.Tensor) -> None:
        launch(threads, table, level, values)
        values[0, 0] ^= level == 12

    DeviceDigester(torch.device("cpu"), launch)._try_out()
    with pytest.raises(RuntimeError, match="is wrong"):
        DeviceDigester(torch.device("cpu"), wrong)._try_out()


@needs_compiler
def test_where_no_bytes_are_none_are_read(launch: DigestKernel) -> None:
    """The address of an empty tensor is 0."""
    assert DeviceDigester(torch.device("cpu"), launch).digests([(0, 0), (3, 0)]) == [blake3().digest()] * 2


def test_no_ranges_have_no_digests() -> None:
    assert DeviceDigester(torch.device("cpu"), lambda *_: None).digests([]) == []


def test_a_device_without_an_accelerator_has_no_digester() -> None:
    assert DeviceDigester.on(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_has_no_digester() -> None:
    assert DeviceDigester.on(torch.device("cuda")) is None
    assert DeviceDigester.on(torch.device("cuda", 0)) is None


def test_the_tryout_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="is wrong"):
        DeviceDigester(torch.device("cpu"), lambda *_: None)._try_out()
    assert torch.equal(torch.get_rng_state(), before)
