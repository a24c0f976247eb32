"""The name of a tree has its component and the scope that the ranks agreed on."""

from __future__ import annotations

import pytest

from holdfast.state.trees import CapturedTree


@pytest.mark.parametrize(
    ("scope", "name"),
    [(None, "rng"), ("", "rng"), ("rank-00001", "rng@rank-00001")],
    ids=["open", "shared", "a rank's"],
)
def test_a_tree_is_named_by_component_and_scope(scope: str | None, name: str) -> None:
    assert CapturedTree("rng", "values", scope, {}, {}).name == name
