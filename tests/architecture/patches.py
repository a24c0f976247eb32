"""Find tests that replace parts of the package by setting attributes of it, without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from pathlib import Path

_SETTERS = {"setattr", "delattr", "patch", "object"}


def patches(path: Path, package: str = "holdfast") -> list[str]:
    """Return what a test file does that sets an attribute of a module or class of the package.

    `monkeypatch.setattr`, `mock.patch` and the builtin `setattr` are found by their first argument, assignments by
    their target: a name that was imported from the package, an attribute of one, or, in a call, a text that begins with
    the package's name.
    """
    tree = ast.parse(path.read_text())
    ours = {name for node in ast.walk(tree) for name in _imported(node, package)}
    found: list[ast.Call | ast.Assign] = [call for call in _calls(tree) if _is_ours(call.args[0], ours, package)]
    found += [one for one in _assignments(tree) if any(_is_ours(target, ours, package) for target in one.targets)]
    return [f"{path.name}:{one.lineno}: {ast.unparse(one)}" for one in found]


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _SETTERS:
                yield node


def _assignments(tree: ast.Module) -> Iterator[ast.Assign]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
            yield node


def _is_ours(target: ast.expr, ours: Set[str], package: str) -> bool:
    if isinstance(target, ast.Constant):
        return isinstance(target.value, str) and target.value.partition(".")[0] == package
    while isinstance(target, ast.Attribute):
        target = target.value
    return isinstance(target, ast.Name) and target.id in ours


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == package:
                yield alias.asname or package
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
        yield from (alias.asname or alias.name for alias in node.names)
