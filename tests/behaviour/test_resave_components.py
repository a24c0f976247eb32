"""Some components stored anew, as the progress of an evaluation: what is written, taken over, and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CorruptCheckpointError, HoldfastError, StorageError, UsageError
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog
from holdfast.storage.base import Storage, StorageFeatures, features_of
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import CrashingStorage, MemoryStorage, SimulatedCrash
from tests.unit.cli.scene import call

pytestmark = pytest.mark.deep
EVALUATION = ("evaluation",)


class Evaluation:
    """Sums over the samples that were evaluated so far."""

    def __init__(self) -> None:
        self.done = 0
        self.sums = torch.zeros(50)

    def add(self, count: int = 1) -> None:
        self.done += count
        self.sums += count

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done, self.sums = state["done"], state["sums"]


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "evaluation": Evaluation()}


def manager_of(run: Path | str, live: Mapping[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, live, **{"mode": "sync", **options})


def resave(manager: holdfast.CheckpointManager, step: int = 500, **options: Any) -> holdfast.Checkpoint:
    return manager.save(step, resave=True, components=EVALUATION, **options).wait()


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the models and the moments of the optimizers are equal, bit for bit."""
    pairs = [(one["model"].state_dict(), other["model"].state_dict())]
    moments = [each["optimizer"].state_dict()["state"] for each in (one, other)]
    pairs += [(moments[0][index], moments[1][index]) for index in moments[0]]
    return all(torch.equal(left[key], right[key]) for left, right in pairs for key in left)


def files(checkpoint: holdfast.Checkpoint) -> dict[str, int]:
    """The files of a checkpoint in its folder, each with its inode."""
    folder = Path(checkpoint.path)
    return {file.name: (folder / file.name).stat().st_ino for file in checkpoint.manifest.files}


@pytest.mark.parametrize("mode", ["sync", "async", "async_pinned", "auto"])
def test_the_progress_of_an_evaluation_is_stored_and_the_rest_is_taken_over(mode: str, tmp_path: Path) -> None:
    live = state()
    saved = state()
    with manager_of(tmp_path, live, mode=mode) as manager:
        manager.save(500)
        with torch.no_grad():
            # Not looked at: the caller has declared that only the evaluation changed.
            live["model"].weight += 1
        for _ in range(3):
            live["evaluation"].add()
            handle = manager.save(500, resave=True, components=EVALUATION)
            assert handle.done()
            assert not handle.skipped
    found = state(1)
    with manager_of(tmp_path, found, mode=mode) as manager:
        start = manager.restore()
        assert start.step == 500
        assert found["evaluation"].done == 3
        assert torch.equal(found["evaluation"].sums, torch.full((50,), 3.0))
        assert same(found, saved)
        # The training goes on from it, with the next resave and the next step.
        found["evaluation"].add()
        resave(manager)
        manager.save(501)
    last = state(2)
    with manager_of(tmp_path, last) as manager:
        assert manager.restore().step == 501
        assert last["evaluation"].done == 4


def test_files_are_shared_and_superseded_ones_are_not_carried_along(tmp_path: Path) -> None:
    live = state()
    with manager_of(tmp_path, live) as manager:
        first = files(manager.save(500).wait())
        second, third = files(resave(manager)), files(resave(manager))
    assert sorted(first) == ["rank-00000.1.safetensors", "rank-00000.json", "rank-00000.safetensors", "shared.json"]
    shared = {"rank-00000.json", "rank-00000.safetensors", "shared.json"}
    assert second.keys() == shared | {"rank-00000.2.safetensors", "shared.2.json"}
    assert third.keys() == shared | {"rank-00000.3.safetensors", "shared.3.json"}
    for name in shared:
        assert first[name] == second[name] == third[name]


class Counting(LocalStorage):
    """Counts the bytes that are written."""

    written = 0

    def put(self, key: str, data: bytes) -> None:
        self.written += len(data)
        super().put(key, data)

    def create(self, key: str, size_bytes: int) -> Any:
        self.written += size_bytes
        return super().create(key, size_bytes)


def test_it_costs_about_the_bytes_of_the_components_that_it_names(tmp_path: Path) -> None:
    live, storage = state(), Counting(tmp_path)
    with manager_of(tmp_path, live, storage=storage) as manager:
        manager.save(500)
        full, storage.written = storage.written, 0
        checkpoint = resave(manager)
    assert full > 480_000
    # The sums, a header, the values, the record of the attempt and the manifest.
    assert storage.written < 15_000
    assert checkpoint.size_bytes > 480_000


def test_the_parent_can_be_removed(tmp_path: Path) -> None:
    live = state()
    with manager_of(tmp_path, live, keep=holdfast.KeepLast(1)) as manager:
        manager.save(500)
        for _ in range(3):
            live["evaluation"].add()
            last = resave(manager)
    assert [path.name for path in tmp_path.glob("step-*")] == [last.folder]
    assert holdfast.verify(tmp_path).ok
    found = state(1)
    manager_of(tmp_path, found).restore()
    assert found["evaluation"].done == 3
    assert same(found, live)


def test_saves_of_one_step_take_one_place_in_keep_last(tmp_path: Path) -> None:
    live = state()
    with manager_of(tmp_path, live, keep=holdfast.KeepLast(2)) as manager:
        manager.save(400)
        manager.save(500)
        for _ in range(3):
            last = resave(manager)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000400", last.folder]


def test_what_is_not_given_is_the_parents(tmp_path: Path) -> None:
    live = state()
    notes = tmp_path / "notes.txt"
    notes.write_text("of the manager")
    with manager_of(tmp_path / "run", live, config={"lr": 1}, assets=[notes]) as manager:
        manager.save(
            500,
            metrics={"loss": 1.0, "old": 2},
            progress={"tokens": 5},
            extra={"name": "x"},
            guards={"vocabulary": 7},
            tag="first",
            epoch=3,
            assets={"plan/a": b"a", "plan/b": b"b"},
        )
        manager.report(500, {"late": 4.0})
        folder = tmp_path / "plan"
        folder.mkdir()
        (folder / "a").write_text("new")
        found = resave(manager, metrics={"loss": 0.5}, progress={"samples": 9}, assets=[folder])
        again = resave(manager)
    assert found.metrics == {"loss": 0.5, "old": 2, "late": 4.0}
    assert found.progress == {"tokens": 5, "samples": 9}
    assert (found.extra, found.head.guards, found.epoch, found.config) == (
        {"name": "x"},
        {"vocabulary": 7},
        3,
        {"lr": 1},
    )
    assert found.tags == ()
    # A folder that is given replaces all that the parent has under its name.
    assert {name: asset.read() for name, asset in again.assets.items()} == {
        "notes.txt": b"of the manager",
        "plan/a": b"new",
    }
    assert again.metrics == found.metrics


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"components": EVALUATION}, "without resave=True"),
        ({"components": (), "resave": True}, "names no component"),
        ({"components": "evaluation", "resave": True}, "components='evaluation'"),
        ({"components": 3, "resave": True}, "components=3"),
        ({"components": (3,), "resave": True}, "which is no name"),
        ({"components": ("evaluatoin",), "resave": True}, "no such component"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with manager_of(tmp_path, state()) as manager:
        manager.save(500)
        with pytest.raises(UsageError, match=problem):
            manager.save(500, **arguments)
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000500"]
        resave(manager)


def test_without_a_checkpoint_of_the_step_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    with manager_of(tmp_path, state()) as manager:
        with pytest.raises(UsageError, match="neither saved nor restored a checkpoint of step 500"):
            resave(manager)
        manager.save(500)
        with pytest.raises(UsageError, match="of step 501"):
            resave(manager, 501)
        manager.save(501)
        with pytest.raises(UsageError, match="step 500 is not the last"):
            resave(manager)
    # Another start of the run has saved it, and this one has not restored.
    with manager_of(tmp_path, state()) as manager, pytest.raises(UsageError, match="of step 501"):
        resave(manager, 501)
    assert len(list(tmp_path.glob("step-*"))) == 2


class FailsOnce(LocalStorage):
    """Fails while the first file of tensors is created."""

    failed = False

    def create(self, key: str, size_bytes: int) -> Any:
        if not self.failed and key.endswith(".safetensors"):
            self.failed = True
            raise StorageError("no room", file=key)
        return super().create(key, size_bytes)


def test_the_failure_of_a_parent_that_is_still_under_way_is_raised(tmp_path: Path) -> None:
    live = state()
    with manager_of(tmp_path, live, mode="async", storage=FailsOnce(tmp_path)) as manager:
        manager.save(500)
        with pytest.raises(StorageError, match="no room"):
            resave(manager)
        with pytest.raises(UsageError, match="neither saved nor restored"):
            resave(manager)
        manager.save(500)
        live["evaluation"].add()
        handle = manager.save(500, resave=True, components=EVALUATION)
        assert handle.path == handle.wait().path
    assert holdfast.resolve(tmp_path, "latest").path == handle.path


@pytest.mark.parametrize("kind", ["folder", "object store"])
@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_parent_with_damage_is_an_error_and_nothing_is_committed(kind: str, harm: str, tmp_path: Path) -> None:
    live = state()
    storage: Storage = LocalStorage(tmp_path) if kind == "folder" else MemoryStorage()
    with manager_of(tmp_path, live, storage=storage) as manager:
        manager.save(500)
        key = "step-000000500/rank-00000.safetensors"
        data = storage.read(key, 1 << 30)
        storage.delete(key)
        if harm == "short":
            storage.put(key, data[:-1])
        with pytest.raises(CorruptCheckpointError, match="the checkpoint that this save continues is damaged"):
            resave(manager)
        assert [found.folder for found in Catalog(storage).scan().checkpoints] == ["step-000000500"]
        assert [entry.name for entry in storage.entries("step-000000500.2")] == []
        # The whole state is in the objects.
        manager.save(500, resave=True)
    assert storage.read("step-000000500.2/rank-00000.safetensors", 1 << 30) == data


def test_a_copy_of_damaged_bytes_is_refused(tmp_path: Path) -> None:
    storage = MemoryStorage()
    with manager_of(tmp_path, state(), storage=storage) as manager:
        manager.save(500)
        key = "step-000000500/rank-00000.safetensors"
        data = bytearray(storage.read(key, 1 << 30))
        data[-5] ^= 1
        storage.delete(key)
        storage.put(key, bytes(data))
        with pytest.raises(CorruptCheckpointError, match="do not have their digest"):
            resave(manager)
    assert len(Catalog(storage).scan().checkpoints) == 1


class NoLinks(LocalStorage):
    """A file system without hard links."""

    @property
    def features(self) -> StorageFeatures:
        return StorageFeatures(clone=lambda key, new_key: False)


@pytest.mark.parametrize("make", [lambda path: MemoryStorage(), NoLinks], ids=["undeclared", "refused"])
def test_where_the_storage_has_no_clones_the_bytes_are_copied(make: Callable[[Path], Any], tmp_path: Path) -> None:
    live, storage = state(), make(tmp_path)
    with manager_of(tmp_path, live, storage=storage) as manager:
        manager.save(500, assets={"a": b"content"})
        for _ in range(2):
            live["evaluation"].add()
            last = resave(manager)
    for folder in ("step-000000500", "step-000000500.2"):
        for entry in storage.entries(folder):
            if not entry.is_folder:
                storage.delete(paths.key(folder, entry.name))
    found = state(1)
    with manager_of(tmp_path, found, storage=storage) as manager:
        assert manager.restore().checkpoint == last
        assert last.assets["a"].read() == b"content"
    assert found["evaluation"].done == 2
    assert same(found, live)


def test_a_parent_with_blocks_of_another_size_is_continued_with_blocks_of_that_size(tmp_path: Path) -> None:
    live = state(0)
    live["evaluation"].sums = torch.randn(100_000)
    source = {name: one.state_dict() for name, one in live.items()}
    torch.save(source, tmp_path / "source.pt")
    holdfast.import_checkpoint(tmp_path / "source.pt", tmp_path / "run", step=500)
    assert holdfast.resolve(tmp_path / "run").manifest.block_bytes == 1 << 20
    other = state(1)
    with manager_of(tmp_path / "run", other, rng=False) as manager:
        manager.restore()
        other["evaluation"].sums = torch.randn(100_000)
        checkpoint = resave(manager)
        assert checkpoint.manifest.block_bytes == 1 << 20
        assert manager.save(501).wait().manifest.block_bytes == 64 << 10, "a save of everything chooses anew"
    restored = state(2)
    with manager_of(tmp_path / "run", restored, rng=False) as manager:
        manager.restore(500)
    assert torch.equal(restored["evaluation"].sums, other["evaluation"].sums)
    assert same(restored, live)


def test_a_file_that_holds_more_than_is_needed_is_copied_without_the_rest(tmp_path: Path) -> None:
    """A model is in one file with the others, so to store one anew costs a copy of what else the file holds."""
    live = state()
    with manager_of(tmp_path, live) as manager:
        manager.save(500)
        with torch.no_grad():
            live["model"].weight += 1
        made = manager.save(500, resave=True, components=("model",)).wait()
        with torch.no_grad():
            live["model"].weight += 1
        again = manager.save(500, resave=True, components=["model"]).wait()
    assert holdfast.verify(made.path).ok
    # The second one takes over the file that the first one has copied.
    before, after = files(made), files(again)
    assert [name for name in after if before.get(name) == after[name] and name.endswith("safetensors")] == [
        "rank-00000.1.safetensors",
        "rank-00000.3.safetensors",
    ]
    found = state(1)
    manager_of(tmp_path, found).restore()
    assert same(found, live)


def test_the_checkpoint_is_like_any_other_to_the_command_line_and_to_exports(tmp_path: Path) -> None:
    live = state()
    run = tmp_path / "run"
    with manager_of(run, live) as manager:
        manager.save(500)
        live["evaluation"].add()
        made = resave(manager)

    def said(*words: object) -> str:
        result = call(*words)
        assert result.exit_code == 0, result.stderr
        return str(result.stdout)

    assert "sound" in said("verify", made.path)
    assert made.folder in said("ls", run)
    assert "evaluation" in said("show", run)
    said("export", run, tmp_path / "out.safetensors", "--format", "safetensors")
    for source in (run, tmp_path / "out.safetensors"):
        model = nn.Linear(200, 200)
        holdfast.load_weights(model, source)
        assert torch.equal(model.weight, live["model"].weight)


def test_the_metrics_of_the_end_rank_the_checkpoint(tmp_path: Path) -> None:
    with manager_of(tmp_path, state(), keep=holdfast.KeepBest("accuracy", mode="max")) as manager:
        manager.save(500)
        resave(manager)
        best = resave(manager, metrics={"accuracy": 0.9})
        manager.save(600, metrics={"accuracy": 0.1})
    assert holdfast.resolve(tmp_path, "best") == best
    assert {path.name for path in tmp_path.glob("step-*")} == {best.folder, "step-000000600"}


def test_a_guard_of_a_frozen_base_stays(tmp_path: Path) -> None:
    def adapted(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        model[0].requires_grad_(False)
        return {"model": holdfast.Trainable(model), "evaluation": Evaluation()}

    with manager_of(tmp_path, adapted(0)) as manager:
        manager.save(500)
        resave(manager)
    manager_of(tmp_path, adapted(0)).restore()
    with pytest.raises(HoldfastError, match="frozen"):
        manager_of(tmp_path, adapted(1)).restore()


@pytest.mark.slow
def test_a_crash_at_any_operation_leaves_the_parent_or_the_whole_of_the_new_one(tmp_path: Path) -> None:
    def run(storage: Storage, live: dict[str, Any]) -> None:
        with manager_of(tmp_path, live, storage=storage) as manager:
            manager.save(500)
            live["evaluation"].add()
            resave(manager)

    whole = CrashingStorage(LocalStorage(tmp_path / "whole"))
    run(whole, state())
    first = next(index for index, text in enumerate(whole.operations, 1) if "step-000000500.2/" in text)
    assert any(text.startswith("clone") for text in whole.operations)
    assert features_of(whole).clone is not None
    for point in range(first, len(whole.operations) + 1):
        inner = LocalStorage(tmp_path / f"{point}")
        with pytest.raises(SimulatedCrash):
            run(CrashingStorage(inner, point), state())
        found = state(1)
        with manager_of(tmp_path, found, storage=inner, verify="full") as manager:
            assert manager.restore().step == 500
        assert found["evaluation"].done in (0, 1)
        assert found["evaluation"].sums[0] == found["evaluation"].done
        assert same(found, state())


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {root!r})
    from tests.behaviour.test_resave_components import manager_of, state
    live = state()
    manager = manager_of({run!r}, live, mode="async")
    start = manager.restore()
    if not start.resumed:
        manager.save(500)
    while live["evaluation"].done < 10:
        live["evaluation"].add()
        manager.save(500, resave=True, components=("evaluation",))
        print(live["evaluation"].done, flush=True)
        if live["evaluation"].done == {stop}:
            live["evaluation"].add()
            os.kill(os.getpid(), signal.SIGKILL)
    manager.save(501)
    manager.close()
"""


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    root, run = str(Path(__file__).parents[2]), str(tmp_path)
    seen: list[int] = []
    for stop, code in ((4, -signal.SIGKILL), (7, -signal.SIGKILL), (99, 0)):
        text = textwrap.dedent(KILLED.format(root=root, run=run, stop=stop))
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env={**os.environ})
        assert ended.returncode == code, ended.stderr
        seen += [int(line) for line in ended.stdout.split()]
    assert seen == list(range(1, 11)), "no part of the evaluation is done twice"
    found = state(1)
    with manager_of(tmp_path, found) as manager:
        assert manager.restore().step == 501
    assert found["evaluation"].sums[0] == 10
    assert same(found, state())


def test_the_manifest_names_its_own_folder_and_every_file_in_it(tmp_path: Path) -> None:
    """What a reader of an older version relies on: nothing outside of the folder is referred to."""
    with manager_of(tmp_path, state()) as manager:
        manager.save(500)
        made = resave(manager)
    body = json.loads((Path(made.path) / "manifest.json").read_text())["manifest"]
    listed = {file["name"] for file in body["files"]}
    there = {path.name for path in Path(made.path).iterdir()}
    assert there == listed | {"manifest.json", "attempt.json"}
    assert body["folder"] == made.folder


def test_a_tensor_that_two_components_share_is_not_stored_for_one_of_them_alone(tmp_path: Path) -> None:
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = encoder.weight
    with holdfast.CheckpointManager(tmp_path, {"encoder": encoder, "head": head}, mode="sync") as manager:
        manager.save(1)
        with pytest.raises(UsageError, match="its 'weight' is the same tensor as 'weight' of 'head'"):
            manager.save(1, resave=True, components=("encoder",))
        with torch.no_grad():
            encoder.weight.fill_(7)
        manager.save(1, resave=True, components=("encoder", "head"))
        with torch.no_grad():
            encoder.weight.fill_(0)
        manager.restore()
    assert bool((head.weight == 7).all())
