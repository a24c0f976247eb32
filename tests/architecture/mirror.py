"""Compare the files of tests/unit with the modules of the package, without importing either."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

_LOGIC = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.With, ast.BoolOp, ast.comprehension, ast.Match)


def without_module(source: Path, tests: Path) -> list[str]:
    """Return the test files that name no module or package of the folder that they mirror.

    `test_names.py` is for `names.py` or the package `names`; `test_names_of_fields.py` is a second file for it.
    """
    return [
        str(path.relative_to(tests))
        for path in sorted(tests.rglob("test_*.py"))
        if _tested(path, source, tests) is None
    ]


def without_test(source: Path, tests: Path, elsewhere: Mapping[str, str]) -> list[str]:
    """Return the modules with logic that have no test file, nor has a package around them, nor are they `elsewhere`."""
    found = {_tested(path, source, tests) for path in tests.rglob("test_*.py")}
    missing = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).with_suffix("")
        around = {name, *name.parents} - {Path()}
        if has_logic(path) and not around & found and not {part.as_posix() for part in around} & elsewhere.keys():
            missing.append(name.as_posix())
    return missing


def outdated(source: Path, tests: Path, elsewhere: Mapping[str, str], root: Path) -> list[str]:
    """Return the entries of `elsewhere` that name no module, a module with a test file, or no test."""
    found = {_tested(path, source, tests) for path in tests.rglob("test_*.py")}
    wrong = []
    for module, places in elsewhere.items():
        if not ((source / module).is_dir() or (source / f"{module}.py").is_file()):
            wrong.append(f"{module}: no such module")
        if Path(module) in found:
            wrong.append(f"{module}: has a test file of its own")
        wrong += [f"{module}: {place} does not exist" for place in places.split() if not (root / place).is_file()]
    return wrong


def has_logic(path: Path) -> bool:
    """Return whether a module decides anything: a record of fields, or a list of names, does not."""
    return path.name != "__init__.py" and any(
        isinstance(node, _LOGIC) for node in ast.walk(ast.parse(path.read_text()))
    )


def _tested(path: Path, source: Path, tests: Path) -> Path | None:
    folder = path.parent.relative_to(tests)
    words = path.stem.removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        name = folder / "_".join(words[:count])
        if (source / name).is_dir() or (source / name).with_suffix(".py").is_file():
            return name
    return None
