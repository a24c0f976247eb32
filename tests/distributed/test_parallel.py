"""Every parallel form: what is stored once and what is stored apart, under which names, and who gets what back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import StateMismatchError, UsageError
from holdfast.testing import values
from tests.distributed.scenes import Holder, Play, bits, caught, hash_tree, meet, run_scenes, the_same_error, trees
from tests.ranks import run_ranks

TIMEOUT_SECONDS = 200.0


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    options = {"mode": "sync", **options}
    return holdfast.CheckpointManager(run, state, rng=False, timeout=TIMEOUT_SECONDS, **options)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step whose gradients depend on nothing but the parameters' places."""
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    optimizer.step()
    optimizer.zero_grad()


def leaf_names(run: Path) -> list[str]:
    return sorted(tensor.name for tensor in holdfast.resolve(run).manifest.tensors)


# Two by two ranks


def one_loader_per_data_rank(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["dp"].get_local_rank()
    by_mesh = Holder(position=100 + place, order=torch.arange(5) * (place + 1))
    by_group = Holder(position=200 + place)
    state = {
        "loader": holdfast.PerRank(by_mesh, group=mesh["dp"]),
        "other": holdfast.PerRank(by_group, group=mesh["dp"].get_group()),
    }
    manager_of(folder, state).save(1)
    by_mesh.state, by_group.state = {}, {}
    manager_of(folder, state).restore()
    return by_mesh.state["position"], by_mesh.state["order"].tolist(), by_group.state["position"]


def a_mesh_of_two_dimensions_is_no_group(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    manager = manager_of(folder, {"loader": holdfast.PerRank(Holder(a=1), group=mesh)})
    return caught(lambda: manager.save(1)), folder.exists()


class Stage(nn.Module):
    """A pipeline stage with the same names as every other stage, and another shape."""

    def __init__(self, stage: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(10 + stage)
        self.layer = nn.Linear(4, 6 + 2 * stage, bias=bias)


def pipeline_of_two_by_two(rank: int, folder: Path) -> Any:
    """Two stages, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()

    def build(seed_of: int) -> dict[str, Any]:
        model = Stage(stage)
        if seed_of != stage:
            nn.init.zeros_(model.layer.weight)
        fully_shard(model, mesh=mesh["dp"])
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1 * (stage + 1))}

    state = build(stage)
    step_once(state["model"], state["optimizer"])
    saved = bits([state["model"].state_dict(), state["optimizer"].state_dict()])
    manager_of(folder, state, pipeline_stage=stage).save(1)
    other = build(-1)
    manager_of(folder, other, pipeline_stage=stage).restore()
    same = bits([other["model"].state_dict(), other["optimizer"].state_dict()]) == saved
    before = bits(other["model"].state_dict())
    manager = manager_of(folder, other, pipeline_stage=stage + 1)
    error = caught(manager.restore)
    without = caught(manager_of(folder, other).restore)
    return same, error, without, bits(other["model"].state_dict()) == before


def saving_by_a_part_of_the_ranks(rank: int, folder: Path) -> Any:
    """Ranks 1 and 2 save, while 0 and 3 talk to each other."""
    savers, others = dist.new_group([1, 2]), dist.new_group([0, 3])
    if rank in (1, 2):
        mesh = DeviceMesh.from_group(savers, "cpu")
        holder = Holder(t=distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), own=torch.tensor([float(rank)]))
        state = {"holder": holdfast.Shared(Holder(t=holder.state["t"])), "own": holdfast.PerRank(Holder(rank=rank))}
        manager = manager_of(folder, state, process_group=savers)
        checkpoint = manager.save(1).wait()
        state["own"].component.state = {}
        manager.restore()
        return checkpoint.world_size, state["own"].component.state
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=others)
    # A name for the group that saves is there on every rank; only its members may use it.
    return int(total), caught(lambda: manager_of(folder / "outside", {"a": Holder(a=1)}, process_group=savers))


def a_mesh_larger_than_the_group_that_saves(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    pair = dist.new_group([0, 1])
    holder = Holder(t=distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
    copies = Holder(t=distribute_tensor(torch.arange(8.0), mesh, [Replicate()]))
    error = saved = None
    if rank < 2:
        error = caught(lambda: manager_of(folder, {"part": holdfast.Shared(holder)}, process_group=pair).save(1))
        meet("part", 2)
        assert not folder.exists(), hash_tree(folder)
        saved = manager_of(folder, {"whole": holdfast.Shared(copies)}, process_group=pair).save(1).wait().step
    return error, saved


FOUR_RANKS = [
    one_loader_per_data_rank,
    a_mesh_of_two_dimensions_is_no_group,
    pipeline_of_two_by_two,
    saving_by_a_part_of_the_ranks,
    a_mesh_larger_than_the_group_that_saves,
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("four")
    return run_scenes(4, FOUR_RANKS, folder), folder


def test_a_loader_is_stored_once_per_data_rank_and_its_tensor_peers_get_the_same(four: tuple[Play, Path]) -> None:
    play, folder = four
    assert play("one_loader_per_data_rank") == [
        (100, [0, 1, 2, 3, 4], 200),
        (100, [0, 1, 2, 3, 4], 200),
        (101, [0, 2, 4, 6, 8], 201),
        (101, [0, 2, 4, 6, 8], 201),
    ]
    run = folder / "one_loader_per_data_rank"
    scopes = ("rank-00000", "rank-00001")
    assert trees(run) == [(name, scope) for name in ("loader", "other") for scope in scopes]
    assert leaf_names(run) == [f"loader@{scope}.order" for scope in scopes]


def test_a_mesh_of_two_dimensions_cannot_say_whose_loader_it_is(four: tuple[Play, Path]) -> None:
    seen = four[0]("a_mesh_of_two_dimensions_is_no_group")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, UsageError)
    assert "one dimension" in str(error)
    assert not any(exists for _, exists in seen)


def test_stages_whose_names_collide_are_stored_apart_also_when_each_is_sharded(four: tuple[Play, Path]) -> None:
    play, folder = four
    seen = play("pipeline_of_two_by_two")
    assert [same for same, *_ in seen] == [True] * 4
    run = folder / "pipeline_of_two_by_two"
    scopes = ("stage-00000", "stage-00001")
    assert trees(run) == [(name, scope) for name in ("model", "optimizer") for scope in scopes]
    shapes = {tensor.name: tensor.shape for tensor in holdfast.resolve(run).manifest.tensors}
    assert shapes["model@stage-00000.layer.weight"] == (6, 4)
    assert shapes["model@stage-00001.layer.weight"] == (8, 4)


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G7")
def test_a_stage_that_the_checkpoint_does_not_have_is_an_error_on_all_ranks(four: tuple[Play, Path]) -> None:
    seen = four[0]("pipeline_of_two_by_two")
    for errors in ([error for _, error, _, _ in seen], [without for _, _, without, _ in seen]):
        error = the_same_error(errors)
        assert isinstance(error, StateMismatchError)
    assert all(unchanged for *_, unchanged in seen)


def test_a_part_of_the_ranks_saves_while_the_others_do_something_else(four: tuple[Play, Path]) -> None:
    play, folder = four
    first, second, third, fourth = play("saving_by_a_part_of_the_ranks")
    assert second == (2, {"rank": 1})
    assert third == (2, {"rank": 2})
    assert first[0] == fourth[0] == 5
    run = folder / "saving_by_a_part_of_the_ranks"
    assert trees(run) == [("holder", ""), ("own", "rank-00000"), ("own", "rank-00001")]
    assert holdfast.verify(run).ok


def test_who_is_no_member_of_the_group_that_saves_is_told_so(four: tuple[Play, Path]) -> None:
    play, folder = four
    first, _, _, fourth = play("saving_by_a_part_of_the_ranks")
    for error in (first[1], fourth[1]):
        assert isinstance(error, UsageError)
        assert "not in the process_group" in str(error)
    assert not (folder / "saving_by_a_part_of_the_ranks" / "outside").exists()


def test_a_mesh_larger_than_the_group_that_saves_is_an_error_on_all_and_nothing_is_written(
    four: tuple[Play, Path],
) -> None:
    seen = four[0]("a_mesh_larger_than_the_group_that_saves")
    error = the_same_error([error for error, _ in seen[:2]])
    assert isinstance(error, UsageError)
    assert (error.leaf, error.step) == ("part.t", 1)
    assert "every rank of its mesh" in error.advice
    assert [saved for _, saved in seen] == [1, 1, None, None], "whole replicas can be saved by a part of the mesh"


# Two ranks


def pipeline_of_two_by_one(rank: int, folder: Path) -> Any:
    def build(start: float) -> dict[str, Any]:
        model = Stage(rank)
        nn.init.constant_(model.layer.bias, start)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)}

    state = build(1.0)
    step_once(state["model"], state["optimizer"])
    saved = bits([state["model"].state_dict(), state["optimizer"].state_dict()])
    manager_of(folder, state, pipeline_stage=rank).save(1)
    other = build(2.0)
    manager_of(folder, other, pipeline_stage=rank).restore()
    same = bits([other["model"].state_dict(), other["optimizer"].state_dict()]) == saved
    swapped = caught(manager_of(folder, build(3.0), pipeline_stage=1 - rank).restore)
    same_stage = caught(manager_of(folder, {"model": build(3.0)["model"]}, pipeline_stage=0).restore)
    collision = caught(lambda: manager_of(folder / "collision", {"model": Stage(rank)}).save(1))
    assert not (folder / "collision").exists()
    fewer = {"model": Stage(rank, bias=rank == 1)}
    unexpected = caught(
        lambda: manager_of(folder, fewer, pipeline_stage=rank).restore(strategy=holdfast.LoadStrategy(only=("model",)))
    )
    return same, swapped, same_stage, collision, unexpected


class Half(nn.Module):
    """Some of the layers of a whole model, under the names that they have in it."""

    def __init__(self, numbers: tuple[int, ...], seed: int = 0) -> None:
        super().__init__()
        layers = {}
        for number in numbers:
            torch.manual_seed(seed + number)
            layers[str(number)] = nn.Linear(3, 3)
        self.layers = nn.ModuleDict(layers)


def half_state(numbers: tuple[int, ...], seed: int) -> dict[str, Any]:
    model = Half(numbers, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """Parameters and moments by their parameter's name."""
    model, optimizer = state["model"], state["optimizer"]
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = bits([parameter, optimizer.state[parameter]])
    return found


def pipeline_without_collisions(rank: int, folder: Path) -> Any:
    numbers = ((0, 1), (2, 3))[rank]
    state = half_state(numbers, seed=0)
    step_once(state["model"], state["optimizer"])
    state["scheduler"].step()
    manager_of(folder, state).save(1)
    other = half_state(numbers, seed=50)
    result = manager_of(folder, other).restore()
    fewer = {"model": Half((1,) if rank == 0 else (2, 3))}
    nobody_has_it = caught(lambda: manager_of(folder, fewer).restore(strategy=holdfast.LoadStrategy(only=("model",))))
    return by_name(state) == by_name(other), by_name(other), result.restored, nobody_has_it


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled-ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "fsdp": sharded,
}


def every_wrapper_loads_every_other(rank: int, folder: Path) -> Any:
    """Save model and optimizer in every form, load each in every other; what is not equal."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True)

    def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        return bits(
            [
                dict(get_model_state_dict(model, options=options)),
                [moment.full_tensor() if hasattr(moment, "full_tensor") else moment for moment in moments],
            ]
        )

    expected, wrong = {}, []
    for form, wrap in WRAPPERS.items():
        model = wrap(net(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step_once(model, optimizer)
        manager_of(folder / form, {"model": model, "optimizer": optimizer}).save(1)
        expected[form] = whole(model, optimizer)
    wrong += [form for form in WRAPPERS if expected[form] != expected["plain"]]
    for saved in WRAPPERS:
        for form, wrap in WRAPPERS.items():
            model = wrap(net(2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            manager_of(folder / saved, {"model": model, "optimizer": optimizer}).restore()
            if whole(model, optimizer) != expected["plain"]:
                wrong.append(f"{saved} to {form}")
    return wrong


def buffers_that_differ_between_replicas(rank: int, folder: Path) -> Any:
    """With DDP the leader's buffers count: the next forward pass gives them to everybody."""
    model = DistributedDataParallel(net(1))
    for _ in range(3):
        model(torch.randn(8, 4) + 5 * rank).sum().backward()
    manager_of(folder, {"model": model}).save(1)
    own = bits(dict(model.module[1].named_buffers()))
    manager_of(folder, {"model": model}).restore()
    return own, bits(dict(model.module[1].named_buffers()))


TWO_RANKS = [
    pipeline_of_two_by_one,
    pipeline_without_collisions,
    every_wrapper_loads_every_other,
    buffers_that_differ_between_replicas,
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("two")
    return run_scenes(2, TWO_RANKS, folder), folder


def test_stages_of_one_rank_whose_names_collide_are_stored_apart(two: tuple[Play, Path]) -> None:
    play, folder = two
    assert [same for same, *_ in play("pipeline_of_two_by_one")] == [True, True]
    scopes = ("stage-00000", "stage-00001")
    assert trees(folder / "pipeline_of_two_by_one") == [(c, s) for c in ("model", "optimizer") for s in scopes]


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("index", [1, 2], ids=["swapped", "the same stage twice"])
def test_the_state_of_another_stage_does_not_fit_and_all_ranks_say_so(two: tuple[Play, Path], index: int) -> None:
    error = the_same_error([seen[index] for seen in two[0]("pipeline_of_two_by_one")])
    assert isinstance(error, StateMismatchError)


def test_stages_whose_names_collide_need_their_number(two: tuple[Play, Path]) -> None:
    error = the_same_error([seen[3] for seen in two[0]("pipeline_of_two_by_one")])
    assert isinstance(error, UsageError)
    assert "pipeline_stage" in error.advice
    assert error.leaf == "model.layer.weight"


def test_a_leaf_that_only_the_checkpoint_of_one_stage_has_is_an_error(two: tuple[Play, Path]) -> None:
    error = the_same_error([seen[4] for seen in two[0]("pipeline_of_two_by_one")])
    assert isinstance(error, StateMismatchError)
    assert error.unexpected == ("model@stage-00000.layer.bias",)


def test_stages_whose_names_do_not_collide_are_one_model_for_any_layout(two: tuple[Play, Path]) -> None:
    play, folder = two
    seen = play("pipeline_without_collisions")
    assert [same for same, *_ in seen] == [True, True]
    run = folder / "pipeline_without_collisions"
    assert trees(run) == [("model", ""), ("optimizer", ""), ("scheduler", "")]
    whole = half_state((0, 1, 2, 3), seed=99)
    with manager_of(run, whole) as manager:
        assert set(manager.restore().restored) == {"model", "optimizer", "scheduler"}
    assert by_name(whole) == {**seen[0][1], **seen[1][1]}
    assert whole["optimizer"].param_groups[0]["lr"] == 0.45


def test_a_layer_that_no_stage_has_a_place_for_is_unexpected(two: tuple[Play, Path]) -> None:
    error = the_same_error([seen[3] for seen in two[0]("pipeline_without_collisions")])
    assert isinstance(error, StateMismatchError)
    assert error.unexpected == ("model.layers.0.bias", "model.layers.0.weight")


def test_every_wrapper_loads_what_every_other_saved(two: tuple[Play, Path]) -> None:
    play, folder = two
    assert play("every_wrapper_loads_every_other") == [[], []]
    for form in WRAPPERS:
        names = leaf_names(folder / "every_wrapper_loads_every_other" / form)
        assert names == leaf_names(folder / "every_wrapper_loads_every_other" / "plain")
        assert not any("module" in name or "_orig_mod" in name for name in names)
        assert "model.0.weight" in names
        assert "optimizer.state.0.weight.exp_avg" in names


@pytest.mark.guarantee("G8")
def test_of_buffers_that_differ_between_replicas_the_leaders_are_stored(two: tuple[Play, Path]) -> None:
    (leaders, first), (others, second) = two[0]("buffers_that_differ_between_replicas")
    assert leaders != others
    assert first == leaders
    assert second == leaders


# No collectives


class RefusingGroup(dist.ProcessGroup):
    """A process group as one of NCCL alone is for a CPU tensor: there, and of no use."""

    def getBackendName(self) -> str:
        return "refusing"

    def size(self) -> int:
        return int(os.environ["WORLD_SIZE"])


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("no collectives here")


COLLECTIVES = [
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
]
for _name in COLLECTIVES:
    setattr(RefusingGroup, _name, _refuse)


def save_without_collectives(rank: int, run: Path) -> Any:
    dist.Backend.register_backend(
        "refusing", lambda store, rank, size, timeout: RefusingGroup(rank, size), devices=["cpu", "cuda"]
    )
    dist.init_process_group("refusing")
    with pytest.raises(RuntimeError, match="no collectives here"):
        dist.all_reduce(torch.ones(1))
    torch.manual_seed(rank)
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    step_once(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "own": holdfast.PerRank(Holder(rank=rank)), "any": Holder(a=rank)}
    with holdfast.CheckpointManager(run, state, timeout=TIMEOUT_SECONDS) as manager:
        assert not manager.restore().resumed
        manager.save(1, metrics={"loss": 0.5})
        saved = bits([model.state_dict(), optimizer.state_dict()])
        step_once(model, optimizer)
        assert manager.should_load()
        result = manager.restore()
    assert bits([model.state_dict(), optimizer.state_dict()]) == saved
    meet("end")
    # Rank 0 keeps the store, and leaves last.
    if rank == 0:
        meet_again = dist.distributed_c10d._get_default_store()
        meet_again.wait(["gone"])
    else:
        dist.distributed_c10d._get_default_store().set("gone", "1")
    return result.step, sorted(result.restored)


def test_saving_and_restoring_need_no_collectives(tmp_path: Path) -> None:
    expected = (1, ["any", "model", "optimizer", "own", "rng"])
    assert values(run_ranks(2, save_without_collectives, tmp_path, backend=None)) == [expected] * 2
    assert holdfast.verify(tmp_path).ok


# One process: every kind of tensor


def every_kind_of_tensor() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(6, 8)
    complex_numbers = torch.randn(3, 4, dtype=torch.complex64)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, -float("nan")])
    kinds = {
        "transposed": whole.t(),
        "strided": whole[::2, 1::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "reversed_view": torch.arange(12.0).reshape(3, 4)[:, [3, 1]],
        "scalar": torch.tensor(2.5),
        "scalar_of_int64": torch.tensor(2**62 + 1),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(3, 0, 2, dtype=torch.int32),
        "empty_transposed": torch.empty(3, 0).t(),
        "bool": torch.tensor([True, False, True]),
        "complex64": complex_numbers,
        "complex64_conjugate": complex_numbers.conj(),
        "complex64_imaginary_of_conjugate": complex_numbers.conj().imag,
        "complex64_imaginary": complex_numbers.imag,
        "complex128": torch.randn(3, dtype=torch.complex128),
        "complex32": torch.randn(3, dtype=torch.complex64).to(torch.complex32),
        "odd_float32": odd,
        "odd_float64": odd.double(),
    }
    for name in ("float16", "bfloat16", "int8", "int16", "uint8", "uint16", "uint32", "uint64"):
        kinds[name] = (torch.arange(7) + 1).to(getattr(torch, name))
        kinds[f"{name}_strided"] = (torch.arange(12) + 1).to(getattr(torch, name)).reshape(3, 4).t()[::2]
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        kinds[name] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
        kinds[f"{name}_transposed"] = kinds[name].reshape(16, 16).t()
    return kinds


@pytest.mark.guarantee("G2")
def test_every_kind_of_tensor_in_a_component_comes_back_bit_for_bit(tmp_path: Path) -> None:
    holder = Holder(**every_kind_of_tensor())
    other = Holder(**{name: torch.zeros_like(tensor) for name, tensor in holder.state.items()})
    with manager_of(tmp_path, {"holder": holder}) as manager:
        manager.save(1)
    assert bits(holder.state) == bits(every_kind_of_tensor()), "saving changed nothing"
    with manager_of(tmp_path, {"holder": other}) as manager:
        manager.restore()
    wrong = [name for name, tensor in holder.state.items() if bits(tensor) != bits(other.state[name])]
    assert wrong == []
    assert holdfast.verify(tmp_path).ok


@pytest.mark.guarantee("G2")
def test_every_kind_of_tensor_in_a_model_comes_back_bit_for_bit_into_its_own_memory(tmp_path: Path) -> None:
    def build(fill: bool) -> nn.Module:
        model = nn.Module()
        for name, tensor in every_kind_of_tensor().items():
            if name == "expanded":
                continue  # several elements in one memory: torch itself refuses to write to it
            model.register_buffer(f"a_{name}", tensor if fill else _zeros_in_place(tensor))
        return model

    model, other = build(True), build(False)
    with manager_of(tmp_path, {"model": model}) as manager:
        manager.save(1)
    places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in other.named_buffers()}
    with manager_of(tmp_path, {"model": other}) as manager:
        manager.restore()
    expected = dict(model.named_buffers())
    wrong = [name for name, tensor in other.named_buffers() if bits(tensor) != bits(expected[name])]
    assert wrong == []
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in other.named_buffers()} == places


def _zeros_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own with the same strides, all zero."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(torch.zeros_like(tensor))


def test_tied_parameters_are_stored_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            nn.init.constant_(self.head.weight, start)

    model, other, apart = Tied(1.5), Tied(0.0), Tied(0.0)
    apart.head.weight = nn.Parameter(torch.zeros(5, 3))
    with manager_of(tmp_path, {"model": model}) as manager:
        manager.save(1)
    assert leaf_names(tmp_path) == ["model.embed.weight"]
    for target in (other, apart):
        with manager_of(tmp_path, {"model": target}) as manager:
            manager.restore()
        assert torch.all(target.embed.weight == 1.5)
        assert torch.all(target.head.weight == 1.5)
    assert other.head.weight is other.embed.weight
    assert apart.head.weight is not apart.embed.weight
    # What differs cannot be given to what is tied.
    nn.init.constant_(apart.head.weight, 9.0)
    with manager_of(tmp_path, {"model": apart}) as manager:
        manager.save(2)
    with manager_of(tmp_path, {"model": other}) as manager:
        error = caught(manager.restore)
    assert isinstance(error, StateMismatchError)
    assert torch.all(other.head.weight == 1.5)


# One process: optimizers


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(dtype)


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.25)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.25),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.25),
    ],
    ids=["AdamW", "SGD", "Adafactor", "LBFGS"],
)
def test_saving_leaves_a_fresh_optimizer_fresh(make: Any, tmp_path: Path) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    optimizer.register_step_post_hook(lambda *_: called.append("stepped"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    model.register_forward_pre_hook(lambda *_: called.append("forward"))
    before = bits([model.state_dict(), optimizer.state_dict()])
    flags = [(parameter._version, parameter.requires_grad) for parameter in model.parameters()]
    with manager_of(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
        manager.save(2)
    assert called == []
    assert len(optimizer.state) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [(parameter._version, parameter.requires_grad) for parameter in model.parameters()] == flags
    assert bits([model.state_dict(), optimizer.state_dict()]) == before
    stepped = make(model.parameters())
    if not isinstance(optimizer, torch.optim.LBFGS):
        step_once(model, stepped)
        with manager_of(tmp_path, {"model": model, "optimizer": stepped}) as manager:
            manager.restore(1)
        assert all(not state for state in stepped.state.values()), "a fresh state is restored as a fresh one"


class WideMoments(torch.optim.Optimizer):
    """Keeps more precision than its parameters have, in plain tensors and deeper down."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                exact = torch.full(parameter.shape, 1 / 3 + number)
                self.state[parameter] = {
                    "master": exact,
                    "factors": [exact.double() / 7, {"deep": exact / 9}],
                    "count": torch.tensor(3, dtype=torch.int64),
                    "note": "kept",
                }


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], torch.dtype]] = {
    "AdamW": (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), torch.float32),
    "Adam amsgrad": (lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True), torch.float32),
    "Adam, rate in a tensor": (lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)), torch.float32),
    "Adam, bfloat16": (lambda parameters: torch.optim.Adam(parameters, lr=0.1), torch.bfloat16),
    "SGD momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), torch.float32),
    "Adafactor": (lambda parameters: torch.optim.Adafactor(parameters, lr=0.1), torch.float32),
    "wide moments, bfloat16": (WideMoments, torch.bfloat16),
}


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("into", ["a fresh one", "one that has stepped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_come_back_bit_for_bit(kind: str, into: str, tmp_path: Path) -> None:
    make, dtype = OPTIMIZERS[kind]
    model, other = model_of(dtype), model_of(dtype, seed=1)
    optimizer, restored = make(model.parameters()), make(other.parameters())
    for _ in range(3):
        step_once(model, optimizer)
    if into == "one that has stepped":
        step_once(other, restored)
    rate = restored.param_groups[0]["lr"]
    restored.param_groups[0]["lr"] = rate * 7
    with manager_of(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
    with manager_of(tmp_path, {"model": other, "optimizer": restored}) as manager:
        manager.restore()
    assert bits(restored.state_dict()) == bits(optimizer.state_dict())
    step_once(model, optimizer)
    step_once(other, restored)
    assert bits([other.state_dict(), restored.state_dict()]) == bits([model.state_dict(), optimizer.state_dict()])


def test_groups_in_another_order_get_their_own_options_and_moments(tmp_path: Path) -> None:
    def groups(model: nn.Module, order: tuple[int, ...]) -> list[dict[str, Any]]:
        both = [
            {"params": [model[0].weight, model[0].bias], "lr": 0.1, "weight_decay": 0.5},
            {"params": [model[1].bias, model[1].weight], "lr": 0.2},
        ]
        return [both[index] for index in order]

    model, other = model_of(), model_of(seed=1)
    optimizer = torch.optim.AdamW(groups(model, (0, 1)))
    step_once(model, optimizer)
    with manager_of(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
    restored = torch.optim.AdamW(groups(other, (1, 0)))
    for group in restored.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    with manager_of(tmp_path, {"model": other, "optimizer": restored}) as manager:
        manager.restore()
    assert [(group["lr"], group["weight_decay"]) for group in restored.param_groups] == [(0.2, 0.01), (0.1, 0.5)]
    for layer in (0, 1):
        for name in ("weight", "bias"):
            mine, theirs = getattr(other[layer], name), getattr(model[layer], name)
            assert bits(restored.state[mine]) == bits(optimizer.state[theirs])
    one_group = torch.optim.AdamW(other.parameters())
    with manager_of(tmp_path, {"model": other, "optimizer": one_group}) as manager:
        error = caught(manager.restore)
    assert isinstance(error, StateMismatchError), "parameters of two groups do not fit into one"
    assert one_group.param_groups[0]["lr"] == 0.001


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_a_scheduler_that_is_restored_without_its_optimizer_sets_the_rate(rate: Any, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = model_of()
        start = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = torch.optim.Adam(model.parameters(), lr=start)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    model, optimizer, scheduler = build()
    for _ in range(5):
        step_once(model, optimizer)
        scheduler.step()
    expected = float(optimizer.param_groups[0]["lr"])
    with manager_of(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler}) as manager:
        manager.save(1)
    model, optimizer, scheduler = build()
    strategy = holdfast.LoadStrategy(skip=("optimizer",))
    with manager_of(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler}) as manager:
        manager.restore(strategy=strategy)
    assert float(optimizer.param_groups[0]["lr"]) == expected == pytest.approx(0.005)
    assert scheduler.last_epoch == 5
    assert len(optimizer.state) == 0
