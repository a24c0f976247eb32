"""Prefixes of wrappers, taken from names or added to them where that brings names together."""

from __future__ import annotations

import pytest

from holdfast.formats.weights.renaming import aligned, renamed


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (["model.a", "model.b"], ["model.a", "model.b"], {"model.a": "model.a", "model.b": "model.b"}),
        (["model.a", "model.b"], ["x", "y"], {"model.a": "model.a", "model.b": "model.b"}),
        (["model.a", "model.b"], ["a", "b"], {"a": "model.a", "b": "model.b"}),
        (["a", "b"], ["module.a", "module.b"], {"module.a": "a", "module.b": "b"}),
        (["module.a", "other.b"], ["a", "b"], {"a": "module.a", "other.b": "other.b"}),
        (["module.a", "a"], ["a", "b"], {"module.a": "module.a", "a": "a"}),
        (["l._orig_mod.w", "x"], ["l.w", "x"], {"l.w": "l._orig_mod.w", "x": "x"}),
        (["module.model.a"], ["model.a"], {"model.a": "module.model.a"}),
        (["l._orig_mod.w", "l.w"], ["l.w", "z"], {"l._orig_mod.w": "l._orig_mod.w", "l.w": "l.w"}),
    ],
)
def test_one_change_for_all_names_is_made_where_it_helps(
    found: list[str], wanted: list[str], expected: dict[str, str]
) -> None:
    result = aligned(renamed(found, None), wanted)
    assert result.names == expected
    assert bool(result.changes) == (list(expected) != found)
