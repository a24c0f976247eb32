"""What is the same on all ranks is stored once, what differs is stored apart, and a changed number of ranks is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import GuardMismatchError, StateMismatchError, UsageError
from tests.distributed.scenes import AdaptingHolder, Holder, Play, bits, caught, meet, run_scenes, the_same_error, trees

TIMEOUT_SECONDS = 200.0
SIZES = (1, 2, 3, 4)
_groups: dict[int, Any] = {}


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    options = {"rng": False, "timeout": TIMEOUT_SECONDS, **options}
    return holdfast.CheckpointManager(run, state, **{"mode": "sync", **options})


def group_of(size: int) -> Any:
    """The first `size` ranks. Groups are made once, on all ranks."""
    for each in SIZES:
        if each not in _groups:
            _groups[each] = dist.new_group(list(range(each)))
    return _groups[size]


# Undecided


def components_that_are_the_same_or_not(rank: int, folder: Path) -> Any:
    state = {
        "same": Holder(step=3, table=torch.arange(4.0)),
        "values_differ": Holder(position=rank),
        "tensors_differ": Holder(position=1, table=torch.full((2,), float(rank))),
    }
    manager = manager_of(folder, state)
    manager.save(1)
    saved = bits({name: component.state for name, component in state.items()})
    for component in state.values():
        component.state = {}
    manager.restore()
    return bits({name: component.state for name, component in state.items()}) == saved


def a_component_that_only_some_ranks_have(rank: int, folder: Path) -> Any:
    """Such as the tracker that only the leader has."""
    state: dict[str, Any] = {"all": Holder(a=1)}
    if rank in (0, 2):
        state["tracker"] = Holder(losses=[0.5, rank])
    manager_of(folder, state).save(1)
    if rank in (0, 2):
        state["tracker"].state = {}
    manager_of(folder, state).restore()
    return state["tracker"].state if "tracker" in state else None


def a_shared_component(rank: int, folder: Path) -> Any:
    """Different on every rank, against the user's word: then the leader's is the one, all of it."""
    holder = Holder(who=rank, **{f"t{number}": torch.full((8,), float(rank)) for number in range(4)})
    manager = manager_of(folder, {"shared": holdfast.Shared(holder)})
    manager.save(1)
    manager.restore()
    return holder.state["who"], [int(holder.state[f"t{number}"][0]) for number in range(4)]


# Another number of ranks


def another_number_of_ranks(rank: int, folder: Path) -> Any:
    """Saved on two ranks; restored on one, three and four, in each of the three ways."""
    if rank < 2:
        state = {"model": nn.Linear(2, 2, bias=False), "loader": holdfast.PerRank(AdaptingHolder(position=rank))}
        nn.init.ones_(state["model"].weight)
        random.seed(rank), numpy.random.seed(rank), torch.manual_seed(rank)
        manager_of(folder, {**state}, rng=True, process_group=group_of(2)).save(1)
    group_of(1)
    meet(f"{folder} saved")
    seen: dict[tuple[int, str], Any] = {}
    for size in SIZES:
        for way in ("error", "skip", "adapt"):
            if rank < size:
                seen[size, way] = restore_on(size, way, folder, rank)
    return seen


def restore_on(size: int, way: str, folder: Path, rank: int) -> Any:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    loader = AdaptingHolder(position=-1, table=torch.zeros(2))
    random.seed(77), numpy.random.seed(77), torch.manual_seed(77)

    def live() -> Any:
        return bits([model.state_dict(), loader.state, loader.loads, holdfast.get_rng_state()])

    before = live()
    state = {"model": model, "loader": holdfast.PerRank(loader)}
    manager = manager_of(folder, state, rng=True, process_group=group_of(size))
    results: list[Any] = []
    error = caught(
        lambda: results.append(manager.restore(strategy=holdfast.LoadStrategy(on_world_change=way)))  # type: ignore[arg-type]
    )
    unchanged = live() == before
    draws = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    return {
        "error": error,
        "unchanged": unchanged,
        "skipped": results[0].skipped if results else None,
        "model": float(model.weight.sum()),
        "loader": bits(loader.state) if way != "adapt" else loader.state,
        "draws": draws,
    }


def a_component_that_cannot_adapt(rank: int, folder: Path) -> Any:
    if rank < 2:
        manager_of(folder, {"loader": holdfast.PerRank(Holder(a=rank))}, process_group=group_of(2)).save(1)
    meet(f"{folder} saved")
    holder = Holder(a=9)
    manager = manager_of(folder, {"loader": holdfast.PerRank(holder)})
    return caught(lambda: manager.restore(strategy=holdfast.LoadStrategy(on_world_change="adapt"))), holder.state


# Late and covered


def models_with_nothing_in_common(rank: int, folder: Path) -> Any:
    """Each rank holds a part of one model, as pipeline ranks do."""
    manager_of(folder, {"model": nn.ModuleDict({f"part{rank}": nn.Linear(2, 2)})}).save(1)
    loose = holdfast.LoadStrategy(strict=False)
    own = nn.ModuleDict({f"part{rank}": nn.Linear(2, 2), f"new{rank}": nn.Linear(2, 2)})
    some = manager_of(folder, {"model": own}).restore(strategy=loose)
    strategy = holdfast.LoadStrategy(exclude=("model.part1.*",))
    parts = nn.ModuleDict({f"part{rank}": nn.Linear(2, 2)})
    left_out = manager_of(folder, {"model": parts}).restore(strategy=strategy)
    none = manager_of(folder, {"model": nn.ModuleDict({f"other{rank}": nn.Linear(2, 2)})})
    name = f"part{rank}" if rank != 1 else "other"
    one = manager_of(folder, {"model": nn.ModuleDict({name: nn.Linear(2, 2)})})
    return (
        some.resumed and left_out.resumed,
        caught(lambda: none.restore(strategy=loose)),
        caught(lambda: one.restore(strategy=loose)),
    )


def late_components_are_carried_on(rank: int, folder: Path) -> Any:
    """Sharded, replicated and per-rank state goes through two saves of a manager that has none of it."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("all",))

    def late(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        tower = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        fully_shard(tower, mesh=mesh)
        optimizer = torch.optim.AdamW(tower.parameters(), lr=0.1 * seed)
        tower(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        own = Holder(rank=rank * seed, table=torch.full((3,), float(rank * seed)))
        return {"tower": tower, "optimizer": optimizer, "own": holdfast.PerRank(own)}

    parts = late(1)
    manager_of(folder, {"first": nn.Linear(2, 2), **parts}, rng=True).save(1)
    only_there = {"here": Holder(a=1)} if rank == 1 else {}
    for step in (2, 3):
        manager = manager_of(folder, {"first": nn.Linear(2, 2), **only_there}, rng=True, mode="async")
        manager.restore(strategy=holdfast.LoadStrategy(on_missing="skip"))
        manager.save(step, wait=True)
        manager.close()
    again = late(7)
    manager = manager_of(folder, {"first": nn.Linear(2, 2), **only_there}, rng=True)
    step = manager.restore().step
    attached = [manager.attach(name, part) for name, part in again.items()]
    return {
        "step": step,
        "attached": attached,
        "own": bits(again["own"].component.state) == bits(parts["own"].component.state),
        "same": bits(local_state(again)) == bits(local_state(parts)),
        "sharded": sorted(leaf.name for leaf in manager.checkpoints()[0].manifest.tensors if leaf.sharded),
        "before": sorted(leaf.name for leaf in manager.checkpoints()[-1].manifest.tensors if leaf.sharded),
        "components": sorted({tree.name for tree in manager.checkpoints()[0].manifest.trees}),
    }


def local_state(parts: dict[str, Any]) -> dict[str, Any]:
    weights = {name: tensor.to_local() for name, tensor in parts["tower"].state_dict().items()}
    moments = {
        index: {key: value.to_local() if hasattr(value, "to_local") else value for key, value in state.items()}
        for index, state in enumerate(parts["optimizer"].state.values())
    }
    return {"weights": weights, "moments": moments, "lr": parts["optimizer"].param_groups[0]["lr"]}


def late_components(rank: int, folder: Path) -> Any:
    own = Holder(rank=rank)
    state = {"first": Holder(a=1), "late": holdfast.PerRank(own), "left_out": Holder(b=2)}
    manager_of(folder, state).save(1)
    before = manager_of(folder, {"first": Holder(a=0)}).attach("late", Holder(rank=1))
    result = manager_of(folder, {"first": Holder(a=0)}).restore()
    manager = manager_of(folder, {"first": Holder(a=0)})
    manager.restore()
    late, unknown = Holder(rank=-1), Holder(z=1)
    attached = manager.attach("late", holdfast.PerRank(late))
    not_there = manager.attach("unknown", unknown)
    twice = caught(lambda: manager.attach("late", late))
    broken = caught(lambda: manager.attach("left_out", nn.Linear(2, 2)))
    manager.save(2)
    return {
        "before": before,
        "skipped": result.skipped,
        "attached": (attached, late.state),
        "not_there": (not_there, unknown.state, unknown.loads),
        "twice": twice,
        "broken": broken,
    }


def covered_components(rank: int, folder: Path) -> Any:
    loader, source, other = Holder(a=rank), Holder(b=rank), Holder(c=rank)
    state = {"loader": holdfast.PerRank(loader, covers=["source"]), "source": source, "other": other}
    manager = manager_of(folder, state)
    manager.save(1)
    first = manager.restore()
    loads = loader.loads, source.loads, other.loads
    manager.restore(strategy=holdfast.LoadStrategy(skip=("loader",)))
    return loads, source.loads, first.skipped, first.restored


# Trainable


def adapted(*, base: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"base": nn.Linear(6, 5), "norm": nn.BatchNorm1d(5), "adapter": nn.Linear(6, 3)})
    with torch.no_grad():
        model["base"].weight.copy_(torch.arange(30.0).reshape(5, 6) + base)
        model["base"].bias.zero_()
    model["base"].requires_grad_(False)
    model["norm"].requires_grad_(False)
    return model


def sharded(model: nn.Module, size: int) -> nn.Module:
    mesh = DeviceMesh.from_group(group_of(size), "cpu")
    for layer in (model["base"], model["adapter"]):
        fully_shard(layer, mesh=mesh)
    return model


def trainable_parts(rank: int, folder: Path) -> Any:
    """Saved sharded over two ranks; restored there, on one rank, on three, and onto other bases."""
    seen: dict[str, Any] = {}
    if rank < 2:
        model = sharded(adapted(base=0, seed=1), 2)
        manager_of(folder, {"model": holdfast.Trainable(model)}, process_group=group_of(2)).save(1)
    meet(f"{folder} saved")
    expected = bits(adapted(base=0, seed=1)["adapter"].weight)
    for size in (1, 2, 3):
        if rank < size:
            model = adapted(base=0, seed=2)
            model = sharded(model, size) if size > 1 else model
            manager_of(folder, {"model": holdfast.Trainable(model)}, process_group=group_of(size)).restore()
            weight = model["adapter"].weight
            whole = weight.full_tensor() if size > 1 else weight
            seen[f"restored on {size}"] = bits(whole) == expected
    if rank < 2:
        for name, base in (("everywhere", 1.0), ("rank 0", float(rank == 0)), ("rank 1", float(rank == 1))):
            model = adapted(base=base, seed=2)
            before = bits(model.state_dict())
            manager = manager_of(folder, {"model": holdfast.Trainable(model)}, process_group=group_of(2))
            seen[f"another base, {name}"] = caught(manager.restore)
            assert bits(model.state_dict()) == before, "a guard is checked before anything changes"
    return seen


# Random state


def random_state_of_each_rank(rank: int, folder: Path) -> Any:
    random.seed(100 + rank), numpy.random.seed(100 + rank), torch.manual_seed(100 + rank)
    manager = manager_of(folder, {"a": Holder(a=1)}, rng=True)
    manager.save(1)
    expected = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    manager.restore()
    return expected, (random.random(), float(numpy.random.rand()), float(torch.rand(())))


# Loaders


def loader_of(rank: int, size: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = list(range(48))
    sampler = StatefulDistributedSampler(data, num_replicas=size, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=workers, collate_fn=list)


def two_loaders_by_name(rank: int, folder: Path) -> Any:
    first, second = loader_of(rank, 4, 0), loader_of(rank, 4, 0)
    running, other = iter(first), iter(second)
    taken = [next(running) for _ in range(2)]
    next(other)
    manager_of(folder, {"train": first, "valid": second}).save(1)
    expected = [list(running), list(other)]
    train, valid = loader_of(rank, 4, 0), loader_of(rank, 4, 0)
    manager_of(folder, {"train": train, "valid": valid}).restore()
    return taken, expected, [list(train), list(valid)]


SCENES = [
    components_that_are_the_same_or_not,
    a_component_that_only_some_ranks_have,
    a_shared_component,
    another_number_of_ranks,
    a_component_that_cannot_adapt,
    late_components,
    late_components_are_carried_on,
    models_with_nothing_in_common,
    covered_components,
    trainable_parts,
    random_state_of_each_rank,
    two_loaders_by_name,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("components")
    return run_scenes(4, SCENES, folder), folder


def test_what_is_the_same_on_all_ranks_is_stored_once_and_what_differs_apart(played: tuple[Play, Path]) -> None:
    play, folder = played
    assert play("components_that_are_the_same_or_not") == [True] * 4, "each rank gets its own back"
    ranks = [f"rank-{rank:05d}" for rank in range(4)]
    assert trees(folder / "components_that_are_the_same_or_not") == [
        ("same", ""),
        *(("tensors_differ", scope) for scope in ranks),
        *(("values_differ", scope) for scope in ranks),
    ]


def test_a_component_that_only_some_ranks_have_comes_back_to_them(played: tuple[Play, Path]) -> None:
    expected = [{"losses": [0.5, 0]}, None, {"losses": [0.5, 2]}, None]
    assert played[0]("a_component_that_only_some_ranks_have") == expected


def test_of_a_shared_component_the_leaders_state_is_given_to_all(played: tuple[Play, Path]) -> None:
    play, folder = played
    assert play("a_shared_component") == [(0, [0, 0, 0, 0])] * 4
    assert trees(folder / "a_shared_component") == [("shared", "")]


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("size", [1, 3, 4])
def test_another_number_of_ranks_is_an_error_before_anything_changes(played: tuple[Play, Path], size: int) -> None:
    seen = [of_rank[size, "error"] for of_rank in played[0]("another_number_of_ranks")[:size]]
    error = the_same_error([one["error"] for one in seen])
    assert isinstance(error, StateMismatchError)
    assert "on_world_change" in str(error)
    assert all(one["unchanged"] for one in seen)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_on_request_per_rank_state_of_another_number_of_ranks_is_left_and_listed(
    played: tuple[Play, Path], size: int
) -> None:
    for of_rank in played[0]("another_number_of_ranks")[:size]:
        one = of_rank[size, "skip"]
        assert one["error"] is None
        assert one["model"] == 4.0
        assert one["loader"] == bits({"position": -1, "table": torch.zeros(2)})
        assert {text.partition(":")[0] for text in one["skipped"]} == {"loader", "rng"}


@pytest.mark.parametrize("size", [1, 3, 4])
def test_on_request_a_component_adapts_and_gets_the_states_of_all_old_ranks(
    played: tuple[Play, Path], size: int
) -> None:
    seen = [of_rank[size, "adapt"] for of_rank in played[0]("another_number_of_ranks")[:size]]
    for rank, one in enumerate(seen):
        assert one["error"] is None
        assert one["model"] == 4.0
        assert one["loader"] == {"states": [{"position": 0}, {"position": 1}], "index": rank, "count": size}
    for kind in range(3):
        assert len({one["draws"][kind] for one in seen}) == size, "no two ranks draw the same numbers"
    random.seed(0)
    assert seen[0]["draws"][0] == random.random(), "an old rank's state goes on"


def test_on_the_same_number_of_ranks_nothing_has_to_adapt(played: tuple[Play, Path]) -> None:
    for rank, of_rank in enumerate(played[0]("another_number_of_ranks")[:2]):
        for way in ("error", "skip"):
            assert of_rank[2, way]["error"] is None
            assert of_rank[2, way]["loader"] == bits({"position": rank})
        assert of_rank[2, "adapt"]["loader"] == {"position": rank}


def test_what_cannot_adapt_says_what_it_needs(played: tuple[Play, Path]) -> None:
    seen = played[0]("a_component_that_cannot_adapt")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, StateMismatchError)
    assert "load_world_state" in str(error)
    assert all(state == {"a": 9} for _, state in seen)


def test_a_component_that_comes_after_the_restore_gets_its_state_when_it_is_attached(
    played: tuple[Play, Path],
) -> None:
    seen = played[0]("late_components")
    for rank, one in enumerate(seen):
        assert one["attached"] == (True, {"rank": rank})
        assert one["before"] is False
        assert any(text.startswith("late: no such component") for text in one["skipped"])


def test_attaching_what_the_checkpoint_does_not_have_leaves_it_as_it_is(played: tuple[Play, Path]) -> None:
    for one in played[0]("late_components"):
        assert one["not_there"] == (False, {"z": 1}, 0)


@pytest.mark.guarantee("G5")
def test_attaching_twice_or_what_does_not_fit_is_an_error_on_all(played: tuple[Play, Path]) -> None:
    play, folder = played
    seen = play("late_components")
    assert isinstance(the_same_error([one["twice"] for one in seen]), UsageError)
    assert isinstance(the_same_error([one["broken"] for one in seen]), StateMismatchError)
    components = {component for component, _ in trees(folder / "late_components")}
    assert components == {"first", "late", "unknown", "left_out"}, "what was not attached is carried on"


@pytest.mark.guarantee("G7")
def test_a_model_of_which_any_rank_restores_no_tensor_is_an_error_on_all(played: tuple[Play, Path]) -> None:
    seen = played[0]("models_with_nothing_in_common")
    assert all(resumed for resumed, *_ in seen)
    error = the_same_error([error for _, error, _ in seen])
    assert isinstance(error, StateMismatchError)
    assert "'model' would stay as it is: no tensor" in str(error)
    error = the_same_error([error for *_, error in seen])
    assert isinstance(error, StateMismatchError)
    assert "'model' would stay as it is on rank 1: no tensor" in str(error)
    assert "model.other.weight" in str(error)


def test_state_of_every_scope_is_carried_on_until_its_component_is_attached(played: tuple[Play, Path]) -> None:
    for one in played[0]("late_components_are_carried_on"):
        assert one["step"] == 3
        assert one["attached"] == [True, True, True]
        assert one["own"]
        assert one["same"]
        assert one["sharded"] == one["before"]
        assert {"tower", "optimizer", "own@rank-00000", "own@rank-00001"} <= set(one["components"])
        assert "here@rank-00001" in one["components"], "what one rank has is not carried on for it"


def test_per_rank_state_that_another_number_of_ranks_cannot_carry_on_is_a_warning(
    played: tuple[Play, Path], caplog: pytest.LogCaptureFixture
) -> None:
    play, folder = played
    play("late_components_are_carried_on")
    strategy = holdfast.LoadStrategy(on_world_change="skip")
    with manager_of(folder / "late_components_are_carried_on", {"first": nn.Linear(2, 2)}) as manager:
        manager.restore(3, strategy=strategy)
        assert [text for text in caplog.messages if "saves before attach() will not have the state of" in text]
        checkpoint = manager.save(4).wait()
    assert {tree.component for tree in checkpoint.manifest.trees} == {"first", "tower", "optimizer"}
    assert holdfast.verify(checkpoint.path).ok


def test_what_is_covered_needs_no_restore_of_its_own(played: tuple[Play, Path]) -> None:
    for loads, without_cover, skipped, restored in played[0]("covered_components"):
        assert loads == (1, 0, 1)
        assert "source: covered by another component" in skipped
        assert "source" not in restored
        assert without_cover == 1, "when what covers it is left out, it is restored itself"


def test_of_an_adapted_model_only_what_trains_is_stored(played: tuple[Play, Path]) -> None:
    play, folder = played
    play("trainable_parts")
    manifest = holdfast.resolve(folder / "trainable_parts").manifest
    names = {tensor.name for tensor in manifest.tensors}
    buffers = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert names == {"model.adapter.weight", "model.adapter.bias", *buffers}
    assert "frozen:model" in manifest.guards


def test_the_same_base_is_the_same_however_it_is_sharded(played: tuple[Play, Path]) -> None:
    for rank, seen in enumerate(played[0]("trainable_parts")):
        assert [seen[f"restored on {size}"] for size in (1, 2, 3) if rank < size] == [True] * max(3 - rank, 0)


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("where", ["everywhere", "rank 0", "rank 1"])
def test_another_base_is_refused_on_all_ranks(played: tuple[Play, Path], where: str) -> None:
    error = the_same_error([seen[f"another base, {where}"] for seen in played[0]("trainable_parts")[:2]])
    assert isinstance(error, GuardMismatchError)
    assert "frozen:model" in error.guards


def test_every_rank_gets_its_own_random_state_back(played: tuple[Play, Path]) -> None:
    seen = played[0]("random_state_of_each_rank")
    assert all(expected == drawn for expected, drawn in seen)
    for kind in range(3):
        assert len({drawn[kind] for _, drawn in seen}) == 4


def test_two_loaders_go_on_in_mid_epoch_on_every_rank(played: tuple[Play, Path]) -> None:
    play, folder = played
    seen = play("two_loaders_by_name")
    for taken, expected, resumed in seen:
        assert resumed == expected
        assert [len(part) for part in expected] == [4, 5]
        assert expected[0][0] not in taken
    assert len({str(taken) for taken, _, _ in seen}) == 4
    scopes = [f"rank-{rank:05d}" for rank in range(4)]
    run = folder / "two_loaders_by_name"
    assert trees(run) == [(name, scope) for name in ("train", "valid") for scope in scopes]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_goes_on_in_mid_epoch(workers: int, tmp_path: Path) -> None:
    loader = loader_of(0, 1, workers)
    running = iter(loader)
    taken = [next(running) for _ in range(5)]
    with manager_of(tmp_path, {"loader": loader}) as manager:
        manager.save(1)
    expected = list(running)
    resumed = loader_of(0, 1, workers)
    with manager_of(tmp_path, {"loader": resumed}) as manager:
        manager.restore()
    assert list(resumed) == expected
    assert len(taken) + len(expected) == 24
