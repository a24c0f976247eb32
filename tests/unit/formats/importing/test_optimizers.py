"""Whose state is whose in an optimizer of another tool: numbers and names in the source, the shapes that state shows,
and models that are alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.formats.importing.importing import import_checkpoint, import_source
from tests.unit.formats.plain_source import PlainSource

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def square_layers() -> nn.Sequential:
    """Return layers of one shape, which only their order and their names tell apart."""
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def backwards(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)


def trained(model: nn.Module, make: MakeOptimizer, width: int = 4) -> torch.optim.Optimizer:
    optimizer = make(model)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, width, generator=torch.Generator().manual_seed(step))).pow(3).sum().backward()
        optimizer.step()
    return optimizer


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def source_of(tree: Any, tmp_path: Path) -> PlainSource:
    return PlainSource(tree, tmp_path / "tensors.bin")


def assert_restores(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, make: MakeOptimizer
) -> None:
    """Restore to a new optimizer, and compare the state of each parameter with the one that was saved."""
    restored = make(other)
    with holdfast.CheckpointManager(run, {"model": other, "optimizer": restored}, mode="sync") as manager:
        manager.restore()
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(before, after)
        assert optimizer.state[before].keys() == restored.state[after].keys() != set()
        for key, value in optimizer.state[before].items():
            assert torch.equal(value, restored.state[after][key]), key


# Numbers


@pytest.mark.parametrize("by", ["model", "names"])
def test_numbers_that_dcp_wrote_as_texts_are_numbers(tmp_path: Path, run: Path, by: str) -> None:
    model = square_layers()
    optimizer = trained(model, adamw)
    dcp.save(saved(model, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    given = model if by == "model" else [name for name, _ in model.named_parameters()]
    import_checkpoint(tmp_path / "dcp", run, step=2, parameters=given)
    assert_restores(run, model, optimizer, square_layers(), adamw)


def test_shapes_are_compared_where_numbers_are_texts(tmp_path: Path, run: Path) -> None:
    model = nn.Linear(4, 3)
    dcp.save(saved(model, trained(model, adamw)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UsageError, match=r"parameter 0 is 'bias' by parameters=, whose shape is \[3\], .* \[3, 4\]"):
        import_checkpoint(tmp_path / "dcp", run, step=2, components={"model": "net"}, parameters=["bias", "weight"])


def test_groups_whose_numbers_are_texts_too_are_understood(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    optimizer = trained(model, adamw)
    tree = saved(model, optimizer)
    tree["optimizer"]["state"] = {str(key): value for key, value in tree["optimizer"]["state"].items()}
    tree["optimizer"]["param_groups"][0]["params"] = ["0", "1", "2"]
    import_source(source_of(tree, tmp_path), run, step=2)
    assert_restores(run, model, optimizer, square_layers(), adamw)


def test_parameters_that_are_called_by_digits_keep_their_names(tmp_path: Path, run: Path) -> None:
    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("0", nn.Parameter(torch.randn(4, 4)))
            self.register_parameter("1", nn.Parameter(torch.randn(4, 4)))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value @ self.get_parameter("1") @ self.get_parameter("0")

    model = Digits()
    optimizer = trained(model, adamw)
    tree = saved(model, optimizer)
    state = {"1": tree["optimizer"]["state"][1], "0": tree["optimizer"]["state"][0]}
    group = {**tree["optimizer"]["param_groups"][0], "params": ["1", "0"]}
    tree["optimizer"] = {"state": state, "param_groups": [group]}
    import_source(source_of(tree, tmp_path), run, step=2)
    assert_restores(run, model, optimizer, Digits(), adamw)


@pytest.mark.parametrize("key", [7, "7", "average", "0"])
def test_state_of_no_parameter_of_any_group_is_refused(tmp_path: Path, run: Path, key: Any) -> None:
    model = square_layers()
    tree = saved(model, trained(model, adamw))
    tree["optimizer"]["state"][key] = {"exp_avg": torch.ones(4, 4)}
    with pytest.raises(UsageError, match=rf"state .*{key}.*\n?.*skip="):
        import_source(source_of(tree, tmp_path), run, step=2)
    assert not run.exists() or not holdfast.checkpoints(run)


def test_state_by_name_of_no_parameter_of_any_group_is_refused(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    tree = saved(model, trained(model, adamw))
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    packed = tree["optimizer"]
    packed["state"] = {names[key]: value for key, value in packed["state"].items()}
    packed["param_groups"][0]["params"] = ["0.weight", "1.weight"]
    with pytest.raises(UsageError, match=r"state under '2\.weight', and no group"):
        import_source(source_of(tree, tmp_path), run, step=2)


# Shapes


def test_factors_of_adafactor_that_contradict_the_order_are_refused(tmp_path: Path, run: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(list(model.parameters())[::-1], lr=0.01)

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))

    model = layers()
    optimizer = trained(model, make)
    for given in (None, model):
        with pytest.raises(UsageError, match="no order of the model's tensors has the shapes of its state"):
            import_source(source_of(saved(model, optimizer), tmp_path), run, step=2, parameters=given)
    names = [name for name, _ in model.named_parameters()][::-1]
    import_source(source_of(saved(model, optimizer), tmp_path), run, step=2, parameters=names)
    assert_restores(run, model, optimizer, layers(), make)


# Names in the source


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second, third = model.named_parameters()
    return torch.optim.AdamW([{"params": [third]}, {"params": [first, second], "lr": 0.1}], lr=0.01)


@pytest.mark.parametrize("make", [backwards, in_two_groups])
@pytest.mark.parametrize("by", ["nothing", "model", "names"])
def test_names_that_the_groups_have_are_used(tmp_path: Path, run: Path, make: MakeOptimizer, by: str) -> None:
    model = square_layers()
    optimizer = trained(model, make)
    given = {"nothing": None, "model": model, "names": ["0.weight", "1.weight", "2.weight"]}[by]
    import_source(source_of(saved(model, optimizer), tmp_path), run, step=2, parameters=given)
    assert_restores(run, model, optimizer, square_layers(), make)


def test_names_that_the_groups_have_need_no_order_of_the_tensors(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    optimizer = trained(model, backwards)
    dcp.save(saved(model, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_checkpoint(tmp_path / "dcp", run, step=2)
    assert_restores(run, model, optimizer, square_layers(), backwards)


@pytest.mark.parametrize("prefixed", ["model", "optimizer", "both"])
def test_names_that_the_groups_have_lose_the_prefixes_of_wrappers(tmp_path: Path, run: Path, prefixed: str) -> None:
    model = square_layers()
    optimizer = trained(model, backwards)
    tree = saved(model, optimizer)
    if prefixed != "optimizer":
        tree["model"] = {f"module._orig_mod.{name}": value for name, value in tree["model"].items()}
    if prefixed != "model":
        group = tree["optimizer"]["param_groups"][0]
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    import_source(source_of(tree, tmp_path), run, step=2)
    assert_restores(run, model, optimizer, square_layers(), backwards)


@pytest.mark.parametrize(
    ("names", "given", "problem"),
    [
        (["bias", "weight"], None, r"parameter 0 is 'bias' by param_names of the source, whose shape is \[3\]"),
        (["bias", "weight"], ["weight", "bias"], r"parameter 0 is 'bias' by param_names"),
        (["weight", "weight"], None, "param_names of the source has 'weight' twice"),
        (["weight", "shift"], None, r"no model of the source has all of param_names .*'shift'"),
    ],
)
def test_names_of_the_groups_that_contradict_the_rest_are_refused(
    tmp_path: Path, run: Path, names: list[str], given: Any, problem: str
) -> None:
    model = nn.Linear(4, 3)
    tree = saved(model, trained(model, adamw))
    tree["optimizer"]["param_groups"][0]["param_names"] = names
    with pytest.raises(UsageError, match=problem):
        import_source(source_of(tree, tmp_path), run, step=2, parameters=given)


def test_other_names_than_those_of_the_groups_are_refused(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    optimizer = trained(model, lambda one: torch.optim.AdamW(list(one.named_parameters())[:2]))
    with pytest.raises(UsageError, match=r"parameters= names '2.weight', which param_names of the source does not"):
        import_source(source_of(saved(model, optimizer), tmp_path), run, step=2, parameters=["0.weight", "2.weight"])


def test_names_of_the_groups_that_no_model_has_give_way_to_those_of_the_user(tmp_path: Path, run: Path) -> None:
    model = square_layers()
    optimizer = trained(model, adamw)
    tree = saved(model, optimizer)
    tree["optimizer"]["param_groups"][0]["param_names"] = ["first", "second", "third"]
    import_source(source_of(tree, tmp_path), run, step=2, parameters=model)
    assert_restores(run, model, optimizer, square_layers(), adamw)


# Models that are alike


def pair(make: MakeOptimizer) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer], dict[str, Any]]:
    torch.manual_seed(5)
    models: dict[str, nn.Module] = {"netG": square_layers(), "netD": square_layers()}
    optimizers = {f"opt{name[-1]}": trained(model, make) for name, model in models.items()}
    tree = {name: part.state_dict() for name, part in (models | optimizers).items()}
    return models, optimizers, tree


@pytest.mark.parametrize("make", [adamw, backwards])
@pytest.mark.parametrize("by", ["nothing", "model", "names"])
def test_two_models_that_are_alike_are_a_doubt_that_says_how_to_settle_it(
    tmp_path: Path, run: Path, make: MakeOptimizer, by: str
) -> None:
    models, _, tree = pair(make)
    one = models["netD"] if by == "model" else [name for name, _ in models["netD"].named_parameters()]
    given = None if by == "nothing" else {"optG": one, "optD": one}
    with pytest.raises(UsageError, match=r"'netG' and 'netD' .*\n?.*parameters=\{'optG': 'netG'\}"):
        import_source(source_of(tree, tmp_path), run, step=2, parameters=given)


@pytest.mark.parametrize("make", [adamw, backwards])
@pytest.mark.parametrize("by", ["component", "model", "names"])
def test_the_component_of_the_model_settles_whose_parameters_they_are(
    tmp_path: Path, run: Path, make: MakeOptimizer, by: str
) -> None:
    models, optimizers, tree = pair(make)
    names = [name for name, _ in models["netD"].named_parameters()]
    given: dict[str, Any] = {"component": "netD", "model": ("netD", models["netD"]), "names": ("netD", names)}
    checkpoint = import_source(source_of(tree, tmp_path), run, step=2, parameters={"optG": "netG", "optD": given[by]})
    assert {one.component: one.model for one in checkpoint.manifest.trees if one.model} == {
        "optG": "netG",
        "optD": "netD",
    }
    others = {name: square_layers() for name in models}
    restored = {f"opt{name[-1]}": make(model) for name, model in others.items()}
    with holdfast.CheckpointManager(run, {**others, **restored}, mode="sync") as manager:
        manager.restore()
    for name, model in models.items():
        optimizer = f"opt{name[-1]}"
        for before, after in zip(model.parameters(), others[name].parameters(), strict=True):
            assert torch.equal(before, after)
            then, now = optimizers[optimizer].state[before], restored[optimizer].state[after]
            assert torch.equal(then["exp_avg"], now["exp_avg"])


def test_state_by_name_that_two_models_have_is_a_doubt_too(tmp_path: Path, run: Path) -> None:
    models, _, tree = pair(adamw)
    names = dict(enumerate(name for name, _ in models["netD"].named_parameters()))
    for packed in (tree["optG"], tree["optD"]):
        packed["state"] = {names[key]: value for key, value in packed["state"].items()}
        packed["param_groups"][0]["params"] = list(names.values())
    with pytest.raises(UsageError, match=r"'netG' and 'netD' .*\n?.*parameters=\{'optG': 'netG'\}"):
        import_source(source_of(tree, tmp_path), run, step=2)
    checkpoint = import_source(source_of(tree, tmp_path), run, step=2, parameters={"optG": "netG", "optD": "netD"})
    assert {one.component: one.model for one in checkpoint.manifest.trees if one.model} == {
        "optG": "netG",
        "optD": "netD",
    }


@pytest.mark.parametrize("given", ["critic", ("critic", ["0.weight"])])
def test_a_component_that_is_no_model_of_the_source_is_refused(tmp_path: Path, run: Path, given: Any) -> None:
    _, _, tree = pair(adamw)
    with pytest.raises(UsageError, match=r"'critic', which is no model of the source.*\n?.*netG, netD"):
        import_source(source_of(tree, tmp_path), run, step=2, parameters={"optG": given})


@pytest.mark.parametrize("given", [3, ("netD", 3), ["weight", 3], (3, ["weight"])])
def test_what_names_no_parameters_is_refused(tmp_path: Path, run: Path, given: Any) -> None:
    _, _, tree = pair(adamw)
    with pytest.raises(UsageError, match=r"parameters= has .*\n?.*give a module"):
        import_source(source_of(tree, tmp_path), run, step=2, parameters={"optG": given})
