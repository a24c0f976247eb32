"""Modules, functions and classes are of a size that one can hold. What outgrows it gets parts with names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.imports import SOURCE
from tests.architecture.sizes import sizes, too_large

LIMITS = {"module": 500, "function": 60, "class": 25}


def test_no_module_function_or_class_is_too_large() -> None:
    assert too_large(SOURCE, LIMITS) == []


def test_everything_is_measured() -> None:
    found = list(sizes(SOURCE))
    assert {size.kind for size in found} == set(LIMITS)
    assert len(found) > 1000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\n" * 4, "module.py: a module of 4"),
        ("async def f():\n    x = 1\n    return x\n", "module.py:1 f: a function of 3"),
        ("class C:\n def f():\n  def g():\n   h()\n", "module.py:2 f: a function of 3"),
        ("class C:\n def a(): ...\n async def b(): ...\n", "module.py:1 C: a class of 2"),
    ],
    ids=["module", "function", "method", "class"],
)
def test_what_is_too_large_is_named(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "module.py").write_text(text)
    limits = {"module": 3 if found.startswith("module.py: ") else 99, "function": 2, "class": 1}
    assert found in too_large(tmp_path, limits)
    assert too_large(tmp_path, {"module": 4, "function": 3, "class": 2}) == []


def test_a_property_and_its_setter_are_one_method(tmp_path: Path) -> None:
    text = "class C:\n    @property\n    def a(self): ...\n    @a.setter\n    def a(self, value): ...\n"
    (tmp_path / "module.py").write_text(text)
    assert too_large(tmp_path, {**LIMITS, "class": 1}) == []
