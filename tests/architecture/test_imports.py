"""Who may import whom: from the top to the bottom of `TIERS` only, without cycles, and torch only where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.imports import (
    SOURCE,
    code_in_packages,
    cycles,
    entry_of,
    module_names,
    out_of_order,
    read_imports,
    torch_users,
)

TIERS = [
    {"cli", "integrations", "plugins", "testing"},
    {"data", "formats"},
    {"manager"},
    {"saving", "loading"},
    {"state", "runs"},
    {"storage", "ranks"},
    {"ondisk"},
    {"errors", "_version"},
]
WITHOUT_TORCH = ("runs", "ondisk", "storage", "cli")
# They load their names when these are first used.
LAZY = {"holdfast", "holdfast.plugins", "holdfast.testing"}


def test_imports_go_down_only() -> None:
    assert out_of_order(read_imports(), TIERS) == []


def test_no_module_reaches_itself_by_imports() -> None:
    assert cycles(read_imports()) == []


def test_a_package_imports_names_and_does_nothing_else() -> None:
    assert code_in_packages(exempt=LAZY) == []


@pytest.mark.parametrize("entry", WITHOUT_TORCH)
def test_what_needs_no_torch_does_not_import_it(entry: str) -> None:
    names = [name for name in module_names() if entry_of(name) == entry]
    assert names
    assert torch_users(names) == []


def test_the_top_of_the_house_has_at_most_fifteen_entries() -> None:
    entries = {path.stem for path in SOURCE.iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert len(entries) <= 15, sorted(entries)
    assert entries | {"_version"} == set().union(*TIERS)


# The checks themselves


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A package of three tiers that is in order."""
    root = tmp_path / "house"
    files = {
        "__init__.py": "",
        "top/__init__.py": '"""The top."""\n',
        "top/one.py": "from house.left.one import thing\nfrom house.bottom import one\n",
        "left/__init__.py": "",
        "left/one.py": "import house.bottom.one\n",
        "right/__init__.py": "",
        "right/one.py": "",
        "bottom/__init__.py": "",
        "bottom/one.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


HOUSE = [{"top"}, {"left", "right"}, {"bottom"}]


def test_a_house_in_order_passes(house: Path) -> None:
    imports = read_imports(house)
    assert len(imports) == 3
    assert (out_of_order(imports, HOUSE), cycles(imports), code_in_packages(house)) == ([], [], [])


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("bottom/one.py", "from house.left import one"),
        ("bottom/one.py", "def later():\n    from house.top.one import thing"),
        ("right/one.py", "import house.left.one"),
        ("cellar.py", "import house.bottom.one"),
    ],
    ids=["upward", "upward when it is called", "sideways", "from an entry that is in no tier"],
)
def test_an_import_out_of_order_is_found(house: Path, module: str, text: str) -> None:
    (house / module).write_text(text)
    (found,) = out_of_order(read_imports(house), HOUSE)
    assert module.replace("/", ".").removesuffix(".py") in found


def test_an_import_for_type_checkers_alone_does_not_count(house: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.top.one import thing\n"
    (house / "bottom/one.py").write_text(text)
    assert out_of_order(read_imports(house), HOUSE) == []


def test_a_cycle_is_found(house: Path) -> None:
    (house / "left/one.py").write_text("import house.left.two")
    (house / "left/two.py").write_text("from house.left.one import thing")
    assert cycles(read_imports(house)) == ["house.left.one -> house.left.two -> house.left.one"]
    (house / "left/two.py").write_text("def later():\n    from house.left.one import thing")
    assert cycles(read_imports(house)) == [], "when it runs, both are loaded"


@pytest.mark.parametrize("text", ["CONSTANT = 1", "def function(): ...", "print()"])
def test_code_in_a_package_is_found(house: Path, text: str) -> None:
    (house / "left/__init__.py").write_text(f"from house.left.one import thing\n__all__ = ['thing']\n{text}\n")
    (found,) = code_in_packages(house)
    assert found.startswith("house.left:3")


def test_a_module_that_imports_torch_is_found(tmp_path: Path) -> None:
    (tmp_path / "plain_module.py").write_text("import json")
    (tmp_path / "module_with_torch.py").write_text("import torch.nn")
    assert torch_users(["plain_module", "module_with_torch"], path=tmp_path) == ["module_with_torch"]
