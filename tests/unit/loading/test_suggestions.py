"""What an error prints to paste: only what is plain to see from the names."""

from __future__ import annotations

import pytest

from holdfast.loading.renaming import renamed
from holdfast.loading.suggestions import Differences, suggested_rename, suggestion


def both(*modules: str) -> list[str]:
    return [f"{module}.{name}" for module in modules for name in ("weight", "bias")]


BLOCKS = [f"layers.{index}.{part}.weight" for index in range(12) for part in ("q", "k", "v")]


@pytest.mark.parametrize(
    ("before", "now", "rename"),
    [
        (both("a", "b"), both("module.a", "module.b"), {"*": "module.*"}),
        (both("module.a", "module.b"), both("a", "b"), {"module.*": "*"}),
        (both("_orig_mod.a"), both("a"), {"_orig_mod.*": "*"}),
        (both("encoder.a", "head"), both("backbone.encoder.a", "head"), {"encoder.*": "backbone.encoder.*"}),
        (both("a", "head"), both("a", "out"), {"head.*": "out.*"}),
        (both("x.a.y", "head"), both("x.b.y", "head"), {"*.a.*": "*.b.*"}),
        (["scale", "a.gamma"], ["scale", "a.beta"], {"*.gamma": "*.beta"}),
        (BLOCKS, [name.replace(".q.", ".query.") for name in BLOCKS], {"*.q.*": "*.query.*"}),
        (BLOCKS, [name.replace("layers.", "blocks.") for name in BLOCKS], {"layers.*": "blocks.*"}),
        (BLOCKS, [name.replace("layers.", "model.blocks.") for name in BLOCKS], {"layers.*": "model.blocks.*"}),
        ([*BLOCKS, "head.w"], [*BLOCKS, "out.w"], {"head.*": "out.*"}),
    ],
)
def test_one_change_of_all_names_is_found(before: list[str], now: list[str], rename: dict[str, str]) -> None:
    gone, new = set(before) - set(now), set(now) - set(before)
    assert suggested_rename(gone, new, before) == rename
    assert set(renamed(before, rename).names) == set(now)


def test_several_changes_are_found_where_each_is_the_only_one() -> None:
    before = [*both("head"), *(f"layers.{index}.mlp.{part}.weight" for index in range(3) for part in ("up", "down"))]
    now = [name.replace(".mlp.", ".feed.").replace("head.", "out.") for name in before]
    gone, new = set(before) - set(now), set(now) - set(before)
    rename = suggested_rename(gone, new, before)
    assert rename is not None
    assert set(renamed(before, rename).names) == set(now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (both("a", "b"), both("c", "d")),
        (both("a", "b"), both("a", "b", "c")),
        (["a.k.weight", "a.q.weight"], ["a.key.weight", "a.query.weight"]),
        (["weight"], ["scale"]),
        ([], ["a.weight"]),
    ],
)
def test_no_rename_is_suggested_where_there_is_none_or_more_than_one(before: list[str], now: list[str]) -> None:
    assert suggested_rename(set(before) - set(now), set(now) - set(before), before) is None


def differences(**changes: object) -> Differences:
    fields: dict[str, object] = {
        "missing": [],
        "unexpected": [],
        "mismatched": [],
        "saved": [f"model.{name}" for name in both("a", "head")],
        "models": ["model"],
        "optimizers": ["optimizer"],
    }
    return Differences(**{**fields, **changes})  # type: ignore[arg-type]


WIDER = [
    "model.head.weight: float32 [2, 3] in the checkpoint, float32 [4, 3] now",
    "model.head.bias: float32 [2] in the checkpoint, float32 [4] now",
    "optimizer.state.head.weight.exp_avg: [2, 3] in the checkpoint, for a parameter of [4, 3]",
]
TYPE = "model.a.weight: float32 [2, 3] in the checkpoint, bfloat16 [2, 3] now; cast=True converts it"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (differences(), ""),
        (differences(mismatched=[TYPE]), "cast=True"),
        (differences(mismatched=WIDER), "exclude=['model.head.*', 'optimizer.state.head.*']"),
        (differences(mismatched=[*WIDER, TYPE]), "cast=True, exclude=['model.head.*', 'optimizer.state.head.*']"),
        (differences(mismatched=["optimizer.param_groups: 1 in the checkpoint, 2 now"]), ""),
        (differences(mismatched=WIDER[:1]), "exclude=['model.head.weight']"),
        (differences(unexpected=["model.head.weight", "model.head.bias"]), "exclude=['model.head.*']"),
        (differences(missing=["model.new.weight", "model.new.bias"]), "exclude=['model.new.*']"),
        (differences(missing=["loader.x"]), ""),
        (differences(unexpected=["model@stage-1"]), ""),
        (
            differences(unexpected=["model.head.weight"], missing=["model.out.weight"]),
            "rename={'head.weight': 'out.weight'}",
        ),
        (
            differences(unexpected=["model.head.weight"], missing=["model.out.weight"], models=["ema", "model"]),
            "rename={'model': {'head.weight': 'out.weight'}}",
        ),
        (differences(mismatched=[one.replace("head", "a") for one in WIDER[:1]], saved=["model.a.weight"]), ""),
    ],
)
def test_the_arguments_are_those_that_let_the_restore_through(found: Differences, text: str) -> None:
    assert suggestion(found, may_rename=True) == text


def test_no_second_rename_is_suggested() -> None:
    found = differences(unexpected=["model.head.weight"], missing=["model.out.weight"])
    assert suggestion(found, may_rename=False) == "exclude=['model.out.*', 'model.head.weight']"


def test_ten_thousand_names_are_brought_together() -> None:
    before = [f"layers.{index}.{part}.weight" for index in range(2500) for part in "abcd"]
    now = [name.replace(".b.", ".beta.") for name in before]
    gone, new = set(before) - set(now), set(now) - set(before)
    assert suggested_rename(gone, new, before) == {"*.b.*": "*.beta.*"}
