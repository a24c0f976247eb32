"""State of components that are attached later: every save between the restore and the attach carries it on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.loading.carrying import carry
from tests.counting import calls


class Holder:
    """Any values as a component."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def late_parts(seed: int) -> dict[str, Any]:
    """Components of every kind, with types and values that a round trip through numbers would change."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16)
    model[0].weight.data[0, 0] = float("nan")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    counts = Holder(big=2**80 + seed, small=5e-324, text="é", table=torch.arange(4) * seed, empty=torch.zeros(0, 3))
    return {"late_model": model, "late_optimizer": optimizer, "counts": counts}


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 2)


def of_component(checkpoint: holdfast.Checkpoint, name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The leaves of a component by name, each with its type and the digests of its bytes; and its values as text."""
    manifest = checkpoint.manifest
    leaves = {
        leaf.name: (leaf.dtype, leaf.shape, leaf.sharded, [chunk.digests for chunk in leaf.chunks])
        for leaf in manifest.tensors
        if leaf.name.partition(".")[0].partition("@")[0] == name
    }
    texts = {}
    for tree in manifest.trees:
        if tree.component == name:
            data = Path(checkpoint.path, tree.file).read_bytes()
            text = bytes(msgspec.json.decode(data, type=dict[str, dict[str, msgspec.Raw]])["trees"][tree.name])
            texts[f"{tree.name} {tree.kind} {tree.type}"] = text
    return leaves, texts


def start(run: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": model(2)}, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model(1), **late_parts(1)}) as manager:
        manager.save(1)
    return tmp_path / "run"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_between_the_restore_and_the_attach_has_the_late_components_bit_for_bit(run: Path, mode: Any) -> None:
    with start(run, mode=mode) as manager:
        manager.restore()
        manager.save(2)
        manager.save(3)
        manager.wait()
        first, second, third = reversed(manager.checkpoints())
    for name in late_parts(1):
        assert of_component(first, name)[0], name
        assert of_component(second, name) == of_component(first, name), name
        assert of_component(third, name) == of_component(first, name), name
    assert holdfast.verify(run).ok


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_was_saved_and_restarted_before_the_attach_still_gives_the_late_state(run: Path, mode: Any) -> None:
    for step in (2, 3):
        with start(run, mode=mode) as manager:
            manager.restore()
            manager.save(step)
    parts, expected = late_parts(9), late_parts(1)
    with start(run) as manager:
        assert manager.restore().step == 3
        for name, part in parts.items():
            assert manager.attach(name, part), name
    for key, value in expected["late_model"].state_dict().items():
        assert torch.equal(parts["late_model"].state_dict()[key].nan_to_num(7), value.nan_to_num(7)), key
    assert parts["counts"].state["big"] == 2**80 + 1
    assert parts["late_optimizer"].param_groups[0]["lr"] == 0.1


def test_what_is_attached_is_saved_as_it_is_now(run: Path) -> None:
    with start(run) as manager:
        manager.restore()
        manager.save(2)
        counts = Holder()
        assert manager.attach("counts", counts)
        counts.state = {"big": 5}
        manager.save(3, wait=True)
        newest, before = manager.checkpoints()[:2]
    assert of_component(newest, "counts") != of_component(before, "counts")
    assert of_component(newest, "late_model") == of_component(before, "late_model")


def test_retention_leaves_the_source_as_long_as_a_component_is_not_attached(run: Path) -> None:
    with start(run, keep=holdfast.KeepLast(1)) as manager:
        manager.restore()
        for step in range(2, 6):
            manager.save(step, wait=True)
        manager.prune()
        assert [found.step for found in manager.checkpoints()] == [5, 1]
        counts, parts = Holder(), late_parts(9)
        assert manager.attach("counts", counts)
        assert counts.state["big"] == 2**80 + 1
        assert manager.attach("late_model", parts["late_model"])
        assert manager.attach("late_optimizer", parts["late_optimizer"])
        manager.prune()
        assert [found.step for found in manager.checkpoints()] == [5]


def test_the_source_in_another_run_is_not_removed_by_that_runs_writer_before_the_attach(
    run: Path, tmp_path: Path
) -> None:
    counts = Holder()
    with start(tmp_path / "new") as manager:
        manager.restore(run)
        with holdfast.CheckpointManager(run, {"model": model(1)}, keep=holdfast.KeepLast(1)) as owner:
            owner.restore(strategy=holdfast.LoadStrategy(only=("model", "rng")))
            owner.save(7, wait=True)
            owner.prune()
            manager.save(2, wait=True)
            assert manager.attach("counts", counts)
    assert counts.state["big"] == 2**80 + 1


@pytest.mark.parametrize(
    "strategy",
    [
        holdfast.LoadStrategy(skip=("counts", "late_optimizer")),
        holdfast.LoadStrategy(only=("model", "<modules>")),
    ],
)
def test_what_the_strategy_leaves_out_is_not_carried_on(run: Path, strategy: holdfast.LoadStrategy) -> None:
    with start(run) as manager:
        manager.restore(strategy=strategy)
        checkpoint = manager.save(2).wait()
    assert {tree.component for tree in checkpoint.manifest.trees} == {"model", "late_model", "rng"}


def test_a_fresh_start_carries_nothing_on(run: Path) -> None:
    with start(run, resume="never") as manager:
        manager.restore()
        checkpoint = manager.save(2).wait()
    assert {tree.component for tree in checkpoint.manifest.trees} == {"model", "rng"}


def test_the_fingerprint_of_a_frozen_base_is_carried_on_with_its_adapter(tmp_path: Path) -> None:
    def adapted(seed: int) -> holdfast.Trainable:
        torch.manual_seed(seed)
        tower = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        tower[0].requires_grad_(False)
        return holdfast.Trainable(tower)

    with holdfast.CheckpointManager(tmp_path, {"model": model(1), "adapter": adapted(1)}) as manager:
        manager.save(1)
    with start(tmp_path) as manager:
        manager.restore()
        manager.save(2)
    with start(tmp_path) as manager:
        manager.restore()
        with pytest.raises(holdfast.GuardMismatchError, match="frozen:adapter"):
            manager.attach("adapter", adapted(2))
        assert manager.attach("adapter", adapted(1))


def test_it_is_logged_once_what_is_carried_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="holdfast"), start(run) as manager:
        manager.restore()
        manager.save(2)
        manager.save(3)
    (line,) = [text for text in caplog.messages if "until they are attached" in text]
    assert "counts, late_model, late_optimizer" in line
    assert "step 1" in line


def test_a_carried_state_that_is_damaged_fails_the_save_and_never_goes_missing(run: Path) -> None:
    with start(run) as manager:
        manager.restore()
        source = manager.checkpoints()[0]
        (chunk,) = next(leaf.chunks for leaf in source.manifest.tensors if leaf.name == "counts.table")
        tensors = Path(source.path, chunk.file)
        data = bytearray(tensors.read_bytes())
        data[chunk.start] ^= 1
        tensors.chmod(0o644)
        tensors.write_bytes(data)
        with pytest.raises(holdfast.CorruptCheckpointError, match="skip="):
            manager.save(2, wait=True)
        data[chunk.start] ^= 1
        tensors.write_bytes(data)
        checkpoint = manager.save(3).wait()
    assert of_component(checkpoint, "counts")[0]


class CountedName(str):
    """A name that is compared and hashed by Python functions, so that `calls` counts it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def test_twice_as_many_components_are_twice_the_work_to_carry(tmp_path: Path) -> None:
    def work(count: int) -> int:
        parts = {f"part-{number}": Holder(table=torch.ones(1)) for number in range(count)}
        with holdfast.CheckpointManager(tmp_path / f"run-{count}", parts, rng=False) as manager:
            checkpoint = manager.save(1).wait()
        names = [CountedName(name) for name in parts]
        return calls(lambda: carry(checkpoint, names, rank=0, size=1, checked=True))

    work(2)  # what is imported and made once
    few, many, more = work(1), work(100), work(200)
    assert more - many < 1.2 * (many - few)
