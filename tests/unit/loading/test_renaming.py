"""Names become other names by a mapping, by patterns or by a function; what cannot be meant is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.loading.renaming import Renamer, frozen_rename, is_by_component, plain_rename, rename_in_words, renamed

NAMES = ("layers.0.q.weight", "layers.1.q.weight", "head.weight", "head.bias")


@pytest.mark.parametrize(
    ("rename", "new"),
    [
        (None, NAMES),
        ({}, NAMES),
        ({"head.bias": "out.bias"}, (*NAMES[:3], "out.bias")),
        ({"head.*": "out.*"}, (*NAMES[:2], "out.weight", "out.bias")),
        ({"layers.*.q.*": "blocks.*.query.*"}, ("blocks.0.query.weight", "blocks.1.query.weight", *NAMES[2:])),
        ({"*": "model.*"}, tuple(f"model.{name}" for name in NAMES)),
        ({"head.*": None}, NAMES[:2]),
        ({"head.*": None, "head.bias": "head.bias"}, (*NAMES[:2], "head.bias")),
        (
            [(r"^layers\.", "blocks."), (r"\.q\.", ".query.")],
            ("blocks.0.query.weight", "blocks.1.query.weight", *NAMES[2:]),
        ),
        ([(r"layers\.(\d)", r"\1")], ("0.q.weight", "1.q.weight", *NAMES[2:])),
        (lambda name: name.upper(), tuple(name.upper() for name in NAMES)),
        (lambda name: None if "head" in name else name, NAMES[:2]),
    ],
)
def test_every_form_of_a_rename_gives_the_new_names(rename: Any, new: tuple[str, ...]) -> None:
    assert tuple(renamed(NAMES, rename).names) == new


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        ({"nothing.*": "x.*"}, "nothing.*"),
        ({"head.*": "x.*", "none": "y"}, "'none'"),
        ([("nothing", "x")], "nothing"),
        ({"head.weight": "head.bias"}, "'head.bias' of both"),
        ([(r"layers\.\d", "layers")], "'layers.q.weight' of both"),
        (lambda name: "one", "'one' of both"),
        (lambda name: "", "makes ''"),
        (lambda name: 7, "makes 7"),
    ],
)
def test_a_rename_that_matches_nothing_or_makes_one_of_two_is_an_error(rename: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("*", r"\*")):
        renamed(NAMES, rename)


@pytest.mark.parametrize(
    "rename",
    [
        7,
        "head",
        {"head": 7},
        {"": "x"},
        {"head": ""},
        {1: "x"},
        {"head": "x.*"},
        {"*.q": "*.*"},
        ["head"],
        [("a", "b", "c")],
        [("(", "x")],
        [("a", r"\1")],
        [("a", r"\g<no>")],
        [("a", None)],
        [(b"a", b"b")],
        {"model": {"a": "b"}, "head": "x"},
        {"model": {"a": 7}},
        {"model": {"model": {"a": "b"}}},
        {"model": 7},
    ],
)
def test_a_rename_that_can_never_be_applied_is_refused_when_it_is_made(rename: Any) -> None:
    with pytest.raises(UsageError):
        frozen_rename(rename)


def test_a_frozen_rename_is_equal_to_what_it_was_made_of_and_does_not_follow_it() -> None:
    rename = {"model": {"a.*": "b.*"}, "ema": [("a", "b")]}
    frozen = frozen_rename(rename)
    rename["model"]["c"] = "d"  # type: ignore[call-overload]
    assert plain_rename(frozen) == {"model": {"a.*": "b.*"}, "ema": [["a", "b"]]}
    assert frozen_rename(plain_rename(frozen)) == frozen
    assert hash(frozen_rename(frozen)) == hash(frozen)
    assert is_by_component(frozen)
    assert not is_by_component(frozen_rename({"a": "b", "c": None}))
    assert frozen_rename({"a": "b"}) == {"a": "b"}
    with pytest.raises(TypeError):
        frozen["model"] = {}


@pytest.mark.parametrize("rename", [None, {}, [], ()])
def test_a_rename_with_nothing_in_it_is_none(rename: Any) -> None:
    assert frozen_rename(rename) is None


def upper(name: str, times: int = 1) -> str:
    return name.upper() * times


def test_a_function_is_written_by_its_name_and_has_no_plain_form() -> None:
    for function in (upper, partial(upper, times=2)):
        words = rename_in_words(frozen_rename({"model": function}))
        assert "test_renaming.upper" in words
        assert "0x" not in words
        with pytest.raises(UsageError, match="function"):
            plain_rename(frozen_rename(function))


def test_the_entries_that_have_matched_nothing_are_known_over_several_lists_of_names() -> None:
    renamer = Renamer({"head.*": "x.*", "tail": "y", "never": "z"})
    renamer.names(["head.weight"])
    renamer.names(["tail"])
    assert renamer.unused == {"never"}
