"""The manager in one process: what it saves, finds, restores and refuses."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import nn

import holdfast
from holdfast.ondisk.manifest import decode_manifest, encode_manifest
from holdfast.runs.catalog import Catalog
from holdfast.runs.doctor import examine
from holdfast.runs.selector import parse_selector
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import FullStorage, MemoryStorage


class Counter:
    """A component of the plainest kind."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


def parts(seed: int = 0, *, width: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": Counter()}


def train(state: Mapping[str, Any], steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["counter"].value += 1
        losses.append(loss.item())
    return losses


def frozen(state: Mapping[str, Any]) -> Any:
    """Everything a live object is, to compare with later."""
    return copy.deepcopy(
        {
            "model": state["model"].state_dict(),
            "optimizer": state["optimizer"].state_dict(),
            "scheduler": state["scheduler"].state_dict(),
            "counter": state["counter"].value,
            "grads": [parameter.grad for parameter in state["model"].parameters()],
            "rng": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()),
        }
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tree_digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 1, 2 and 3, of which 2 is the best."""
    state = parts()
    with holdfast.CheckpointManager(tmp_path / "run", state, config={"width": 6}) as manager:
        for step, loss in ((1, 0.5), (2, 0.25), (3, float("nan"))):
            train(state)
            tag = "milestone" if step == 1 else None
            manager.save(step, metrics={"loss": loss}, progress={"tokens": 2**53 + step}, extra={"note": step}, tag=tag)
    return tmp_path / "run"


# What is saved, and how it comes back


def test_a_fresh_run_starts_at_step_0(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", parts()) as manager:
        start = manager.restore()
        assert not manager.should_load()
    assert (start.resumed, start.step, start.next_step, dict(start.progress)) == (False, None, 0, {})
    assert not (tmp_path / "run").exists(), "looking for a checkpoint makes nothing"


def test_everything_comes_back(run: Path) -> None:
    state = parts(9)
    with holdfast.CheckpointManager(run, state) as manager:
        start = manager.restore()
    assert (start.resumed, start.step, start.next_step) == (True, 3, 4)
    assert start.progress == {"tokens": 2**53 + 3}
    assert math.isnan(start.metrics["loss"])
    assert start.extra == {"note": 3}
    assert start.config == {"width": 6}
    assert start.restored == ("model", "optimizer", "scheduler", "counter", "rng")
    assert (start.missing, start.skipped, start.rejected) == ((), (), ())
    assert state["counter"].value == 3
    assert state["optimizer"].param_groups[0]["lr"] == 0.05


@pytest.mark.guarantee("G10")
def test_saving_changes_nothing_of_the_callers(tmp_path: Path) -> None:
    for trained in (False, True):
        state = parts()
        if trained:
            train(state)
            state["model"](torch.randn(8, 4)).sum().backward()
        calls: list[object] = []
        state["optimizer"].register_step_pre_hook(partial(_note, calls))
        before = frozen(state)
        metrics, progress = {"loss": torch.tensor(0.5)}, {"tokens": 1}
        with holdfast.CheckpointManager(tmp_path / str(trained), state) as manager:
            manager.save(1, metrics=metrics, progress=progress)
        assert same(before, frozen(state))
        assert calls == []
        assert (list(state), list(metrics), progress) == (
            ["model", "optimizer", "scheduler", "counter"],
            ["loss"],
            {"tokens": 1},
        )


def test_a_committed_step_is_not_written_again(run: Path) -> None:
    state = parts()
    with holdfast.CheckpointManager(run, state) as manager:
        manager.restore()
        before = tree_digest(run)
        handle = manager.save(3)
        assert handle.skipped
        assert handle.wait().step == 3
        assert tree_digest(run) == before
        assert not manager.save(4).skipped


def test_after_a_rollback_the_continued_line_is_the_latest(run: Path) -> None:
    state = parts()
    with holdfast.CheckpointManager(run, state) as manager:
        assert manager.restore(1).step == 1
        train(state)
        handle = manager.save(2, metrics={"loss": 9.0})
        assert not handle.skipped, "this line has no step 2 yet"
        assert handle.wait().path.endswith("step-000000002.2")
        assert [(found.step, found.sequence) for found in manager.checkpoints()] == [(2, 4), (3, 3), (2, 2), (1, 1)]
    assert holdfast.resolve(run).sequence == 4
    first = holdfast.resolve(run, 1)
    assert holdfast.resolve(run).parent == first.digest


def test_what_metrics_and_progress_hold_is_exact(tmp_path: Path) -> None:
    metrics = {"a": 0.1 + 0.2, "nan": float("nan"), "inf": float("-inf"), "int": 2**63 - 1}
    progress = {"tokens": 2**60 + 1, "big": 2**80 + 1}
    with holdfast.CheckpointManager(tmp_path, parts()) as manager:
        checkpoint = manager.save(0, metrics=metrics, progress=progress).wait()
    again = holdfast.resolve(tmp_path)
    assert again.metrics["a"] == 0.1 + 0.2
    assert math.isnan(again.metrics["nan"])
    assert (again.metrics["inf"], again.metrics["int"]) == (float("-inf"), 2**63 - 1)
    assert again.progress == progress
    assert again == checkpoint
    assert json.loads((tmp_path / "step-000000000" / "manifest.json").read_text())["holdfast_format"] == 1


def test_assets_lie_beside_the_state(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "deep").mkdir(parents=True)
    (tokenizer / "deep" / "vocab.txt").write_text("a b c")
    (tmp_path / "config.yaml").write_text("x: 1")
    with holdfast.CheckpointManager(tmp_path / "run", parts(), assets=[tokenizer, tmp_path / "config.yaml"]) as manager:
        manager.save(0)
    folder = tmp_path / "run" / "step-000000000" / "assets"
    assert (folder / "tokenizer" / "deep" / "vocab.txt").read_text() == "a b c"
    assert holdfast.verify(tmp_path / "run").ok
    (folder / "config.yaml").write_text("x: 2")
    assert [problem.file for problem in holdfast.verify(tmp_path / "run").problems] == ["assets/config.yaml"]


def test_tied_weights_are_stored_once_and_come_back_to_both_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Module()
        model.a, model.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        model.b.weight = model.a.weight
        return model

    first, second = tied(), tied()
    with holdfast.CheckpointManager(tmp_path, {"model": first}, rng=False) as manager:
        manager.save(0)
    assert [tensor.name for tensor in holdfast.resolve(tmp_path).manifest.tensors] == ["model.a.weight"]
    with holdfast.CheckpointManager(tmp_path, {"model": second}, rng=False) as manager:
        manager.restore()
    assert torch.equal(second.b.weight, first.a.weight)
    assert second.b.weight is second.a.weight
    untied = nn.Module()
    untied.a, untied.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    with holdfast.CheckpointManager(tmp_path, {"model": untied}, rng=False) as manager:
        manager.restore()
    assert torch.equal(untied.a.weight, first.a.weight)
    assert torch.equal(untied.b.weight, first.a.weight)


def _note(calls: list[object], *arguments: object) -> None:
    calls.append(arguments)


@pytest.mark.guarantee("G2")
def test_arrays_come_back_in_any_order_of_bytes_and_memory(tmp_path: Path) -> None:
    arrays = {
        "foreign": numpy.arange(1000, dtype=">i4"),
        "columns": numpy.asfortranarray(numpy.random.rand(40, 50)),
        "reversed": numpy.arange(2000)[::-2],
        "half": numpy.arange(900, dtype=numpy.float16),
        "text": numpy.array(["a", "bc"]),
    }

    class Arrays:
        def __init__(self, arrays: dict[str, numpy.ndarray]) -> None:
            self.arrays = arrays

        def state_dict(self) -> dict[str, Any]:
            return self.arrays

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.arrays = dict(state)

    with holdfast.CheckpointManager(tmp_path, {"arrays": Arrays(arrays)}) as manager:
        manager.save(0)
    fresh = Arrays({})
    with holdfast.CheckpointManager(tmp_path, {"arrays": fresh}) as manager:
        manager.restore()
    for name, array in arrays.items():
        assert fresh.arrays[name].dtype == array.dtype
        assert numpy.array_equal(fresh.arrays[name], array), name


# Which checkpoint


@pytest.mark.parametrize(
    ("selector", "step"),
    [
        ("latest", 3),
        ("2", 2),
        (2, 2),
        ("best", 2),
        ("best:loss", 2),
        ("best:loss:max", 1),
        ("milestone", 1),
        ("step-000000002", 2),
    ],
)
def test_every_selector_finds_its_checkpoint(selector: str | int, step: int, run: Path) -> None:
    assert holdfast.resolve(run, selector).step == step
    with holdfast.CheckpointManager(run, parts()) as manager:
        assert manager.restore(selector).step == step
        found = manager.peek(selector)
        assert found is not None
        assert found.step == step


@pytest.mark.parametrize("metric", ["val:loss", "val:max", "max", "val/loss", "acc@1", "a@b/c:d"])
def test_a_checkpoint_is_found_by_whatever_its_metric_is_called(metric: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, parts(), mode="sync", keep=holdfast.KeepBest(metric)) as manager:
        for step, value in enumerate([3.0, 1.0, 2.0]):
            manager.save(step, metrics={metric: value, "other": 0.0})
        manager.prune()
        for selector, step in ((f"best:{metric}:min", 1), (f"best:{metric}:max", 2)):
            assert manager.restore(selector).step == step
            assert holdfast.resolve(f"{run}@{selector}").step == step
            assert str(parse_selector(selector)) in (selector, f"best:{metric}")


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("", 3),
        ("@2", 2),
        ("@best", 2),
        ("@milestone", 1),
        ("/latest", 3),
        ("/step-000000001", 1),
        ("/step-000000001/manifest.json", 1),
    ],
)
def test_every_way_to_write_a_path_is_understood(path: str, step: int, run: Path) -> None:
    assert holdfast.resolve(f"{run}{path}").step == step
    with holdfast.CheckpointManager(run.parent / "other", parts()) as manager:
        assert manager.restore(f"{run}{path}").step == step


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("selector", ["7", "best:nothing", "no-such-tag", "step-000000009", "/nowhere/at/all", "x@3"])
def test_what_is_asked_for_by_name_and_is_not_there_is_an_error(selector: str, run: Path) -> None:
    state = parts(5)
    before = frozen(state)
    with holdfast.CheckpointManager(run, state) as manager, pytest.raises(FileNotFoundError) as caught:
        manager.restore(selector)
    assert isinstance(caught.value, holdfast.CheckpointNotFoundError)
    assert same(before, frozen(state))


def test_resume_decides_what_an_empty_run_means(run: Path, tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "empty", parts(), resume="required") as manager:
        with pytest.raises(holdfast.CheckpointNotFoundError, match="no checkpoint to resume"):
            manager.restore()
    with holdfast.CheckpointManager(run, parts(), resume="never") as manager:
        assert not manager.should_load()
        assert not manager.restore().resumed
        assert manager.restore("2").resumed, "an explicit request is a request"
    with holdfast.CheckpointManager(run, parts(), resume="required") as manager:
        assert manager.should_load()
        assert manager.restore().resumed


def test_looking_without_loading(run: Path, tmp_path: Path) -> None:
    assert holdfast.is_restart(run)
    assert not holdfast.is_restart(tmp_path / "nothing")
    assert holdfast.peek(tmp_path / "nothing") is None
    found = holdfast.peek(run)
    assert found is not None
    assert (found.step, found.world_size, found.tags) == (3, 1, ())
    assert found.size_bytes > 1000
    assert [checkpoint.step for checkpoint in holdfast.checkpoints(run)] == [3, 2, 1]
    with pytest.raises(holdfast.CheckpointNotFoundError):
        holdfast.peek(run, 17)


# Damage


@pytest.mark.guarantee("G3")
def test_latest_falls_back_to_the_newest_sound_one_and_says_so(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(run / "step-000000003" / "rank-00000.safetensors")
    (run / "step-000000009").mkdir()
    state = parts(5)
    with holdfast.CheckpointManager(run, state) as manager:
        start = manager.restore()
        assert start.step == 2
        assert any("step-000000003" in text and "digest" in text for text in start.rejected)
        assert any("step-000000009" in text and "never committed" in text for text in start.rejected)
        assert "step-000000003" in caplog.text
        train(state)
        assert manager.save(3).wait().path.endswith("step-000000003.2"), "the damaged one is left alone"


@pytest.mark.guarantee("G3")
def test_an_explicit_request_never_falls_back(run: Path) -> None:
    damage(run / "step-000000003" / "rank-00000.safetensors")
    state = parts(5)
    before = frozen(state)
    with holdfast.CheckpointManager(run, state) as manager:
        with pytest.raises(holdfast.CorruptCheckpointError, match="step-000000003 is damaged"):
            manager.restore(3)
    assert same(before, frozen(state))


@pytest.mark.guarantee("G11")
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(run: Path) -> None:
    for step in (1, 2, 3):
        damage(run / f"step-{step:09d}" / "rank-00000.safetensors")
    with holdfast.CheckpointManager(run, parts()) as manager:
        with pytest.raises(holdfast.CorruptCheckpointError, match="no sound checkpoint is left"):
            manager.restore()
    for step in (1, 2, 3):
        (run / f"step-{step:09d}" / "manifest.json").write_text("garbage")
    with holdfast.CheckpointManager(run, parts()) as manager:
        with pytest.raises(holdfast.CorruptCheckpointError, match="the content is no manifest"):
            manager.restore()


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)


def test_verify_off_and_quick_look_at_less(run: Path) -> None:
    damage(run / "step-000000003" / "rank-00000.safetensors")
    for verify in ("quick", "off"):
        with holdfast.CheckpointManager(run, parts(), verify=verify) as manager:
            assert manager.restore().step == 3
    (run / "step-000000003" / "rank-00000.safetensors").write_bytes(b"")
    with holdfast.CheckpointManager(run, parts(), verify="quick") as manager:
        assert manager.restore().step == 2


@pytest.mark.guarantee("G7")
def test_a_quick_look_finds_a_short_file_before_live_tensors_change(run: Path) -> None:
    state = {"model": parts(5)["model"]}
    before = copy.deepcopy(state["model"].state_dict())
    (run / "step-000000003" / "rank-00000.safetensors").write_bytes(b"short")
    with holdfast.CheckpointManager(run, state, rng=False, verify="quick") as manager:
        with pytest.raises(holdfast.CorruptCheckpointError, match="has 5 bytes"):
            manager.restore(3)
        assert same(before, state["model"].state_dict())
        assert manager.restore().step == 2


@pytest.mark.guarantee("G11")
def test_a_run_with_nothing_but_damage_is_a_restart(run: Path) -> None:
    for step in (1, 2, 3):
        (run / f"step-{step:09d}" / "manifest.json").write_text("garbage")
    assert holdfast.is_restart(run)
    with pytest.raises(holdfast.CorruptCheckpointError):
        holdfast.peek(run)
    with holdfast.CheckpointManager(run, parts()) as manager:
        assert manager.should_load()


# Partial loads


def test_every_combination_of_a_strategy_does_what_it_says(run: Path) -> None:
    names = {"model", "optimizer", "scheduler", "counter", "rng"}
    choices = [None, ("model",), ("model", "counter")]
    for only, skip, progress, strict in itertools.product(
        choices, [(), ("optimizer", "scheduler")], [True, False], [True, False]
    ):
        strategy = holdfast.LoadStrategy(only=only, skip=skip, progress=progress, strict=strict)
        state = parts(5)
        before, wanted = frozen(state), (set(only) if only else names) - set(skip)
        with holdfast.CheckpointManager(run, state) as manager:
            start = manager.restore(strategy=strategy)
        after = frozen(state)
        assert set(start.restored) == wanted
        assert (start.next_step, start.resumed) == ((4, True) if progress else (0, False))
        for name in ("model", "optimizer", "counter"):
            assert same(before[name], after[name]) == (name not in wanted), (strategy, name)
        assert strategy == holdfast.LoadStrategy(only=only, skip=skip, progress=progress, strict=strict)


def test_weights_only_and_warm_start(run: Path) -> None:
    state = parts(5)
    with holdfast.CheckpointManager(run, state) as manager:
        start = manager.restore(strategy=holdfast.LoadStrategy.weights_only())
        assert (start.restored, start.next_step, start.resumed) == (("model",), 0, False)
        start = manager.restore(strategy=holdfast.LoadStrategy.warm_start())
        assert (start.restored, start.next_step) == (("model", "optimizer"), 0)
        assert state["counter"].value == 0
        assert not manager.save(3).skipped, "a warm start is a new line"


def test_excluded_leaves_stay_as_they_are(run: Path) -> None:
    state = parts(5)
    head = state["model"][2].weight.detach().clone()
    with holdfast.CheckpointManager(run, state) as manager:
        manager.restore(strategy=holdfast.LoadStrategy(exclude=["model.2.*", "optimizer.state.2.*"]))
    assert torch.equal(state["model"][2].weight, head)
    assert state["model"][2].weight not in state["optimizer"].state
    assert state["model"][0].weight in state["optimizer"].state
    with holdfast.CheckpointManager(run, state) as manager, pytest.raises(holdfast.UsageError, match="matches no leaf"):
        manager.restore(strategy=holdfast.LoadStrategy(exclude=["model.nothing.*"]))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_an_exclude_leaves_exactly_its_leaves_whatever_else_a_strategy_says(
    run: Path, progress: bool, strict: bool
) -> None:
    saved = parts(1)
    with holdfast.CheckpointManager(run, saved) as manager:
        manager.restore()
    choices = [None, ("model",), ("optimizer",)]
    for only, globs in itertools.product(choices, [("model.0.*",), ("*.2.*",), ("model.0.*", "optimizer.state.0.*")]):
        strategy = holdfast.LoadStrategy(only=only, exclude=globs, progress=progress, strict=strict)
        state = parts(5)
        train(state)
        before, expected = named_tensors(state), named_tensors(saved)
        chosen = {name for name in before if only is None or name.partition(".")[0] in only}
        with holdfast.CheckpointManager(run, state) as manager:
            if not all(fnmatch.filter(chosen, glob) for glob in globs):
                with pytest.raises(holdfast.UsageError, match="matches no leaf"):
                    manager.restore(strategy=strategy)
                chosen = set()
            else:
                start = manager.restore(strategy=strategy)
                assert (start.next_step, start.resumed) == ((4, True) if progress else (0, False))
        filled = {name for name in chosen if not any(fnmatch.fnmatchcase(name, glob) for glob in globs)}
        for name, tensor in named_tensors(state).items():
            assert torch.equal(tensor, (expected if name in filled else before)[name]), (strategy, name)


def named_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the model and the optimizer by the names that they have in a checkpoint."""
    model, optimizer = state["model"], state["optimizer"]
    moments = {
        f"optimizer.state.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return copy.deepcopy({**weights, **moments})


def test_a_component_that_the_checkpoint_lacks(run: Path) -> None:
    state = {**parts(5), "ema": Counter(7)}
    before = frozen(state)
    with holdfast.CheckpointManager(run, state) as manager:
        with pytest.raises(holdfast.StateMismatchError, match="ema"):
            manager.restore()
        assert same(before, frozen(state))
        start = manager.restore(strategy=holdfast.LoadStrategy(on_missing="skip"))
    assert start.missing == ("ema",)
    assert state["ema"].value == 7


def test_a_component_that_is_named_and_unknown(run: Path) -> None:
    with holdfast.CheckpointManager(run, parts()) as manager:
        with pytest.raises(holdfast.UsageError, match="no component 'modle'"):
            manager.restore(strategy=holdfast.LoadStrategy(only=["modle"]))


def test_a_late_component_gets_its_state_when_it_is_attached(run: Path) -> None:
    state = parts(5)
    late = state.pop("counter")
    with holdfast.CheckpointManager(run, state) as manager:
        start = manager.restore()
        assert any(text.startswith("counter: ") for text in start.skipped)
        assert manager.attach("counter", late)
        assert late.value == 3
        assert not manager.attach("newer", Counter(1)), "the checkpoint has nothing for it"
        with pytest.raises(holdfast.UsageError, match="already"):
            manager.attach("counter", late)
        manager.save(4)
    assert {tree.component for tree in holdfast.resolve(run).manifest.trees} >= {"counter", "newer"}


def test_what_a_loader_covers_is_not_restored_beside_it(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {"loader": holdfast.PerRank(Counter(1), covers=["source"]), "source": Counter(2)}

    with holdfast.CheckpointManager(tmp_path, state()) as manager:
        manager.save(0)
    live = state()
    with holdfast.CheckpointManager(tmp_path, live) as manager:
        start = manager.restore()
        assert (live["loader"].component.loads, live["source"].loads) == (1, 0)
        assert any(text.startswith("source: covered") for text in start.skipped)
        manager.restore(strategy=holdfast.LoadStrategy(skip=["loader"]))
        assert live["source"].loads == 1, "without the loader it is restored"


def test_guards_are_compared_before_anything_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = parts()
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        manager.save(0, guards={"vocabulary": 50257, "frozen": ["embed"]})
    live = parts(5)
    before = frozen(live)
    with holdfast.CheckpointManager(tmp_path, live) as manager:
        with pytest.raises(ValueError, match="50257 in the checkpoint, 50304 now"):
            manager.restore(guards={"vocabulary": 50304, "only here": 1})
        assert same(before, frozen(live))
        warn = holdfast.LoadStrategy(on_guard_mismatch="warn")
        assert manager.restore(guards={"vocabulary": 50304}, strategy=warn).resumed
        assert "50304" in caplog.text
        assert manager.restore(guards={"vocabulary": 50257, "only here": 1}).resumed


def test_guards_are_compared_before_a_tensor_file_is_opened(run: Path) -> None:
    for file in run.glob("step-*/*.safetensors"):
        file.unlink()
    with holdfast.CheckpointManager(run, parts()) as manager:
        manager.save(9, guards={"vocabulary": 1})
        for file in run.glob("step-000000009/*.safetensors"):
            file.unlink()
        with pytest.raises(holdfast.GuardMismatchError):
            manager.restore(9, guards={"vocabulary": 2})


def test_a_path_into_the_run_itself_stays_on_its_line(run: Path) -> None:
    with holdfast.CheckpointManager(run, parts()) as manager:
        manager.restore(f"{run}@2")
        assert manager.save(2).skipped
        assert manager.save(4).wait().parent == holdfast.resolve(run, 2).digest


# What does not fit


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("verify", ["full", "quick", "off"])
def test_a_mismatch_is_an_error_before_anything_changes(verify: str, run: Path) -> None:
    state = parts(5, width=7)
    before = frozen(state)
    with holdfast.CheckpointManager(run, state, verify=verify) as manager:
        with pytest.raises(
            RuntimeError, match=r"model\.0\.weight: float32 \[6, 4\] in the checkpoint, float32 \[7, 4\]"
        ):
            manager.restore()
    assert same(before, frozen(state))
    state = parts(5)
    state["model"].to(torch.bfloat16)
    before = frozen(state)
    with holdfast.CheckpointManager(run, state, verify=verify) as manager:
        with pytest.raises(holdfast.StateMismatchError, match="bfloat16"):
            manager.restore()
    assert same(before, frozen(state))


@pytest.mark.guarantee("G7")
def test_missing_and_unexpected_leaves_are_listed(run: Path) -> None:
    state = parts(5)
    state["model"].add_module("extra", nn.Linear(2, 2))
    del state["optimizer"], state["scheduler"]
    with holdfast.CheckpointManager(run, state) as manager:
        with pytest.raises(holdfast.StateMismatchError) as caught:
            manager.restore()
        assert caught.value.missing == ("model.extra.bias", "model.extra.weight")
        loose = manager.restore(strategy=holdfast.LoadStrategy(strict=False))
        assert loose.missing == ("model.extra.bias", "model.extra.weight")
    small = {"model": nn.Sequential(nn.Linear(4, 6))}
    with holdfast.CheckpointManager(run, small, rng=False) as manager:
        with pytest.raises(holdfast.StateMismatchError) as caught:
            manager.restore()
        assert "model.2.weight" in caught.value.unexpected


def test_a_component_of_another_kind(run: Path) -> None:
    state = {**parts(), "model": Counter()}
    del state["optimizer"], state["scheduler"]
    with holdfast.CheckpointManager(run, state) as manager:
        with pytest.raises(holdfast.StateMismatchError, match="saved as 'module' and is 'values' now"):
            manager.restore()


def test_a_component_that_refuses_its_state_leaves_the_tensors_alone(run: Path) -> None:
    class Refusing(Counter):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise KeyError("nope")

    state = {**parts(5), "counter": Refusing()}
    before = frozen(state)
    with holdfast.CheckpointManager(run, state) as manager:
        with pytest.raises(holdfast.StateMismatchError, match=r"component 'counter'.*KeyError"):
            manager.restore()
    after = frozen(state)
    assert same(before["model"], after["model"])
    assert same(before["optimizer"], after["optimizer"])


# Bad input


def test_bad_arguments_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for arguments, words in (
        ({"state": {}}, "empty"),
        ({"state": [1]}, "mapping"),
        ({"state": {"a b": nn.Linear(1, 1)}}, "cannot name a component"),
        ({"state": {"model": nn.Linear(1, 1), "x": 3}}, "has no state_dict"),
        ({"state": {"rng": Counter()}}, "rng"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"resume": True}, "resume=True"),
        ({"verify": "half"}, "verify='half'"),
        ({"replicas": "ignore"}, "replicas='ignore'"),
        ({"timeout": 0}, "timeout=0"),
        ({"pipeline_stage": -1}, "pipeline_stage=-1"),
        ({"assets": [tmp_path / "none"]}, "is not there"),
        ({"config": {"f": print}}, "cannot be stored"),
        ({"process_group": object()}, "not initialised"),
    ):
        with pytest.raises(holdfast.UsageError, match=words):
            holdfast.CheckpointManager(run, **{"state": parts(), **arguments})  # type: ignore[arg-type]
    with holdfast.CheckpointManager(run, parts()) as manager:
        for step in (-1, 2**63, 1.0, "1", True):
            with pytest.raises(holdfast.UsageError):
                manager.save(step)  # type: ignore[arg-type]
        for arguments in ({"tag": "latest"}, {"tag": "a/b"}, {"metrics": {1: 2}}, {"extra": {"x": object()}}):
            with pytest.raises(holdfast.UsageError):
                manager.save(1, **arguments)  # type: ignore[arg-type]
    assert not run.exists()


def test_a_value_outside_the_codec_is_named_with_its_place(tmp_path: Path) -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"sampler": {"it": (number for number in range(3))}}

    with holdfast.CheckpointManager(tmp_path / "run", {"loader": Odd()}) as manager:
        with pytest.raises(holdfast.UsageError) as caught:
            manager.save(500)
    text = str(caught.value)
    for word in ("step 500", "loader.sampler.it", "generator", "leave it out of the state dict"):
        assert word in text
    assert not (tmp_path / "run").exists()


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    manager = holdfast.CheckpointManager(tmp_path, parts())
    manager.close()
    manager.close()
    for call in (lambda: manager.save(1), manager.restore, manager.wait, manager.poll):
        with pytest.raises(RuntimeError, match="was closed"):
            call()


def test_a_run_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    manager = holdfast.CheckpointManager(tmp_path / "file", parts())
    with pytest.raises(holdfast.HoldfastError, match="file"):
        manager.save(1)
    with pytest.raises(holdfast.HoldfastError, match="file"):
        holdfast.resolve(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_an_error_with_the_numbers_before_anything_is_written() -> None:
    inner = MemoryStorage()
    with holdfast.CheckpointManager("run", parts(), storage=FullStorage(inner, 1000)) as manager:
        with pytest.raises(OSError, match=r"needs [\d.,]+ MiB and 0\.0 MiB are free") as caught:
            manager.save(1)
    assert caught.value.errno == 28
    assert inner.entries("") == []


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_fails_in_the_middle_leaves_the_run_as_it_was_and_the_next_one_works(mode: Any) -> None:
    class Leaky(MemoryStorage):
        fails = False

        def create(self, key: str, size_bytes: int) -> Any:
            if self.fails and key.endswith("shared.json"):
                raise holdfast.StorageError("the cable is out", errno=5, file=key)
            return super().create(key, size_bytes)

    storage = Leaky()
    state = parts()
    with holdfast.CheckpointManager("run", state, storage=storage, mode=mode) as manager:
        manager.save(1, wait=True)
        storage.fails = True
        with pytest.raises(OSError, match=r"step 2.*the cable is out"):
            manager.save(2, wait=True)
        storage.fails = False
        names = [entry.name for entry in storage.entries("") if entry.name != "lease"]
        assert names == ["run.json", "step-000000001"], "its debris is gone"
        assert manager.save(2).wait().sequence == 2
    assert holdfast.verify(storage, 1).ok
    assert holdfast.verify(storage, 2).ok


@pytest.mark.guarantee("G6")
def test_an_interrupted_save_leaves_nothing_behind_and_the_next_one_works() -> None:
    class Interrupted(MemoryStorage):
        armed = True

        def create(self, key: str, size_bytes: int) -> Any:
            if self.armed and key.endswith("shared.json"):
                raise KeyboardInterrupt
            return super().create(key, size_bytes)

    storage = Interrupted()
    with holdfast.CheckpointManager("run", parts(), storage=storage, mode="sync") as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(1)
        assert [entry.name for entry in storage.entries("")] == ["lease", "run.json"]
        storage.armed = False
        assert manager.save(1).wait().folder == "step-000000001"


@pytest.mark.guarantee("G12")
def test_a_newer_format_is_refused_by_name(run: Path) -> None:
    manifest = run / "step-000000003" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"holdfast_format":1', '"holdfast_format":2'))
    with holdfast.CheckpointManager(run, parts()) as manager:
        with pytest.raises(holdfast.UnsupportedFormatError, match="format 2"):
            manager.restore("step-000000003")
        assert manager.restore().step == 2
    (run / "run.json").write_text('{"holdfast_format": 2, "run_id": "x", "created": "y"}')
    with holdfast.CheckpointManager(run, parts()) as manager:
        with pytest.raises(holdfast.UnsupportedFormatError, match="format 2"):
            manager.save(9)


def with_unknown_type(manifest: Path) -> None:
    """Make it the manifest of a version that knows one more element type."""
    record, _ = decode_manifest(manifest.read_bytes())
    tensors = (msgspec.structs.replace(record.tensors[0], dtype="float7"), *record.tensors[1:])
    versions = {**record.versions, "holdfast": "999.0.0"}
    manifest.write_bytes(encode_manifest(msgspec.structs.replace(record, tensors=tensors, versions=versions))[0])


@pytest.mark.guarantee("G12")
def test_an_unknown_element_type_is_refused_as_a_newer_format_is(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_unknown_type(run / "step-000000003" / "manifest.json")
    state = parts()
    with holdfast.CheckpointManager(run, state, mode="sync") as manager:
        with pytest.raises(holdfast.UnsupportedFormatError, match="float7"):
            manager.restore("step-000000003")
        result = manager.restore()
        assert result.step == 2
        assert len(result.rejected) == 1
        assert "float7" in result.rejected[0]
        assert any("rejected" in text and "float7" in text for text in caplog.messages)
        manager.save(9)
    # Unknown is not damaged: nothing is noted of it, and retention does not touch it.
    assert (run / "step-000000003" / "manifest.json").exists()
    (finding,) = [one for one in examine(Catalog(LocalStorage(run))) if "step-000000003" in one.path]
    assert not finding.damage


@pytest.mark.guarantee("G12")
def test_a_run_of_which_every_checkpoint_has_an_unknown_element_type_does_not_start_afresh(run: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        with_unknown_type(manifest)
    with holdfast.CheckpointManager(run, parts()) as manager:
        with pytest.raises(holdfast.UnsupportedFormatError, match="float7"):
            manager.restore()


def test_a_folder_of_something_else_is_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "step-1").mkdir()
    with pytest.raises(holdfast.CheckpointNotFoundError, match=r"model\.safetensors"):
        holdfast.resolve(tmp_path)
    before = tree_digest(tmp_path)
    with holdfast.CheckpointManager(tmp_path, parts()) as manager:
        assert not manager.restore().resumed
        manager.save(1)
        assert manager.restore().step == 1
    assert before.items() <= tree_digest(tmp_path).items(), "nothing of theirs was touched"


# Building blocks


def test_train_state_goes_round(tmp_path: Path) -> None:
    state = {**parts(), "rng": holdfast.RNGState()}
    train(state, 2)
    taken = copy.deepcopy(holdfast.build_train_state(state))
    expected = train(state, 3)
    other = {**parts(5), "rng": holdfast.RNGState()}
    holdfast.restore_train_state(other, taken)
    assert train(other, 3) == expected
    with pytest.raises(holdfast.StateMismatchError):
        holdfast.restore_train_state(other, {"model": taken["model"]})


def test_the_random_state_is_all_of_it() -> None:
    state = holdfast.get_rng_state()

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    first = draw()
    assert draw() != first
    holdfast.set_rng_state(state)
    assert draw() == first
    with pytest.raises(holdfast.StateMismatchError, match="no random state"):
        holdfast.set_rng_state({"python": 1})


def test_reprs_say_what_a_thing_is(run: Path) -> None:
    with holdfast.CheckpointManager(run, parts()) as manager:
        assert "model, optimizer" in repr(manager)
        assert repr(manager.restore().checkpoint).startswith("Checkpoint(step=3, sequence=3")
        assert repr(manager.save(3)) == "SaveHandle(step=3, committed before)"
    assert repr(holdfast.verify(run)).startswith("Report(ok")
