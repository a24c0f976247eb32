"""Checkpoints of other tools become Holdfast checkpoints: which part becomes what, how parameters get their names, what
is refused, and that an import that fails commits nothing. Files of real tools are in tests/compat/test_import.py."""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import holdfast
from holdfast.errors import KeyMissingError, SaveUncertainError, StateMismatchError, StorageError, UsageError
from holdfast.formats.importing.importing import import_checkpoint, import_source
from holdfast.formats.source import Source, TensorEntry
from holdfast.ondisk import paths
from holdfast.runs.lease import holder
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.registry import open_storage
from tests.unit.formats.plain_source import PlainSource

Losses = list[float]


class Training:
    """A small model with AdamW in two groups and a scheduler. Every step has its own batch."""

    def __init__(self, seed: int = 0, groups: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        weights = [one for one in self.model.parameters() if one.dim() > 1]
        biases = [one for one in self.model.parameters() if one.dim() == 1]
        given = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(given if groups == 2 else self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def run(self, first: int, end: int) -> Losses:
        losses = []
        for step in range(first, end):
            batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def saved(self, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            **more,
        }

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def trained(steps: int = 1) -> Training:
    """Return a training that has done some steps: its optimizer has state, whose shapes tell the parameters apart."""
    training = Training()
    training.run(0, steps)
    return training


def resumed(run: Path, training: Training, end: int, **strategy: Any) -> tuple[holdfast.RestoreResult, Losses]:
    with holdfast.CheckpointManager(run, training.components(), mode="sync") as manager:
        start = manager.restore(strategy=holdfast.LoadStrategy(**strategy))
        return start, training.run(start.next_step, end)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def source_of(tree: Any, tmp_path: Path, **options: Any) -> PlainSource:
    return PlainSource(tree, tmp_path / "tensors.bin", **options)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_dict_of_state_dicts_is_resumed_exactly(tmp_path: Path, run: Path, groups: int) -> None:
    control = Training(groups=groups)
    control.run(0, 3)
    source = source_of(control.saved(step=3, note="first"), tmp_path)
    expected = control.run(3, 6)
    checkpoint = import_source(source, run, step=2)
    assert checkpoint.step == 2
    start, losses = resumed(run, Training(seed=9, groups=groups), 6)
    assert losses == expected
    assert start.resumed
    assert start.next_step == 3
    assert start.progress == {"step": 3, "note": "first"}
    assert start.skipped == ("rng: the checkpoint was imported, and its source had none",)
    assert holdfast.verify(run).ok


def test_trees_are_what_a_manager_stores(tmp_path: Path, run: Path) -> None:
    training = trained(2)
    import_source(source_of(training.saved(), tmp_path), run, step=1)
    with holdfast.CheckpointManager(tmp_path / "own", training.components(), mode="sync", rng=False) as manager:
        own = manager.save(1).wait()
    imported = holdfast.resolve(run)
    assert {tree.name: tree.kind for tree in imported.manifest.trees} == {
        tree.name: tree.kind for tree in own.manifest.trees
    }
    assert {tree.model for tree in imported.manifest.trees} == {tree.model for tree in own.manifest.trees}
    digests = [
        {leaf.name: (leaf.dtype, leaf.shape, [chunk.digests for chunk in leaf.chunks]) for leaf in one.manifest.tensors}
        for one in (imported, own)
    ]
    assert digests[0] == digests[1]


def test_an_imported_checkpoint_continues_the_run(tmp_path: Path, run: Path) -> None:
    training = trained()
    with holdfast.CheckpointManager(run, training.components(), mode="sync") as manager:
        manager.save(0).wait()
    checkpoint = import_source(source_of(training.saved(), tmp_path), run, step=5)
    assert checkpoint.parent == holdfast.resolve(run, 0).digest
    assert holdfast.resolve(run).step == 5
    assert (run / "latest").resolve().name == checkpoint.folder
    with pytest.raises(UsageError, match="step 5 is committed already"):
        import_source(source_of(training.saved(), tmp_path), run, step=5)


def test_a_source_that_does_not_count_steps_done_wants_a_step(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match=r"which step was the last that is done; it has step=7.*\n?.*give step="):
        import_source(source_of(trained().saved(step=7), tmp_path), run)
    assert not run.exists() or not holdfast.checkpoints(run)


# Which part becomes what


@pytest.mark.parametrize(
    ("model", "optimizer", "scheduler"),
    [
        ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict"),
        ("state_dict", "optim", "lr_scheduler"),
        ("net", "opt", "sched"),
    ],
)
def test_usual_names_become_the_usual_components(
    tmp_path: Path, run: Path, model: str, optimizer: str, scheduler: str
) -> None:
    saved = trained().saved()
    tree = {model: saved["model"], optimizer: saved["optimizer"], scheduler: saved["scheduler"]}
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0)
    assert checkpoint.extra["import"]["components"] == {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_parts_inside_of_another_dict_are_found(tmp_path: Path, run: Path) -> None:
    training = trained()
    checkpoint = import_source(source_of({"app": training.saved(), "epoch": 2}, tmp_path), run, step=0)
    assert checkpoint.extra["import"]["components"]["optimizer"] == "app.optimizer"
    expected = training.run(1, 3)
    assert resumed(run, Training(seed=3), 3)[1] == expected


def test_every_value_has_a_place(tmp_path: Path, run: Path) -> None:
    tree = trained().saved(
        epoch=2,
        best=None,
        config={"width": 8, "betas": (0.9, 0.99)},
        history=[1.0, 0.5],
        shadow={"mean": torch.ones(3), "count": 4},
        mask=torch.arange(3),
    )
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0)
    assert checkpoint.progress == {"epoch": 2, "best": None}
    assert checkpoint.config == {"width": 8, "betas": (0.9, 0.99)}
    shadow: dict[str, Any] = {}
    other: dict[str, Any] = {}
    manager = holdfast.CheckpointManager(run, {"shadow": shadow, "other": other}, rng=False, mode="sync")
    manager.restore()
    manager.close()
    assert torch.equal(shadow["mean"], torch.ones(3))
    assert shadow["count"] == 4
    assert other["history"] == [1.0, 0.5]
    assert torch.equal(other["mask"], torch.arange(3))


def test_weights_alone_are_a_model(tmp_path: Path, run: Path) -> None:
    model = torch.nn.Linear(3, 2)
    import_source(source_of(model.state_dict(), tmp_path, config={"in": 3}), run, step=0)
    other = torch.nn.Linear(3, 2)
    with holdfast.CheckpointManager(run, {"model": other}, mode="sync") as manager:
        assert manager.restore().config == {"in": 3}
    assert torch.equal(other.weight, model.weight)


def test_components_gives_other_names(tmp_path: Path, run: Path) -> None:
    saved = trained().saved()
    tree = {"student": saved["model"], "optimizer": saved["optimizer"]}
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0, components={"student": "net", "optimizer": "o"})
    assert {tree.component: (tree.kind, tree.model) for tree in checkpoint.manifest.trees} == {
        "net": ("module", ""),
        "o": ("optimizer", "net"),
    }


def test_two_parts_of_one_name_are_refused(tmp_path: Path, run: Path) -> None:
    saved = trained().saved()
    tree = {**saved, "optim": saved["optimizer"]}
    with pytest.raises(UsageError, match=r"both 'optimizer' and 'optim' .*component 'optimizer'"):
        import_source(source_of(tree, tmp_path), run, step=0)
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0, skip=["optim"])
    assert checkpoint.extra["import"]["left"] == ["optim: left out by skip="]


def test_an_option_that_names_nothing_is_refused(tmp_path: Path, run: Path) -> None:
    for option in ({"skip": ["optimiser"]}, {"components": {"optimiser": "optimizer"}}):
        with pytest.raises(UsageError, match=r"'optimiser', which is no part of the source.*\n?.*optimizer"):
            import_source(source_of(trained().saved(), tmp_path), run, step=0, **option)
    with pytest.raises(UsageError, match="skip='model'"):
        import_source(source_of(trained().saved(), tmp_path), run, step=0, skip="model")


def test_prefixes_of_wrappers_are_removed_and_reported(tmp_path: Path, run: Path) -> None:
    training = trained()
    saved = training.saved()
    saved["model"] = OrderedDict((f"module._orig_mod.{name}", value) for name, value in saved["model"].items())
    checkpoint = import_source(source_of(saved, tmp_path), run, step=0)
    assert checkpoint.extra["import"]["changes"][0] == "model: prefixes of wrappers removed from 4 names"
    assert resumed(run, Training(seed=3), 3)[1] == training.run(1, 3)


def test_a_tied_weight_is_stored_once_under_its_first_name(tmp_path: Path, run: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embedding(torch.arange(6))).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0)
    names = {leaf.name for leaf in checkpoint.manifest.tensors}
    assert "model.embedding.weight" in names
    assert "model.head.weight" not in names
    other = Tied()
    components = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    with holdfast.CheckpointManager(run, components, mode="sync") as manager:
        manager.restore()
    assert torch.equal(other.head.weight, model.head.weight)


def test_a_value_that_cannot_be_stored_is_named_with_the_way_out(tmp_path: Path, run: Path) -> None:
    tree = trained().saved(callbacks={"hook": object()})
    with pytest.raises(UsageError, match=r"callbacks\.hook.*skip=\('callbacks',\)"):
        import_source(source_of(tree, tmp_path), run, step=0)
    assert not run.exists() or not holdfast.checkpoints(run)
    import_source(source_of(tree, tmp_path), run, step=0, skip=("callbacks",))


def test_the_random_state_of_a_process_is_taken_over(tmp_path: Path, run: Path) -> None:
    training = trained()
    import_source(source_of(training.saved(rng_state=holdfast.get_rng_state()), tmp_path), run, step=0)
    expected = torch.rand(3)
    torch.manual_seed(123)
    start, _ = resumed(run, Training(seed=1), 0)
    assert start.skipped == ()
    assert torch.equal(torch.rand(3), expected)


def test_a_random_state_that_is_asked_for_by_name_is_an_error_where_there_is_none(tmp_path: Path, run: Path) -> None:
    import_source(source_of(trained().saved(), tmp_path), run, step=0)
    with pytest.raises(StateMismatchError, match="no such component"):
        resumed(run, Training(), 0, only=("model", "rng"))


# Optimizers by number


def test_layers_of_one_shape_leave_a_doubt_that_parameters_settles(tmp_path: Path, run: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        # The last layer has a rate of its own: which layer that is, the shapes do not show.
        return model, torch.optim.AdamW(
            [{"params": model[:2].parameters()}, {"params": model[2].parameters(), "lr": 0.1}]
        )

    model, optimizer = make()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(UsageError, match=r"parameter \d+ may be '.*' or '.*'.*\n?.*parameters="):
        import_source(source_of(tree, tmp_path), run, step=0)
    names = [name for name, _ in model.named_parameters()]
    import_source(source_of(tree, tmp_path), run, step=0, parameters=names)
    other, restored = make()
    with holdfast.CheckpointManager(run, {"model": other, "optimizer": restored}, mode="sync") as manager:
        manager.restore()
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[before]["exp_avg"], restored.state[after]["exp_avg"])


def test_names_may_stand_in_the_order_of_the_model(tmp_path: Path, run: Path) -> None:
    training = trained()
    expected = import_source(source_of(training.saved(), tmp_path), run, step=0)
    names = [name for name, _ in training.model.named_parameters()]
    for number, given in enumerate((names, training.model), 1):
        checkpoint = import_source(source_of(training.saved(), tmp_path), run, step=number, parameters=given)
        assert [leaf.name for leaf in checkpoint.manifest.tensors] == [leaf.name for leaf in expected.manifest.tensors]
        assert [leaf.chunks[0].digests for leaf in checkpoint.manifest.tensors] == [
            leaf.chunks[0].digests for leaf in expected.manifest.tensors
        ]


def test_tensors_in_another_order_than_the_models_name_nothing(tmp_path: Path, run: Path) -> None:
    class Sorted(PlainSource):
        format = "safetensors"

    training = trained()
    saved = training.saved()
    with pytest.raises(UsageError, match="do not stand in the order of the model"):
        import_source(Sorted(saved, tmp_path / "tensors.bin"), run, step=0)
    import_source(Sorted(saved, tmp_path / "tensors.bin"), run, step=0, parameters=training.model)
    assert resumed(run, Training(seed=3), 3)[1] == training.run(1, 3)


def test_a_module_names_the_parameters_among_buffers(tmp_path: Path, run: Path) -> None:
    class Buffered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.weight * self.scale

    model = Buffered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(UsageError, match="parameter 0 may be"):
        import_source(source_of(tree, tmp_path), run, step=0)
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0, parameters=model)
    assert "optimizer.state.weight.momentum_buffer" in {leaf.name for leaf in checkpoint.manifest.tensors}


def test_buffers_of_normalisation_are_no_parameters(tmp_path: Path, run: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0)
    assert "optimizer.state.1.bias.exp_avg" in {leaf.name for leaf in checkpoint.manifest.tensors}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["0.weight"], "1 different names, and the optimizer 4 parameters"),
        (["0.weight", "2.weight", "0.bias", "bias"], "unknown are 'bias'"),
        (["0.weight", "2.weight", "2.bias", "0.bias"], r"parameter 2 is '2.bias' by parameters=, whose shape is \[3\]"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, run: Path, names: list[str], problem: str) -> None:
    training = trained()
    with pytest.raises(UsageError, match=problem):
        import_source(source_of(training.saved(), tmp_path), run, step=0, parameters=names)


def test_an_optimizer_without_state_in_several_groups_leaves_a_doubt(tmp_path: Path, run: Path) -> None:
    fresh = Training()
    with pytest.raises(UsageError, match=r"parameter \d may be"):
        import_source(source_of(fresh.saved(), tmp_path), run, step=0)
    import_source(source_of(Training(groups=1).saved(), tmp_path), run, step=0)


def test_an_optimizer_without_its_model_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match="the source has no model with such parameters"):
        import_source(source_of({"optimizer": trained().saved()["optimizer"]}, tmp_path), run, step=0)


def test_two_models_have_an_optimizer_each(tmp_path: Path, run: Path) -> None:
    models = {"generator": torch.nn.Linear(2, 5), "critic": torch.nn.Linear(5, 1)}
    tree: dict[str, Any] = {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
        tree |= {f"{name}_state_dict": model.state_dict(), f"{name}_optimizer": optimizer.state_dict()}
    checkpoint = import_source(source_of(tree, tmp_path), run, step=0)
    assert {one.component: (one.kind, one.model) for one in checkpoint.manifest.trees} == {
        "generator": ("module", ""),
        "critic": ("module", ""),
        "generator_optimizer": ("optimizer", "generator"),
        "critic_optimizer": ("optimizer", "critic"),
    }
    with pytest.raises(UsageError, match="'optimizer', which is no optimizer of the source"):
        import_source(source_of(tree, tmp_path), run, step=1, parameters={"optimizer": models["critic"]})


def test_two_models_of_the_same_shapes_leave_a_doubt(tmp_path: Path, run: Path) -> None:
    training = trained()
    average = {name: value.clone() for name, value in training.model.state_dict().items()}
    tree = {"student": training.model.state_dict(), "teacher": average, "optimizer": training.saved()["optimizer"]}
    with pytest.raises(UsageError, match="the parameters of 'student' and 'teacher' have the same shapes"):
        import_source(source_of(tree, tmp_path), run, step=0)


def test_an_average_of_the_model_is_no_model(tmp_path: Path, run: Path) -> None:
    training = trained()
    average = {name: value.clone() for name, value in training.model.state_dict().items()}
    checkpoint = import_source(source_of({"ema": average, **training.saved()}, tmp_path), run, step=0)
    kinds = {one.component: (one.kind, one.model) for one in checkpoint.manifest.trees}
    assert kinds["ema"] == ("values", "")
    assert kinds["optimizer"] == ("optimizer", "model")


# Optimizers by name, as PyTorch's own API gives them


@pytest.mark.parametrize("flat", [False, True])
def test_state_by_name_is_resumed_exactly(tmp_path: Path, run: Path, flat: bool) -> None:
    control = Training()
    control.run(0, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(control.model, control.optimizer, options=options)
    tree = {"model": model, "optim": optimizer, "scheduler": control.scheduler.state_dict()}
    import_source(source_of(tree, tmp_path), run, step=1)
    expected = control.run(2, 5)
    assert resumed(run, Training(seed=4), 5)[1] == expected


# Lightning


def lightning_tree(training: Training, steps: int, optimizers: int = 1) -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": steps,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": training.model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [training.optimizer.state_dict()] * optimizers,
        "lr_schedulers": [training.scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 8},
    }


def test_a_lightning_checkpoint_goes_on_after_its_last_step(tmp_path: Path, run: Path) -> None:
    control = Training()
    control.run(0, 3)
    checkpoint = import_source(source_of(lightning_tree(control, 3), tmp_path), run)
    assert checkpoint.step == 2
    assert checkpoint.config == {"width": 8}
    assert checkpoint.progress["epoch"] == 1
    assert set(checkpoint.extra["import"]["components"]) == {"model", "optimizer", "scheduler", "lightning"}
    expected = control.run(3, 5)
    start, losses = resumed(run, Training(seed=2), 5)
    assert losses == expected
    assert start.next_step == 3


def test_a_given_step_counts_more_than_the_stated_one(tmp_path: Path, run: Path) -> None:
    assert import_source(source_of(lightning_tree(trained(), 3), tmp_path), run, step=40).step == 40


def test_a_checkpoint_before_the_first_step_wants_a_step(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match="it has global_step=0"):
        import_source(source_of(lightning_tree(trained(), 0), tmp_path), run)


def test_several_optimizers_of_lightning_are_numbered(tmp_path: Path, run: Path) -> None:
    training = trained()
    checkpoint = import_source(source_of(lightning_tree(training, 2, optimizers=2), tmp_path), run)
    assert {"optimizer_0", "optimizer_1", "scheduler"} <= set(checkpoint.extra["import"]["components"])


# What goes wrong on the way


class FailingSource(PlainSource):
    """Raises when the bytes of a tensor are asked for."""

    error: BaseException = KeyboardInterrupt()

    def pieces(self, entry: TensorEntry, **options: Any) -> Iterator[memoryview]:
        yield from super().pieces(entry, **options)
        if entry.name.endswith("exp_avg"):
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("gone")], ids=["Ctrl-C", "OSError"])
def test_an_import_that_is_cut_off_leaves_nothing(tmp_path: Path, run: Path, error: BaseException) -> None:
    training = trained()
    source = FailingSource(training.saved(), tmp_path / "tensors.bin")
    source.error = error
    with pytest.raises(type(error)):
        import_source(source, run, step=0)
    assert [path.name for path in run.rglob("*") if path.is_file() and "lease" not in path.parts] == [paths.RUN_KEY]
    assert holdfast.checkpoints(run) == []
    assert holder(open_storage(run)) is None
    import_source(source_of(training.saved(), tmp_path), run, step=0)
    assert holdfast.verify(run).ok


class RefusingManifests(LocalStorage):
    """Raises when a manifest is put, before it is there or right after."""

    def __init__(self, url: str, error: BaseException, *, after: bool) -> None:
        super().__init__(url)
        self._error: BaseException | None = error
        self._after = after

    def put(self, key: str, data: bytes) -> None:
        error = self._error if key.endswith(paths.MANIFEST) else None
        if error is not None and not self._after:
            raise error
        super().put(key, data)
        if error is not None:
            self._error = None  # a manifest can be taken back
            raise error


def files_of_steps(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*/**/*") if path.is_file())


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), StorageError("full", errno=errno.ENOSPC), UnicodeEncodeError("utf-8", "a", 0, 1, "bad")],
    ids=["Ctrl-C", "full", "bug"],
)
def test_an_import_that_fails_at_the_commit_leaves_nothing(tmp_path: Path, run: Path, error: BaseException) -> None:
    training = trained()
    with pytest.raises(type(error)):
        import_source(source_of(training.saved(), tmp_path), RefusingManifests(str(run), error, after=False), step=0)
    assert files_of_steps(run) == []
    assert holder(open_storage(run)) is None
    import_source(source_of(training.saved(), tmp_path), run, step=0)
    assert holdfast.verify(run).ok


def test_an_interrupt_right_after_the_commit_keeps_the_checkpoint(tmp_path: Path, run: Path) -> None:
    storage = RefusingManifests(str(run), KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        import_source(source_of(trained().saved(), tmp_path), storage, step=0)
    assert [checkpoint.step for checkpoint in holdfast.checkpoints(run)] == [0]
    assert holdfast.verify(run).ok


def test_a_manifest_that_was_taken_back_keeps_its_files(tmp_path: Path, run: Path) -> None:
    storage = RefusingManifests(str(run), StorageError("no answer"), after=True)
    with pytest.raises(StorageError, match="no answer"):
        import_source(source_of(trained().saved(), tmp_path), storage, step=0)
    assert holdfast.checkpoints(run) == []
    assert len(files_of_steps(run)) > 2


class Unanswering(RefusingManifests):
    """Commits without an answer, and neither takes the manifest back nor shows it from then on."""

    is_silent = False

    def delete(self, key: str) -> None:
        if key.endswith(paths.MANIFEST):
            self.is_silent = True
            raise StorageError("no answer")
        super().delete(key)

    def open(self, key: str) -> Any:
        if key.endswith(paths.MANIFEST) and self.is_silent:
            raise KeyMissingError("not seen yet")
        return super().open(key)


def test_a_commit_of_uncertain_outcome_keeps_its_files(tmp_path: Path, run: Path) -> None:
    with pytest.raises(SaveUncertainError):
        import_source(
            source_of(trained().saved(), tmp_path), Unanswering(str(run), StorageError("late"), after=True), step=0
        )
    assert holdfast.verify(run).ok
    assert [checkpoint.step for checkpoint in holdfast.checkpoints(run)] == [0]


def test_a_run_in_use_is_not_written_to(tmp_path: Path, run: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch, holdfast\n"
        f"manager = holdfast.CheckpointManager({str(run)!r}, {{'model': torch.nn.Linear(2, 2)}}, mode='sync')\n"
        "manager.save(0).wait(); print('saved', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        with pytest.raises(holdfast.RunInUseError):
            import_source(source_of(trained().saved(), tmp_path), run, step=5)
    assert [checkpoint.step for checkpoint in holdfast.checkpoints(run)] == [0]


def test_a_holdfast_checkpoint_is_not_imported(tmp_path: Path, run: Path) -> None:
    import_source(source_of(trained().saved(), tmp_path), run, step=0)
    with pytest.raises(UsageError, match="a Holdfast run or checkpoint"):
        import_checkpoint(run, tmp_path / "other", step=0)
    with pytest.raises(UsageError, match="or a URL"):
        import_checkpoint("s3://bucket/last.pt", tmp_path / "other", step=0)


def test_tensors_come_in_pieces_and_no_digest_is_over_a_part_of_a_block(tmp_path: Path, run: Path) -> None:
    # Rows of 3 MB: a piece of the source is never a whole number of blocks.
    weight = torch.arange(40 * 750_001, dtype=torch.float32).reshape(40, 750_001)
    source = source_of({"weight": weight, "odd": torch.ones(3, dtype=torch.bfloat16)}, tmp_path)
    largest = 0

    class Counting(Source):
        format = "plain"
        tree = source.tree

        def pieces(self, entry: TensorEntry, **options: Any) -> Iterator[memoryview]:
            nonlocal largest
            for piece in source.pieces(entry, **options):
                largest = max(largest, len(piece))
                yield piece

    import_source(Counting("counting"), run, step=0)
    assert 0 < largest <= 16 << 20
    report = holdfast.verify(run)
    assert report.ok, report.problems
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros_like(weight))
    model.odd = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with holdfast.CheckpointManager(run, {"model": model}, mode="sync") as manager:
        manager.restore()
    assert torch.equal(model.weight, weight)


def test_the_log_says_what_was_taken_and_what_was_left(
    tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")
    import_source(source_of(trained().saved(epoch=1), tmp_path), run, step=7, skip=["scheduler"])
    text = caplog.text
    assert "imported step 7 (torch): model from model, optimizer from optimizer; training goes on with step 8" in text
    assert "left: scheduler: left out by skip=" in text
