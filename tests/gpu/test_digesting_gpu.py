"""Digests that the GPU computes over its own memory, against those of the blake3 package over the same bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blake3 import blake3

from holdfast.loading.gpu_digest import DeviceDigester

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MEBI = 1 << 20
GIBI = 1 << 30


@pytest.fixture
def digester() -> DeviceDigester:
    digester = DeviceDigester.on(torch.device("cuda"))
    assert digester is not None, "the log says why at level DEBUG"
    return digester


def noise(size_bytes: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(size_bytes)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


def ranges(memory: torch.Tensor, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(memory.data_ptr() + start, size) for start, size in places]


def expected(memory: torch.Tensor, places: list[tuple[int, int]]) -> list[bytes]:
    data = memory.cpu().numpy()
    return [blake3(data[start : start + size], max_threads=blake3.AUTO).digest() for start, size in places]


def test_a_device_has_one_digester_whatever_its_name(digester: DeviceDigester) -> None:
    assert DeviceDigester.on(torch.device("cuda", torch.cuda.current_device())) is digester


def test_every_size_up_to_three_chunks_at_every_alignment_has_blake3s_digest(digester: DeviceDigester) -> None:
    memory = noise(4096)
    places = [(start, size) for start in range(17) for size in range(3 * 1024 + 2)]
    assert digester.digests(ranges(memory, places)) == expected(memory, places)


def test_every_number_of_chunks_has_blake3s_tree(digester: DeviceDigester) -> None:
    memory = noise(9 * MEBI)
    counts = [*range(1, 131), *(power + more for power in (512, 1024, 2048, 8192) for more in (-1, 0, 1, 3))]
    places = [(16 * (count % 2), count * 1024 + more) for count in counts for more in (-1, 0, 1)]
    assert digester.digests(ranges(memory, places)) == expected(memory, places)


def test_blocks_of_a_mebibyte_over_several_groups_have_their_digests(digester: DeviceDigester) -> None:
    memory = noise(5 * GIBI + 12_345)
    places = [(start, min(MEBI, memory.nbytes - start)) for start in range(0, memory.nbytes, MEBI)]
    assert digester.digests(ranges(memory, places)) == expected(memory, places)


def test_many_small_ranges_beside_large_ones_have_their_digests(digester: DeviceDigester) -> None:
    memory = noise(8 * MEBI)
    places = [(turn * 331 % MEBI, turn * 7919 % (64 << 10)) for turn in range(70_000)]
    places[100:100] = places[50_000:50_000] = [(0, 8 * MEBI), (1, 7 * MEBI), (0, 0)]
    assert digester.digests(ranges(memory, places)) == expected(memory, places)


@pytest.mark.parametrize("start", [0, 1])
def test_a_range_of_a_gibibyte_has_its_digest(digester: DeviceDigester, start: int) -> None:
    memory = noise(GIBI + 1)
    assert digester.digests(ranges(memory, [(start, GIBI)])) == expected(memory, [(start, GIBI)])


def test_one_flipped_bit_changes_the_digest_of_its_block_alone(digester: DeviceDigester) -> None:
    memory = noise(64 * MEBI)
    places = [(start, MEBI) for start in range(0, memory.nbytes, MEBI)]
    sound = digester.digests(ranges(memory, places))
    for place in (0, MEBI - 1, MEBI, 33 * MEBI + 54_321, memory.nbytes - 1):
        memory[place] ^= 1 << (place % 8)
        damaged = digester.digests(ranges(memory, places))
        assert [turn for turn, digest in enumerate(damaged) if digest != sound[turn]] == [place // MEBI]
        memory[place] ^= 1 << (place % 8)


def test_digests_wait_for_what_their_stream_has_to_do_before(digester: DeviceDigester) -> None:
    memory, source = torch.zeros(256 * MEBI, dtype=torch.uint8, device="cuda"), noise(256 * MEBI)
    places = [(start, MEBI) for start in range(0, memory.nbytes, MEBI)]
    wanted = expected(source, places)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        memory.copy_(source)
        assert digester.digests(ranges(memory, places)) == wanted


def test_threads_that_never_used_the_device_digest_at_the_same_time(digester: DeviceDigester) -> None:
    memory = noise(32 * MEBI)
    places = [(start, MEBI) for start in range(0, memory.nbytes, MEBI)]
    wanted = expected(memory, places)

    def digests() -> list[bytes]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return digester.digests(ranges(memory, places))

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert all(found.result() == wanted for found in [pool.submit(digests) for _ in range(16)])


def test_the_random_state_is_left_alone(digester: DeviceDigester) -> None:
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    digester._try_out()
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
