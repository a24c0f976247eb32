"""Over changes of the number of ranks, kills and read-ahead, an epoch has every sample once. Counted, not computed."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from holdfast.data import ElasticLoader, ElasticShards
from holdfast.errors import StateMismatchError
from tests.distributed.scenes import Play, bits, caught, meet, run_scenes, the_same_error
from tests.ranks import run_ranks

ADAPT = holdfast.LoadStrategy(on_world_change="adapt")
LENGTH = 70
SHARDS = [f"{number}/{size}" for number, size in enumerate([5, 9, 1, 14, 3, 7, 2, 11, 6, 4, 8])]
EVERY_OF_SHARDS = [f"{shard}:{sample}" for shard in SHARDS for sample in range(int(shard.split("/")[1]))]
_groups: dict[int, Any] = {}


def group_of(size: int) -> Any:
    """The first `size` ranks. Groups are made once, on all ranks."""
    for each in range(1, dist.get_world_size() + 1):
        if each not in _groups:
            _groups[each] = dist.new_group(list(range(each)))
    return _groups[size]


def read(shard: str, position: int) -> Iterator[str]:
    for sample in range(position, int(shard.split("/")[1])):
        yield f"{shard}:{sample}"


def loader_of(kind: str, rank: int, size: int, workers: int, **options: Any) -> Any:
    given = {"shuffle": True, "seed": 7, "num_workers": workers, "collate_fn": list, "rank": rank, "size": size}
    if kind == "samples":
        return ElasticLoader(list(range(LENGTH)), 3, **given | options)
    return ElasticShards(SHARDS, read, 3, **given | options)


# One start of four ranks


def chain(rank: int, folder: Path, kind: str, worlds: Sequence[int], workers: int, batches: int) -> list[Any]:
    """Train through one epoch on some numbers of ranks, each from the checkpoint of the one before."""
    seen: list[Any] = []
    for number, size in enumerate(worlds):
        last = number == len(worlds) - 1
        if rank < size:
            loader = loader_of(kind, rank, size, workers)
            state = {"model": nn.Linear(1, 1, bias=False), "loader": loader}
            nn.init.ones_(state["model"].weight)
            with holdfast.CheckpointManager(
                folder, state, mode="sync", timeout=200, process_group=group_of(size)
            ) as manager:
                manager.restore(strategy=ADAPT)
                if loader.epoch == 0:
                    # Rank 0 is one batch ahead; the last ranks train to the end.
                    taken = itertools.islice(iter(loader), None if last else batches + (rank == 0))
                    seen += itertools.chain(*taken)
                manager.save(number)
        meet(f"{folder} {number}")
    return seen


CHAINS = [
    ("samples", (1, 2, 4), 0, 4),
    ("samples", (4, 2, 1), 0, 3),
    ("samples", (4, 3, 2, 4), 0, 1),
    ("samples", (2, 4, 2), 2, 3),
    ("samples", (1, 2), 2, 0),
    ("shards", (1, 2, 4), 0, 3),
    ("shards", (4, 3, 1), 0, 1),
    ("shards", (2, 1, 2), 2, 2),
]


def chains(rank: int, folder: Path) -> Any:
    group_of(1)
    return [chain(rank, folder / str(number), *one) for number, one in enumerate(CHAINS)]


def the_same_number_of_ranks(rank: int, folder: Path) -> Any:
    """Uninterrupted and resumed, in the middle of an epoch and after its last batch: batches, losses and draws."""
    seen = []
    for kind, stop in (("samples", 3), ("samples", 6), ("shards", 2)):
        run = folder / f"{kind}-{stop}"
        both = []
        for resumes in (False, True):
            torch.manual_seed(31337 if resumes else rank)
            random.seed(31337 if resumes else rank)
            loader = loader_of(kind, rank, 4, 0)
            model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
            nn.init.ones_(model[0].weight), nn.init.ones_(model[0].bias)
            with holdfast.CheckpointManager(
                run, {"model": model, "loader": loader}, mode="sync", timeout=200
            ) as manager:
                step = manager.restore().next_step
                found: list[Any] = []
                while len(found) < 14 - (stop if resumes else 0):
                    for batch in loader:
                        found.append((batch, model(torch.ones(1, 1)).sum().item(), random.random()))
                        if step == stop - 1:
                            manager.save(step)
                        step += 1
            both.append(found[:14])
        seen.append(both[0][stop:] == both[1][: 14 - stop])
    return seen


def other_data(rank: int, folder: Path) -> Any:
    """Saved on two ranks, restored on four, of which one has another dataset."""
    if rank < 2:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        state = {"model": model, "loader": loader_of("samples", rank, 2, 0)}
        with holdfast.CheckpointManager(folder, state, mode="sync", timeout=200, process_group=group_of(2)) as manager:
            manager.save(1)
    meet(f"{folder} saved")
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    loader = loader_of("samples", rank, 4, 0, seed=7 if rank < 3 else 8)
    next(iter(loader))

    def live() -> Any:
        return bits([model.state_dict(), loader.state_dict(), holdfast.get_rng_state()])

    before = live()
    manager = holdfast.CheckpointManager(folder, {"model": model, "loader": loader}, mode="sync", timeout=200)
    return caught(lambda: manager.restore(strategy=ADAPT)), live() == before


def tensor_parallel_ranks(rank: int, folder: Path) -> Any:
    """Two data-parallel ranks of two, which read the same data, and then four data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = loader_of("samples", mesh["dp"].get_local_rank(), 2, 0)
    seen = list(itertools.chain(*itertools.islice(iter(loader), 5)))
    state = {"loader": holdfast.PerRank(loader, group=mesh["dp"])}
    holdfast.CheckpointManager(folder, state, mode="sync", rng=False, timeout=200).save(1)
    plain = loader_of("samples", rank, 4, 0)
    manager = holdfast.CheckpointManager(folder, {"loader": plain}, mode="sync", rng=False, timeout=200)
    # Without the group nothing tells that the number of ranks that read different data has changed.
    refused = caught(lambda: manager.restore(strategy=ADAPT))
    wide = loader_of("samples", rank, 4, 0)
    state = {"loader": holdfast.PerRank(wide, group=dist.group.WORLD)}
    holdfast.CheckpointManager(folder, state, mode="sync", rng=False, timeout=200).restore(strategy=ADAPT)
    return seen, list(itertools.chain(*wide)), refused


SCENES = [chains, the_same_number_of_ranks, other_data, tensor_parallel_ranks]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(4, SCENES, tmp_path_factory.mktemp("elastic"))


def require_once(seen: Counter[Any], kind: str, size: int) -> None:
    """Every sample once; of single samples, some twice that fill up the last round of the last ranks."""
    if kind == "shards":
        assert seen == Counter(EVERY_OF_SHARDS)
        return
    assert set(seen) == set(range(LENGTH))
    assert max(seen.values()) <= 2
    assert seen.total() - LENGTH < size


@pytest.mark.guarantee("G8")
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CHAINS)), ids=[str(one) for one in CHAINS])
def test_over_changes_of_the_number_of_ranks_every_sample_of_an_epoch_is_seen_once(played: Play, number: int) -> None:
    kind, worlds, _, _ = CHAINS[number]
    seen = Counter(sample for of_rank in played("chains") for sample in of_rank[number])
    require_once(seen, kind, worlds[-1])


@pytest.mark.guarantee("G8")
@pytest.mark.slow
def test_on_the_same_number_of_ranks_the_training_goes_on_bit_for_bit(played: Play) -> None:
    assert played("the_same_number_of_ranks") == [[True, True, True]] * 4


@pytest.mark.guarantee("G8")
@pytest.mark.slow
def test_other_data_on_one_rank_is_refused_on_all_and_changes_nothing(played: Play) -> None:
    seen = played("other_data")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, StateMismatchError)
    assert "seed was 7 and is 8 now" in str(error)
    assert error.component == "loader"
    assert [untouched for _, untouched in seen] == [True] * 4


@pytest.mark.guarantee("G8")
@pytest.mark.slow
def test_ranks_that_read_the_same_data_are_counted_once(played: Play) -> None:
    seen = played("tensor_parallel_ranks")
    assert seen[0][0] == seen[1][0] != seen[2][0] == seen[3][0]
    before = Counter(seen[0][0] + seen[2][0])
    assert before.total() == len(before) == 30
    require_once(before + Counter(sample for _, rest, _ in seen for sample in rest), "samples", 4)
    error = the_same_error([error for _, _, error in seen])
    assert isinstance(error, StateMismatchError)


# Killed


def train_and_die(rank: int, size: int, run: str, batches: int | None) -> None:
    """Train on, save after every second batch, and die by SIGKILL in the middle; None ends the epoch.

    Each rank writes down what it got, with the step; a step that no checkpoint has is trained again.
    """
    samples, shards = loader_of("samples", rank, size, 2), loader_of("shards", rank, size, 0)
    state = {"samples": samples, "shards": shards}
    manager = holdfast.CheckpointManager(run, state, mode="sync", timeout=200)
    step = manager.restore(strategy=ADAPT).next_step
    with open(f"{run}-{size}-{rank}.txt", "a", buffering=1) as log:
        for number, both in enumerate(itertools.zip_longest(samples, shards, fillvalue=())):
            if number == batches:
                os.kill(os.getpid(), signal.SIGKILL)
            log.writelines(f"{step} {sample}\n" for batch in both for sample in batch)
            if number % 2 == 1 and batches is not None:
                manager.save(step)
            step += 1


@pytest.mark.guarantee("G8")
@pytest.mark.slow
def test_after_a_kill_the_rest_of_the_epoch_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    seen: Counter[str] = Counter()
    for size, batches in ((2, 3), (3, 3), (1, None)):
        outcomes = run_ranks(size, train_and_die, size, run, batches)
        assert [outcome.exit_code for outcome in outcomes] == [0 if batches is None else -signal.SIGKILL] * size
        saved = holdfast.resolve(run).step
        for rank in range(size):
            for line in Path(f"{run}-{size}-{rank}.txt").read_text().splitlines():
                step, _, sample = line.partition(" ")
                if batches is None or int(step) <= saved:
                    seen[sample] += 1
    assert seen == Counter([*map(str, range(LENGTH)), *EVERY_OF_SHARDS])
