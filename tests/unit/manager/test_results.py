"""What a restore gives its caller belongs to the caller, and what it leaves out stays left out."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, CheckpointNotFoundError, LoadStrategy, StateMismatchError, StorageError
from holdfast.testing import MemoryStorage


def net(value: float, names: str = "xy") -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in names})
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def values(model: Any) -> dict[str, float]:
    return {name: part.weight.item() for name, part in model.items()}


def opened(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, mode="sync", rng=False, **options)


def test_what_the_caller_changes_in_a_result_changes_no_later_result(tmp_path: Path) -> None:
    with opened(tmp_path, {"model": net(0.0)}, config={"sizes": [1]}) as manager:
        manager.save(1, progress={"history": [0.9]}, extra={"table": torch.zeros(2), "names": {"a": ["b"]}})
        first = manager.restore()
        first.progress["history"].append(0.8)
        first.extra["table"].fill_(7)
        first.extra["names"]["a"].append("c")
        first.config["sizes"].append(2)
        second = manager.restore(1)
        assert second.progress == {"history": [0.9]}
        assert second.extra["names"] == {"a": ["b"]}
        assert second.extra["table"].tolist() == [0.0, 0.0]
        assert second.config == {"sizes": [1]}


def test_what_the_caller_changes_in_a_checkpoint_changes_no_other_look_at_it(tmp_path: Path) -> None:
    with opened(tmp_path, {"model": net(0.0)}, config={"sizes": [1]}) as manager:
        manager.save(1, progress={"history": [0.9]}, extra={"names": ["a"]}, metrics={"loss": 1.0})
        seen = manager.peek()
        assert seen is not None
        seen.progress["history"].append(0.8)
        seen.extra["names"].append("b")
        seen.config["sizes"].append(2)
        with pytest.raises(TypeError):
            seen.metrics["loss"] = 0.0  # type: ignore[index]
        again = manager.peek()
        assert again is not None
        assert (again.progress, again.extra, again.config) == ({"history": [0.9]}, {"names": ["a"]}, {"sizes": [1]})


# A component that is attached later


def test_what_the_restore_excludes_is_excluded_of_a_component_that_is_attached_later(tmp_path: Path) -> None:
    with opened(tmp_path, {"first": net(1.0), "late": net(1.0)}) as manager:
        manager.save(1)
    first, late = net(7.0), net(7.0)
    with opened(tmp_path, {"first": first}) as manager:
        manager.restore(strategy=LoadStrategy(exclude=("*.x.weight",)))
        assert manager.attach("late", late)
    assert values(first) == values(late) == {"x": 7.0, "y": 1.0}


def test_an_exclude_that_matches_nothing_of_a_component_that_is_attached_later_is_no_error(tmp_path: Path) -> None:
    with opened(tmp_path, {"first": net(1.0), "late": net(1.0)}) as manager:
        manager.save(1)
    late = net(7.0)
    with opened(tmp_path, {"first": net(7.0)}) as manager:
        manager.restore(strategy=LoadStrategy(exclude=("first.x.weight",)))
        assert manager.attach("late", late)
    assert values(late) == {"x": 1.0, "y": 1.0}


def test_an_exclude_that_leaves_nothing_of_a_model_that_is_attached_later_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path, {"first": net(1.0), "late": net(1.0, "x")}) as manager:
        manager.save(1)
    with opened(tmp_path, {"first": net(7.0)}) as manager:
        manager.restore(strategy=LoadStrategy(exclude=("*.x.weight",)))
        with pytest.raises(StateMismatchError, match="'late' would stay as it is"):
            manager.attach("late", net(7.0, "x"))


def test_the_handle_of_a_save_that_was_skipped_has_what_the_save_added(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(2, 2)}, mode="sync") as manager:
        manager.save(1, metrics={"a": 1.0})
        again = manager.save(1, metrics={"b": 2.0}, tag="gold").wait()
    assert (dict(again.metrics), again.tags) == ({"a": 1.0, "b": 2.0}, ("gold",))


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("ask", [holdfast.examine, holdfast.mend, holdfast.unlock])
def test_a_run_that_is_not_there_cannot_be_examined_mended_or_unlocked(tmp_path: Path, ask: Any) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no run"):
        ask(tmp_path / "nope")
    assert not (tmp_path / "nope").exists()


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_committed_save_whose_manifest_cannot_be_read_again_is_committed_and_read_when_it_is_needed(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Locked(MemoryStorage):
        def put(self, key: str, data: bytes) -> None:
            super().put(key, data)
            self.locked = key.endswith("manifest.json")

        def open(self, key: str) -> Any:
            if getattr(self, "locked", False) and key.endswith("manifest.json"):
                raise StorageError("not permitted just now", errno=errno.EACCES, file=key)
            return super().open(key)

    storage = Locked()
    with CheckpointManager("run", {"model": torch.nn.Linear(2, 2)}, storage=storage, mode=mode) as manager:
        handle = manager.save(1, metrics={"loss": 2.0})
        committed = handle.wait()
        assert "step 1 is committed in step-000000001, but this process cannot read its records now" in caplog.text
        assert (committed.step, committed.folder, committed.sequence) == (1, "step-000000001", 1)
        assert committed.size_bytes > 0
        for name in ("metrics", "manifest", "created", "tags"):
            with pytest.raises(StorageError, match="not permitted just now"):
                getattr(committed, name)
        storage.locked = False
        assert handle.wait() == committed
        assert dict(committed.metrics) == {"loss": 2.0}
        assert committed.manifest == handle.wait().manifest
        assert committed.size_bytes == handle.wait().size_bytes


# The path of a save


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_path_of_a_save_is_known_before_it_is_committed(tmp_path: Path, mode: Any) -> None:
    with CheckpointManager(tmp_path, {"model": net(0.0)}, mode=mode, rng=False) as manager:
        handles = [manager.save(1), manager.save(2), manager.save(1, resave=True)]
        told = [handle.path for handle in handles]
        assert told == [str(tmp_path / name) for name in ("step-000000001", "step-000000002", "step-000000001.2")]
        assert [handle.wait().path for handle in handles] == told
        assert (again := manager.save(2)).skipped
        assert again.path == told[1] == again.wait().path


def test_a_save_into_a_folder_that_something_else_has_is_committed_where_its_handle_says(tmp_path: Path) -> None:
    (tmp_path / "step-000000001").mkdir(parents=True)
    (tmp_path / "step-000000001" / "rank-00000.safetensors").write_text("not ours")
    (tmp_path / "step-000000002").write_text("a file")
    with CheckpointManager(tmp_path, {"model": net(0.0)}, mode="async", rng=False) as manager:
        for step in (1, 2):
            handle = manager.save(step)
            told = handle.path
            assert handle.wait().path == told


class RefusingStorage(MemoryStorage):
    """Takes no tensor file."""

    def create(self, key: str, size_bytes: int) -> Any:
        if key.endswith(".safetensors"):
            raise StorageError("refused", errno=errno.EIO, file=key)
        return super().create(key, size_bytes)


def test_a_save_that_failed_leaves_no_checkpoint_at_its_path() -> None:
    storage = RefusingStorage("memory://run")
    with CheckpointManager("anywhere", {"model": net(0.0)}, mode="async", rng=False, storage=storage) as manager:
        handle = manager.save(1)
        assert handle.path == "memory://run/step-000000001"
        with pytest.raises(StorageError, match="refused"):
            handle.wait()
        assert handle.path == "memory://run/step-000000001"
        assert manager.checkpoints() == []
