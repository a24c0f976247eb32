"""A strategy is checked when it is made, says what it takes, and never changes."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.errors import UsageError
from holdfast.loading.strategy import MODULES, OPTIMIZERS, LoadStrategy

steady = settings(derandomize=True, deadline=None, max_examples=300)

ONLY: tuple[Any, ...] = (
    None,
    ("model",),
    ["model", "loader"],
    {"model"},
    (MODULES,),
    (MODULES, "loader"),
    (),
    "model",
    ("",),
    (1,),
    ("a.b",),
    7,
)
SKIP: tuple[Any, ...] = ((), ("model",), ["loader"], {"rng"}, "loader", ("",), (None,), ("loader@rank-00000",), None)
EXCLUDE: tuple[Any, ...] = ((), ("model.head.*",), ["*"], "model.*", ("",), None)
CHOICES: dict[str, tuple[Any, ...]] = {
    "strict": (True, False, "yes", None),
    "on_missing": ("error", "skip", "adapt", None),
    "on_world_change": ("error", "skip", "adapt", "warn"),
    "on_guard_mismatch": ("error", "warn", "skip"),
    "progress": (True, False, "no"),
    "cast": (True, False, "float32", None),
}


def upper(name: str) -> str:
    return name.upper()


RENAME: tuple[Any, ...] = (
    None,
    {"a.*": "b.*"},
    {"a": None},
    {"model": {"a": "b"}, "head": [("a", "b")]},
    [("^a", "b")],
    upper,
    {"a.b": {"a": "b"}},
    {"a": {"b": "c"}, "d": "e"},
    {"a": 7},
    {"a": "b.*"},
    [("(", "")],
    "a",
    7,
)
WRONG_RENAMES = RENAME[6:]
ALLOWED = {
    "strict": (True, False),
    "on_missing": ("error", "skip"),
    "on_world_change": ("error", "skip", "adapt"),
    "on_guard_mismatch": ("error", "warn"),
    "progress": (True, False),
    "cast": (True, False),
}


def texts(value: Any) -> bool:
    return isinstance(value, tuple | list | set) and all(isinstance(text, str) and text for text in value)


def plain(name: str) -> bool:
    return name in (MODULES, OPTIMIZERS) or name.isidentifier()


def possible(only: Any, skip: Any, exclude: Any) -> bool:
    """Whether these three go together, said in another way than the code says it."""
    if not (only is None or texts(only)) or not texts(skip) or not texts(exclude):
        return False
    named = [] if only is None else list(only)
    if only is not None and not named:
        return False
    return all(plain(name) for name in (*named, *skip)) and not set(named) & set(skip)


def test_names_that_contradict_each_other_are_refused_at_once() -> None:
    for only, skip, exclude in itertools.product(ONLY, SKIP, EXCLUDE):
        refused_if_contradictory(only, skip, exclude)


def refused_if_contradictory(only: Any, skip: Any, exclude: Any) -> None:
    before = repr((only, skip, exclude))
    if possible(only, skip, exclude):
        strategy = LoadStrategy(only=only, skip=skip, exclude=exclude)
        assert strategy.only is None or set(strategy.only) == set(only)
        assert (set(strategy.skip), set(strategy.exclude)) == (set(skip), set(exclude))
    else:
        with pytest.raises(UsageError):
            LoadStrategy(only=only, skip=skip, exclude=exclude)
    assert repr((only, skip, exclude)) == before


def test_every_combination_of_choices_is_taken_or_refused_at_once() -> None:
    for values in itertools.product(*CHOICES.values()):
        fields = dict(zip(CHOICES, values, strict=True))
        if all(value in ALLOWED[name] for name, value in fields.items()):
            assert {name: getattr(LoadStrategy(**fields), name) for name in fields} == fields
        else:
            with pytest.raises(UsageError):
                LoadStrategy(**fields)


def test_every_rename_goes_with_all_other_names_or_is_refused_at_once() -> None:
    for only, exclude, rename in itertools.product(ONLY, EXCLUDE, RENAME):
        goes_or_is_refused(only, exclude, rename)


def goes_or_is_refused(only: Any, exclude: Any, rename: Any) -> None:
    if possible(only, (), exclude) and not any(rename is wrong for wrong in WRONG_RENAMES):
        strategy = LoadStrategy(only=only, exclude=exclude, rename=rename)
        assert dataclasses.replace(strategy) == strategy
        assert hash(dataclasses.replace(strategy)) == hash(strategy)
        assert "0x" not in repr(strategy)
    else:
        with pytest.raises(UsageError):
            LoadStrategy(only=only, exclude=exclude, rename=rename)


def test_the_rule_of_a_model_is_its_own_or_that_of_all() -> None:
    everywhere = LoadStrategy(rename={"a": "b"})
    assert everywhere.renaming("model") == everywhere.renaming("ema") == {"a": "b"}
    assert everywhere.renamed_components() == []
    single = LoadStrategy(rename={"ema": {"a": "b"}})
    assert single.renaming("model") is None
    assert single.renaming("ema") == {"a": "b"}
    assert single.renamed_components() == ["ema"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rename": {"a.*": "b.*", "c": None}, "cast": True},
        {"rename": {"model": {"a": "b"}, "ema": [["^a", "b"]]}, "only": ["model", "ema"]},
        {"rename": [["a", "b"], ["c", "d"]], "exclude": ["model.*"], "strict": False, "progress": False},
    ],
)
def test_a_strategy_of_plain_data_gives_the_same_data_back(fields: dict[str, Any]) -> None:
    strategy = LoadStrategy.from_dict(fields)
    data = strategy.to_dict()
    assert {name: data[name] for name in fields} == fields
    assert LoadStrategy.from_dict(json.loads(json.dumps(data))) == strategy


@pytest.mark.parametrize("data", [7, ["rename"], {"renames": {}}, {"cast": "yes"}, {1: 2}])
def test_what_is_no_data_of_a_strategy_is_refused(data: Any) -> None:
    with pytest.raises(UsageError):
        LoadStrategy.from_dict(data)


def test_a_rename_by_a_function_has_no_plain_data() -> None:
    with pytest.raises(UsageError, match="function"):
        LoadStrategy(rename=upper).to_dict()


def test_a_strategy_cannot_be_changed() -> None:
    strategy = LoadStrategy(only=["model"])
    for field in dataclasses.fields(strategy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field.name, getattr(strategy, field.name))
    with pytest.raises((AttributeError, TypeError)):
        strategy.something = 1  # type: ignore[attr-defined]


def test_a_strategy_does_not_follow_the_list_that_it_was_made_from() -> None:
    only, skip, exclude = ["model"], ["loader"], ["model.head.*"]
    strategy = LoadStrategy(only=only, skip=skip, exclude=exclude)
    only.append("optimizer")
    skip.clear()
    exclude.append("*")
    assert (strategy.only, strategy.skip, strategy.exclude) == (("model",), ("loader",), ("model.head.*",))
    assert hash(strategy) == hash(LoadStrategy(only=("model",), skip=("loader",), exclude=("model.head.*",)))


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        LoadStrategy(("model",))  # type: ignore[misc]
    with pytest.raises(TypeError):
        LoadStrategy(onyl=("model",))  # type: ignore[call-arg]


NAMES = ("model", "head", "optimizer", "loader", "rng")
KINDS = {"model": "module", "head": "module", "optimizer": "optimizer", "loader": "values", "rng": "values"}


@given(
    only=st.none() | st.sets(st.sampled_from((*NAMES, MODULES, OPTIMIZERS)), min_size=1),
    skip=st.sets(st.sampled_from(NAMES)),
)
@steady
def test_it_takes_what_only_names_and_skip_does_not(only: set[str] | None, skip: set[str]) -> None:
    if only is not None and only & skip:
        with pytest.raises(UsageError, match="in only= and in skip="):
            LoadStrategy(only=tuple(only), skip=tuple(skip))
        return
    strategy = LoadStrategy(only=None if only is None else tuple(only), skip=tuple(skip))
    wanted = set(NAMES)
    if only is not None:
        kinds = {MODULES: "module", OPTIMIZERS: "optimizer"}
        wanted = (only & set(NAMES)) | {name for name in NAMES for word in only if kinds.get(word) == KINDS[name]}
    assert {name for name in NAMES if strategy.takes(name, KINDS[name])} == wanted - skip
    assert set(strategy.named()) == ((only or set()) | skip) - {MODULES, OPTIMIZERS}


def test_the_two_short_forms_say_what_they_are_called() -> None:
    weights, warm = LoadStrategy.weights_only(), LoadStrategy.warm_start()
    assert [name for name in NAMES if weights.takes(name, KINDS[name])] == ["model", "head"]
    assert [name for name in NAMES if warm.takes(name, KINDS[name])] == ["model", "head", "optimizer"]
    assert not weights.progress
    assert not warm.progress
    assert LoadStrategy.weights_only(strict=False, skip=("head",)) == LoadStrategy(
        only=(MODULES,), progress=False, strict=False, skip=("head",)
    )
    with pytest.raises(UsageError):
        LoadStrategy.weights_only(on_missing="whatever")


@given(
    leaf=st.text(alphabet="ab.[]*?!", max_size=8),
    globs=st.lists(st.text(alphabet="ab.[]*?!", min_size=1, max_size=5), max_size=4),
)
@steady
def test_the_first_glob_that_matches_excludes_a_leaf(leaf: str, globs: list[str]) -> None:
    matching = [glob for glob in globs if fnmatch.fnmatchcase(leaf, glob)]
    assert LoadStrategy(exclude=globs).excluding(leaf) == (matching[0] if matching else None)


def test_globs_are_over_whole_names_and_know_case() -> None:
    strategy = LoadStrategy(exclude=("model.head.*", "*.bias"))
    assert strategy.excluding("model.head.weight") == "model.head.*"
    assert strategy.excluding("model.body.bias") == "*.bias"
    assert strategy.excluding("model.heads.weight") is None
    assert strategy.excluding("Model.head.weight") is None
