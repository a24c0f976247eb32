"""Very many small chunks: few reads, exact bytes, every damaged one found and no other blamed, and the rest left."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.loading.files import Files
from holdfast.loading.read import check_bytes, read
from holdfast.loading.requests import Request
from holdfast.loading.small_chunks import check_small, read_small
from holdfast.ondisk.regions import Box, whole
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem
from holdfast.storage.local.disk import Disk
from holdfast.storage.local.local import LocalStorage
from tests.counting import calls

COUNT = 500


class CountingDisk(Disk):
    """Knows the ranges that were read of files that hold tensors."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        count = super().read_at(file, target, offset)
        self.reads.append(count)
        return count


class Holder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def tensors() -> dict[str, torch.Tensor]:
    """Small ones of odd sizes, among them a scalar and an empty one, and a large one."""
    generator = torch.Generator().manual_seed(0)
    small = {f"s{index:04d}": torch.randn(1 + index % 53, generator=generator) for index in range(COUNT)}
    return {
        **small,
        "s0100": torch.tensor(2.5),
        "s0101": torch.zeros(0, 3),
        "s0250_large": torch.randn(1000, 700, generator=generator),
        "s0300": torch.randint(0, 9, (7,), dtype=torch.int32, generator=generator),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with holdfast.CheckpointManager(tmp_path / "run", {"h": Holder(tensors())}, rng=False, mode="sync") as manager:
        manager.save(0)
    return tmp_path / "run"


def file_of(folder: Path) -> Path:
    return next(folder.glob("step-*/*.safetensors"))


def requests_of(checkpoint: Checkpoint) -> list[Request]:
    saved = tensors()
    return [
        Request(leaf, whole(leaf.shape), torch.zeros_like(saved[leaf.name.removeprefix("h.")]), fresh=False)
        for leaf in checkpoint.manifest.tensors
        if leaf.size_bytes
    ]


def assert_exact(requests: list[Request]) -> None:
    saved = tensors()
    for one in requests:
        assert torch.equal(one.target, saved[one.leaf.name.removeprefix("h.")]), one.leaf.name


def read_the_small(
    checkpoint: Checkpoint, requests: list[Request], *, checked: bool = True, on_bytes: Any = lambda count: None
) -> tuple[list[Problem], list[Request]]:
    with ExitStack() as stack:
        return read_small(Files(checkpoint, stack), requests, checked=checked, once=False, on_bytes=on_bytes)


def check_the_small(checkpoint: Checkpoint, requests: list[Request]) -> tuple[list[Problem], list[Request]]:
    with ExitStack() as stack:
        return check_small(Files(checkpoint, stack), requests, on_bytes=lambda count: None)


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(position)
        byte = handle.read(1)
        handle.seek(position)
        handle.write(bytes([byte[0] ^ 16]))


@pytest.mark.parametrize("checked", [True, False])
def test_small_chunks_are_read_in_a_few_reads_and_are_exact(folder: Path, checked: bool) -> None:
    disk = CountingDisk()
    checkpoint = holdfast.resolve(LocalStorage(folder, disk=disk))
    requests = requests_of(checkpoint)
    disk.reads.clear()
    counts: list[int] = []
    problems, rest = read_the_small(checkpoint, requests, checked=checked, on_bytes=counts.append)
    assert problems == []
    assert [one.leaf.name for one in rest] == ["h.s0250_large"]
    done = [one for one in requests if one.leaf.name != "h.s0250_large"]
    assert_exact(done)
    assert len(disk.reads) == 1
    assert sum(counts) == sum(one.target.nbytes for one in done)


def test_a_check_reads_the_same_and_changes_nothing(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    requests = requests_of(checkpoint)
    problems, rest = check_the_small(checkpoint, requests)
    assert problems == []
    assert [one.leaf.name for one in rest] == ["h.s0250_large"]
    assert not any(one.target.any() for one in requests)


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G7")
def test_each_damaged_chunk_is_named_stays_out_of_memory_and_no_other_is_blamed(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    leaves = {leaf.name: leaf for leaf in checkpoint.manifest.tensors}
    names = ["h.s0000", "h.s0100", "h.s0333", f"h.s{COUNT - 1:04d}"]
    for name in names:
        flip(file_of(folder), leaves[name].chunks[0].start + leaves[name].size_bytes - 1)
    requests = requests_of(checkpoint)
    problems = read(checkpoint, requests, checked=True)
    assert sorted(problem.leaf or "" for problem in problems) == sorted(names)
    for problem in problems:
        leaf = leaves[problem.leaf or ""]
        assert problem.byte_range == (leaf.chunks[0].start, leaf.chunks[0].start + leaf.size_bytes)
        assert problem.what == "the bytes do not have their digest"
    assert_exact([one for one in requests if one.leaf.name not in names])
    assert not any(one.target.any() for one in requests if one.leaf.name in names)
    assert sorted(problem.leaf or "" for problem in check_bytes(checkpoint, requests)) == sorted(names)


@pytest.mark.guarantee("G3")
def test_a_flipped_bit_in_any_small_chunk_is_found(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    requests = requests_of(checkpoint)
    for leaf in checkpoint.manifest.tensors:
        if leaf.size_bytes and leaf.name != "h.s0250_large":
            flip(file_of(folder), leaf.chunks[0].start)
            problems, _ = check_the_small(checkpoint, requests)
            assert [problem.leaf for problem in problems] == [leaf.name]
            flip(file_of(folder), leaf.chunks[0].start)


def test_a_part_another_type_and_another_layout_are_left_to_the_caller(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    requests = requests_of(checkpoint)
    odd = {"h.s0010", "h.s0020", "h.s0030"}
    leaves = {leaf.name: leaf for leaf in checkpoint.manifest.tensors}
    requests = [one for one in requests if one.leaf.name not in odd] + [
        Request(leaves["h.s0010"], Box((2,), (5,)), torch.zeros(5), fresh=False),
        Request(leaves["h.s0020"], whole((21,)), torch.zeros(21, dtype=torch.float64), fresh=False),
        Request(leaves["h.s0030"], whole((31,)), torch.zeros(62)[::2], fresh=False),
    ]
    problems, rest = read_the_small(checkpoint, requests)
    assert problems == []
    assert {one.leaf.name for one in rest} == {*odd, "h.s0250_large"}
    assert not any(one.target.any() for one in rest)


def test_a_file_that_is_not_there_or_has_another_size_is_left_to_the_caller(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    requests = requests_of(checkpoint)
    file = file_of(folder)
    os.truncate(file, file.stat().st_size - 1)
    for _ in range(2):
        assert read_the_small(checkpoint, requests) == ([], requests)
        assert len(read(checkpoint, requests, checked=True)) == len(requests)
        file.unlink(missing_ok=True)


@pytest.mark.guarantee("G3")
def test_a_file_that_is_cut_short_while_it_is_read_is_damage_of_the_rest_of_it(folder: Path) -> None:
    file = file_of(folder)

    class TruncatingDisk(Disk):
        def read_at(self, handle: int, target: memoryview, offset: int) -> int:
            if os.path.samestat(os.fstat(handle), file.stat()):
                os.truncate(file, end)
            return super().read_at(handle, target, offset)

    leaves = {leaf.name: leaf for leaf in holdfast.resolve(folder).manifest.tensors}
    end = leaves["h.s0400"].chunks[0].start + 1
    checkpoint = holdfast.resolve(LocalStorage(folder, disk=TruncatingDisk()))
    requests = requests_of(checkpoint)
    problems, _ = read_the_small(checkpoint, requests)
    beyond = {leaf.name for leaf in leaves.values() if leaf.chunks[0].start + leaf.size_bytes > end}
    assert {problem.leaf for problem in problems} == beyond - {"h.s0250_large"}
    assert_exact([one for one in requests if one.leaf.name not in beyond and one.leaf.name != "h.s0250_large"])


def test_a_few_small_chunks_are_left_to_the_caller(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    requests = requests_of(checkpoint)[:10]
    assert read_the_small(checkpoint, requests) == ([], requests)


def test_a_small_chunk_takes_few_calls(folder: Path) -> None:
    checkpoint = holdfast.resolve(folder)
    requests = [one for one in requests_of(checkpoint) if one.leaf.name != "h.s0250_large"]

    def work() -> None:
        read_the_small(checkpoint, requests)

    work()
    assert calls(work) <= 8 * len(requests) + 200
