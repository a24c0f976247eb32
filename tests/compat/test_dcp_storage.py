"""What PyTorch's own storage does, `HoldfastWriter` and `HoldfastReader` do or refuse at once: one test for each."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import HoldfastReader, HoldfastWriter, UsageError
from holdfast.testing import values
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _one_process_is_no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def error_of(failure: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    return failure.value.failures[rank][0]


def a_state(number: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((4, 3), float(number)), "b": torch.tensor(number)},
        "optimizer": {"state": [{"m": torch.ones(2) * number}], "param_groups": [{"lr": 0.1 * number}]},
        "epoch": number,
        "names": ["a", "b"],
    }


def emptied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, dict) for value in state):
        return [emptied(value) for value in state]
    return torch.full_like(state, -1) if isinstance(state, torch.Tensor) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


# What is stored


def test_a_stream_comes_back_with_its_bytes_and_its_position(tmp_path: pathlib.Path) -> None:
    stream = io.BytesIO()
    torch.save([1.0, 2.0], stream)
    written = stream.tell()
    state = {"train": {"losses": stream, "all": [io.BytesIO(b"x")]}, "top": io.BytesIO(b"abc")}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path))
    found: dict[str, Any] = {"train": {"losses": io.BytesIO(), "all": [None]}, "top": None}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert found["train"]["losses"].tell() == written
    found["train"]["losses"].seek(0)
    assert torch.load(found["train"]["losses"]) == [1.0, 2.0]
    assert found["train"]["all"][0].getvalue() == b"x"
    assert found["top"].read() == b"abc"


@pytest.mark.parametrize("state", [{}, {"foo": {}}, {"foo": {"bar": {}}, "x": 1}], ids=str)
def test_a_state_dict_with_nothing_in_it_is_saved_and_loaded(tmp_path: pathlib.Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path))
    dcp.load(state, storage_reader=HoldfastReader(tmp_path))
    assert holdfast.verify(tmp_path).ok


def test_a_state_dict_that_is_not_flattened_keeps_its_values_whole(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(2), "options": {"a": 1, "deep": {"b": [2, {"c": 3}]}}, "many": [{"x": 1}]}
    flat = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path), planner=flat)
    assert set(HoldfastReader(tmp_path).read_metadata().state_dict_metadata) == set(state)
    loader = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    found = {"w": torch.zeros(2), "options": None, "many": None}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path), planner=loader)
    assert same(found, state)


def test_what_an_older_pytorch_flattened_less_is_loaded(tmp_path: pathlib.Path) -> None:
    state = {"a": torch.zeros(4, 4), "dict": {"one": {"x": 1, "y": 2}, "two": {"z": 3}}, "list": [0, 1, 2]}
    _version._act_like_version = "2_3"
    try:
        dcp.save(state, storage_writer=HoldfastWriter(tmp_path))
    finally:
        _version._act_like_version = None
    found = {"a": torch.ones(4, 4), "dict": {"one": {"x": 0, "y": 0}, "two": {"z": 0}}, "list": [9, 9, 9]}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert same(found, state)


# Metadata


def test_the_metadata_is_what_pytorchs_own_storage_gives(tmp_path: pathlib.Path) -> None:
    state = a_state(3)
    stock_writer, writer = dcp.FileSystemWriter(tmp_path / "stock"), HoldfastWriter(tmp_path / "run")
    returned = dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=stock_writer)
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    reader = HoldfastReader(tmp_path / "run")
    ours = reader.read_metadata()
    assert dict(ours.state_dict_metadata) == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert ours.version == stock.version == returned.version
    assert ours.storage_data.keys() == stock.storage_data.keys() == returned.storage_data.keys()
    assert ours.storage_meta is not None
    assert ours.storage_meta.checkpoint_id == reader.checkpoint_id == writer.checkpoint_id == tmp_path / "run"
    assert ours.storage_meta.save_id == writer.save_id == returned.storage_meta.save_id
    assert ours.storage_meta.load_id == reader.load_id
    place = ours.storage_data[MetadataIndex("model.w", (0, 0))]
    data = (tmp_path / "run" / "step-000000000" / place.relative_path).read_bytes()
    assert data[place.offset : place.offset + place.length] == state["model"]["w"].numpy().tobytes()
    assert returned.storage_data[MetadataIndex("model.w", (0, 0))] == place


def test_a_managers_checkpoint_has_an_id_of_its_save(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    holdfast.CheckpointManager(tmp_path, {"model": model}, mode="sync").save(0)
    meta = HoldfastReader(tmp_path).read_metadata().storage_meta
    assert meta is not None
    assert meta.save_id == holdfast.resolve(tmp_path).digest


def test_each_reset_begins_another_save_and_another_load(tmp_path: pathlib.Path) -> None:
    writer, reader = HoldfastWriter(tmp_path), HoldfastReader(tmp_path)
    first = writer.save_id, reader.load_id
    writer.reset()
    reader.reset()
    assert (writer.save_id != first[0], reader.load_id != first[1]) == (True, True)


# Where it goes


def test_one_writer_serves_several_checkpoint_ids(tmp_path: pathlib.Path) -> None:
    writer, reader = HoldfastWriter("unused"), HoldfastReader("unused")
    places = [tmp_path / "a", tmp_path / "a" / "step-000000007", tmp_path / "a", str(tmp_path / "b"), tmp_path / "b"]
    for number, place in enumerate(places):
        dcp.save({"x": {"w": torch.full((2,), float(number))}}, checkpoint_id=place, storage_writer=writer)
    assert [found.step for found in holdfast.checkpoints(tmp_path / "a")] == [8, 7, 0]
    assert [found.step for found in holdfast.checkpoints(tmp_path / "b")] == [1, 0]
    target = {"x": {"w": torch.zeros(2)}}
    for place, expected in ((tmp_path / "a", 2.0), (f"{tmp_path}/a@7", 1.0), (tmp_path / "b", 4.0)):
        dcp.load(target, checkpoint_id=place, storage_reader=reader)
        assert target["x"]["w"].tolist() == [expected] * 2


def test_a_writer_may_save_a_step_again_and_the_load_of_it_takes_the_later_one(tmp_path: pathlib.Path) -> None:
    for value in (1.0, 2.0):
        dcp.save({"weight": torch.full((2,), value)}, storage_writer=HoldfastWriter(tmp_path, step=5, resave=True))
    found = {"weight": torch.zeros(2)}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path, 5))
    assert found["weight"].tolist() == [2.0, 2.0]
    assert [pathlib.Path(one.path).name for one in holdfast.checkpoints(tmp_path)] == [
        "step-000000005.2",
        "step-000000005",
    ]
    with pytest.raises(UsageError, match="resave='yes'"):
        HoldfastWriter(tmp_path, resave="yes")  # type: ignore[arg-type]


def test_the_step_of_a_path_does_not_outlast_it(tmp_path: pathlib.Path) -> None:
    writer = HoldfastWriter(tmp_path, step=3)
    writer.reset(tmp_path / "step-000000009")
    writer.reset(tmp_path)
    dcp.save({"x": 1}, storage_writer=writer)
    assert holdfast.resolve(tmp_path).step == 3


OPTIONS = ["single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict"]
OPTIONS += ["overwrite", "serialization_format", "_extensions"]


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_pytorchs_own_writer_is_refused_with_a_reason(tmp_path: pathlib.Path, option: str) -> None:
    with pytest.raises(UsageError, match=f"HoldfastWriter has no option {option}: .+; leave it out"):
        HoldfastWriter(tmp_path, **{option: None})


def test_an_extension_of_pytorchs_own_reader_is_refused_and_a_slip_is_a_type_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="HoldfastReader has no option _extension_registry"):
        HoldfastReader(tmp_path, _extension_registry=None)
    with pytest.raises(TypeError, match="'threads'"):
        HoldfastWriter(tmp_path, threads=3)


def test_a_save_without_agreement_between_the_ranks_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="use_collectives=False"):
        dcp.save({"x": 1}, storage_writer=HoldfastWriter(tmp_path / "run"), use_collectives=False)
    assert not (tmp_path / "run").exists()


# Loading parts


def test_a_part_that_the_checkpoint_lacks_is_an_error_or_left_alone(tmp_path: pathlib.Path) -> None:
    dcp.save(a_state(1), storage_writer=HoldfastWriter(tmp_path))
    target = {"model": {"w": torch.zeros(4, 3), "new": torch.zeros(2)}, "added": 5}
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(target, storage_reader=HoldfastReader(tmp_path))
    dcp.load(target, storage_reader=HoldfastReader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert target["model"]["w"].tolist() == [[1.0] * 3] * 4
    assert target["model"]["new"].tolist() == [0.0, 0.0]
    assert target["added"] == 5


def test_keys_can_be_loaded_without_a_template(tmp_path: pathlib.Path) -> None:
    dcp.save(a_state(2), storage_writer=HoldfastWriter(tmp_path))
    found = _load_state_dict_from_keys({"model", "epoch"}, storage_reader=HoldfastReader(tmp_path))
    assert same(found, {key: a_state(2)[key] for key in ("model", "epoch")})
    found = _load_state_dict_from_keys("optimizer.state", storage_reader=HoldfastReader(tmp_path))
    assert same(found, {"optimizer": {"state": a_state(2)["optimizer"]["state"]}})


def test_a_checkpoint_becomes_a_file_of_torch_save_and_back(tmp_path: pathlib.Path) -> None:
    dcp.save(a_state(4), storage_writer=HoldfastWriter(tmp_path / "run"))
    found: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        found, HoldfastReader(tmp_path / "run"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    torch.save(found, tmp_path / "file.pt")
    again = torch.load(tmp_path / "file.pt")
    assert same(again, a_state(4))
    dcp.state_dict_saver._save_state_dict(again, HoldfastWriter(tmp_path / "run"), no_dist=True)
    assert holdfast.resolve(tmp_path / "run").step == 1


# Plans that a planner keeps


class CachingPlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


class PlannerOfTwoWriters(CachingPlanner):
    """PyTorch keeps plans by the name of the planner's class, for the whole process."""


def test_a_plan_that_the_planner_kept_writes_the_new_values_to_a_new_checkpoint(tmp_path: pathlib.Path) -> None:
    states = [
        a_state(1),
        a_state(2),
        {**a_state(3), "more": {"x": torch.ones(5)}},
        {**a_state(4), "more": {"x": torch.zeros(5)}},
    ]
    for state in states:
        dcp.save(state, storage_writer=HoldfastWriter(tmp_path), planner=CachingPlanner())
    for step, state in enumerate(states):
        found = emptied(state)
        dcp.load(found, storage_reader=HoldfastReader(tmp_path, step))
        assert same(found, state), step
        assert holdfast.verify(tmp_path, step).ok


def test_a_plan_that_was_kept_for_another_writer_is_refused(tmp_path: pathlib.Path) -> None:
    dcp.save(a_state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), planner=PlannerOfTwoWriters())
    with pytest.raises(CheckpointException) as failure:
        dcp.save(a_state(1), storage_writer=HoldfastWriter(tmp_path / "run"), planner=PlannerOfTwoWriters())
    assert isinstance(error_of(failure), UsageError)
    assert "made for another storage writer" in str(error_of(failure))
    assert list(holdfast.checkpoints(tmp_path / "run")) == []


def sharded_state(number: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"m": {"w": distribute_tensor(torch.full((5, 2), float(number)), mesh, [Shard(0)])}, "epoch": number}


def save_with_kept_plans(rank: int, run: str) -> list[Any]:
    found = []
    for number in range(4):
        state = sharded_state(number)
        if number == 2 and rank == 1:  # a plan that changes on one rank only
            state["of_one"] = {"x": torch.full((3,), 7.0)}
        dcp.save(state, storage_writer=HoldfastWriter(run), planner=CachingPlanner())
        target = sharded_state(-1)
        dcp.load(target, storage_reader=HoldfastReader(run))
        found.append((float(target["m"]["w"].full_tensor().sum()), target["epoch"]))
    return found


# Ranks


def save_beside_others(rank: int, folder: str) -> list[int]:
    """Save from a group of one rank, from one rank alone, and in the background."""
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())]
    state = {"m": {"w": torch.full((3,), float(rank))}}
    dcp.save(state, storage_writer=HoldfastWriter(f"{folder}/group-{rank}"), process_group=alone[rank])
    dcp.save(state, storage_writer=HoldfastWriter(f"{folder}/alone-{rank}"), no_dist=True)
    writer = HoldfastWriter(f"{folder}/background")
    dcp.save(sharded_state(1), storage_writer=writer)
    for number, kind in enumerate((AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS)):
        dcp.async_save(sharded_state(number + 2), storage_writer=writer, async_checkpointer_type=kind).result()
    target = {"m": {"w": torch.zeros(3)}}
    dcp.load(target, storage_reader=HoldfastReader(f"{folder}/group-{rank}"), process_group=alone[rank])
    dcp.load(target, storage_reader=HoldfastReader(f"{folder}/alone-{rank}"), no_dist=True)
    whole = sharded_state(0)
    dcp.load(whole, storage_reader=HoldfastReader(f"{folder}/background"))
    return [int(target["m"]["w"][0]), int(whole["m"]["w"].full_tensor().sum())]


def save_to_different_runs(rank: int, folder: str) -> list[str]:
    try:
        dcp.save(sharded_state(1), storage_writer=HoldfastWriter(f"{folder}/run-{rank}"))
    except CheckpointException as failure:
        return [f"{number} {type(error).__name__}: {error}" for number, (error, _) in failure.failures.items()]
    return []


def in_two_ranks(rank: int, folder: str) -> Any:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return [
        save_with_kept_plans(rank, f"{folder}/kept"),
        save_beside_others(rank, folder),
        save_to_different_runs(rank, folder),
    ]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, values(run_ranks(2, in_two_ranks, str(folder)))


def test_two_ranks_keep_plans_save_beside_others_and_refuse_different_runs(
    two_ranks: tuple[pathlib.Path, list[Any]],
) -> None:
    tmp_path, outcome = two_ranks
    for rank, (kept, beside, different) in enumerate(outcome):
        assert kept == [(10.0 * number, number) for number in range(4)]
        assert beside == [rank, 30]
        assert len(different) == 1
        assert different[0].startswith("1 UsageError: ")
        assert "does not see the folder step-000000000" in different[0]
    assert [found.step for found in holdfast.checkpoints(tmp_path / "background")] == [2, 1, 0]
    leaves = {leaf.name for leaf in holdfast.resolve(tmp_path / "kept", 2).manifest.tensors}
    assert leaves == {"m.w", "of_one.x"}
    assert holdfast.verify(tmp_path / "kept", 2).ok
    assert list(holdfast.checkpoints(tmp_path / "run-0")) == []


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("verify", ["full", "quick"])
def test_a_missing_file_is_met_before_a_tensor_changes(
    two_ranks: tuple[pathlib.Path, list[Any]], tmp_path: pathlib.Path, verify: Any
) -> None:
    run = shutil.copytree(two_ranks[0] / "kept", tmp_path / "run", symlinks=True)
    (run / "step-000000002" / "rank-00001.safetensors").unlink()
    target = {"m": {"w": torch.full((5, 2), -1.0)}}
    with pytest.raises(CheckpointException, match=r"rank-00001\.safetensors"):
        dcp.load(target, storage_reader=HoldfastReader(run, 2, verify=verify))
    assert (target["m"]["w"] == -1).all()


def test_a_writer_travels_to_another_process_after_it_has_saved(tmp_path: pathlib.Path) -> None:
    writer = HoldfastWriter(tmp_path)
    dcp.save({"x": 1}, storage_writer=writer)
    dcp.save({"x": 2}, storage_writer=pickle.loads(pickle.dumps(writer)))
    assert holdfast.resolve(tmp_path).step == 1


# A save that fails

ANOTHER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp, holdfast
print("ready", flush=True)
for line in sys.stdin:
    try:
        dcp.save({"w": torch.ones(2)}, storage_writer=holdfast.HoldfastWriter(line.strip()), no_dist=True)
        print("saved", flush=True)
    except dcp.CheckpointException as failure:
        print(type(failure.failures[0][0]).__name__, flush=True)
"""


class Another:
    """Another process that saves to a run when it is asked to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def save(self, run: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{run}\n")
        self.process.stdin.flush()
        return self.answer()

    def save_until_it_may(self, run: object) -> str:
        """Try until the run is free, or for a minute."""
        deadline = time.monotonic() + 60
        while (answer := self.save(run)) == "RunInUseError" and time.monotonic() < deadline:
            pass
        return answer


@pytest.fixture(scope="module")
def another() -> Iterator[Another]:
    process = Another()
    yield process
    process.process.kill()
    process.process.wait()


def failures_of(save: Callable[[], object]) -> dict[int, type[BaseException]]:
    """Return the type of the error of each rank that failed, and keep none of the errors."""
    try:
        save()
    except CheckpointException as failure:
        return {rank: type(error) for rank, (error, _) in failure.failures.items()}
    return {}


class FailingPlanner(DefaultSavePlanner):
    """Raises an error of a given type where a save has come to a given method."""

    def __init__(self, method: str, error: type[BaseException]) -> None:
        super().__init__()
        self.method, self.error = method, error

    def finish_plan(self, new_plan: Any) -> Any:
        if self.method == "finish_plan":
            raise self.error("on purpose")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self.method == "resolve_data":
            raise self.error("on purpose")
        return super().resolve_data(write_item)


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["finish_plan", "resolve_data"])
def test_a_save_that_fails_leaves_the_run_to_others(
    tmp_path: pathlib.Path, another: Another, method: str, error: type[BaseException]
) -> None:
    writer, planner = HoldfastWriter(tmp_path), FailingPlanner(method, error)
    assert failures_of(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)) == {0: error}
    assert another.save_until_it_may(tmp_path) == "saved"
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]


@pytest.mark.guarantee("G13")
def test_a_failure_that_is_kept_does_not_keep_the_run(tmp_path: pathlib.Path, another: Another) -> None:
    planner = FailingPlanner("finish_plan", RuntimeError)
    writer = HoldfastWriter(tmp_path)
    with pytest.raises(CheckpointException) as kept:
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
    assert another.save_until_it_may(tmp_path) == "saved"
    assert kept.value.failures


def test_a_save_outside_of_any_call_ends_with_its_writer(tmp_path: pathlib.Path, another: Another) -> None:
    writer, planner = HoldfastWriter(tmp_path), DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plans = writer.prepare_global_plan(plans)
    assert another.save(tmp_path) == "RunInUseError"
    writer.write_data(planner.finish_plan(plans[0]), planner)
    del writer
    assert another.save(tmp_path) == "saved"


class PlannerThatAsks(DefaultSavePlanner):
    """Calls a function in the middle of a save."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self.ask = ask

    def resolve_data(self, write_item: Any) -> Any:
        self.ask()
        return super().resolve_data(write_item)


@pytest.mark.guarantee("G13")
def test_no_other_process_takes_the_run_while_a_save_goes_on(tmp_path: pathlib.Path, another: Another) -> None:
    answers: list[str] = []
    planner = PlannerThatAsks(lambda: answers.append(another.save(tmp_path)))
    dcp.save({"w": torch.ones(2)}, storage_writer=HoldfastWriter(tmp_path), planner=planner)
    assert answers == ["RunInUseError"]
    assert another.save(tmp_path) == "saved"


def fail_on_the_other_rank(rank: int, run: str) -> str:
    planner = FailingPlanner("resolve_data" if rank else "", RuntimeError)
    state = sharded_state(1)
    failures = failures_of(lambda: dcp.save(state, storage_writer=HoldfastWriter(run), planner=planner))
    assert failures == {1: RuntimeError}
    answer = Another().save_until_it_may(run) if rank == 0 else ""
    dist.barrier()
    dcp.save(state, storage_writer=HoldfastWriter(run))
    return answer


@pytest.mark.guarantee("G13")
def test_a_failure_on_another_rank_leaves_the_run_to_others(tmp_path: pathlib.Path) -> None:
    assert values(run_ranks(2, fail_on_the_other_rank, str(tmp_path))) == ["saved", ""]
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]


# What is being read


def prune(run: object) -> list[int]:
    """Keep the newest checkpoint only, in another process, and return the steps that are left."""
    command = "import sys, holdfast; holdfast.prune(sys.argv[1], holdfast.KeepLast(1))"
    subprocess.run([sys.executable, "-P", "-c", command, str(run)], check=True)
    return [found.step for found in holdfast.checkpoints(str(run))]


def prune_until_one_is_left(run: object) -> list[int]:
    """Prune until a single checkpoint is left, or for a minute."""
    deadline = time.monotonic() + 60
    while len(left := prune(run)) > 1 and time.monotonic() < deadline:
        pass
    return left


class LoadPlannerThatActs(DefaultLoadPlanner):
    """Calls a function where a load has come to a given method."""

    def __init__(self, method: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.method, self.act = method, act

    def _at(self, method: str) -> None:
        if self.method == method:
            self.act()

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._at("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        self._at("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        self._at("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: Any) -> Any:
        self._at("resolve_tensor")
        return super().resolve_tensor(read_item)


METHODS_OF_LOAD = ["set_up_planner", "create_local_plan", "finish_plan", "resolve_tensor"]


def save_two_steps(run: pathlib.Path) -> None:
    for step in (0, 1):
        dcp.save({"w": torch.full((2,), float(step))}, storage_writer=HoldfastWriter(run, step=step))


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("method", METHODS_OF_LOAD)
def test_a_checkpoint_that_dcp_loads_is_not_deleted_meanwhile(tmp_path: pathlib.Path, method: str, verify: Any) -> None:
    save_two_steps(tmp_path)
    left: list[list[int]] = []
    planner = LoadPlannerThatActs(method, lambda: left.append(prune(tmp_path)))
    state = {"w": torch.full((2,), -1.0)}
    dcp.load(state, storage_reader=HoldfastReader(tmp_path, 0, verify=verify), planner=planner)
    assert torch.equal(state["w"], torch.zeros(2))
    assert left == [[1, 0]]
    assert prune(tmp_path) == [1]


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", METHODS_OF_LOAD)
def test_a_load_that_fails_keeps_no_checkpoint(tmp_path: pathlib.Path, method: str, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("on purpose")

    save_two_steps(tmp_path)
    reader = HoldfastReader(tmp_path, 0)
    with pytest.raises(CheckpointException) as kept:
        dcp.load({"w": torch.ones(2)}, storage_reader=reader, planner=LoadPlannerThatActs(method, fail))
    assert prune_until_one_is_left(tmp_path) == [1]
    assert type(error_of(kept)) is error


def fail_to_load_on_the_other_rank(rank: int, run: str) -> list[int]:
    def fail() -> None:
        raise RuntimeError("on purpose")

    planner = LoadPlannerThatActs("create_local_plan" if rank else "", fail)
    reader = HoldfastReader(run, 0)
    failures = failures_of(lambda: dcp.load({"w": torch.ones(2)}, storage_reader=reader, planner=planner))
    assert failures == {1: RuntimeError}
    left = prune_until_one_is_left(run) if rank == 0 else []
    dist.barrier()
    return left


@pytest.mark.guarantee("G4")
def test_a_load_that_fails_on_another_rank_keeps_no_checkpoint(tmp_path: pathlib.Path) -> None:
    save_two_steps(tmp_path)
    assert values(run_ranks(2, fail_to_load_on_the_other_rank, str(tmp_path))) == [[1], []]


def prune_while_the_other_rank_reads(rank: int, run: str) -> tuple[list[int], float]:
    left: list[int] = []

    def prune_when_the_other_is_done() -> None:
        dist.barrier()
        left.extend(prune(run))

    state = {"w": torch.full((2,), -1.0)}
    planner = LoadPlannerThatActs("resolve_tensor" if rank else "", prune_when_the_other_is_done)
    reader = HoldfastReader(run, 0)
    if rank:
        dcp.load(state, storage_reader=reader, planner=planner)
    else:
        dcp.load(state, storage_reader=ReaderThatMeetsTheOther(reader))
    return left, float(state["w"][0])


class ReaderThatMeetsTheOther(dcp.StorageReader):  # type: ignore[misc]
    """Reads through another reader, and waits for the other rank when everything is read."""

    def __init__(self, reader: HoldfastReader) -> None:
        self.reader = reader

    def read_data(self, plan: Any, planner: Any) -> Any:
        result = self.reader.read_data(plan, planner)
        dist.barrier()
        return result

    def reset(self, checkpoint_id: Any = None) -> None:
        self.reader.reset(checkpoint_id)

    def read_metadata(self) -> Any:
        return self.reader.read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        self.reader.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: Any) -> Any:
        return self.reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self.reader.prepare_global_plan(plans)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return HoldfastReader.validate_checkpoint_id(checkpoint_id)


@pytest.mark.guarantee("G4")
def test_a_rank_that_still_reads_keeps_the_checkpoint(tmp_path: pathlib.Path) -> None:
    save_two_steps(tmp_path)
    assert values(run_ranks(2, prune_while_the_other_rank_reads, str(tmp_path))) == [([], 0.0), ([1, 0], 0.0)]
    assert prune(tmp_path) == [1]


def test_metadata_that_is_read_outside_of_a_load_keeps_no_checkpoint(tmp_path: pathlib.Path) -> None:
    save_two_steps(tmp_path)
    reader = HoldfastReader(tmp_path, 0)
    metadata = reader.read_metadata()
    assert prune(tmp_path) == [1]
    with pytest.raises(holdfast.CheckpointNotFoundError):
        reader.set_up_storage_reader(metadata, True)


def test_a_load_outside_of_any_call_ends_with_its_reader(tmp_path: pathlib.Path) -> None:
    save_two_steps(tmp_path)
    reader = HoldfastReader(tmp_path, 0)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    assert prune(tmp_path) == [1, 0]
    del reader
    assert prune(tmp_path) == [1]
