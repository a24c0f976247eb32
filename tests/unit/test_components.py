"""How a component says what it is: what a wrapper takes, and what `covers` may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.components import PerRank, check_covers
from holdfast.errors import UsageError


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
