"""How a component says what it is: what a wrapper takes, and what `covers` may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import UsageError
from holdfast.state.names import follow_models
from holdfast.state.wrappers import PerRank, Shared, check_covers


@pytest.mark.parametrize("covers", [None, 3, "sampler", {"sampler": 1}, len], ids=repr)
def test_covers_takes_names(covers: Any) -> None:
    with pytest.raises(UsageError, match=r"covers=.*give a list of names of other components"):
        PerRank(object(), covers=covers)


@pytest.mark.parametrize("covers", [["a b"], [1], ("ok", None)], ids=repr)
def test_covers_takes_names_of_components(covers: Any) -> None:
    with pytest.raises(UsageError, match="cannot name a component"):
        PerRank(object(), covers=covers)


def covering(**covers: list[str]) -> dict[str, Any]:
    components: dict[str, Any] = {name: PerRank(object(), covers=names) for name, names in covers.items()}
    return {**components, "model": object(), "sampler": object()}


@pytest.mark.parametrize(
    ("components", "problem"),
    [
        (covering(loader=["nope"]), "component 'loader': covers names 'nope', .*; name one of model, sampler"),
        (covering(loader=["model", "loader"]), "covers names 'loader', which is no other component"),
        ({"loader": PerRank(object(), covers=["nope"])}, "there is no other one"),
        (covering(a=["b"], b=["a"]), "covers names 'b', which covers 'a'"),
        (covering(a=["b"], b=["c"], c=["sampler", "a"]), "covers names 'b', which covers 'a'"),
    ],
    ids=["no component", "itself", "none to name", "each other", "in a circle"],
)
def test_covers_names_other_components(components: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_covers(components)


def test_what_is_covered_may_cover_others() -> None:
    check_covers(covering(loader=["data", "model"], data=["sampler"], alone=[]))
    check_covers(covering(a=["b"], b=["c"], c=["b2"], b2=["sampler"], d=["b", "c"]))


def test_a_manager_refuses_a_cover_of_what_it_does_not_have(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(1, 1), "loader": holdfast.PerRank(torch.nn.Linear(1, 1), covers=("nope",))}
    with pytest.raises(holdfast.UsageError, match=r"covers names 'nope'.*name one of model, rng"):
        holdfast.CheckpointManager(tmp_path, state)
    with holdfast.CheckpointManager(tmp_path, {"model": torch.nn.Linear(1, 1)}) as manager:
        with pytest.raises(holdfast.UsageError, match="covers names 'nope'"):
            manager.attach("loader", holdfast.PerRank(torch.nn.Linear(1, 1), covers=["nope"]))
        assert not manager.attach("loader", holdfast.PerRank(torch.nn.Linear(1, 1), covers=["model"]))


def test_a_model_per_rank_counts_as_a_model_and_its_optimizer_as_an_optimizer(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        return {"model": PerRank(model), "optimizer": torch.optim.SGD(model.parameters(), lr=value)}

    with holdfast.CheckpointManager(tmp_path, state(1.0), rng=False, mode="sync") as manager:
        stored = manager.save(0).wait().manifest.trees
    assert [(tree.component, tree.scope) for tree in stored] == [("model", "rank-00000"), ("optimizer", "rank-00000")]
    others = state(2.0)
    with holdfast.CheckpointManager(tmp_path, others, rng=False, mode="sync") as manager:
        assert manager.restore(strategy=holdfast.LoadStrategy.weights_only()).restored == ("model",)
    assert float(others["model"].component.weight[0, 0].detach()) == 1.0
    assert others["optimizer"].param_groups[0]["lr"] == 2.0


def followed(state: dict[str, Any], stage: int | None = None) -> dict[str, str]:
    return {name: type(one).__name__ for name, one in follow_models(state, pipeline_stage=stage).items()}


def test_an_optimizer_is_wrapped_as_its_model_is() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    group = object()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
    found = follow_models(
        {"one": PerRank(one, group=group), "other": other, "first": first, "second": second}, pipeline_stage=None
    )
    assert isinstance(found["first"], PerRank)
    assert found["first"].group is group
    assert found["second"] is second
    assert followed({"one": Shared(one), "first": first}) == {"one": "Shared", "first": "Shared"}
    own = PerRank(first)
    assert follow_models({"one": PerRank(one), "first": own}, pipeline_stage=None)["first"] is own


def test_a_shared_model_and_a_stage_of_another_cannot_have_one_optimizer() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="'one' and of 'other', which are stored in different ways"):
        followed({"one": Shared(one), "other": other, "both": both}, stage=1)


def test_an_optimizer_over_a_shared_model_and_another_without_stages_is_fine() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for models in ((one, other), (other, one)):
        both = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
        assert followed({"one": Shared(one), "other": other, "both": both})["both"] == "SGD"
