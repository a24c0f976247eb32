"""Plain local shards that a user declares: stored as whole tensors, once, and restored into any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import StateMismatchError, UsageError
from holdfast.testing import values
from tests.distributed.scenes import Play, bits, caught, meet, run_scenes, the_same_error, trees
from tests.ranks import run_ranks
from tests.sizes import if_deep

TIMEOUT_SECONDS = 200.0
WIDTH, HIDDEN, WORDS = 6, 8, 12


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    options = {"mode": "sync", **options}
    return holdfast.CheckpointManager(run, state, rng=False, timeout=TIMEOUT_SECONDS, **options)


class Block(nn.Module):
    """A column parallel layer, a row parallel one and a norm; with one rank, simply the layers."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN // ranks)
        self.down = nn.Linear(HIDDEN // ranks, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Net(nn.Module):
    """An embedding that is cut by words and tied to the head, and two blocks."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS // ranks, WIDTH)
        self.blocks = nn.ModuleList(Block(ranks) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS // ranks, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(HIDDEN // ranks))


CUTS = {"embed.weight": 0, "*.up.*": 0, "*.down.weight": -1, "scale": 0}


def dimension_of(name: str) -> int | None:
    if name in ("embed.weight", "scale") or ".up." in name:
        return 0
    return 1 if name.endswith("down.weight") else None


def content(name: str, key: str) -> torch.Tensor:
    """What the whole tensor of a name holds."""
    whole = {**dict(Net().named_parameters()), **dict(Net().named_buffers())}[name]
    generator = torch.Generator().manual_seed(sum(map(ord, f"{name}/{key}")))
    return torch.randn(whole.shape, generator=generator)


def piece(name: str, whole: torch.Tensor, place: int, ranks: int) -> torch.Tensor:
    dimension = dimension_of(name)
    return whole if dimension is None else whole.chunk(ranks, dimension)[place]


def state_of(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, place: int, ranks: int) -> None:
    """Give model and optimizer this rank's pieces of the contents, and master copies of the weights."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(piece(name, content(name, "weight"), place, ranks))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            **{
                key: piece(name, content(name, key), place, ranks).clone()
                for key in ("exp_avg", "exp_avg_sq", "master")
            },
        }


def differences(model: nn.Module, optimizer: torch.optim.Optimizer, place: int, ranks: int) -> list[str]:
    """What is not bit for bit this rank's piece of the contents."""
    wrong = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if bits(tensor) != bits(piece(name, content(name, "weight"), place, ranks))
    ]
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        wrong += [
            f"{name}/{key}"
            for key in ("exp_avg", "exp_avg_sq", "master")
            if bits(state[key]) != bits(piece(name, content(name, key), place, ranks))
        ]
        wrong += [f"{name}/step"] if float(state["step"]) != 7.0 else []
    return wrong


def declared(model: nn.Module, group: Any) -> holdfast.Sharded:
    return holdfast.Sharded(model, {glob: (dimension, group) for glob, dimension in CUTS.items()})


def save_sharded(rank: int, run: Path, mode: str) -> None:
    size = dist.get_world_size()
    model, optimizer = state_of(Net(size))
    fill(model, optimizer, rank, size)
    with manager_of(run, {"model": declared(model, dist.group.WORLD), "optimizer": optimizer}, mode=mode) as manager:
        for step in range(3):
            manager.save(step).wait()


def load_sharded(rank: int, run: Path, fresh: bool) -> list[str]:
    size = dist.get_world_size()
    model, optimizer = state_of(Net(size))
    if not fresh:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = {"model": declared(model, init_device_mesh("cpu", (size,))), "optimizer": optimizer}
    with manager_of(run, state) as manager:
        manager.restore()
    return differences(model, optimizer, rank, size)


def load_whole(run: Path) -> list[str]:
    model, optimizer = state_of(Net())
    with manager_of(run, {"model": model, "optimizer": optimizer}) as manager:
        manager.restore()
    return differences(model, optimizer, 0, 1)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", ["async", *if_deep("sync")])
def test_shards_of_two_ranks_are_whole_tensors_for_one_and_shards_for_four(tmp_path: Path, mode: str) -> None:
    values(run_ranks(2, save_sharded, tmp_path / "two", mode))
    stored = {tensor.name: tensor for tensor in holdfast.resolve(tmp_path / "two").manifest.tensors}
    assert stored["model.blocks.0.down.weight"].shape == (WIDTH, HIDDEN)
    assert stored["optimizer.state.embed.weight.master"].shape == (WORDS, WIDTH)
    assert stored["model.scale"].shape == (HIDDEN,)
    assert load_whole(tmp_path / "two") == []
    assert holdfast.verify(tmp_path / "two").ok
    model, optimizer = state_of(Net())
    fill(model, optimizer, 0, 1)
    with manager_of(tmp_path / "one", {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
    for run in ("two", "one"):
        assert values(run_ranks(4, load_sharded, tmp_path / run, run == "one")) == [[]] * 4, run
    values(run_ranks(4, save_sharded, tmp_path / "four", mode))
    assert load_whole(tmp_path / "four") == []
    assert values(run_ranks(2, load_sharded, tmp_path / "four", False)) == [[]] * 2


def test_declared_shards_are_read_by_pytorchs_own_reader(tmp_path: Path) -> None:
    values(run_ranks(2, save_sharded, tmp_path, "sync"))
    folder = Path(holdfast.resolve(tmp_path).path)
    wanted = {f"model.{name}": torch.zeros(parameter.shape) for name, parameter in Net().named_parameters()}
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in wanted.items():
        assert torch.equal(tensor, content(name.removeprefix("model."), "weight")), name


# Two by two ranks: data and tensor parallel


def each_shard_is_stored_once(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["tp"].get_local_rank()
    model, optimizer = state_of(DistributedDataParallel(Net(2), process_group=mesh["dp"].get_group()))
    fill(model.module, optimizer, place, 2)
    state = {"model": declared(model, mesh["tp"]), "optimizer": optimizer}
    manager_of(folder, state).save(1)
    other, second = state_of(Net(2))
    manager_of(folder, {"model": declared(other, mesh["tp"].get_group()), "optimizer": second}).restore()
    return differences(other, second, place, 2)


def what_differs_between_replicas_of_shards(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    errors = []
    for name in ("blocks.1.norm.weight", "blocks.0.up.weight"):
        model, optimizer = state_of(Net(2))
        fill(model, optimizer, mesh["tp"].get_local_rank(), 2)
        if rank == 3:
            with torch.no_grad():
                model.get_parameter(name).view(-1)[-1] += 1
        manager = manager_of(folder / name, {"model": declared(model, mesh["tp"]), "optimizer": optimizer})
        errors.append(caught(lambda manager=manager: manager.save(1)))
    return errors


def what_cannot_be_declared(rank: int, folder: Path) -> Any:
    pair, others = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine, not_mine = (pair, others) if rank < 2 else (others, pair)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(2)
    distributed = nn.Linear(4, 4)
    distributed.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)]))

    def refused(module: Any, layouts: Any) -> Any:
        return caught(lambda: manager_of(folder, {"model": holdfast.Sharded(module, layouts)}))

    return {
        "no match": refused(model, {"*.gate.weight": (0, mine)}),
        "no dimension": refused(model, {"*.up.*": (1, mine)}),
        "another group": refused(model, {"*.up.*": (0, not_mine)}),
        "two dimensions": refused(model, {"*.up.*": (0, mesh)}),
        "no group": refused(model, {"*.up.*": (0, None)}),
        "no pair": refused(model, {"*.up.*": 0}),
        "nothing": refused(model, {}),
        "no module": refused({"a": 1}, {"a": (0, mine)}),
        "two layouts": refused(model, {"*.up.*": (0, mine), "*.up.weight": (1, mine)}),
        "tied": refused(model, {"head.weight": (0, mine)}),
        "a DTensor": refused(distributed, {"weight": (0, mine)}),
        "wrapped": caught(lambda: holdfast.PerRank(holdfast.Sharded(model, {"*.up.*": (0, mine)}))),
    }


def shards_that_are_not_equal(rank: int, folder: Path) -> Any:
    group = init_device_mesh("cpu", (4,))
    model = holdfast.Sharded(nn.Linear(3, 5 if rank == 3 else 4, bias=False), {"weight": (0, group)})
    error = caught(lambda: manager_of(folder, {"model": model}).save(1))
    meet("looked")
    return error, folder.exists()


def whole_tensors_of_another_size(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    layouts = {"weight": (0, mesh)}
    nn.init.ones_((saved := nn.Linear(3, 2, bias=False)).weight)
    manager_of(folder, {"model": holdfast.Sharded(saved, layouts)}).save(1)
    return caught(manager_of(folder, {"model": holdfast.Sharded(nn.Linear(3, 3, bias=False), layouts)}).restore)


FOUR_RANKS = [
    each_shard_is_stored_once,
    what_differs_between_replicas_of_shards,
    what_cannot_be_declared,
    shards_that_are_not_equal,
    whole_tensors_of_another_size,
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("four")
    return run_scenes(4, FOUR_RANKS, folder), folder


def test_of_data_and_tensor_parallel_ranks_each_shard_is_stored_once(four: tuple[Play, Path]) -> None:
    play, folder = four
    assert play("each_shard_is_stored_once") == [[]] * 4
    run = folder / "each_shard_is_stored_once"
    assert trees(run) == [("model", ""), ("optimizer", "")]
    for tensor in holdfast.resolve(run).manifest.tensors:
        name = tensor.name.removeprefix("model.").removeprefix("optimizer.state.")
        parameter = name.rpartition(".")[0] if tensor.name.startswith("optimizer.") else name
        whole = dimension_of(parameter) is None or name.endswith(".step")
        assert len(tensor.chunks) == (1 if whole else 2), tensor.name
        elements = sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks)
        assert elements == torch.Size(tensor.shape).numel()


@pytest.mark.guarantee("G2")
def test_norms_and_shards_are_compared_among_the_ranks_that_replicate_them(four: tuple[Play, Path]) -> None:
    seen = four[0]("what_differs_between_replicas_of_shards")
    norm, shard = (the_same_error(errors) for errors in zip(*seen, strict=True))
    assert norm.leaf == "model.blocks.1.norm.weight"
    assert "ranks 0, 1, 2 and rank 3" in norm.problem
    assert shard.leaf == "model.blocks.0.up.weight"
    assert "rank 1 and rank 3" in shard.problem


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no match", "'*.gate.weight'"),
        ("no dimension", "no dimension 1"),
        ("another group", "process group"),
        ("two dimensions", "one dimension"),
        ("no group", "process group"),
        ("no pair", "pair"),
        ("nothing", "mapping"),
        ("no module", "torch.nn.Module"),
        ("two layouts", "different layouts"),
        ("tied", "tied to 'embed.weight'"),
        ("a DTensor", "DTensor"),
        ("wrapped", "PerRank cannot wrap"),
    ],
)
def test_what_cannot_be_declared_is_refused_when_it_is_built(four: tuple[Play, Path], case: str, text: str) -> None:
    play, folder = four
    for rank in play("what_cannot_be_declared"):
        assert isinstance(rank[case], UsageError), case
        assert text in str(rank[case])
    assert not (folder / "what_cannot_be_declared").exists()


def test_shards_of_different_sizes_are_an_error_that_names_them(four: tuple[Play, Path]) -> None:
    seen = four[0]("shards_that_are_not_equal")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, UsageError)
    assert "a shard of [4, 3] on rank 0 and a shard of [5, 3] on rank 3" in error.problem
    assert not any(exists for _, exists in seen)


@pytest.mark.guarantee("G7")
def test_declared_shards_of_a_tensor_of_another_size_do_not_fit(four: tuple[Play, Path]) -> None:
    error = the_same_error(four[0]("whole_tensors_of_another_size"))
    assert isinstance(error, StateMismatchError)
    assert "float32 [8, 3] in the checkpoint, float32 [12, 3] now" in str(error)
