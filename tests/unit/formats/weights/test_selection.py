"""Which part of a source is the model: what the format knows, what is nothing but tensors, usual names, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from holdfast.errors import CorruptCheckpointError, UsageError
from holdfast.formats.source import Source, TensorEntry
from holdfast.formats.weights.selection import find_extra_states, find_model, find_weights, part_of

W = TensorEntry("w", "float32", (2,))
B = TensorEntry("b", "float32", (1,))
MODEL = {"layer.weight": W, "layer.bias": B}


class Held(Source):
    format = "held"

    def __init__(self, tree: Mapping[str, Any], models: Sequence[str] = ()) -> None:
        super().__init__("memory")
        self._tree, self._models = tree, models

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    def weights_trees(self) -> Sequence[str]:
        return self._models


@pytest.mark.parametrize(
    "tree",
    [
        MODEL,
        {"layer": {"weight": W, "bias": B}, "epoch": 3},
        {"state_dict": MODEL, "epoch": 3, "optimizer_states": [{"state": {0: {"exp_avg": W}}}]},
        {"model": MODEL, "optimizer": {"state": {0: {"exp_avg": W}}}},
        {"model": MODEL, "net": {"other": W}},
        {"app": {"model": MODEL, "step": 3}},
        {"anything": MODEL, "epoch": 3},
        {**MODEL, "layer._extra_state": {"count": 3}},
    ],
)
def test_the_model_is_found(tree: dict[str, Any]) -> None:
    found = find_weights(Held(tree))
    assert {name.removeprefix("layer.") for name in found} == {"weight", "bias"}


@pytest.mark.parametrize("tree", [{"first": MODEL, "second": {"x": W}}, {"net": MODEL, "network": MODEL}, {"epoch": 3}])
def test_nothing_is_guessed(tree: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="component="):
        find_weights(Held(tree))


def test_a_component_is_found_by_its_path_also_with_dots_in_keys() -> None:
    tree = {"a.b": {"c": [MODEL, {}]}, "a": {"x": W}}
    assert find_weights(Held(tree), "a.b.c.0").keys() == MODEL.keys()
    with pytest.raises(UsageError, match="nothing at"):
        part_of(tree, "a.b.d")
    with pytest.raises(UsageError, match="has no tensors"):
        find_weights(Held(tree), "a.b.c.1")


def test_models_that_the_format_knows_go_before_names() -> None:
    assert find_weights(Held({"ema": MODEL, "model": {"x": W}}, ["ema"])).keys() == MODEL.keys()
    assert find_weights(Held({"ema": {"x": W}, "model": MODEL}, ["ema", "model"])).keys() == MODEL.keys()
    with pytest.raises(UsageError, match="actor, critic"):
        find_weights(Held({"actor": MODEL, "critic": MODEL}, ["actor", "critic"]))


def test_extra_states_are_found_beside_the_tensors() -> None:
    tree = {"model": {**MODEL, "layer._extra_state": {"count": 3}}}
    assert find_extra_states(Held(tree)) == {"layer._extra_state": {"count": 3}}


def test_stages_of_a_pipeline_are_put_together_where_no_name_collides() -> None:
    stages = {"model@stage-00000": {"a": W}, "model@stage-00001": {"b": B, "b._extra_state": 3}}
    assert find_weights(Held(stages, list(stages))) == {"a": W, "b": B}
    assert find_extra_states(Held(stages, list(stages))) == {"b._extra_state": 3}
    assert find_weights(Held(stages, list(stages)), "model@stage-00001") == {"b": B}
    ranks = {"model@rank-00000": {"a": W}, "model@rank-00001": {"a": W}}
    with pytest.raises(UsageError, match="'a' is in both 'model@rank-00000' and 'model@rank-00001'"):
        find_weights(Held(ranks, list(ranks)))
    assert find_weights(Held(ranks, list(ranks)), "model@rank-00001") == {"a": W}


def test_all_of_a_model_is_found_with_the_values_that_are_no_tensors_in_order() -> None:
    extra = {"scale": [1, 2]}
    model = {"updates": 5, "layer": {"weight": W, "note": "s", "steps": [B, 3]}, "layer._extra_state": extra}
    assert list(find_model(Held({"model": model, "epoch": 3})).items()) == [
        ("updates", 5),
        ("layer.weight", W),
        ("layer.note", "s"),
        ("layer.steps.0", B),
        ("layer.steps.1", 3),
        ("layer._extra_state", extra),
    ]


def test_two_values_of_a_model_under_one_name_are_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match="same name"):
        find_model(Held({"model": {"layer": {"weight": W, "note": 1}, "layer.note": 2}}))
